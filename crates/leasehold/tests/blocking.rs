//! The blocking API: on every store, on threads without a runtime, and inside a runtime.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use leasehold::blocking::{self, Wait};
use leasehold::{Client, Error, LossReason, Permit, Primitive, Semaphore};
use testkit::wait::{TIME_LIMIT, eventually, until};

fn has_waiters(semaphore: &Semaphore, expected: usize) {
    until("the waiters are queued", TIME_LIMIT, || {
        let waiting = semaphore.stats().wait().unwrap().waiting;
        if waiting == expected { Ok(()) } else { Err(format!("{waiting} wait")) }
    });
}

/// At most two of eight threads hold a permit. Each thread has its own client if the store allows that.
fn threads_share_permits(open: &(impl Fn() -> Client + Sync)) {
    let (running, most, runs) = (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0));
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let semaphore = open().semaphore("threads", 2).build().unwrap();
                for _ in 0..5 {
                    let work = |_: &_| {
                        let now = running.fetch_add(1, Ordering::SeqCst) + 1;
                        most.fetch_max(now, Ordering::SeqCst);
                        thread::sleep(Duration::from_millis(1)); // so that the threads meet
                        running.fetch_sub(1, Ordering::SeqCst);
                        runs.fetch_add(1, Ordering::SeqCst);
                    };
                    semaphore.acquire().within(TIME_LIMIT).blocking_with(work).unwrap();
                }
            });
        }
    });
    assert_eq!(runs.into_inner(), 40);
    assert!(most.into_inner() <= 2, "more than two permits at once");
}

fn a_thread_waits_its_turn(open: &(impl Fn() -> Client + Sync)) {
    let here = open().semaphore("turn", 3).build().unwrap();
    let held = here.acquire().weight(2).wait().unwrap();
    assert!(here.try_acquire().weight(2).wait().unwrap().is_none());
    // Long enough for the store to answer; otherwise the error would be `Unavailable`.
    let limit = Duration::from_millis(500);
    let error = here.acquire().weight(2).within(limit).wait().unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    let (waiting, waiters) = mpsc::channel();
    thread::scope(|scope| {
        let waiting = scope.spawn(move || {
            let there = open().semaphore("turn", 3).build().unwrap();
            waiting.send(std::fs::read_link("/proc/thread-self")).unwrap();
            there.acquire().weight(2).wait().unwrap().release().wait().unwrap()
        });
        has_waiters(&here, 1);
        if let Ok(waiter) = waiters.recv().unwrap() {
            is_asleep(&std::path::Path::new("/proc").join(waiter));
        }
        assert!(held.release().wait().unwrap());
        assert!(waiting.join().unwrap());
    });
}

/// Waits until the thread sleeps. A thread that polled in a loop would be runnable at every look.
fn is_asleep(thread: &std::path::Path) {
    until("the waiting thread sleeps", TIME_LIMIT, || {
        let stat = std::fs::read_to_string(thread.join("stat")).unwrap();
        let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
        if state == Some('S') { Ok(()) } else { Err(format!("its state is {state:?}")) }
    });
}

fn a_loss_is_reported_after_the_work(client: &Client) {
    let semaphore = client.semaphore("loss", 1).ttl(Duration::from_secs(1)).build().unwrap();
    let mut ran = false;
    let lost = semaphore.blocking_with(|permit| {
        until("the loss", TIME_LIMIT, || permit.check().map_or(Ok(()), |()| Err("held".into())));
        ran = true;
    });
    assert!(matches!(lost, Err(Error::Lost { reason: LossReason::TtlEnded, .. })), "{lost:?}");
    assert!(ran, "the work runs to its end");
    let lock = client.lock("loss").ttl(Duration::from_secs(1)).build().unwrap();
    let lost = lock.blocking_with(|guard| {
        until("the loss", TIME_LIMIT, || guard.check().map_or(Ok(()), |()| Err("held".into())));
    });
    assert!(matches!(lost, Err(Error::Lost { reason: LossReason::TtlEnded, .. })), "{lost:?}");
}

fn a_panic_releases(client: &Client) {
    let semaphore = client.semaphore("panic", 1).build().unwrap();
    let work = || semaphore.blocking_with(|_| std::panic::resume_unwind(Box::new("on purpose")));
    assert!(catch_unwind(AssertUnwindSafe(|| work().map(|(): ()| ()))).is_err());
    drop(semaphore.acquire().within(TIME_LIMIT).wait().expect("the permit was released"));
}

