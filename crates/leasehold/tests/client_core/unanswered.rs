//! A server that accepts connections and does not answer is unavailable, which is not contention.

use std::time::Duration;

use leasehold::Error;
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;

use super::{acquire, connect, one, release, within};

const LIMIT: Duration = Duration::from_secs(2);
/// Longer than the answer time-out.
const TIME_LIMIT: Duration = Duration::from_secs(6);

#[tokio::test]
async fn an_acquire_that_is_not_answered_over_a_stalled_link_is_unavailable() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let client = connect(&proxy.url()).await;
    let semaphore = one(&client);
    proxy.stall();
    let error = within(TIME_LIMIT, semaphore.acquire().within(LIMIT)).await.unwrap_err();
    proxy.heal();
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
}

#[tokio::test]
async fn a_try_that_a_stopped_server_does_not_answer_is_unavailable() {
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    let semaphore = one(&client);
    server.pause();
    let tried = tokio::time::timeout(TIME_LIMIT, semaphore.try_acquire()).await;
    server.resume();
    let error = tried.expect("an answer in time").unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
}

#[tokio::test]
async fn an_acquire_times_out_while_the_server_answers_and_another_holds() {
    let server = RedisServer::start();
    let (client, other) = (connect(&server.url()).await, connect(&server.url()).await);
    let held = acquire(&one(&other)).await;
    let acquire = one(&client).acquire().within(Duration::from_millis(300));
    let error = within(TIME_LIMIT, acquire).await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error:?}");
    assert!(release(held).await);
}
