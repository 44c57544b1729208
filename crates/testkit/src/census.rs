//! Who holds, who waits, and whether every permit can be had.

use leasehold::Semaphore;

/// How many hold, and how many wait.
pub async fn census(semaphore: &Semaphore) -> (u32, usize) {
    let stats = semaphore.stats().await.unwrap();
    (stats.held(), stats.waiting())
}

/// Fails unless nobody holds or waits now, and there are exactly as many permits to be had as the
/// semaphore has.
pub async fn assert_all_are_free(semaphore: &Semaphore) {
    assert_eq!(census(semaphore).await, (0, 0), "there are still holders or waiters");
    let mut permits = Vec::new();
    while permits.len() < semaphore.capacity() as usize {
        let permit = semaphore.try_acquire().await.unwrap();
        permits.push(permit.expect("nobody holds, but a permit is missing"));
    }
    assert!(semaphore.try_acquire().await.unwrap().is_none(), "a permit too many");
    for permit in permits {
        assert!(permit.release().await.unwrap());
    }
}
