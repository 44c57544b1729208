//! Guards: what permits, locks and pool leases have in common.

use std::future::{pending, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use leasehold::{Client, Error, Guard, Lock, LossReason, Pool, Semaphore};
use tokio::sync::oneshot;

use super::{SHORT, Store, unique};
use crate::by_hand::step_aside;
use crate::wait::{deadline, eventually};

/// The shortest lease that every primitive allows.
const LEASE: Duration = Duration::from_secs(1);

type Outcome<T> = Result<T, Error>;

/// A primitive of which one can be held at a time.
trait Primitive: Clone + Send + Sync + 'static {
    type Guard: Guard + 'static;

    fn declare(client: &Client, name: &str, ttl: Option<Duration>) -> Self;

    fn acquire(
        &self,
        within: Option<Duration>,
    ) -> impl Future<Output = Outcome<Self::Guard>> + Send + 'static;

    fn try_acquire(&self) -> impl Future<Output = Outcome<Option<Self::Guard>>> + Send + 'static;

    async fn with<T>(&self, work: impl AsyncFnOnce(&Self::Guard) -> T) -> Outcome<T>;

    fn detach(guard: Self::Guard) -> String;

    async fn extend(&self, id: &str) -> Outcome<bool>;

    async fn release(&self, id: &str) -> Outcome<bool>;
}

impl Primitive for Semaphore {
    type Guard = leasehold::Permit;

    fn declare(client: &Client, name: &str, ttl: Option<Duration>) -> Self {
        let builder = client.semaphore(name, 1).lease(LEASE);
        ttl.map_or(builder.clone(), |ttl| builder.ttl(ttl)).build().unwrap()
    }

    fn acquire(
        &self,
        within: Option<Duration>,
    ) -> impl Future<Output = Outcome<Self::Guard>> + Send + 'static {
        let acquire = self.acquire();
        if let Some(limit) = within { acquire.within(limit) } else { acquire }
    }

    fn try_acquire(&self) -> impl Future<Output = Outcome<Option<Self::Guard>>> + Send + 'static {
        self.try_acquire()
    }

    async fn with<T>(&self, work: impl AsyncFnOnce(&Self::Guard) -> T) -> Outcome<T> {
        self.with(work).await
    }

    fn detach(guard: Self::Guard) -> String {
        guard.detach().to_string()
    }

    async fn extend(&self, id: &str) -> Outcome<bool> {
        self.extend(&id.parse()?).await
    }

    async fn release(&self, id: &str) -> Outcome<bool> {
        self.release(&id.parse()?).await
    }
}

impl Primitive for Lock {
    type Guard = leasehold::LockGuard;

    fn declare(client: &Client, name: &str, ttl: Option<Duration>) -> Self {
        let builder = client.lock(name).lease(LEASE);
        let builder = ttl.map_or(builder.clone(), |ttl| builder.ttl(ttl));
        builder.build().unwrap()
    }

    fn acquire(
        &self,
        within: Option<Duration>,
    ) -> impl Future<Output = Outcome<Self::Guard>> + Send + 'static {
        let acquire = self.acquire();
        if let Some(limit) = within { acquire.within(limit) } else { acquire }
    }

    fn try_acquire(&self) -> impl Future<Output = Outcome<Option<Self::Guard>>> + Send + 'static {
        self.try_acquire()
    }

    async fn with<T>(&self, work: impl AsyncFnOnce(&Self::Guard) -> T) -> Outcome<T> {
        self.with(work).await
    }

    fn detach(guard: Self::Guard) -> String {
        guard.detach().id.to_string()
    }

    async fn extend(&self, id: &str) -> Outcome<bool> {
        self.extend(&id.parse()?).await
    }

    async fn release(&self, id: &str) -> Outcome<bool> {
        self.release(&id.parse()?).await
    }
}

/// A pool whose acquires have an instance id each.
#[derive(Clone)]
struct PoolOfOne(Pool, Arc<AtomicU32>);

impl PoolOfOne {
    fn instance(&self) -> String {
        unique(&format!("instance {}", self.1.fetch_add(1, Ordering::Relaxed)))
    }
}

impl Primitive for PoolOfOne {
    type Guard = leasehold::PoolLease;

    fn declare(client: &Client, name: &str, ttl: Option<Duration>) -> Self {
        let builder = client.pool(name, 1).lease(LEASE);
        let builder = ttl.map_or(builder.clone(), |ttl| builder.ttl(ttl));
        Self(builder.build().unwrap(), Arc::default())
    }

