//! A recorder is foreign code: one that panics or calls back does not disturb the client.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use leasehold::Semaphore;
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};
use testkit::wait::{deadline, eventually};

use super::{NAME, SHORT, Store};

/// A recorder that calls this function for every record.
struct Calls(Arc<dyn Fn() + Send + Sync>);

struct Handle(Arc<dyn Fn() + Send + Sync>);

impl CounterFn for Handle {
    fn increment(&self, _value: u64) {
        (self.0)();
    }
    fn absolute(&self, _value: u64) {}
}

impl GaugeFn for Handle {
    fn increment(&self, _value: f64) {
        (self.0)();
    }
    fn decrement(&self, _value: f64) {
        (self.0)();
    }
    fn set(&self, _value: f64) {
        (self.0)();
    }
}

impl HistogramFn for Handle {
    fn record(&self, _value: f64) {
        (self.0)();
    }
}

impl Recorder for Calls {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Arc::new(Handle(self.0.clone())).into()
    }
    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Arc::new(Handle(self.0.clone())).into()
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Arc::new(Handle(self.0.clone())).into()
    }
}

/// Acquires, waits, renews, releases, loses and closes.
async fn everything(store: &Store, recorder: &Calls, share: impl FnOnce(&Semaphore)) {
    let client = store.client().await;
    let (semaphore, lock, pool) = metrics::with_local_recorder(recorder, || {
        (
            client.semaphore(NAME, 1).lease(SHORT).build().unwrap(),
            client.lock(NAME).lease(SHORT).build().unwrap(),
            client.pool(NAME, 1).build().unwrap(),
        )
    });
    share(&semaphore);
    let permit = deadline(semaphore.acquire()).await.unwrap();
    let waiting = tokio::spawn(semaphore.acquire());
    let guard = deadline(lock.acquire()).await.unwrap();
    let lease = deadline(pool.acquire("i")).await.unwrap();
    let begun = Instant::now();
    eventually(async || guard.valid_until() > Some(begun + 2 * SHORT)).await;
    permit.check().unwrap();
    guard.check().unwrap();
    lease.check().unwrap();
    assert!(deadline(permit.release()).await.unwrap());
    let permit = deadline(waiting).await.unwrap().unwrap();
    assert!(deadline(guard.release()).await.unwrap());
    deadline(client.close()).await.unwrap();
    assert!(permit.check().is_err() && lease.check().is_err());
}

#[tokio::test]
async fn a_recorder_that_panics_disturbs_nobody() {
    for store in Store::all() {
        let calls = Arc::new(AtomicU32::new(0));
        let count = calls.clone();
        let recorder = Calls(Arc::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
            std::panic::resume_unwind(Box::new("on purpose"));
        }));
        everything(&store, &recorder, |_| {}).await;
        assert!(calls.load(Ordering::Relaxed) > 10, "{}", store.label());
    }
}

/// The recorder acquires the semaphore whose metric it records. If the library held an internal
/// lock, this would deadlock.
#[tokio::test]
async fn a_recorder_that_calls_back_finds_no_lock_held() {
    for store in Store::all() {
        let semaphore = Arc::new(OnceLock::<Semaphore>::new());
        let known = semaphore.clone();
        let calls = Arc::new(AtomicU32::new(0));
        let count = calls.clone();
        let recorder = Calls(Arc::new(move || {
            thread_local!(static CALLED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) });
            // The acquire below is recorded as well: do not recurse.
            if !CALLED.replace(true) {
                if let Some(semaphore) = known.get() {
                    let mut acquire = testkit::by_hand::ByHand::new(semaphore.acquire());
                    drop(acquire.poll());
                    count.fetch_add(1, Ordering::Relaxed);
                }
                CALLED.set(false);
            }
        }));
        everything(&store, &recorder, |used| drop(semaphore.set(used.clone()))).await;
        eventually(async || calls.load(Ordering::Relaxed) > 5).await;
    }
}
