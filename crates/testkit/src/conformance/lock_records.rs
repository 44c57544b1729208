//! What the store records of locks, what observers receive, and what is refused.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::compat::sync_guard::{self, Backend, TimeAuthority};
use leasehold::{
    Client, Error, Event, Jitter, LockId, LockInfo, Locks, Observer, Operation, Outcome, Primitive,
    Retry,
};

use super::locks::{MINUTES, acquire, is_free, is_locked, lock, lock_of, release};
use super::{SHORT, Store, unique};
use crate::by_hand::poll_once;
use crate::wait::{deadline, eventually};

pub async fn an_acquire_with_the_same_id_returns_the_same_lock(store: &impl Store) {
    let (client, other, key) = (store.client().await, store.client().await, unique("again"));
    let first = deadline(client.locks().try_acquire(&key, MINUTES)).await.unwrap().unwrap();
    for (locks, ttl) in [(client.locks(), MINUTES), (other.locks(), SHORT)] {
        let again = deadline(locks.try_acquire_as(&key, ttl, &first.id)).await.unwrap();
        assert_eq!(again, Some(first));
    }
    let stranger: LockId = "AAECAwQFBgcICQoLDA0ODw".parse().unwrap();
    assert_eq!(deadline(other.locks().try_acquire_as(&key, SHORT, &stranger)).await.unwrap(), None);
    assert!(deadline(client.locks().release(&first.id)).await.unwrap());
    // After the release, the same id acquires the lock anew.
    let anew =
        deadline(client.locks().try_acquire_as(&key, SHORT, &first.id)).await.unwrap().unwrap();
    assert!(anew.id == first.id && anew.fence > first.fence);
    assert!(deadline(client.locks().release(&anew.id)).await.unwrap());
}

pub async fn is_locked_reports_the_lock(store: &impl Store) {
    let (client, other, key) = (store.client().await, store.client().await, unique("asked"));
    let clean = other.locks().cleanup_in_is_locked(true);
    assert!(!is_locked(&client, &key).await);
    let held = deadline(client.locks().try_acquire(&key, SHORT)).await.unwrap().unwrap();
    assert!(is_locked(&other, &key).await);
    assert!(deadline(clean.is_locked(&key)).await.unwrap());
    assert!(deadline(client.locks().owns(&held.id)).await.unwrap());
    eventually(async || !is_locked(&other, &key).await).await;
    assert!(!deadline(clean.is_locked(&key)).await.unwrap());
    assert!(!deadline(client.locks().owns(&held.id)).await.unwrap());
    // Cleaning up an expired lock keeps its fence counter.
    assert!(acquire(&lock(&client, &key)).await.fence() > held.fence);
}

