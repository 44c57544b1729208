//! One lock, shared with a program that follows seed document 003.
//!
//! Theirs is [`testkit::seed003`], which is written from the document alone and shares none of our code.

use leasehold::compat::sync_guard::{LockLayout, StoreSettings};
use testkit::seed003::{LockData, Seed003, TTL_MS};

use super::{Client, KEY, MINUTES, Server, Waiter, acquire, connect, deadline, lock, release};
use super::{Duration, try_acquire};

async fn both() -> (Server, Client, Seed003) {
    let server = Server::start();
    let ours = connect(&server.url()).await;
    let theirs = Seed003::new(server.async_connection().await, "syncguard");
    (server, ours, theirs)
}

fn millis(time: std::time::SystemTime) -> u64 {
    let since = time.duration_since(std::time::UNIX_EPOCH).unwrap();
    u64::try_from(since.as_millis()).unwrap()
}

#[tokio::test]
async fn each_excludes_the_other_and_fences_go_on() {
    let (_server, ours, theirs) = both().await;
    let mut last = 0;
    for _ in 0..3 {
        let guard = acquire(&lock(&ours, MINUTES)).await;
        assert_eq!(guard.fence().get(), last + 1);
        assert_eq!(theirs.acquire(KEY, TTL_MS).await.unwrap(), None);
        assert!(theirs.is_locked(KEY).await.unwrap());
        assert!(release(guard).await);

        let held = theirs.acquire(KEY, TTL_MS).await.unwrap().expect("it is free");
        assert_eq!(held.fence.parse::<u64>().unwrap(), last + 2);
        assert!(try_acquire(&ours).await.is_none());
        assert!(deadline(ours.locks().is_locked(KEY)).await.unwrap());
        assert_eq!(theirs.release(&held.lock_id).await.unwrap(), 1);
        last += 2;
    }
    assert!(!theirs.is_locked(KEY).await.unwrap());
}

#[tokio::test]
async fn they_find_extend_and_release_ours_by_its_id() {
    const LABEL: &str = "\"é\" / 夜";
    let (_server, ours, theirs) = both().await;
    let guard = acquire(&ours.lock(KEY).lease(MINUTES).label(LABEL).build().unwrap()).await;
    let id = guard.id().to_string();
    let expected = LockData {
        lock_id: id.clone(),
        expires_at_ms: millis(guard.expires_at()),
        acquired_at_ms: millis(guard.expires_at() - MINUTES),
        key: KEY.to_owned(),
        fence: guard.fence().to_string(),
    };
    assert_eq!(theirs.lookup_by_key(KEY).await.unwrap(), Some(expected.clone()));
    assert_eq!(theirs.lookup_by_id(&id).await.unwrap(), Some(expected));
    assert_eq!(theirs.extend(&id, 900_000).await.unwrap(), 1);
    let info = deadline(ours.locks().lookup(&guard.id())).await.unwrap().unwrap();
    assert!(info.expires_at > guard.expires_at() + MINUTES);
    assert_eq!(info.fence, guard.fence());
    // They do not know the members that describe the holder, and keep them.
    assert!(info.host.is_some());
    assert_eq!((info.pid, info.label.as_deref()), (Some(std::process::id()), Some(LABEL)));
    assert_eq!(theirs.release(&id).await.unwrap(), 1);
    assert!(!release(guard).await);
    assert!(try_acquire(&ours).await.is_some());
}

#[tokio::test]
async fn we_find_extend_and_release_theirs_by_its_id() {
    let (_server, ours, theirs) = both().await;
    let held = theirs.acquire(KEY, TTL_MS).await.unwrap().unwrap();
    let (locks, id) = (ours.locks(), held.lock_id.parse().unwrap());
    let raw = deadline(locks.lookup(&id)).await.unwrap().unwrap();
    assert_eq!(deadline(locks.lookup(KEY)).await.unwrap().as_ref(), Some(&raw));
    assert_eq!((raw.key.as_str(), raw.id), (KEY, id));
    assert_eq!(raw.fence.to_string(), held.fence);
    assert_eq!(millis(raw.expires_at), held.expires_at_ms);
    assert_eq!((&raw.host, raw.pid, &raw.label), (&None, None, &None));

    assert!(deadline(locks.extend(&id, MINUTES)).await.unwrap());
    let extended = theirs.lookup_by_id(&held.lock_id).await.unwrap().unwrap();
    assert!(extended.expires_at_ms > held.expires_at_ms + 60_000);
    assert_eq!((extended.fence, extended.acquired_at_ms), (held.fence, millis(raw.acquired_at)));
    assert!(deadline(locks.owns(&id)).await.unwrap());
    assert!(deadline(locks.release(&id)).await.unwrap());
    assert_eq!(theirs.release(&held.lock_id).await.unwrap(), -1);
    assert!(theirs.acquire(KEY, TTL_MS).await.unwrap().is_some());
}

/// They publish no release: a waiter finds it at its next retry, but finds the end of their lease without one.
#[tokio::test]
async fn we_wait_for_theirs() {
    let (server, ours, theirs) = both().await;
    let held = theirs.acquire(KEY, TTL_MS).await.unwrap().unwrap();
    let delay = Duration::from_millis(20);
    let retry = leasehold::Retry::default().delay(delay).max_delay(delay);
    let asking = ours.lock(KEY).retry(retry).build().unwrap();
    let waiter = Waiter::join(&server, &ours, &asking).await;
    assert_eq!(theirs.release(&held.lock_id).await.unwrap(), 1);
    assert!(release(waiter.granted().await.1).await);

    let silent = theirs.acquire(KEY, 300).await.unwrap().unwrap();
    let guard = acquire(&lock(&ours, MINUTES)).await;
    assert!(guard.fence().to_string() > silent.fence);
    assert_eq!(theirs.release(&silent.lock_id).await.unwrap(), -1, "ours is not theirs to release");
    guard.check().unwrap();
    assert!(release(guard).await);
}

