//! What is stored, under which keys, and for how long.

use std::collections::BTreeSet;

use super::{
    Client, Duration, KEY, MINUTES, Server, Waiter, acquire, builder, connect, deadline, lock,
    only_when_told, release, try_acquire,
};

const FENCE: &str = "syncguard:fence:invoice:42";

#[tokio::test]
async fn a_lock_is_two_keys_that_end_together_and_a_counter_that_stays() {
    let server = Server::start();
    let client = connect(&server.url()).await;
    let labelled = client.lock(KEY).lease(MINUTES).label("nightly").build().unwrap();
    let guard = acquire(&labelled).await;
    let index = format!("syncguard:id:{}", guard.id());
    let main = "syncguard:invoice:42";
    assert_eq!(server.keys(), [FENCE, &index, main]);
    for ttl in [None, Some(2 * MINUTES)] {
        if let Some(ttl) = ttl {
            deadline(guard.extend(ttl)).await.unwrap();
        }
        let ends = server.ends(main).cast_unsigned();
        assert_eq!(ends, server.ends(&index).cast_unsigned(), "both keys end together");
        let json: String = server.ask(&["GET", main]);
        let record: serde_json::Value = serde_json::from_str(&json).unwrap();
        let fields: BTreeSet<_> = record.as_object().unwrap().keys().map(String::as_str).collect();
        let expected = ["acquiredAtMs", "expiresAtMs", "fence", "key", "lockId"];
        let ours = ["host", "label", "pid"];
        assert_eq!(fields, expected.into_iter().chain(ours).collect());
        assert_eq!(record["pid"], std::process::id());
        assert_eq!(record["label"], "nightly");
        assert!(record["host"].as_str().is_some_and(|host| !host.is_empty()), "{record}");
        assert_eq!(record["lockId"], guard.id().to_string());
        assert_eq!(record["key"], KEY);
        assert_eq!(record["fence"], "0000000000000000001");
        let (from, until) =
            (record["acquiredAtMs"].as_u64().unwrap(), record["expiresAtMs"].as_u64().unwrap());
        assert_eq!(ends, until, "and when the record says");
        if ttl.is_none() {
            assert_eq!(u128::from(until - from), MINUTES.as_millis());
        }
        assert_eq!(server.ask::<String>(&["GET", &index]), KEY);
        assert_eq!(server.ask::<String>(&["GET", FENCE]), "1");
        assert_eq!(server.ask::<i64>(&["TTL", FENCE]), -1, "a fence never expires");
    }
    assert!(release(guard).await);
    assert_eq!(server.keys(), [FENCE], "nothing is left but the counter");
}

#[tokio::test]
async fn nothing_is_left_of_waiting() {
    let server = Server::start();
    let (client, other) = (connect(&server.url()).await, connect(&server.url()).await);
    let held = acquire(&lock(&client, MINUTES)).await;
    let waiter = Waiter::join(&server, &other, &lock(&other, MINUTES)).await;
    let waiting = "adv-sem:lock_waiting:syncguard:invoice:42";
    let left: i64 = server.ask(&["PTTL", waiting]);
    let lease = i64::try_from(MINUTES.as_millis()).unwrap();
    assert!(left > lease / 2 && left <= lease + 10_000, "{left}");
    assert!(release(held).await);
    assert!(release(waiter.granted().await.1).await);
    assert_eq!(server.keys(), [FENCE]);
}

#[tokio::test]
async fn a_prefix_is_followed_by_one_colon() {
    let server = Server::start();
    for (turn, (prefix, begins)) in (1_u64..).zip([
        ("app", "app:"),
        ("app:", "app:"),
        ("a:b", "a:b:"),
        ("{app}:locks:", "{app}:locks:"),
    ]) {
        let client = builder(&server.url()).lock_prefix(prefix).open().await.unwrap();
        let guard = acquire(&lock(&client, MINUTES)).await;
        let keys = [format!("{begins}{KEY}"), format!("{begins}id:{}", guard.id())];
        for key in keys {
            assert!(server.ask::<bool>(&["EXISTS", &key]), "{key} is not in {:?}", server.keys());
        }
        // The first two have the same prefix, and so share a counter.
        let fence = if turn == 2 { 2 } else { 1 };
        assert_eq!(server.ask::<u64>(&["GET", &format!("{begins}fence:{KEY}")]), fence);
        assert!(deadline(client.locks().owns(&guard.id())).await.unwrap());
        assert!(release(guard).await);
    }
    for bad in ["", &"p".repeat(513), "a\nb"] {
        let error = builder(&server.url()).lock_prefix(bad).open().await.unwrap_err();
        assert!(error.to_string().contains("lock prefix"), "{error}");
    }
}

async fn with_long_prefix(server: &Server) -> Client {
    builder(&server.url()).lock_prefix(&"p".repeat(500)).open().await.unwrap()
}

/// All operations of a lock whose storage keys are so long that they are hashed.
#[tokio::test]
async fn keys_that_are_cut_down_are_locks_like_any_other() {
    let server = Server::start();
    let (here, there) = (with_long_prefix(&server).await, with_long_prefix(&server).await);
    // The second key differs only at its end; of the third, only the storage key of the fence is hashed.
    let keys = ["k".repeat(512), format!("{}l", "k".repeat(511)), "k".repeat(496)];
    let mut held = Vec::new();
    for key in &keys {
        let lock = here.lock(key).lease(MINUTES).retry(only_when_told()).build().unwrap();
        let guard = acquire(&lock).await;
        assert_eq!(guard.fence().get(), 1, "each key has its own counter");
        assert!(deadline(there.locks().is_locked(key)).await.unwrap());
        let raw = deadline(there.locks().lookup(&guard.id())).await.unwrap().unwrap();
        assert_eq!((&raw.key, raw.id), (key, guard.id()));
        assert_eq!(deadline(there.locks().lookup(key)).await.unwrap(), Some(raw));
        deadline(guard.extend(MINUTES)).await.unwrap();
        held.push((lock, guard));
    }
    assert!(server.keys().iter().all(|key| key.len() <= 1000), "{:?}", server.keys());
    for (key, (_, guard)) in keys.iter().zip(held) {
        let other = there.lock(key).lease(MINUTES).retry(only_when_told()).build().unwrap();
        let waiter = Waiter::begin(&other);
        let sets = || server.ask::<Vec<String>>(&["KEYS", "adv-sem:lock_waiting:*"]);
        testkit::wait::eventually(async || !sets().is_empty()).await;
        assert!(deadline(there.locks().release(&guard.id())).await.unwrap());
        let (_, next) = waiter.granted().await;
        assert_eq!(next.fence().get(), 2);
        assert!(!release(guard).await);
        assert!(release(next).await);
    }
    assert_eq!(server.keys().len(), 3, "the counters: {:?}", server.keys());
}

#[tokio::test]
async fn scripts_that_the_server_forgot_are_sent_again() {
    let server = Server::start();
    let client = connect(&server.url()).await;
    let locks = client.locks();
    let flush = || server.ask::<()>(&["SCRIPT", "FLUSH"]);
    flush();
    let guard = acquire(&lock(&client, Duration::from_secs(30))).await;
    flush();
    assert!(deadline(locks.is_locked(KEY)).await.unwrap());
    flush();
    assert!(deadline(locks.owns(&guard.id())).await.unwrap());
    flush();
    deadline(guard.extend(MINUTES)).await.unwrap();
    flush();
    assert!(release(guard).await);
    assert_eq!(try_acquire(&client).await.unwrap().fence().get(), 2);
}