fn locks_and_pools(client: &Client) {
    let lock = client.lock("key").label("a thread").within(Duration::from_millis(500));
    let lock = lock.build().unwrap();
    let guard = lock.acquire().wait().unwrap();
    assert!(lock.try_acquire().wait().unwrap().is_none());
    let refused = lock.acquire().wait();
    assert!(
        matches!(refused, Err(Error::TimedOut { primitive: Primitive::Lock, .. })),
        "{refused:?}"
    );
    guard.extend(Duration::from_secs(60)).wait().unwrap();
    let info = client.locks().lookup("key").wait().unwrap().expect("it is held");
    assert_eq!(info.label.as_deref(), Some("a thread"));
    assert!(guard.release().wait().unwrap());
    assert!(lock.blocking_with(|guard| guard.check().is_ok()).unwrap());

    let pool = client.pool("pool", 1).build().unwrap();
    let one = pool.acquire("one").wait().unwrap().detach();
    assert!(pool.extend(&one).wait().unwrap());
    assert!(pool.try_acquire("two").wait().unwrap().is_none());
    assert!(pool.release(&one).wait().unwrap());
    let lease = pool.acquire("two").wait().unwrap();
    assert_eq!(client.pools().list(10).wait().unwrap().len(), 1);
    assert!(lease.release().wait().unwrap());
    assert!(pool.blocking_with("three", |lease| lease.check().is_ok()).unwrap());
}

fn limits_and_statistics(client: &Client) {
    let semaphore = client.semaphore("limited", 1).build().unwrap();
    let held = semaphore.acquire().wait().unwrap();
    semaphore.set_capacity(2).wait().unwrap();
    semaphore.pause().reason("a test").wait().unwrap();
    assert!(semaphore.try_acquire().wait().unwrap().is_none());
    let busy = semaphore.drain().within(Duration::from_millis(20)).wait().unwrap_err();
    assert!(matches!(busy, Error::NotDrained { .. }), "{busy}");
    let all = client.stats().names(["limited"]).wait().unwrap();
    assert_eq!((all[0].held, all[0].capacity), (1, 2));
    let id = held.detach();
    assert!(semaphore.release(&id).wait().unwrap());
    semaphore.drain().wait().unwrap();
    semaphore.resume().wait().unwrap();
    assert!(semaphore.try_acquire().wait().unwrap().is_some());
}

fn everything(open: impl Fn() -> Client + Sync) {
    threads_share_permits(&open);
    a_thread_waits_its_turn(&open);
    let client = open();
    a_loss_is_reported_after_the_work(&client);
    a_panic_releases(&client);
    locks_and_pools(&client);
    limits_and_statistics(&client);
    client.close().wait().unwrap();
    let error = client.semaphore("limited", 1).build().map(drop);
    assert!(matches!(error, Err(Error::Closed)));
}

#[test]
fn in_memory() {
    let client = Client::open("memory:").wait().unwrap();
    everything(|| client.clone());
}

#[cfg(all(feature = "local", target_os = "linux"))]
#[test]
fn on_one_host() {
    let store = testkit::local_store::LocalStore::new();
    everything(|| Client::local(store.path()).wait().unwrap());
}

#[cfg(feature = "redis")]
#[test]
fn on_redis() {
    let server = testkit::redis_server::RedisServer::start();
    everything(|| Client::redis(&server.url()).wait().unwrap());
}

fn assert_refused<T>(result: Result<T, Error>) {
    let Err(error) = result else { panic!("the call blocked the runtime") };
    assert!(matches!(error, Error::WrongThread { .. }), "{error}");
    for hint in ["belongs to a Tokio runtime", "await the future", "leasehold::blocking::allow"] {
        assert!(error.to_string().contains(hint), "{error}");
    }
}

#[tokio::test]
async fn a_thread_of_a_runtime_is_refused() {
    assert_refused(Client::open("memory:").wait());
    let semaphore = Client::memory().semaphore("runtime", 1).build().unwrap();
    assert_refused(semaphore.acquire().wait());
    assert_refused(semaphore.blocking_with(|_| panic!("it must not run")));
    assert_refused(semaphore.stats().wait());
    let lock = Client::memory().lock("runtime").build().unwrap();
    assert_refused(lock.blocking_with(|_| panic!("it must not run")));

    // Nothing was acquired, and the held permit is released although the call was refused.
    let permit = semaphore.try_acquire().await.unwrap().expect("it is free");
    assert_refused(permit.release().wait());
    eventually(async || semaphore.try_acquire().await.unwrap().is_some()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_works_where_a_thread_of_a_runtime_may_block() {
    let semaphore = Client::memory().semaphore("runtime", 1).build().unwrap();
    let held = semaphore.acquire().await.unwrap();
    let first = held.fence();
    let there = semaphore.clone();
    let waiting = tokio::task::spawn_blocking(move || {
        assert_refused(there.acquire().wait());
        let fence = blocking::allow(|| there.blocking_with(Permit::fence));
        // Blocking is refused again after `allow` returns, even if its closure panicked.
        assert_refused(there.acquire().wait());
        let panics = || blocking::allow(|| std::panic::resume_unwind(Box::new("on purpose")));
        assert!(catch_unwind(panics).map(|(): ()| ()).is_err());
        assert_refused(there.acquire().wait());
        fence
    });
    eventually(async || semaphore.stats().await.unwrap().waiting == 1).await;
    drop(held);
    assert!(waiting.await.unwrap().unwrap() > first);

    let in_place = || blocking::allow(|| semaphore.blocking_with(|_| 42));
    assert_eq!(tokio::task::block_in_place(in_place).unwrap(), 42);
}
