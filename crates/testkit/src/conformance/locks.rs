//! Locks: one holder, identified by its fence, until it releases the lock or its TTL ends.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use leasehold::{Client, Error, Jitter, Lock, LockBuilder, LockGuard, LossReason, Retry};
use tokio::task::JoinHandle;

use super::{SHORT, Store, unique};
use crate::by_hand::{poll_once, step_aside};
use crate::wait::{deadline, eventually};

/// Longer than any test may take. Whatever happens sooner did not wait for this time.
pub(super) const MINUTES: Duration = Duration::from_secs(300);

/// Asks again only after minutes. So a waiter acquires when it is notified of a release, or when
/// the holder's lease ends.
pub(super) fn only_when_told() -> Retry {
    Retry::default().delay(MINUTES).max_delay(MINUTES).jitter(Jitter::None)
}

pub(super) fn declare(client: &Client, key: &str) -> LockBuilder {
    client.lock(key).retry(only_when_told())
}

pub(super) fn lock(client: &Client, key: &str) -> Lock {
    declare(client, key).build().unwrap()
}

pub(super) async fn acquire(lock: &Lock) -> LockGuard {
    deadline(lock.acquire()).await.unwrap()
}

pub(super) async fn try_acquire(lock: &Lock) -> Option<LockGuard> {
    deadline(lock.try_acquire()).await.unwrap()
}

pub(super) async fn release(guard: LockGuard) -> bool {
    deadline(guard.release()).await.unwrap()
}

pub(super) async fn is_locked(client: &Client, key: &str) -> bool {
    deadline(client.locks().is_locked(key)).await.unwrap()
}

/// Fails unless the lock becomes free and can be acquired. This may take several attempts: a
/// dropped acquire may hold the lock until its client has noticed the drop.
pub(super) async fn is_free(client: &Client, key: &str) {
    let lock = lock(client, key);
    eventually(async || match try_acquire(&lock).await {
        Some(guard) => release(guard).await,
        None => false,
    })
    .await;
}

/// Waits until another lock with this TTL is lost.
pub(super) async fn outlast(client: &Client, time: Duration) {
    let canary = lock_of(client, &unique("canary"), time);
    let guard = acquire(&canary).await;
    deadline(guard.lost()).await;
}

pub(super) fn lock_of(client: &Client, key: &str, ttl: Duration) -> Lock {
    declare(client, key).lease(ttl).ttl(ttl).build().unwrap()
}

/// An acquire that found the lock held, and waits in its own task, with the time when it was granted.
pub(super) struct Waiter {
    pub(super) task: JoinHandle<(Instant, Result<LockGuard, Error>)>,
}

impl Waiter {
    /// Starts an acquire, and returns when the store has answered that the lock is held.
    pub(super) async fn join(client: &Client, key: &str) -> Self {
        let lock = lock(client, key);
        let mut acquire = Box::pin(async move { lock.acquire().await });
        assert!(poll_once(acquire.as_mut()).await.is_none(), "it does not wait");
        // A client gets its answers in the order of its calls.
        deadline(client.locks().is_locked(key)).await.unwrap();
        let task = tokio::spawn(async move {
            let result = acquire.await;
            (Instant::now(), result)
        });
        Self { task }
    }

    pub(super) async fn granted(self) -> (Instant, LockGuard) {
        let (at, result) = deadline(self.task).await.unwrap();
        (at, result.unwrap())
    }

    pub(super) async fn guard(self) -> LockGuard {
        self.granted().await.1
    }

    pub(super) async fn error(self) -> Error {
        deadline(self.task).await.unwrap().1.unwrap_err()
    }
}

pub async fn a_lock_has_one_holder(store: &impl Store) {
    let (here, there, key) = (store.client().await, store.client().await, unique("one"));
    let guard = acquire(&lock(&here, &key)).await;
    assert_eq!(guard.name(), key);
    for client in [&here, &there] {
        assert!(try_acquire(&lock(client, &key)).await.is_none());
        assert!(deadline(client.locks().try_acquire(&key, SHORT)).await.unwrap().is_none());
    }
    guard.check().unwrap();
    assert!(release(guard).await);
    let next = try_acquire(&lock(&there, &key)).await.expect("it is free");
    assert!(try_acquire(&lock(&here, &key)).await.is_none());
    assert!(release(next).await);
    is_free(&here, &key).await;
}

pub async fn equal_keys_are_one_lock(store: &impl Store) {
    let (client, suffix) = (store.client().await, unique("nfc"));
    let composed = lock(&client, &format!("caf\u{e9} {suffix}"));
    let decomposed = lock(&client, &format!("cafe\u{301} {suffix}"));
    assert_eq!(composed.name(), decomposed.name());
    let guard = acquire(&composed).await;
    assert!(try_acquire(&decomposed).await.is_none());
    let waiter = Waiter::join(&client, &format!("cafe\u{301} {suffix}")).await;
    assert!(release(guard).await);
    assert!(release(waiter.guard().await).await);
}