fn is_a_hash(text: &str) -> bool {
    text.len() == 24 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

pub async fn a_lookup_shows_secrets_only_on_request(store: &impl Store) {
    let (client, other, key) = (store.client().await, store.client().await, unique("secret"));
    let locks = other.locks();
    assert_eq!(deadline(locks.lookup(&key)).await.unwrap(), None);
    let held = deadline(client.locks().try_acquire(&key, MINUTES)).await.unwrap().unwrap();

    let by_key = deadline(locks.lookup(&key)).await.unwrap().unwrap();
    let by_id = deadline(locks.lookup(&held.id)).await.unwrap().unwrap();
    assert_eq!(by_key, by_id);
    assert!(is_a_hash(&by_key.key_hash) && is_a_hash(&by_key.id_hash), "{by_key:?}");
    assert_ne!(by_key.key_hash, by_key.id_hash);
    let shown = format!("{by_key:?}");
    assert!(!shown.contains(&key) && !shown.contains(&held.id.to_string()), "{shown}");
    assert_eq!((by_key.fence, by_key.expires_at), (held.fence, held.expires_at));
    assert_eq!(by_key.expires_at.duration_since(by_key.acquired_at).unwrap(), MINUTES);

    let raw = by_key.clone();
    assert_eq!((&raw.key, raw.id, &raw), (&key, held.id, &by_key));

    // An extension changes neither the time of the acquisition nor the fence.
    assert!(deadline(client.locks().extend(&held.id, SHORT * 100)).await.unwrap());
    let extended = deadline(locks.lookup(&key)).await.unwrap().unwrap();
    assert_eq!((extended.acquired_at, extended.fence), (by_key.acquired_at, by_key.fence));
    assert_eq!(
        extended.expires_at.duration_since(by_key.expires_at).is_err(),
        MINUTES > SHORT * 100
    );
    assert!(deadline(client.locks().release(&held.id)).await.unwrap());
    assert_eq!(deadline(locks.lookup(&key)).await.unwrap(), None);
    assert_eq!(deadline(locks.lookup(&held.id)).await.unwrap(), None);
    let guard = acquire(&lock(&client, &key)).await;
    let next = deadline(locks.lookup(&key)).await.unwrap().unwrap();
    assert_eq!(next.key_hash, by_key.key_hash);
    assert_ne!(next.id_hash, by_key.id_hash);
    assert_eq!(
        deadline(locks.lookup(&held.id)).await.unwrap(),
        None,
        "another lock id holds the key"
    );
    assert!(!deadline(locks.owns(&held.id)).await.unwrap());
    assert!(release(guard).await);
}

pub async fn a_lookup_names_the_holder(store: &impl Store) {
    let (client, other, key) = (store.client().await, store.client().await, unique("holder"));
    // Not only ASCII, and with the characters that JSON and SQL escape.
    let label = "nightly \"backup\", 'é' \\ / 夜";
    let labelled = client.lock(&key).label(label).lease(MINUTES).build().unwrap();
    let guard = acquire(&labelled).await;
    let expected = (Some(host()), Some(std::process::id()), Some(label.to_owned()));
    let locks = other.locks();
    let of = |info: LockInfo| (info.host, info.pid, info.label);
    let by_key = async || of(deadline(locks.lookup(&key)).await.unwrap().unwrap());
    assert_eq!(by_key().await, expected);
    let by_id = deadline(locks.lookup(&guard.id())).await.unwrap().unwrap();
    assert_eq!(of(by_id), expected);
    let listed = deadline(locks.list(1000)).await.unwrap();
    let listed = listed.into_iter().find(|one| one.key == key).unwrap();
    assert_eq!(of(listed), expected);
    // An extension changes only the expiry, be it by the guard or by a client that knows the id.
    deadline(guard.extend(MINUTES * 2)).await.unwrap();
    assert!(deadline(locks.extend(&guard.id(), MINUTES)).await.unwrap());
    assert_eq!(by_key().await, expected);
    // A refused acquire, and a repeated one with the same id, change nothing.
    assert!(deadline(lock(&other, &key).try_acquire()).await.unwrap().is_none());
    let again = deadline(locks.try_acquire_as(&key, MINUTES, &guard.id())).await.unwrap();
    assert!(again.is_some());
    assert_eq!(by_key().await, expected);
    assert!(release(guard).await);

    // The next holder inherits nothing of it, even after the lease expired.
    let plain = (Some(host()), Some(std::process::id()), None);
    let guard = acquire(&lock_of(&client, &key, MINUTES)).await;
    assert_eq!(by_key().await, plain);
    assert!(release(guard).await);
    let short = client.lock(&key).label(label).lease(SHORT).build().unwrap();
    let held = acquire(&short).await.detach();
    is_free(&client, &key).await;
    let held =
        deadline(client.locks().try_acquire_as(&key, MINUTES, &held.id)).await.unwrap().unwrap();
    assert_eq!(by_key().await, plain);
    assert!(deadline(client.locks().release(&held.id)).await.unwrap());
}

fn host() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("tests run on Linux");
    host.trim_end().to_owned()
}

pub async fn labels_of_locks_that_cannot_be_are_refused(store: &impl Store) {
    let (client, key) = (store.client().await, unique("labelled"));
    let labelled = |label: &str| client.lock(&key).label(label).build();
    assert_refused(labelled(""), "label", &["empty"]);
    assert_refused(labelled("bell\u{7}"), "label", &[r"bell\u{7}"]);
    assert_refused(labelled(&"x".repeat(513)), "label", &["513", "512"]);
    let longest = "x".repeat(512);
    let guard = acquire(&labelled(&longest).unwrap()).await;
    let info = deadline(client.locks().lookup(&key)).await.unwrap().unwrap();
    assert_eq!(info.label, Some(longest));
    assert!(release(guard).await);
}

pub async fn a_store_reports_its_capabilities(store: &impl Store) {
    let capabilities = store.client().await.locks().capabilities();
    assert!(capabilities.supports_fencing);
    let expected = match capabilities.backend {
        "memory" => TimeAuthority::Process,
        "local" => TimeAuthority::Host,
        "redis" => TimeAuthority::Server,
        other => panic!("unknown store {other:?}"),
    };
    assert_eq!(capabilities.time_authority, expected);
}

type Events = Arc<Mutex<Vec<Event>>>;

fn observed(client: &Client, raw: bool) -> (Locks, Events) {
    let events = Events::default();
    let list = events.clone();
    let observer = Observer::new(move |event| list.lock().unwrap().push(event.clone()));
    let observer = if raw { observer.include_raw() } else { observer };
    (client.locks().observer(observer), events)
}

