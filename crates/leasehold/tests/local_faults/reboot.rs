//! The machine was started anew: everybody is gone, fences go on.

use std::time::Duration;

use testkit::local_store::LocalStore;
use testkit::wait::deadline;

use super::{Waiter, acquire, census, count, look, one, open, release};

#[tokio::test]
async fn after_a_start_of_the_machine_everybody_is_gone() {
    let store = LocalStore::new();
    let before = open(&store).await;
    let permit = acquire(&one(&before)).await;
    let _waiter = Waiter::join(&one(&before)).await;
    let locks = before.locks();
    let held = deadline(locks.acquire("key", Duration::from_secs(60))).await.unwrap().unwrap();
    let pool = before.pool("pool", 1).ttl(Duration::from_secs(60)).build().unwrap();
    deadline(pool.acquire("instance")).await.unwrap();

    look(&store).execute("UPDATE meta SET boot = 'another start'", []).unwrap();
    let after = open(&store).await;
    assert_eq!(census(&one(&after)).await, (0, 0));
    for table in ["holders", "waiters", "leases", "lock_ids"] {
        assert_eq!(count(&store, table), 0, "{table}");
    }
    let next = acquire(&one(&after)).await;
    assert!(next.fence() > permit.fence());
    assert!(release(next).await);
    assert!(!deadline(after.locks().is_locked("key")).await.unwrap());
    let next = deadline(after.locks().acquire("key", Duration::from_secs(60))).await.unwrap();
    assert!(next.unwrap().fence > held.fence);
    let pool = after.pool("pool", 1).ttl(Duration::from_secs(60)).build().unwrap();
    assert_eq!(deadline(pool.count()).await.unwrap().current_count, 0);

    // In the same start of the machine, nobody goes.
    let permit = acquire(&one(&after)).await;
    let again = open(&store).await;
    assert_eq!(census(&one(&again)).await, (1, 0));
    assert!(release(permit).await);
}

/// A clock that is set back before the machine is started again.
#[tokio::test]
async fn fences_grow_whatever_the_clock_says() {
    let store = LocalStore::new();
    let client = open(&store).await;
    let ahead = "UPDATE semaphores SET last_fence = last_fence + 1000000000000";
    let first = acquire(&one(&client)).await;
    let fence = first.fence();
    assert!(release(first).await);
    look(&store).execute(ahead, []).unwrap();
    look(&store).execute("UPDATE meta SET boot = 'another start'", []).unwrap();
    let after = open(&store).await;
    let next = acquire(&one(&after)).await;
    assert_eq!(next.fence().get(), fence.get() + 1_000_000_000_001);
    assert!(release(next).await);
}
