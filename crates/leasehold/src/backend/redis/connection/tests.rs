//! Suspect connections, and replies that are too large.

use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};

use super::*;
use crate::backend::Slot;
use crate::backend::redis::settings::Purpose;
use crate::backend::redis::topology::Topology;
use crate::url::Deployment;

fn connection_to(url: &str, purpose: Purpose) -> (Arc<Connection>, Topology) {
    let settings = RedisSettings { purpose, ..RedisSettings::new(url).unwrap() };
    let settings = Arc::new(settings);
    let server = match &settings.deployment {
        Deployment::Server(server) => Target::Only(server.clone()),
        other => panic!("{other:?}"),
    };
    let connection = Connection::new(settings, Arc::new(Scripts::new()), server, Destination::ONLY);
    tokio::spawn(connection.clone().keep_up(ClientId::random(), Arc::new(|_| ())));
    (connection.clone(), Topology::One(connection, None))
}

async fn ping(server: &Topology) -> Result<Vec<Value>, Error> {
    server.query(Slot::ONLY, vec![RedisCommand::new("PING")]).await
}

/// A caller that waits for an answer over a suspect connection is answered over the next one.
#[tokio::test]
async fn a_suspect_connection_is_replaced_once() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (connection, server) = connection_to(&proxy.url(), Purpose::Commands);
    deadline(ping(&server)).await.unwrap();

    proxy.forget_connections();
    let limit = Duration::from_millis(20);
    let mut patient = Box::pin(ping(&server));
    tokio::time::timeout(limit, patient.as_mut()).await.expect_err("nobody answers");
    tokio::time::timeout(limit, ping(&server)).await.expect_err("nobody answers");
    // A caller that stops waiting does not make the connection suspect.
    let first = connection.current().unwrap();
    assert_eq!(proxy.traffic().accepted, 1);
    connection.suspect_current();
    let is_other = |current: Arc<CurrentSocket>| !Arc::ptr_eq(&current, &first);
    eventually(async || connection.current().is_ok_and(is_other)).await;
    deadline(ping(&server)).await.unwrap();

    // Requests sent over the old connection do not make the new one suspect.
    deadline(patient).await.unwrap();
    for _ in 0..10 {
        deadline(ping(&server)).await.unwrap();
    }
    assert_eq!(proxy.traffic().accepted, 2);
}

/// The query fails at once, with the reason. Other queries over the same connection are repeated over the next one.
#[tokio::test]
async fn a_reply_that_is_too_large_fails_only_its_query() {
    let redis = RedisServer::start();
    let mut keys = redis.connection();
    let _: u64 =
        redis::cmd("SETRANGE").arg("large").arg(40 << 20).arg("x").query(&mut keys).unwrap();
    // Redis itself closes a connection with subscriptions at 32 MB.
    let (_, server) = connection_to(&redis.url(), Purpose::Reading);
    let get = vec![RedisCommand::new("GET").arg("large")];
    for _ in 0..3 {
        let (large, other) = tokio::join!(server.query(Slot::ONLY, get.clone()), ping(&server));
        let error = large.unwrap_err().to_string();
        assert!(error.contains("a reply is larger than 32 MiB"), "{error}");
        other.unwrap();
    }
    // Many replies that are too large only together.
    let _: String =
        redis::cmd("SET").arg("small").arg("x".repeat(20 << 20)).query(&mut keys).unwrap();
    let get = RedisCommand::new("GET").arg("small");
    assert_eq!(server.query(Slot::ONLY, vec![get.clone(); 3]).await.unwrap().len(), 3);
    let error = server.query(Slot::ONLY, vec![get; 4]).await.unwrap_err().to_string();
    assert!(error.contains("the replies to one request are larger than 64 MiB"), "{error}");
}
