//! Fence counters: exact as far as Redis counts, and refused where they cannot grow.

use leasehold::Error;

use super::{Client, KEY, MINUTES, Server, acquire, connect, deadline, lock, release, try_acquire};

const FENCE: &str = "syncguard:fence:invoice:42";

async fn start() -> (Server, Client) {
    let server = Server::start();
    let client = connect(&server.url()).await;
    (server, client)
}

#[tokio::test]
async fn fences_are_exact_beyond_what_a_floating_point_number_can_say() {
    let (server, client) = start().await;
    for before in [(1_u64 << 53) - 2, (1 << 53) - 1, 1 << 53, (1 << 62) + 12345, (1 << 63) - 3] {
        server.set(FENCE, &before.to_string());
        for fence in [before + 1, before + 2] {
            let guard = acquire(&lock(&client, MINUTES)).await;
            assert_eq!(guard.fence().get(), fence);
            // An extension reads the record and writes it again.
            deadline(guard.extend(MINUTES)).await.unwrap();
            let info = deadline(client.locks().lookup(KEY)).await.unwrap().unwrap();
            assert_eq!(info.fence.get(), fence);
            let again = client.locks();
            let again = deadline(again.try_acquire_as(KEY, MINUTES, &guard.id())).await.unwrap();
            assert_eq!(again.unwrap().fence.get(), fence);
            assert!(release(guard).await);
        }
    }
}

#[tokio::test]
async fn a_counter_near_its_end_is_warned_of() {
    const WARNING: &str = "the fence counter is near its maximum";
    testkit::events::listen();
    let (server, client) = start().await;
    let warned = |fence: u64| {
        let warnings = testkit::events::saying(WARNING);
        let of = |event: &&testkit::events::RecordedEvent| {
            event.fields["fence"] == format!("{fence:019}")
        };
        warnings.iter().filter(of).count()
    };
    server.set(FENCE, "8999999999999999999");
    assert!(release(acquire(&lock(&client, MINUTES)).await).await);
    assert_eq!(warned(9_000_000_000_000_000_000), 0);
    assert!(release(acquire(&lock(&client, MINUTES)).await).await);
    assert_eq!(warned(9_000_000_000_000_000_001), 1);
}

#[tokio::test]
async fn a_counter_that_cannot_grow_is_named_and_nothing_is_written() {
    let (server, client) = start().await;
    for counter in ["9223372036854775807", "9223372036854775808", "many", "", "1.5", "-1", "-7"] {
        server.set(FENCE, counter);
        let before = server.dump();
        for error in [
            deadline(lock(&client, MINUTES).acquire()).await.unwrap_err(),
            deadline(lock(&client, MINUTES).try_acquire()).await.unwrap_err(),
            deadline(client.locks().try_acquire(KEY, MINUTES)).await.unwrap_err(),
        ] {
            assert!(matches!(error, Error::ForeignData { .. }), "{counter:?}: {error}");
            assert!(error.to_string().contains(FENCE), "{counter:?}: {error}");
        }
        assert_eq!(server.dump(), before, "{counter:?}");
    }
    server.ask::<u64>(&["DEL", FENCE]);
    server.ask::<u64>(&["RPUSH", FENCE, "1"]);
    let before = server.dump();
    let error = deadline(lock(&client, MINUTES).acquire()).await.unwrap_err();
    assert!(matches!(error, Error::ForeignData { .. }), "{error}");
    assert!(error.to_string().contains(FENCE), "{error}");
    assert_eq!(server.dump(), before);

    server.ask::<u64>(&["DEL", FENCE]);
    assert!(try_acquire(&client).await.is_some());
}

/// An error of the server is not reported as an error of the counter.
#[tokio::test]
async fn a_server_that_is_full_is_not_taken_for_a_bad_counter() {
    let (server, client) = start().await;
    assert!(release(acquire(&lock(&client, MINUTES)).await).await);
    server.ask::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    let error = deadline(lock(&client, MINUTES).acquire()).await.unwrap_err();
    assert!(error.to_string().contains("out of memory"), "{error}");
    server.ask::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(try_acquire(&client).await.unwrap().fence().get(), 2);
}
