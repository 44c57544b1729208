//! Counts of holders and waiters, and a check that every permit can be acquired.

use leasehold::Semaphore;

/// Returns the number of holders and the number of waiters.
pub async fn held_and_waiting(semaphore: &Semaphore) -> (u32, usize) {
    let stats = semaphore.stats().await.unwrap();
    (stats.held, stats.waiting)
}

/// Fails unless nothing is held, nothing waits, and exactly as many permits as the capacity can be acquired.
pub async fn assert_all_are_free(semaphore: &Semaphore) {
    assert_eq!(held_and_waiting(semaphore).await, (0, 0), "(holders, waiters)");
    let mut permits = Vec::new();
    while permits.len() < semaphore.capacity() as usize {
        let permit = semaphore.try_acquire().await.unwrap();
        permits.push(permit.expect("nothing is held, but a permit cannot be acquired"));
    }
    assert!(semaphore.try_acquire().await.unwrap().is_none(), "more permits than the capacity");
    for permit in permits {
        assert!(permit.release().await.unwrap());
    }
}
