//! Connections that are not to be trusted.

use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};

use super::*;

async fn ping(link: &Link) -> Result<Vec<Value>, Error> {
    link.send(vec![redis::cmd("PING")]).await
}

/// Whoever waits for an answer over a suspect connection is answered over the next one.
#[tokio::test]
async fn a_suspect_connection_is_replaced_once() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let link = Link::new(RedisSettings::new(&proxy.url()).unwrap(), Scripts::new());
    tokio::spawn(link.clone().keep_up(ClientId::random(), Box::new(|_| ())));
    deadline(ping(&link)).await.unwrap();

    proxy.forget_connections();
    let limit = Duration::from_millis(20);
    let mut patient = Box::pin(ping(&link));
    tokio::time::timeout(limit, patient.as_mut()).await.expect_err("nobody answers");
    tokio::time::timeout(limit, ping(&link)).await.expect_err("nobody answers");
    // That nobody waits any longer proves nothing.
    assert!(link.connection().await.is_ok_and(|(_, number)| number == 1));
    link.suspect_current();
    eventually(async || link.connection().await.is_ok_and(|(_, number)| number == 2)).await;
    deadline(ping(&link)).await.unwrap();

    // What was sent over the old one says nothing about the new one.
    deadline(patient).await.unwrap();
    for _ in 0..10 {
        deadline(ping(&link)).await.unwrap();
    }
    assert_eq!(proxy.traffic().accepted, 2);
}