    fn acquire(
        &self,
        within: Option<Duration>,
    ) -> impl Future<Output = Outcome<Self::Guard>> + Send + 'static {
        let acquire = self.0.acquire(&self.instance());
        if let Some(limit) = within { acquire.within(limit) } else { acquire }
    }

    fn try_acquire(&self) -> impl Future<Output = Outcome<Option<Self::Guard>>> + Send + 'static {
        self.0.try_acquire(&self.instance())
    }

    async fn with<T>(&self, work: impl AsyncFnOnce(&Self::Guard) -> T) -> Outcome<T> {
        self.0.with(&self.instance(), work).await
    }

    fn detach(guard: Self::Guard) -> String {
        guard.detach()
    }

    async fn extend(&self, id: &str) -> Outcome<bool> {
        self.0.extend(id).await
    }

    async fn release(&self, id: &str) -> Outcome<bool> {
        self.0.release(id).await
    }
}

/// Runs a case for each primitive, all at once.
macro_rules! each {
    ($store:expr, $case:ident) => {
        tokio::join!($case::<Semaphore>($store), $case::<Lock>($store), $case::<PoolOfOne>($store))
    };
}

async fn two<P: Primitive>(store: &impl Store, about: &str, ttl: Option<Duration>) -> (P, P) {
    let name = unique(about);
    let (here, there) = (store.client().await, store.client().await);
    (P::declare(&here, &name, ttl), P::declare(&there, &name, ttl))
}

async fn hold<P: Primitive>(primitive: &P) -> P::Guard {
    deadline(primitive.acquire(None)).await.unwrap()
}

async fn is_free<P: Primitive>(primitive: &P) -> bool {
    match deadline(primitive.try_acquire()).await.unwrap() {
        Some(guard) => deadline(guard.release()).await.unwrap(),
        None => false,
    }
}

async fn becomes_free<P: Primitive>(primitive: &P) {
    eventually(async || is_free(primitive).await).await;
}

pub async fn a_guard_outlives_its_lease(store: &impl Store) {
    async fn case<P: Primitive>(store: &impl Store) {
        let (here, there): (P, P) = two(store, "renewed", None).await;
        let guard = hold(&here).await;
        let begun = Instant::now();
        eventually(async || {
            guard.check().unwrap();
            assert!(!is_free(&there).await, "{guard:?}");
            begun.elapsed() > LEASE * 5 / 2
        })
        .await;
        assert!(guard.valid_until().is_none_or(|until| until > Instant::now()));
        assert!(deadline(guard.release()).await.unwrap());
        assert!(is_free(&there).await);
    }
    each!(store, case);
}

pub async fn a_ttl_ends_a_guard(store: &impl Store) {
    async fn case<P: Primitive>(store: &impl Store) {
        for ttl in [SHORT, LEASE * 3 / 2] {
            let (here, there): (P, P) = two(store, "ttl", Some(ttl)).await;
            let begun = Instant::now();
            let guard = hold(&here).await;
            guard.check().unwrap();
            let waiting = tokio::spawn(there.acquire(None));
            assert_eq!(deadline(guard.lost()).await, LossReason::TtlEnded, "{guard:?}");
            let took = begun.elapsed();
            assert!(took + Duration::from_millis(200) >= ttl, "{guard:?} was lost after {took:?}");
            assert!(matches!(guard.check(), Err(Error::Lost { .. })));
            assert!(!deadline(guard.release()).await.unwrap());
            let next = deadline(waiting).await.unwrap().unwrap();
            let waited = next.waited();
            assert!(waited + Duration::from_millis(300) >= ttl, "{next:?} waited {waited:?}");
        }
    }
    each!(store, case);
}

pub async fn a_dropped_guard_releases(store: &impl Store) {
    async fn case<P: Primitive>(store: &impl Store) {
        let (here, there): (P, P) = two(store, "dropped", None).await;
        drop(hold(&here).await);
        becomes_free(&there).await;
        let guard = hold(&here).await;
        std::thread::spawn(move || drop(guard)).join().unwrap();
        becomes_free(&there).await;
        // The release is not even polled.
        drop(hold(&here).await.release());
        becomes_free(&there).await;
    }
    each!(store, case);
}

pub async fn a_guard_is_lost_if_its_id_is_released(store: &impl Store) {
    async fn case<P: Primitive>(store: &impl Store) {
        let (here, there): (P, P) = two(store, "by id", None).await;
        let guard = hold(&here).await;
        let (lost, id) = (tokio::spawn(guard.lost()), guard.id());
        assert!(deadline(there.release(&id)).await.unwrap());
        let reason = deadline(lost).await.unwrap();
        assert!(matches!(reason, LossReason::Missing | LossReason::Released), "{reason}");
        assert!(matches!(guard.check(), Err(Error::Lost { .. })));
        assert!(!deadline(guard.release()).await.unwrap());
        assert!(!deadline(there.release(&id)).await.unwrap());
    }
    each!(store, case);
}