#[tokio::test]
async fn a_stale_index_of_theirs_hits_nobody() {
    let (server, ours, theirs) = both().await;
    let old = testkit::seed003::new_lock_id();
    server.set(&format!("syncguard:id:{old}"), KEY);
    let guard = acquire(&lock(&ours, MINUTES)).await;
    assert_eq!(theirs.release(&old).await.unwrap(), 0);
    let id = old.parse().unwrap();
    assert!(!deadline(ours.locks().release(&id)).await.unwrap());
    assert!(!deadline(ours.locks().extend(&id, MINUTES)).await.unwrap());
    assert!(!deadline(ours.locks().owns(&id)).await.unwrap());
    assert!(release(guard).await);
}

/// The same with a program of version 2.
#[tokio::test]
async fn with_version_2_each_excludes_the_other_and_fences_go_on() {
    let (server, _, theirs) = both().await;
    let theirs = theirs.version_2();
    let ours = Client::redis_builder(&server.url()).lock_layout(LockLayout::SyncGuard2);
    let ours = ours.open().await.unwrap();
    let mut last = 0;
    for _ in 0..3 {
        let guard = acquire(&lock(&ours, MINUTES)).await;
        assert_eq!(guard.fence().get(), last + 1);
        assert_eq!(theirs.acquire(KEY, TTL_MS).await.unwrap(), None);
        let id = guard.id().to_string();
        let found = theirs.lookup_by_id(&id).await.unwrap().expect("they find it by its id");
        assert_eq!(found.fence, format!("{:015}", last + 1));
        assert_eq!(guard.fence().to_string(), found.fence);
        assert_eq!(theirs.extend(&id, 900_000).await.unwrap(), 1);
        assert!(release(guard).await);

        let held = theirs.acquire(KEY, TTL_MS).await.unwrap().expect("it is free");
        assert_eq!(held.fence.parse::<u64>().unwrap(), last + 2);
        assert!(try_acquire(&ours).await.is_none());
        let id: leasehold::LockId = held.lock_id.parse().unwrap();
        let info = deadline(ours.locks().lookup(&id)).await.unwrap().expect("we find theirs");
        assert_eq!(info.fence.get(), last + 2);
        assert_eq!(info.fence.to_string(), held.fence);
        let listed = deadline(ours.locks().list(10)).await.unwrap();
        assert_eq!(listed[0].fence.to_string(), held.fence);
        assert!(deadline(ours.locks().extend(&id, MINUTES)).await.unwrap());
        assert!(deadline(ours.locks().release(&id)).await.unwrap());
        last += 2;
    }
}

/// A fence with one digit more would not be the largest as text.
#[tokio::test]
async fn the_largest_fence_of_version_2_has_15_digits() {
    let (server, _, _) = both().await;
    let ours = Client::redis_builder(&server.url()).lock_layout(LockLayout::SyncGuard2);
    let ours = ours.open().await.unwrap();
    let counter = format!("syncguard:fence:syncguard:{KEY}");
    let mut db = server.connection();
    redis::cmd("SET").arg(&counter).arg(999_999_999_999_997_u64).exec(&mut db).unwrap();
    for number in [999_999_999_999_998_u64, 999_999_999_999_999] {
        let guard = acquire(&lock(&ours, MINUTES)).await;
        assert_eq!(guard.fence().to_string(), number.to_string());
        assert!(release(guard).await);
    }
    for _ in 0..2 {
        let error = deadline(lock(&ours, MINUTES).try_acquire()).await.unwrap_err();
        assert!(error.to_string().contains(&counter), "{error}");
    }
    let left: u64 = redis::cmd("GET").arg(&counter).query(&mut db).unwrap();
    assert_eq!(left, 999_999_999_999_999);
}

/// Otherwise the two versions would exclude each other with separate fence counters.
#[tokio::test]
async fn a_lock_or_a_fence_of_the_other_version_is_refused() {
    for two in [false, true] {
        let (server, _, theirs) = both().await;
        let layout = if two { LockLayout::SyncGuard1 } else { LockLayout::SyncGuard2 };
        let theirs = if two { theirs.version_2() } else { theirs };
        let ours = Client::redis_builder(&server.url()).lock_layout(layout).open().await.unwrap();
        let held = theirs.acquire(KEY, TTL_MS).await.unwrap().expect("it is free");
        let refused = |error: leasehold::Error| {
            assert!(matches!(error, leasehold::Error::InvalidArgument { .. }), "{error:?}");
            assert!(error.to_string().contains("--lock-layout"), "{error}");
        };
        let lock = lock(&ours, MINUTES);
        refused(deadline(lock.try_acquire()).await.unwrap_err());
        refused(deadline(ours.locks().lookup(KEY)).await.unwrap_err());
        // Also refused when only its counter is left.
        assert_eq!(theirs.release(&held.lock_id).await.unwrap(), 1);
        refused(deadline(lock.try_acquire()).await.unwrap_err());
        let next = theirs.acquire(KEY, TTL_MS).await.unwrap().expect("it is free");
        assert_eq!(next.fence.parse::<u64>().unwrap(), 2);
    }
}
