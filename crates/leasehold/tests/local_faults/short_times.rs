//! Times that are shorter than an answer of the store takes.

use std::time::Duration;

use leasehold::{Error, Retry};
use testkit::local_store::LocalStore;
use testkit::wait::deadline;

use super::{acquire, one, open, release};

/// A TTL that ends before its holder learns of the grant would be acquired again and again.
#[tokio::test]
async fn a_ttl_below_the_minimum_is_refused() {
    let store = LocalStore::new();
    let client = open(&store).await;
    for ttl in [Duration::from_nanos(1), Duration::from_micros(5), Duration::from_millis(99)] {
        let error = client.semaphore("x", 1).ttl(ttl).build().unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(&format!("{ttl:?}")) && text.contains("100ms"), "{text}");
    }
    let shortest = client.semaphore("x", 1).ttl(Duration::from_millis(100)).build().unwrap();
    let permit = acquire(&shortest).await;
    assert_eq!(deadline(permit.lost()).await, leasehold::LossReason::TtlEnded);
}

/// The limit may end before the store has answered, or after that.
fn is_late(error: &Error) -> bool {
    matches!(error, Error::TimedOut { .. } | Error::Unavailable { timed_out: true, .. })
}

#[tokio::test]
async fn a_short_limit_of_a_wait_ends_it() {
    let store = LocalStore::new();
    let client = open(&store).await;
    let permit = acquire(&one(&client)).await;
    for limit in [Duration::from_nanos(1), Duration::from_micros(1), Duration::from_millis(1)] {
        let error = deadline(one(&client).acquire().within(limit)).await.unwrap_err();
        assert!(is_late(&error), "{error}");
        let limited = client.semaphore("x", 1).within(limit).build().unwrap();
        let error = deadline(limited.acquire()).await.unwrap_err();
        assert!(is_late(&error), "{error}");
    }
    assert!(release(permit).await);
    assert!(release(acquire(&one(&client)).await).await);
}

/// Their TTL may end before the answer arrives. Then the lock is lost at once, and the next acquire succeeds.
#[tokio::test]
async fn a_lock_with_a_short_lease_expires() {
    let store = LocalStore::new();
    let client = open(&store).await;
    let retry = Retry::default().delay(Duration::from_nanos(1));
    let lock = client.lock("key").ttl(Duration::from_millis(1)).retry(retry).build().unwrap();
    for _ in 0..10 {
        match deadline(lock.acquire()).await {
            Ok(guard) => {
                deadline(guard.lost()).await;
                assert!(guard.check().is_err());
            }
            Err(error) => assert!(matches!(error, Error::Lost { .. }), "{error}"),
        }
        let held = deadline(client.locks().try_acquire("key", Duration::from_millis(1))).await;
        held.unwrap();
    }
}