pub async fn an_observer_receives_every_call_by_key_and_by_id(store: &impl Store) {
    use Operation::{Acquire, Lookup, Release, Renew};
    let (client, key) = (store.client().await, unique("observed"));
    let (locks, events) = observed(&client, false);
    let held = deadline(locks.try_acquire(&key, MINUTES)).await.unwrap().unwrap();
    let other = LockId::random();
    deadline(locks.try_acquire_as(&key, MINUTES, &other)).await.unwrap();
    deadline(locks.extend(&held.id, MINUTES)).await.unwrap();
    deadline(locks.is_locked(&key)).await.unwrap();
    deadline(locks.lookup(&key)).await.unwrap();
    deadline(locks.lookup(&held.id)).await.unwrap();
    deadline(locks.release(&held.id)).await.unwrap();
    deadline(locks.release(&held.id)).await.unwrap();
    deadline(locks.extend(&held.id, MINUTES)).await.unwrap();
    deadline(locks.is_locked(&key)).await.unwrap();
    deadline(locks.lookup(&key)).await.unwrap();
    let expected = [
        (Acquire, None, true, true),
        (Acquire, Some("locked"), true, true),
        (Renew, None, false, true),
        (Lookup, None, true, false),
        (Lookup, None, true, false),
        (Lookup, None, false, true),
        (Release, None, false, true),
        (Release, Some("not-found"), false, true),
        (Renew, Some("not-found"), false, true),
        (Lookup, Some("not-found"), true, false),
        (Lookup, Some("not-found"), true, false),
    ];
    let reported = std::mem::take(&mut *events.lock().unwrap());
    let seen = reported.iter().map(|event| {
        let (name, id) = (event.name.is_some(), event.id.is_some());
        (event.operation, sync_guard::reason(event), name, id)
    });
    assert_eq!(seen.collect::<Vec<_>>(), expected);
    let texts = reported.iter().flat_map(|event| [&event.name, &event.id]).flatten();
    assert!(texts.clone().all(|text| is_a_hash(text)), "{reported:?}");
    assert!(reported.iter().all(|event| event.primitive == Primitive::Lock));
    let waited = |event: &Event| event.waited.is_some();
    assert!(reported.iter().all(|event| waited(event) == (event.operation == Acquire)));
}

pub async fn an_observer_receives_secrets_only_on_request(store: &impl Store) {
    let (client, key) = (store.client().await, unique("raw"));
    for raw in [false, true] {
        let (locks, events) = observed(&client, raw);
        let held = deadline(locks.try_acquire(&key, MINUTES)).await.unwrap().unwrap();
        let id = held.id.to_string();
        let waiting = locks.lock(&key).within(Duration::from_millis(1)).build().unwrap();
        deadline(waiting.acquire()).await.unwrap_err();
        deadline(locks.release(&held.id)).await.unwrap();
        let reported = events.lock().unwrap();
        let names: Vec<_> = reported.iter().map(|event| event.name.as_deref()).collect();
        let shown = format!("{reported:?}");
        assert_eq!((shown.contains(&key), shown.contains(&id)), (raw, raw), "{shown}");
        if raw {
            assert_eq!(names, [Some(&*key), Some(&*key), None]);
            assert_eq!(reported[2].id.as_deref(), Some(&*id));
        }
        assert!(matches!(reported[1].outcome, Outcome::Failed(Error::TimedOut { .. })), "{shown}");
    }
}

pub async fn a_panic_of_an_observer_has_no_effect(store: &impl Store) {
    let (client, key) = (store.client().await, unique("panics"));
    let observer = Observer::new(|_| std::panic::resume_unwind(Box::new("on purpose")));
    let locks = client.locks().observer(observer);
    let lock = locks.lock(&key).lease(SHORT).build().unwrap();
    let guard = acquire(&lock).await;
    super::locks::outlast(&client, SHORT * 2).await;
    guard.check().unwrap();
    assert!(deadline(locks.is_locked(&key)).await.unwrap());
    assert!(release(guard).await);
    drop(acquire(&lock).await);
    is_free(&client, &key).await;
}

/// Fails unless the error names `argument` and contains these words.
#[track_caller]
fn assert_refused<T>(result: Result<T, Error>, argument: &str, words: &[&str]) {
    let error = result.err().expect("it is refused");
    let Error::InvalidArgument { argument: found, problem, .. } = error else { panic!("{error}") };
    assert_eq!(found, argument, "{problem}");
    for word in words {
        assert!(problem.contains(word), "{word:?} is not in {problem:?}");
    }
}