pub async fn keys_that_differ_are_two_locks(store: &impl Store) {
    let (client, suffix) = (store.client().await, unique("alike"));
    let mut held = Vec::new();
    for alike in ["a", "A", " a", "a ", "a:", ":a", "\u{430}", "\u{ff41}", "{a}", "\u{1f512}", "*"]
    {
        let guard = try_acquire(&lock(&client, &format!("{suffix}{alike}"))).await;
        held.push(guard.unwrap_or_else(|| panic!("{alike:?} is another's")));
    }
    for guard in held {
        assert!(release(guard).await);
    }
}

pub async fn fences_of_a_key_only_grow(store: &impl Store) {
    let (here, there, key) = (store.client().await, store.client().await, unique("fences"));
    let mut last = acquire(&lock(&here, &key)).await.fence();
    for round in 0..9 {
        let client = if round % 2 == 0 { &there } else { &here };
        let guard = match round % 3 {
            0 => acquire(&lock_of(client, &key, Duration::from_millis(50))).await,
            _ => acquire(&lock(client, &key)).await,
        };
        assert!(guard.fence() > last, "{} after {last}", guard.fence());
        last = guard.fence();
        match round % 3 {
            0 => drop(deadline(guard.lost()).await),
            1 => drop(guard),
            _ => assert!(release(guard).await),
        }
    }
}

