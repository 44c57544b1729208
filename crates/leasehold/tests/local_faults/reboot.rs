//! After a restart of the machine: no holder is left, and fences continue.

use std::time::Duration;

use testkit::local_store::LocalStore;
use testkit::wait::deadline;

use super::files::client_is_gone;
use super::{Waiter, acquire, count, held_and_waiting, look, one, open, release};

#[tokio::test]
async fn after_a_start_of_the_machine_everybody_is_gone() {
    let store = LocalStore::new();
    let before = open(&store).await;
    let permit = acquire(&one(&before)).await;
    let _waiter = Waiter::join(&one(&before)).await;
    let locks = before.locks();
    let held = deadline(locks.try_acquire("key", Duration::from_secs(60))).await.unwrap().unwrap();
    let pool = before.pool("pool", 1).lease(Duration::from_secs(60)).build().unwrap();
    let _id = deadline(pool.acquire("instance")).await.unwrap().detach();

    look(&store).execute("UPDATE meta SET boot = 'another start'", []).unwrap();
    let after = open(&store).await;
    assert_eq!(held_and_waiting(&one(&after)).await, (0, 0));
    for table in ["holders", "waiters", "leases", "lock_ids"] {
        assert_eq!(count(&store, table), 0, "{table}");
    }
    let next = acquire(&one(&after)).await;
    assert!(next.fence() > permit.fence());
    assert!(release(next).await);
    assert!(!deadline(after.locks().is_locked("key")).await.unwrap());
    let next = deadline(after.locks().try_acquire("key", Duration::from_secs(60))).await.unwrap();
    assert!(next.unwrap().fence > held.fence);
    assert_eq!(deadline(after.pools().lookup("pool")).await.unwrap(), None);

    // Without a restart, every holder stays.
    let permit = acquire(&one(&after)).await;
    let again = open(&store).await;
    assert_eq!(held_and_waiting(&one(&again)).await, (1, 0));
    assert!(release(permit).await);
}

/// The clock is set back before the machine restarts.
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
    assert!(next.fence().get() > fence.get() + 1_000_000_000_000, "{}", next.fence());
    assert!(release(next).await);
}

/// Returns the store as a power cut may leave it: what was only in the log is lost.
fn without_its_log(store: &LocalStore) -> LocalStore {
    let copy = LocalStore::new();
    std::fs::copy(store.path(), copy.path()).unwrap();
    copy
}

/// Uses some names and keys, and returns the fences of each: the lowest and the highest.
async fn fences(store: &LocalStore) -> Vec<(u64, u64)> {
    let client = open(store).await;
    let mut all = Vec::new();
    for name in ["a", "b", "c"] {
        let (semaphore, mut fences) = (client.semaphore(name, 1).build().unwrap(), Vec::new());
        for _ in 0..3 {
            let permit = acquire(&semaphore).await;
            fences.push(permit.fence().get());
            assert!(release(permit).await);
        }
        all.push(fences);
        let (lock, mut fences) = (client.lock(name).build().unwrap(), Vec::new());
        for _ in 0..3 {
            let guard = deadline(lock.acquire()).await.unwrap();
            fences.push(guard.fence().get());
            deadline(guard.release()).await.unwrap();
        }
        all.push(fences);
    }
    assert!(all.iter().all(|fences| fences.is_sorted_by(|a, b| a < b)), "{all:?}");
    all.iter().map(|fences| (fences[0], fences[2])).collect()
}

#[track_caller]
fn assert_above(after: &[(u64, u64)], before: &[(u64, u64)]) {
    let grow = after.iter().zip(before).all(|((lowest, _), (_, highest))| lowest > highest);
    assert!(grow, "{after:?} after {before:?}");
}

/// The same a second and a third time, without anything copied back from the log.
#[tokio::test]
async fn fences_grow_after_a_power_cut_that_took_the_log() {
    let mut store = LocalStore::new();
    let mut before = fences(&store).await;
    for start in ["second", "third", "fourth"] {
        store = without_its_log(&store);
        let boot = look(&store).execute("UPDATE meta SET boot = ?1", [start]);
        assert_eq!(boot.unwrap_or(0), 1, "the store is complete");
        let after = fences(&store).await;
        assert_above(&after, &before);
        before = after;
    }
}

/// A machine without a battery-backed clock starts in 1970. The store still knows which fences it has granted.
#[tokio::test]
async fn fences_grow_after_a_power_cut_that_took_the_log_and_the_time() {
    const YEAR: i64 = 365 * 24 * 3600 * 1_000_000;
    let store = LocalStore::new();
    drop(open(&store).await);
    // Until the restart, the clock was ahead.
    look(&store).execute("UPDATE meta SET origin = origin + ?1", [YEAR]).unwrap();
    let before = fences(&store).await;
    let store = without_its_log(&store);
    look(&store).execute("UPDATE meta SET boot = 'another start'", []).unwrap();
    assert_above(&fences(&store).await, &before);
}

