//! A store that refuses its clients permanently: waiting acquires fail at once.

use std::fs;
use std::path::Path;
use std::time::Duration;

use leasehold::{Error, LockGuard};
use testkit::local_store::LocalStore;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::{MINUTES, NAME, Waiter, acquire, ask, connect, one, only_when_notified, open};

/// How soon a waiter must get its error.
const NOTIFIED: Duration = Duration::from_secs(3);

/// Waits for a permit and a lock that another client holds, and damages the files meanwhile.
async fn is_refused_after(harm: impl FnOnce(&LocalStore)) {
    let store = LocalStore::new();
    let (client, other) = (open(&store).await, open(&store).await);
    let held = acquire(&one(&other)).await;
    let lock = |client: &leasehold::Client| {
        client.lock(NAME).lease(MINUTES).retry(super::persistent()).build().unwrap()
    };
    let guard = deadline(lock(&other).acquire()).await.unwrap();
    let waiter = Waiter::join(&one(&client)).await;
    let lock_waiter = lock(&client);
    let lock_waiter = tokio::spawn(async move { lock_waiter.acquire().await });

    harm(&store);
    are_refused(waiter, lock_waiter).await;
    drop((held, guard));
}

/// Fails unless both waiters are refused in time.
async fn are_refused(waiter: Waiter, lock_waiter: JoinHandle<Result<LockGuard, Error>>) {
    let semaphore = async { waiter.task.await.unwrap().map(drop) };
    let lock = async { lock_waiter.await.unwrap().map(drop) };
    let (semaphore, lock) = tokio::join!(timeout(NOTIFIED, semaphore), timeout(NOTIFIED, lock));
    let refused = |answer: &Result<Result<(), Error>, _>| {
        matches!(answer, Ok(Err(Error::Unusable { .. } | Error::Denied { .. })))
    };
    assert!(
        refused(&semaphore) && refused(&lock),
        "the semaphore's waiter: {semaphore:?}; the lock's waiter: {lock:?}"
    );
}

#[tokio::test]
async fn waiters_are_refused_when_the_file_is_removed() {
    is_refused_after(|store| fs::remove_file(store.path()).unwrap()).await;
}

#[tokio::test]
async fn waiters_are_refused_when_the_file_is_replaced() {
    let new = LocalStore::new();
    drop(open(&new).await);
    let replace = |path: &Path| {
        let beside = path.with_extension("new");
        fs::copy(new.path(), &beside).unwrap();
        fs::rename(&beside, path).unwrap();
    };
    is_refused_after(|store| replace(&store.path())).await;
}

#[tokio::test]
async fn waiters_are_refused_when_the_directory_is_removed() {
    is_refused_after(|store| fs::remove_dir_all(store.directory()).unwrap()).await;
}

/// Redis closes the connections of a deleted user, and refuses new ones.
#[tokio::test]
async fn waiters_are_refused_when_their_redis_user_is_deleted() {
    let server = RedisServer::start_with(&["--user app on >secret ~* &* +@all"]);
    let client = connect(&server.url_with("app", "secret")).await;
    let other = connect(&server.url()).await;
    let lock = |client: &leasehold::Client| {
        client.lock(NAME).lease(MINUTES).retry(only_when_notified()).build().unwrap()
    };
    let (held, guard) = (acquire(&one(&other)).await, lock(&other).acquire().await.unwrap());
    let waiter = Waiter::join(&one(&client)).await;
    let lock_waiter = lock(&client);
    let lock_waiter = tokio::spawn(async move { lock_waiter.acquire().await });
    let waiting = ["SISMEMBER", "adv-sem:lock_waiting:syncguard:x", &client.id().to_string()];
    eventually(async || ask::<bool>(&server, &waiting)).await;

    assert_eq!(ask::<u32>(&server, &["ACL", "DELUSER", "app"]), 1);
    are_refused(waiter, lock_waiter).await;
    drop((held, guard));
}
