//! The names of other programs that still work, one test for each of their documents.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::compat::{asyncio_advanced_semaphores, lua_pool, sync_guard};
use leasehold::{Client, Error, Observer, Retry};

/// Seed 000, 001 and 004.
#[tokio::test]
async fn the_settings_of_asyncio_advanced_semaphores() {
    use asyncio_advanced_semaphores::Settings;
    let api = Client::memory()
        .semaphore("api", 1)
        .ttl(Duration::from_secs(60))
        .heartbeat_max_interval(Duration::from_secs(10))
        .max_acquire_time(Duration::from_millis(20))
        .build()
        .unwrap();
    let held = api.acquire().await.unwrap();
    let error = api.acquire().await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    assert!(held.release().await.unwrap());
}

/// Seed 002.
#[tokio::test]
async fn the_calls_and_words_of_the_lua_scripts() {
    use lua_pool::{AcquireStatus, LuaPool, PoolAnswer, PoolCount, ReleaseStatus, RenewStatus};
    let pool = LuaPool::new(Client::memory().pool("encoders", 1).build().unwrap());
    let answer: PoolAnswer<AcquireStatus> = pool.acquire("a").await.unwrap();
    assert_eq!((answer.status, answer.current_count), (AcquireStatus::Acquired, 1));
    assert_eq!(pool.acquire("b").await.unwrap().status, AcquireStatus::CapacityFull);
    assert_eq!(pool.renew("a").await.unwrap().status, RenewStatus::Renewed);
    assert_eq!(pool.renew("b").await.unwrap().status, RenewStatus::NotHeld);
    let count: PoolCount = pool.count().await.unwrap();
    assert_eq!((count.current_count, count.expired_count), (1, 0));
    assert_eq!(pool.release("a").await.unwrap().status, ReleaseStatus::Released);
    let words = [
        AcquireStatus::Acquired.as_str(),
        AcquireStatus::CapacityFull.as_str(),
        RenewStatus::Renewed.as_str(),
        RenewStatus::NotHeld.as_str(),
        RenewStatus::Expired.as_str(),
        ReleaseStatus::Released.as_str(),
        ReleaseStatus::NotHeld.as_str(),
        ReleaseStatus::AlreadyExpired.as_str(),
    ];
    let expected = ["acquired", "capacity_full", "renewed", "not_held", "expired"];
    assert_eq!(words[..5], expected);
    assert_eq!(words[5..], ["released", "not_held", "already_expired"]);
}

/// Seed 003.
#[tokio::test]
async fn the_settings_and_words_of_sync_guard() {
    use sync_guard::{Backend, ErrorCode, Settings, TimeAuthority};
    let client = Client::memory();
    let lock = client.lock("invoice:42").ttl_ms(30_000).timeout_ms(5000);
    let lock = lock.max_retries(0, Retry::default()).on_release_error(|_| ()).build().unwrap();
    let guard = lock.acquire().await.unwrap();
    let error = lock.acquire().await.unwrap_err();
    assert_eq!(ErrorCode::from(&error).as_str(), "AcquisitionTimeout");
    let reasons = Arc::new(Mutex::new(Vec::new()));
    let list = reasons.clone();
    let observer = Observer::new(move |event| list.lock().unwrap().push(sync_guard::reason(event)));
    let locks = client.locks().observer(observer).cleanup_in_is_locked(true);
    assert!(locks.is_locked("invoice:42").await.unwrap());
    assert!(locks.owns(&guard.id()).await.unwrap());
    let info = locks.lookup("invoice:42").await.unwrap().unwrap();
    assert_eq!((info.key_hash.len(), info.id_hash.len()), (24, 24));
    let capabilities = locks.capabilities();
    assert!(capabilities.supports_fencing);
    assert_eq!(capabilities.backend, "memory");
    assert_eq!(capabilities.time_authority, TimeAuthority::Process);
    #[cfg(feature = "redis")]
    for layout in [sync_guard::LockLayout::SyncGuard1, sync_guard::LockLayout::SyncGuard2] {
        use sync_guard::StoreSettings;
        let _ = Client::redis_builder("redis://localhost").lock_layout(layout);
    }
    let held = locks.acquire("invoice:43", Duration::from_secs(1)).await.unwrap().unwrap();
    assert!(locks.extend(&held.id, Duration::from_secs(2)).await.unwrap());
    assert!(locks.acquire("invoice:43", Duration::from_secs(1)).await.unwrap().is_none());
    let again = locks.acquire_as(&held.id, "invoice:43", Duration::from_secs(1)).await;
    assert_eq!(again.unwrap().map(|again| again.fence), Some(held.fence));
    assert!(locks.release(&held.id).await.unwrap());
    assert!(!locks.release(&held.id).await.unwrap());
    let reasons = std::mem::take(&mut *reasons.lock().unwrap());
    assert!(reasons.contains(&Some("locked")) && reasons.ends_with(&[None, Some("not-found")]));
}