#[tokio::test]
async fn fences_grow_if_the_log_is_lost_without_a_start_of_the_machine() {
    let store = LocalStore::new();
    let before = fences(&store).await;
    let store = without_its_log(&store);
    assert_above(&fences(&store).await, &before);
}

/// A file of schema version 1, whose lock fences were counters.
#[tokio::test]
async fn a_store_of_the_first_version_goes_on() {
    let store = LocalStore::new();
    let client = open(&store).await;
    client_is_gone(&store, client).await;
    let first_version = "ALTER TABLE meta RENAME COLUMN fence_lead TO lock_floor; ALTER TABLE meta DROP COLUMN horizon;
                         ALTER TABLE locks DROP COLUMN host; ALTER TABLE locks DROP COLUMN pid; ALTER TABLE locks DROP COLUMN label;
                         DROP INDEX holders_to_claim; ALTER TABLE holders DROP COLUMN unclaimed;
                         ALTER TABLE holders DROP COLUMN hold_until;
                         ALTER TABLE semaphores DROP COLUMN pinned; ALTER TABLE semaphores DROP COLUMN paused;
                         ALTER TABLE semaphores DROP COLUMN paused_by; ALTER TABLE semaphores DROP COLUMN pause_reason;
                         ALTER TABLE semaphores DROP COLUMN units; ALTER TABLE semaphores DROP COLUMN rate_count;
                         ALTER TABLE semaphores DROP COLUMN rate_period;
                         ALTER TABLE semaphores DROP COLUMN rate_burst; ALTER TABLE semaphores DROP COLUMN rate_full_at;
                         ALTER TABLE semaphores DROP COLUMN rate_returns_from; DROP INDEX holders_by_slot;
                         ALTER TABLE holders DROP COLUMN weight; ALTER TABLE holders DROP COLUMN slot;
                         ALTER TABLE waiters DROP COLUMN weight; ALTER TABLE waiters DROP COLUMN numbered;
                         CREATE INDEX holders_to_claim ON holders (client) WHERE fence IS NULL;
                         UPDATE meta SET lock_floor = 1048576; PRAGMA user_version = 1;
                         INSERT INTO locks (key, fence) VALUES ('a', 1048583);";
    look(&store).execute_batch(first_version).unwrap();
    let before = fences(&store).await;
    assert!(before.iter().all(|(lowest, _)| *lowest > 1_048_583), "{before:?}");
    let store = without_its_log(&store);
    look(&store).execute("UPDATE meta SET boot = 'another start'", []).unwrap();
    assert_above(&fences(&store).await, &before);
}

/// A file of schema version 5, in which a rate was an interval and a burst.
#[tokio::test]
async fn a_rate_of_the_fifth_version_still_limits() {
    const HOUR: std::time::Duration = std::time::Duration::from_secs(3600);
    let store = LocalStore::new();
    let client = open(&store).await;
    for name in ["rated", "free", "undeclared"] {
        drop(acquire(&client.semaphore(name, 9).build().unwrap()).await);
    }
    client_is_gone(&store, client).await;
    let fifth_version = "ALTER TABLE semaphores DROP COLUMN rate_count;
                         ALTER TABLE semaphores RENAME COLUMN rate_period TO rate_interval;
                         UPDATE semaphores SET rate_interval = 3600000000, rate_burst = 2, rate_full_at = 1, rate_returns_from = 1
                         WHERE name = 'rated';
                         UPDATE semaphores SET rate_interval = 0 WHERE name = 'free'; PRAGMA user_version = 5;";
    look(&store).execute_batch(fifth_version).unwrap();
    let client = open(&store).await;
    let rated = client.semaphore("rated", 9).build().unwrap();
    let rate = deadline(rated.stats()).await.unwrap().rate.unwrap();
    assert_eq!((rate.interval(), rate.burst), (HOUR, 2));
    drop((acquire(&rated).await, acquire(&rated).await));
    assert!(deadline(rated.try_acquire()).await.unwrap().is_none());
    // Where the rate was removed, only a new declaration counts, which the first acquire of a client makes.
    let counts: Vec<Option<i64>> = {
        let connection = look(&store);
        let mut select = connection
            .prepare("SELECT rate_count FROM semaphores WHERE name <> 'rated' ORDER BY name")
            .unwrap();
        let counts = select.query_map([], |row| row.get(0)).unwrap();
        counts.map(Result::unwrap).collect()
    };
    assert_eq!(counts, [Some(0), None]);
}
