//! Suspect connections.

use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};

use super::*;

async fn ping(link: &Link) -> Result<Vec<Value>, Error> {
    link.send(vec![redis::cmd("PING")]).await
}

/// A caller that waits for an answer over a suspect connection is answered over the next one.
#[tokio::test]
async fn a_suspect_connection_is_replaced_once() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let link = {
        let settings = Arc::new(RedisSettings::new(&proxy.url()).unwrap());
        let server =
            Server::Only(redis::IntoConnectionInfo::into_connection_info(proxy.url()).unwrap());
        Link::new(settings, Arc::new(Scripts::new()), server, Destination::ONLY)
    };
    tokio::spawn(link.clone().keep_up(ClientId::random(), Arc::new(|_| ())));
    deadline(ping(&link)).await.unwrap();

    proxy.forget_connections();
    let limit = Duration::from_millis(20);
    let mut patient = Box::pin(ping(&link));
    tokio::time::timeout(limit, patient.as_mut()).await.expect_err("nobody answers");
    tokio::time::timeout(limit, ping(&link)).await.expect_err("nobody answers");
    // A caller that stops waiting does not make the connection suspect.
    assert!(link.connection().await.is_ok_and(|up| up.number == 1));
    link.suspect_current();
    eventually(async || link.connection().await.is_ok_and(|up| up.number == 2)).await;
    deadline(ping(&link)).await.unwrap();

    // Requests sent over the old connection do not make the new one suspect.
    deadline(patient).await.unwrap();
    for _ in 0..10 {
        deadline(ping(&link)).await.unwrap();
    }
    assert_eq!(proxy.traffic().accepted, 2);
}
