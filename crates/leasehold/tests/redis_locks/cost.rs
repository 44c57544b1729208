//! What a client sends when there is no fault.

use testkit::proxy::FaultProxy;
use testkit::wait::eventually;

use super::{KEY, MINUTES, Server, acquire, connect, deadline, lock, release};

#[tokio::test]
async fn each_operation_is_one_round_trip() {
    let server = Server::start();
    let proxy = FaultProxy::start(server.port());
    let client = connect(&proxy.url()).await;
    // Requests of the connect may still be under way. The last one sets the expiry of the client's record.
    eventually(async || server.command_count("expire") == 1).await;
    let (locks, lock) = (client.locks(), lock(&client, MINUTES));
    let sent = |what: &str, before: u64| assert_eq!(proxy.requests(), before + 1, "{what}");
    for _ in 0..3 {
        let before = proxy.requests();
        let guard = acquire(&lock).await;
        sent("acquire", before);
        deadline(guard.extend(MINUTES)).await.unwrap();
        sent("extend", before + 1);
        assert!(deadline(lock.try_acquire()).await.unwrap().is_none());
        sent("try_acquire", before + 2);
        assert!(deadline(locks.is_locked(KEY)).await.unwrap());
        sent("is_locked", before + 3);
        deadline(locks.lookup(KEY)).await.unwrap().unwrap();
        sent("lookup", before + 4);
        deadline(locks.lookup(&guard.id())).await.unwrap().unwrap();
        sent("lookup_id", before + 5);
        assert!(release(guard).await);
        sent("release", before + 6);
    }
    assert_eq!(server.command_count("publish"), 0, "without waiters nothing is published");
    assert_eq!(server.command_count("sadd"), 0, "without waiters none is recorded");
}

/// Two scripts, and the seven calls that they make. What the client knows saves three calls: the
/// next fence, its key, and that its lease has not ended.
#[tokio::test]
async fn a_pair_is_nine_calls() {
    let server = Server::start();
    let client = connect(&server.url()).await;
    eventually(async || server.command_count("expire") == 1).await;
    let lock = lock(&client, MINUTES);
    // The first acquire of a key needs more calls, because its fence counter is new.
    assert!(release(acquire(&lock).await).await);
    for _ in 0..3 {
        let before = server.total_commands_processed();
        assert!(release(acquire(&lock).await).await);
        assert_eq!(server.total_commands_processed() - before, 9);
    }
}