pub async fn holders_are_one_after_the_other(store: &impl Store) {
    let (here, there, key) = (store.client().await, store.client().await, unique("crowd"));
    let fences = Arc::new(Mutex::new(Vec::new()));
    let holders = Arc::new(AtomicU32::new(0));
    let tasks: Vec<_> = (0..16)
        .map(|turn| {
            let lock = lock(if turn % 2 == 0 { &here } else { &there }, &key);
            let (fences, holders) = (fences.clone(), holders.clone());
            tokio::spawn(async move {
                for round in 0..4 {
                    let guard = lock.acquire().await.unwrap();
                    assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "two at once");
                    fences.lock().unwrap().push(guard.fence());
                    step_aside(3).await;
                    assert_eq!(holders.fetch_sub(1, Ordering::SeqCst), 1, "two at once");
                    if round % 2 == 0 {
                        guard.release().await.unwrap();
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        deadline(task).await.unwrap();
    }
    let fences = fences.lock().unwrap();
    assert_eq!(fences.len(), 64);
    assert!(fences.is_sorted_by(|earlier, later| earlier < later), "{fences:?}");
}

pub async fn a_lock_is_released_once(store: &impl Store) {
    let (client, key) = (store.client().await, unique("once"));
    let guard = acquire(&lock(&client, &key)).await;
    let id = guard.id();
    assert!(release(guard).await);
    assert!(!deadline(client.locks().release(&id)).await.unwrap());
    assert!(!deadline(client.locks().extend(&id, MINUTES)).await.unwrap());

    let held = deadline(client.locks().try_acquire(&key, MINUTES)).await.unwrap().unwrap();
    assert!(
        !deadline(client.locks().release(&id)).await.unwrap(),
        "that id released another holder's lock"
    );
    assert!(deadline(client.locks().owns(&held.id)).await.unwrap());
    assert!(deadline(client.locks().release(&held.id)).await.unwrap());
    assert!(!deadline(client.locks().release(&held.id)).await.unwrap());
    is_free(&client, &key).await;
}

/// A release by id takes effect at once. The guard learns of it at its next request to the store.
pub async fn the_next_extension_reports_a_released_id(store: &impl Store) {
    let (client, other, key) = (store.client().await, store.client().await, unique("by id"));
    // In memory both clients are the same, which knows what it has released.
    let is_same = other.id() == client.id();
    let expected = if is_same { LossReason::Released } else { LossReason::Missing };
    let plain = acquire(&lock(&client, &key)).await;
    assert!(deadline(other.locks().release(&plain.id())).await.unwrap());
    let error = deadline(plain.extend(MINUTES)).await.unwrap_err();
    assert!(matches!(error, Error::Lost { reason, .. } if reason == expected), "{error}");
    assert_eq!(deadline(plain.lost()).await, expected);
    plain.check().unwrap_err();

    let extended = acquire(&declare(&client, &key).lease(SHORT).build().unwrap()).await;
    assert!(deadline(other.locks().release(&extended.id())).await.unwrap());
    assert_eq!(deadline(extended.lost()).await, expected);
    extended.check().unwrap_err();

    // Neither guard releases the lock of the next holder.
    let next = acquire(&lock(&other, &key)).await;
    assert!(!release(plain).await);
    drop(extended);
    outlast(&client, Duration::from_millis(50)).await;
    assert!(deadline(other.locks().owns(&next.id())).await.unwrap());
    assert!(release(next).await);
}

pub async fn an_extension_replaces_what_was_left(store: &impl Store) {
    let (client, other, key) = (store.client().await, store.client().await, unique("extended"));
    let guard = acquire(&declare(&client, &key).lease(SHORT).build().unwrap()).await;
    let before = guard.expires_at();
    deadline(guard.extend(MINUTES)).await.unwrap();
    assert!(guard.expires_at() > before + MINUTES / 2);
    guard.check().unwrap();

    // Without its guard, an extension may also shorten the time left.
    let held = guard.detach();
    outlast(&client, SHORT + Duration::from_millis(100)).await;
    assert!(try_acquire(&lock(&other, &key)).await.is_none());
    assert!(deadline(client.locks().extend(&held.id, Duration::from_millis(100))).await.unwrap());
    is_free(&other, &key).await;
}

pub async fn a_lock_ends_with_its_ttl(store: &impl Store) {
    let (client, other, key) = (store.client().await, store.client().await, unique("ttl"));
    let begun = Instant::now();
    let guard = acquire(&lock_of(&client, &key, SHORT)).await;
    guard.check().unwrap();
    let lost = tokio::spawn(guard.lost());
    let waiter = Waiter::join(&other, &key).await;
    let (at, next) = waiter.granted().await;
    // The next holder gets the lock only after the previous one considers it lost.
    let error = guard.check().unwrap_err();
    assert!(matches!(error, Error::Lost { reason: LossReason::TtlEnded, .. }), "{error}");
    assert_eq!(error.to_string(), format!("the lock {key:?} was lost: its TTL ended"));
    assert!(at - begun + Duration::from_millis(150) >= SHORT, "granted after {:?}", at - begun);
    assert_eq!(deadline(lost).await.unwrap(), LossReason::TtlEnded);
    assert_eq!(deadline(guard.lost()).await, LossReason::TtlEnded);
    assert!(next.fence() > guard.fence());
    assert!(!release(guard).await);
    next.check().unwrap();
    assert!(release(next).await);
}

/// Without a task that waits on `lost`, `check` still notices the end.
pub async fn an_unwatched_guard_notices_its_end(store: &impl Store) {
    let (client, key) = (store.client().await, unique("unwatched"));
    let guard = acquire(&lock_of(&client, &key, Duration::from_millis(100))).await;
    eventually(async || guard.check().is_err()).await;
    let error = guard.check().unwrap_err();
    assert!(matches!(error, Error::Lost { reason: LossReason::TtlEnded, .. }), "{error}");
    assert!(!release(guard).await);
    is_free(&client, &key).await;
}

pub async fn a_renewed_lock_outlives_its_lease(store: &impl Store) {
    let (client, other, key) = (store.client().await, store.client().await, unique("automatic"));
    let guard = acquire(&declare(&client, &key).lease(SHORT).build().unwrap()).await;
    let (id, first_end) = (guard.id(), guard.expires_at());
    outlast(&other, SHORT * 4).await;
    guard.check().unwrap();
    assert!(guard.expires_at() > first_end + SHORT);
    assert!(deadline(other.locks().owns(&id)).await.unwrap());
    assert!(try_acquire(&lock(&other, &key)).await.is_none());
    assert!(release(guard).await);
    assert!(!is_locked(&other, &key).await);
    // No late extension revives it.
    let next = acquire(&lock(&other, &key)).await;
    outlast(&other, SHORT).await;
    next.check().unwrap();
    assert!(!deadline(other.locks().owns(&id)).await.unwrap());
}

/// A lock of a short lease is renewed in the background, and then extended by its holder.
pub async fn a_renewal_does_not_undo_an_extension(store: &impl Store) {
    let (client, other, key) = (store.client().await, store.client().await, unique("extended"));
    let guard = acquire(&declare(&client, &key).lease(SHORT).build().unwrap()).await;
    outlast(&other, SHORT).await;
    deadline(guard.extend(MINUTES)).await.unwrap();
    outlast(&other, SHORT * 2).await;
    assert!(guard.valid_until() > Some(Instant::now() + MINUTES / 2));
    let held = guard.detach();
    outlast(&other, SHORT).await;
    let found = deadline(other.locks().lookup(&key)).await.unwrap().unwrap();
    assert!(found.expires_at > SystemTime::now() + MINUTES / 2, "{:?}", found.expires_at);
    assert!(deadline(other.locks().release(&held.id)).await.unwrap());
}

pub async fn a_guard_has_the_id_key_and_fence_of_its_lock(store: &impl Store) {
    let (client, key) = (store.client().await, unique("known"));
    let before = SystemTime::now();
    let guard = acquire(&declare(&client, &key).lease(MINUTES).build().unwrap()).await;
    // The store uses the clock of this machine, but two readings of it may differ.
    let ends = guard.expires_at() + Duration::from_millis(2);
    assert!(ends >= before + MINUTES && ends <= SystemTime::now() + MINUTES + SHORT, "{ends:?}");
    let raw = deadline(client.locks().lookup(&key)).await.unwrap().unwrap();
    assert_eq!((raw.key.as_str(), raw.id), (guard.name(), guard.id()));
    assert_eq!((raw.fence, raw.expires_at), (guard.fence(), guard.expires_at()));
    let shown = format!("{guard:?}");
    assert!(shown.contains(&key) && !shown.contains(&guard.id().to_string()), "{shown}");
}