pub async fn an_acquire_ends_at_its_limit(store: &impl Store) {
    async fn case<P: Primitive>(store: &impl Store) {
        let (here, there): (P, P) = two(store, "limit", None).await;
        let guard = hold(&here).await;
        let begun = Instant::now();
        let error = deadline(there.acquire(Some(SHORT))).await.unwrap_err();
        assert!(matches!(error, Error::TimedOut { limit: SHORT, .. }), "{error:?}");
        assert!(begun.elapsed() >= SHORT);
        let error = deadline(there.acquire(Some(Duration::ZERO))).await.unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { argument: "within", .. }), "{error:?}");
        assert!(deadline(guard.release()).await.unwrap());
        drop(deadline(there.acquire(Some(SHORT))).await.unwrap());
    }
    each!(store, case);
}

pub async fn an_acquire_that_is_not_polled_does_nothing(store: &impl Store) {
    async fn case<P: Primitive>(store: &impl Store) {
        let (here, there): (P, P) = two(store, "not polled", None).await;
        let (acquire, attempt) = (here.acquire(None), here.try_acquire());
        assert!(is_free(&there).await);
        drop((acquire, attempt));
        assert!(is_free(&there).await);
    }
    each!(store, case);
}

/// Whatever step an acquire has reached when it is dropped, it leaves nothing held.
pub async fn an_acquire_that_is_dropped_leaves_nothing(store: &impl Store) {
    async fn case<P: Primitive>(store: &impl Store) {
        let (here, there): (P, P) = two(store, "given up", None).await;
        for steps in 0..30 {
            let held = if steps % 2 == 0 { Some(hold(&there).await) } else { None };
            let tasks = [
                tokio::spawn({
                    let acquire = here.acquire(None);
                    async move { acquire.await.map(Some) }
                }),
                tokio::spawn(here.try_acquire()),
            ];
            step_aside(steps).await;
            for task in &tasks {
                task.abort();
            }
            drop(held);
            for task in tasks {
                drop(deadline(task).await);
            }
            becomes_free(&there).await;
        }
    }
    each!(store, case);
}

pub async fn what_is_detached_is_renewed_and_released_by_hand(store: &impl Store) {
    async fn case<P: Primitive>(store: &impl Store) {
        let (here, there): (P, P) = two(store, "detached", None).await;
        let guard = hold(&here).await;
        let (lost, expected) = (guard.lost(), guard.id());
        let id = P::detach(guard);
        assert_eq!(id, expected);
        assert_eq!(deadline(lost).await, LossReason::Released);
        // For longer than the lease.
        let begun = Instant::now();
        eventually(async || {
            assert!(deadline(here.extend(&id)).await.unwrap(), "{id}");
            begun.elapsed() > LEASE * 3 / 2
        })
        .await;
        assert!(!is_free(&there).await);
        assert!(deadline(there.release(&id)).await.unwrap());
        assert!(!deadline(here.extend(&id)).await.unwrap());
        assert!(is_free(&there).await);
    }
    each!(store, case);
}

pub async fn with_holds_a_guard_while_the_work_runs(store: &impl Store) {
    async fn case<P: Primitive>(store: &impl Store) {
        let (here, there): (P, P) = two(store, "with", None).await;
        let mut borrowed = String::from("what the work");
        let answer = here.with(async |guard| {
            guard.check().unwrap();
            assert!(!is_free(&there).await);
            borrowed.push_str(" borrows");
            guard.name().len()
        });
        assert!(deadline(answer).await.unwrap() > 0);
        assert_eq!(borrowed, "what the work borrows");
        // Without waiting: `with` returns after the release.
        assert!(is_free(&there).await);
    }
    each!(store, case);
}

/// Work that never ends, and must not be polled after its guard is lost.
async fn endless(guard: &impl Guard, stray: &AtomicBool) {
    poll_fn(|_| {
        stray.fetch_or(guard.check().is_err(), Ordering::Relaxed);
        Poll::<()>::Pending
    })
    .await;
}

