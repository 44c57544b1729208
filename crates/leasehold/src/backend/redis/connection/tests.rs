//! Suspect connections, and replies that are too large.

use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};

use super::*;
use crate::backend::redis::Deployment;
use crate::backend::redis::settings::Purpose;

fn connection_to(url: &str, purpose: Purpose) -> Arc<Connection> {
    let settings = RedisSettings { purpose, ..RedisSettings::new(url).unwrap() };
    let settings = Arc::new(settings);
    let server = match Deployment::parse(url) {
        Ok(Deployment::Server(server)) => Target::Only(server),
        other => panic!("{other:?}"),
    };
    let connection = Connection::new(settings, Arc::new(Scripts::new()), server, Destination::ONLY);
    tokio::spawn(connection.clone().keep_up(ClientId::random(), Arc::new(|_| ())));
    connection
}

async fn ping(connection: &Connection) -> Result<Vec<Value>, Error> {
    connection.send(vec![RedisCommand::new("PING")]).await
}

/// A caller that waits for an answer over a suspect connection is answered over the next one.
#[tokio::test]
async fn a_suspect_connection_is_replaced_once() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let connection = connection_to(&proxy.url(), Purpose::Commands);
    deadline(ping(&connection)).await.unwrap();

    proxy.forget_connections();
    let limit = Duration::from_millis(20);
    let mut patient = Box::pin(ping(&connection));
    tokio::time::timeout(limit, patient.as_mut()).await.expect_err("nobody answers");
    tokio::time::timeout(limit, ping(&connection)).await.expect_err("nobody answers");
    // A caller that stops waiting does not make the connection suspect.
    assert!(connection.wait_until_up().await.is_ok_and(|current| current.number == 1));
    connection.suspect_current();
    eventually(async || connection.wait_until_up().await.is_ok_and(|current| current.number == 2))
        .await;
    deadline(ping(&connection)).await.unwrap();

    // Requests sent over the old connection do not make the new one suspect.
    deadline(patient).await.unwrap();
    for _ in 0..10 {
        deadline(ping(&connection)).await.unwrap();
    }
    assert_eq!(proxy.traffic().accepted, 2);
}

/// The query fails at once, with the reason. Other queries over the same connection are repeated over the next one.
#[tokio::test]
async fn a_reply_that_is_too_large_fails_only_its_query() {
    let server = RedisServer::start();
    let mut keys = server.connection();
    let _: u64 =
        redis::cmd("SETRANGE").arg("large").arg(40 << 20).arg("x").query(&mut keys).unwrap();
    // Redis itself closes a connection with subscriptions at 32 MB.
    let connection = connection_to(&server.url(), Purpose::Reading);
    let get = vec![RedisCommand::new("GET").arg("large")];
    for _ in 0..3 {
        let (large, other) = tokio::join!(connection.send(get.clone()), ping(&connection));
        let error = large.unwrap_err().to_string();
        assert!(error.contains("a reply is larger than 32 MiB"), "{error}");
        other.unwrap();
    }
    // Many replies that are too large only together.
    let _: String =
        redis::cmd("SET").arg("small").arg("x".repeat(20 << 20)).query(&mut keys).unwrap();
    let get = RedisCommand::new("GET").arg("small");
    assert_eq!(connection.send(vec![get.clone(); 3]).await.unwrap().len(), 3);
    let error = connection.send(vec![get; 4]).await.unwrap_err().to_string();
    assert!(error.contains("the replies to one request are larger than 64 MiB"), "{error}");
}
