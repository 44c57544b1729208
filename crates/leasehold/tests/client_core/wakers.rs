//! Wakers that own a permit, and so release it wherever the library drops them.
//!
//! Nothing here runs in a runtime. Each test runs on its own thread, which is abandoned if it deadlocks.

use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use leasehold::{Client, Error, LossReason, Semaphore};
use testkit::by_hand::{block_on, until};
use testkit::redis_server::RedisServer;

use super::{MINUTES, connect, one};

/// A call that takes longer than this has deadlocked.
const STUCK: Duration = Duration::from_secs(5);

/// A waker that owns a value.
struct Owner<T> {
    _owned: Mutex<T>,
}

impl<T: Send> Wake for Owner<T> {
    fn wake(self: Arc<Self>) {}
}

/// Returns a waker with the only reference to the value, so that dropping the waker drops it.
fn owning<T: Send + 'static>(owned: T) -> Waker {
    Waker::from(Arc::new(Owner { _owned: Mutex::new(owned) }))
}

/// Polls once. Afterwards only the future's clone of the waker is left.
fn poll_with<F: Future>(future: Pin<&mut F>, waker: Waker) -> Poll<F::Output> {
    let polled = future.poll(&mut Context::from_waker(&waker));
    drop(waker);
    polled
}

/// Runs the test with a client in memory and with one on Redis, each on its own thread.
fn on_memory_and_redis(test: impl Fn(&Client) + Copy + Send + 'static) {
    let server = RedisServer::start();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let connected = runtime.block_on(connect(&server.url()));
    let mut deadlocks = Vec::new();
    for (store, client) in [("memory", Client::memory()), ("Redis", connected)] {
        let (done, is_done) = mpsc::channel();
        let thread = thread::spawn(move || {
            test(&client);
            let _ = done.send(());
        });
        match is_done.recv_timeout(STUCK) {
            Err(mpsc::RecvTimeoutError::Timeout) => deadlocks.push(store),
            _ => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
        }
    }
    assert!(deadlocks.is_empty(), "deadlock: {deadlocks:?}");
}

fn all_are_free(semaphore: &Semaphore) {
    until(|| block_on(testkit::counts::held_and_waiting(semaphore)) == (0, 0));
    block_on(testkit::counts::assert_all_are_free(semaphore));
}

#[test]
fn a_waker_may_release_the_awaited_permit_when_another_replaces_it() {
    on_memory_and_redis(|client| {
        let semaphore = one(client);
        let held = block_on(semaphore.acquire()).unwrap();
        let mut acquire = pin!(semaphore.acquire());
        assert!(poll_with(acquire.as_mut(), owning(held)).is_pending());
        let permit = match poll_with(acquire.as_mut(), Waker::noop().clone()) {
            Poll::Ready(permit) => permit,
            Poll::Pending => block_on(acquire),
        };
        drop(permit.unwrap());
        all_are_free(&semaphore);
    });
}

#[test]
fn a_waker_may_release_the_awaited_permit_when_the_acquire_is_dropped() {
    on_memory_and_redis(|client| {
        let semaphore = one(client);
        let held = block_on(semaphore.acquire()).unwrap();
        let mut acquire = Box::pin(semaphore.acquire());
        assert!(poll_with(acquire.as_mut(), owning(held)).is_pending());
        drop(acquire);
        all_are_free(&semaphore);
    });
}

#[test]
fn a_waker_may_release_a_permit_when_its_acquire_is_granted() {
    on_memory_and_redis(|client| {
        let semaphore = client.semaphore(super::NAME, 2).build().unwrap();
        let held = block_on(semaphore.acquire()).unwrap();
        let released = block_on(semaphore.acquire()).unwrap();
        let mut acquire = pin!(semaphore.acquire());
        assert!(poll_with(acquire.as_mut(), owning(held)).is_pending());
        assert!(block_on(released.release()).unwrap());
        let permit = block_on(acquire).unwrap();
        assert!(block_on(permit.release()).unwrap());
        all_are_free(&semaphore);
    });
}

#[test]
fn a_waker_may_release_the_awaited_permit_when_its_acquire_times_out() {
    on_memory_and_redis(|client| {
        let semaphore = one(client);
        let held = block_on(semaphore.acquire()).unwrap();
        let mut acquire = pin!(semaphore.acquire().within(Duration::from_millis(200)));
        assert!(poll_with(acquire.as_mut(), owning(held)).is_pending());
        // The time-out drops the waker, and the waker drops the permit.
        until(|| block_on(testkit::counts::held_and_waiting(&semaphore)) == (0, 0));
        assert!(matches!(block_on(acquire).unwrap_err(), Error::TimedOut { .. }));
        all_are_free(&semaphore);
    });
}

#[test]
fn a_waker_may_release_a_permit_when_the_client_is_closed() {
    on_memory_and_redis(|client| {
        let semaphore = one(client);
        let held = block_on(semaphore.acquire()).unwrap();
        let mut acquire = pin!(semaphore.acquire());
        assert!(poll_with(acquire.as_mut(), owning(held)).is_pending());
        block_on(client.close()).unwrap();
        assert!(matches!(block_on(acquire).unwrap_err(), Error::Closed));
    });
}

#[test]
fn a_waker_may_release_the_permit_whose_loss_it_awaits_when_another_replaces_it() {
    on_memory_and_redis(|client| {
        let semaphore = one(client);
        let held = block_on(semaphore.acquire()).unwrap();
        let mut lost = pin!(held.lost());
        assert!(poll_with(lost.as_mut(), owning(held)).is_pending());
        let _ = poll_with(lost.as_mut(), Waker::noop().clone());
        assert_eq!(block_on(lost), LossReason::Released);
        all_are_free(&semaphore);
    });
}

#[test]
fn a_waker_may_release_the_permit_whose_loss_it_awaits_when_that_is_dropped() {
    on_memory_and_redis(|client| {
        let semaphore = one(client);
        let held = block_on(semaphore.acquire()).unwrap();
        let mut lost = Box::pin(held.lost());
        assert!(poll_with(lost.as_mut(), owning(held)).is_pending());
        drop(lost);
        all_are_free(&semaphore);
    });
}

#[test]
fn a_waker_may_release_the_lock_whose_loss_it_awaits() {
    on_memory_and_redis(|client| {
        let lock = client.lock(super::NAME).lease(MINUTES).build().unwrap();
        for replaced in [true, false] {
            let guard = block_on(lock.acquire()).unwrap();
            let mut lost = Box::pin(guard.lost());
            assert!(poll_with(lost.as_mut(), owning(guard)).is_pending());
            if replaced {
                let _ = poll_with(lost.as_mut(), Waker::noop().clone());
            }
            drop(lost);
            until(|| !block_on(client.locks().is_locked(super::NAME)).unwrap());
        }
    });
}
