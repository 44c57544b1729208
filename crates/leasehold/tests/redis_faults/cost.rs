//! What a client sends when there is no fault.

use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::eventually;

use super::{acquire, connect, one, release};

#[tokio::test]
async fn an_acquire_is_one_round_trip_and_so_is_a_release() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let client = connect(&proxy.url()).await;
    let semaphore = one(&client);
    // Requests of the connect may still be under way. The last one sets the expiry of the client's record.
    eventually(async || server.command_count("expire") == 1).await;
    let count = || (proxy.requests(), server.command_count("evalsha"));

    for _ in 0..3 {
        let before = count();
        let permit = acquire(&semaphore).await;
        assert_eq!(count(), (before.0 + 1, before.1 + 1), "an acquire");
        assert!(release(permit).await);
        assert_eq!(count(), (before.0 + 2, before.1 + 2), "a release");
    }
}