pub async fn work_stops_when_its_guard_is_lost(store: &impl Store) {
    async fn case<P: Primitive>(store: &impl Store) {
        let (limited, other): (P, P) = two(store, "work and ttl", Some(SHORT)).await;
        let stray = AtomicBool::new(false);
        let work = limited.with(async |guard| endless(guard, &stray).await);
        let error = deadline(work).await.unwrap_err();
        let ended = matches!(error, Error::Lost { reason: LossReason::TtlEnded, .. });
        assert!(ended, "{error}");
        becomes_free(&other).await;

        let (here, there): (P, P) = two(store, "work and release", None).await;
        let (held, id) = oneshot::channel();
        let work = here.with(async |guard| {
            held.send(guard.id()).unwrap();
            endless(guard, &stray).await;
        });
        let release = async { there.release(&id.await.unwrap()).await };
        let (result, released) = deadline(async { tokio::join!(work, release) }).await;
        assert!(released.unwrap());
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Lost { .. }), "{error}");
        assert!(!stray.into_inner(), "the work was polled after its guard was lost");
        becomes_free(&there).await;
    }
    each!(store, case);
}

pub async fn cancelled_or_panicking_work_releases_its_guard(store: &impl Store) {
    async fn case<P: Primitive>(store: &impl Store) {
        let (here, there): (P, P) = two(store, "given up", None).await;
        let (begun, has_begun) = oneshot::channel();
        let work = here.with(async |_| {
            begun.send(()).unwrap();
            pending::<()>().await;
        });
        tokio::select! {
            _ = work => unreachable!("the work never ends"),
            begun = deadline(has_begun) => begun.unwrap(),
        }
        becomes_free(&there).await;

        let panics = here.with(async |_| resume_unwind(Box::new("on purpose")));
        let mut panics: Pin<Box<dyn Future<Output = Outcome<()>>>> = Box::pin(panics);
        let panicked = poll_fn(|cx| {
            let polled = catch_unwind(AssertUnwindSafe(|| panics.as_mut().poll(cx)));
            polled.map_or(Poll::Ready(true), |polled| polled.map(|_| false))
        });
        assert!(deadline(panicked).await);
        becomes_free(&there).await;
    }
    each!(store, case);
}

/// What the client released itself, it does not have to learn from the store.
pub async fn a_release_by_id_notifies_the_guard_of_its_client_at_once(store: &impl Store) {
    async fn case<P: Primitive>(store: &impl Store) {
        let (here, there): (P, P) = two(store, "own id", None).await;
        let guard = hold(&here).await;
        let (lost, id) = (guard.lost(), guard.id());
        assert!(deadline(here.release(&id)).await.unwrap());
        let error = guard.check().unwrap_err();
        let released = matches!(error, Error::Lost { reason: LossReason::Released, .. });
        assert!(released, "{error}");
        assert_eq!(deadline(lost).await, LossReason::Released);
        let next = hold(&there).await;
        assert!(!deadline(guard.release()).await.unwrap());
        next.check().unwrap();
        assert!(!is_free(&here).await);
    }
    each!(store, case);
}

/// A case for each primitive, because in memory all clients of a store are the same.
async fn a_close_ends<P: Primitive>(store: &impl Store) {
    let (client, other, name) = (store.client().await, store.client().await, unique("closed"));
    let (here, there) = (P::declare(&client, &name, None), P::declare(&other, &name, None));
    let (guard, not_polled) = (hold(&here).await, here.acquire(None));
    let (lost, asked_later) = (tokio::spawn(guard.lost()), guard.lost());
    let waits = tokio::spawn(here.acquire(None));
    step_aside(5).await;
    deadline(client.close()).await.unwrap();
    assert_eq!(deadline(lost).await.unwrap(), LossReason::Closed);
    assert_eq!(deadline(asked_later).await, LossReason::Closed);
    let error = guard.check().unwrap_err();
    assert!(matches!(error, Error::Lost { reason: LossReason::Closed, .. }), "{error}");
    for refused in [
        deadline(waits).await.unwrap().unwrap_err(),
        deadline(not_polled).await.unwrap_err(),
        deadline(here.acquire(None)).await.unwrap_err(),
        deadline(here.try_acquire()).await.unwrap_err(),
        deadline(here.with(async |_| ())).await.unwrap_err(),
    ] {
        assert!(matches!(refused, Error::Closed), "{refused}");
    }
    assert!(!deadline(guard.release()).await.unwrap());
    // In memory both clients are the same.
    if other.id() != client.id() {
        // Without waiting: the close has released it in the store.
        assert!(is_free(&there).await);
    }
}

pub async fn a_close_ends_permits(store: &impl Store) {
    a_close_ends::<Semaphore>(store).await;
}

pub async fn a_close_ends_locks(store: &impl Store) {
    a_close_ends::<Lock>(store).await;
}

pub async fn a_close_ends_pool_leases(store: &impl Store) {
    a_close_ends::<PoolOfOne>(store).await;
}