pub async fn keys_that_cannot_be_are_refused(store: &impl Store) {
    let client = store.client().await;
    let locks = client.locks();
    let (long, wide) = ("x".repeat(513), "\u{fc}".repeat(257));
    for (key, words) in [
        ("", &["empty"][..]),
        (&long, &["513", "512"]),
        (&wide, &["514", "512"]),
        ("two\nlines", &[r"two\nlines"]),
        ("nothing\0", &[r"\0"]),
        ("fence:invoice", &["fence:invoice", "\"fence:\""]),
        ("id:invoice", &["id:invoice", "\"id:\""]),
        ("id:", &["\"id:\""]),
    ] {
        assert_refused(client.lock(key).build(), "key", words);
        assert_refused(deadline(locks.try_acquire(key, SHORT)).await, "key", words);
        assert_refused(deadline(locks.is_locked(key)).await, "key", words);
        assert_refused(deadline(locks.lookup(key)).await, "key", words);
        assert_refused(deadline(locks.lookup(key)).await, "key", words);
    }
    // These only resemble reserved keys, and a key of the maximum length is accepted.
    let longest = format!("{:x<512}", unique("longest"));
    for key in [&longest, "fence", "ids:", "Fence:", ":id:"] {
        assert!(release(acquire(&lock(&client, key)).await).await, "{key}");
    }
}

pub async fn times_that_cannot_be_are_refused(store: &impl Store) {
    let (client, key) = (store.client().await, unique("times"));
    let locks = client.locks();
    let guard = acquire(&lock(&client, &key)).await;
    for (ttl, words) in [
        (Duration::ZERO, &["0s", "longer than zero"][..]),
        (Duration::from_nanos(1), &["1ns", "milliseconds"]),
        (Duration::from_micros(1_500), &["1.5ms", "milliseconds"]),
        (Duration::from_millis(10_000_000_000_001), &["the limit is 10000000000s"]),
        (Duration::MAX, &[]),
    ] {
        assert_refused(client.lock(&key).lease(ttl).build(), "lease", words);
        assert_refused(deadline(locks.try_acquire(&key, ttl)).await, "lease", words);
        assert_refused(deadline(locks.extend(&guard.id(), ttl)).await, "lease", words);
        assert_refused(deadline(guard.extend(ttl)).await, "lease", words);
    }
    guard.check().unwrap();
    assert_refused(client.lock(&key).ttl(Duration::ZERO).build(), "ttl", &["longer than zero"]);
    let longest = lock_of(&client, &unique("longest"), Duration::from_secs(10_000_000_000));
    let held = acquire(&longest).await;
    held.check().unwrap();
    assert!(release(held).await);
}

pub async fn lock_ids_that_cannot_be_are_refused(store: &impl Store) {
    for text in [
        "",
        "short",
        "AAECAwQFBgcICQoLDA0OD",
        "AAECAwQFBgcICQoLDA0ODww",
        "AAECAwQFBgcICQoLDA0OD=",
        "AAECAwQFBgcICQoLDA0OD/",
        "AAECAwQFBgcICQoLDA0O\u{e9}",
    ] {
        assert_refused(text.parse::<LockId>(), "lock id", &["22 characters"]);
    }
    // An id that holds nothing is not an error.
    let (locks, id) = (store.client().await.locks(), "AAECAwQFBgcICQoLDA0OD_".parse().unwrap());
    assert!(!deadline(locks.release(&id)).await.unwrap());
    assert!(!deadline(locks.extend(&id, SHORT)).await.unwrap());
    assert!(!deadline(locks.owns(&id)).await.unwrap());
    assert_eq!(deadline(locks.lookup(&id)).await.unwrap(), None);
}

pub async fn retries_that_cannot_be_are_refused(store: &impl Store) {
    let (client, key) = (store.client().await, unique("retries"));
    let with = |retry: Retry| client.lock(&key).retry(retry).build();
    let retry = Retry::default();
    assert_refused(with(retry.delay(Duration::ZERO)), "retry delay", &["longer than zero"]);
    assert_refused(with(retry.max_delay(Duration::ZERO)), "retry max_delay", &["longer than zero"]);
    let within = |limit| client.lock(&key).within(limit);
    assert_refused(within(Duration::ZERO).build(), "within", &["longer than zero"]);
    let limited = lock(&client, &key).acquire().within(Duration::ZERO);
    assert_refused(deadline(limited).await, "within", &["longer than zero"]);
    for multiplier in [0.0, 0.99, -1.0, f64::NAN, f64::INFINITY] {
        assert_refused(with(retry.multiplier(multiplier)), "retry multiplier", &["at least 1"]);
    }
    // The longest delays that can be expressed: a waiter is still notified of a release.
    let endless = retry.delay(Duration::MAX).max_delay(Duration::MAX);
    let endless = endless.multiplier(f64::MAX).jitter(Jitter::None);
    let lock_with = client.lock(&key).retry(endless).within(Duration::MAX).build().unwrap();
    let held = acquire(&lock(&client, &key)).await;
    let mut waiting = Box::pin(async move { lock_with.acquire().await });
    assert!(poll_once(waiting.as_mut()).await.is_none());
    let waiting = tokio::spawn(waiting);
    assert!(release(held).await);
    assert!(release(deadline(waiting).await.unwrap().unwrap()).await);
}
