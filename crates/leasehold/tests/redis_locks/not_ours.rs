//! Foreign values under the storage keys of locks.

use leasehold::Error;
use leasehold::compat::sync_guard::Backend;

use super::{
    Client, Duration, KEY, MINUTES, Server, Waiter, acquire, connect, deadline, lock, release,
    try_acquire,
};

const MAIN: &str = "syncguard:invoice:42";
const WAITING: &str = "adv-sem:lock_waiting:syncguard:invoice:42";

/// Returns the error of every operation that reads the key.
async fn by_key(client: &Client) -> [Error; 5] {
    let locks = client.locks().cleanup_in_is_locked(true);
    [
        deadline(lock(client, MINUTES).acquire()).await.unwrap_err(),
        deadline(lock(client, MINUTES).try_acquire()).await.unwrap_err(),
        deadline(locks.try_acquire(KEY, MINUTES)).await.unwrap_err(),
        deadline(locks.is_locked(KEY)).await.unwrap_err(),
        deadline(locks.lookup(KEY)).await.unwrap_err(),
    ]
}

async fn by_id(client: &Client, id: &str) -> [Error; 3] {
    let (locks, id) = (client.locks(), id.parse().unwrap());
    [
        deadline(locks.release(&id)).await.unwrap_err(),
        deadline(locks.extend(&id, MINUTES)).await.unwrap_err(),
        deadline(locks.lookup(&id)).await.unwrap_err(),
    ]
}

#[track_caller]
fn named(errors: impl IntoIterator<Item = Error>, key: &str, about: &str) {
    for error in errors {
        assert!(matches!(error, Error::ForeignData { .. }), "{about}: {error:?}");
        assert!(error.to_string().contains(key), "{about}: {error}");
    }
}

#[tokio::test]
async fn a_value_that_is_not_ours_is_named_and_left_alone() {
    let server = Server::start();
    let client = connect(&server.url()).await;
    let id = testkit::seed003::new_lock_id();
    let index = format!("syncguard:id:{id}");
    let times = r#""expiresAtMs":9999999999999,"acquiredAtMs":1"#;
    for value in [
        "",
        "a session",
        "42",
        "null",
        "[]",
        "{}",
        "{\"lockId\":",
        r#"{"lockId":"a","key":"b"}"#,
        &format!(r#"{{"lockId":"a","key":"b",{times}}}"#),
        &format!(r#"{{"lockId":1,"key":"b","fence":"1",{times}}}"#),
        &format!(r#"{{"lockId":"a","key":"b","fence":1,{times}}}"#),
        r#"{"lockId":"a","key":"b","fence":"1","expiresAtMs":"soon","acquiredAtMs":1}"#,
    ] {
        server.set(MAIN, value);
        server.set(&index, KEY);
        let before = server.dump();
        named(by_key(&client).await, MAIN, value);
        named(by_id(&client, &id).await, MAIN, value);
        assert_eq!(server.dump(), before, "{value}");
    }
    server.ask::<u64>(&["DEL", MAIN]);
    assert!(try_acquire(&client).await.is_some(), "the lock works again");
}

#[tokio::test]
async fn a_key_of_another_type_is_named_and_left_alone() {
    let server = Server::start();
    let client = connect(&server.url()).await;
    let id = testkit::seed003::new_lock_id();
    let index = format!("syncguard:id:{id}");
    server.ask::<u64>(&["RPUSH", MAIN, "theirs"]);
    server.set(&index, KEY);
    let before = server.dump();
    named(by_key(&client).await, MAIN, "the lock");
    named(by_id(&client, &id).await, MAIN, "the lock");
    assert_eq!(server.dump(), before);

    server.ask::<u64>(&["DEL", MAIN, &index]);
    server.ask::<u64>(&["RPUSH", &index, "theirs"]);
    let before = server.dump();
    named(by_id(&client, &id).await, &index, "the index");
    assert_eq!(server.dump(), before);
}

/// A foreign record excludes others, whatever its lock id is. Only a lookup fails, because it cannot return such an id.
#[tokio::test]
async fn a_holder_with_an_id_that_cannot_be_ours_excludes_us() {
    let server = Server::start();
    let client = connect(&server.url()).await;
    let record = r#"{"lockId":"short","key":"invoice:42","fence":"0000000000000000007","expiresAtMs":9999999999999,"acquiredAtMs":1}"#;
    server.set(MAIN, record);
    assert!(try_acquire(&client).await.is_none());
    assert!(deadline(client.locks().is_locked(KEY)).await.unwrap());
    named([deadline(client.locks().lookup(KEY)).await.unwrap_err()], MAIN, record);
    assert_eq!(server.ask::<String>(&["GET", MAIN]), record);
}

/// Members of a record that the layout does not define may have any value. An unusable one is
/// reported as unknown; the rest is shown.
#[tokio::test]
async fn a_holder_that_cannot_be_ours_is_unknown() {
    let server = Server::start();
    let client = connect(&server.url()).await;
    let locks = client.locks();
    let id = testkit::seed003::new_lock_id();
    let huge = "x".repeat(10_000);
    let (web, none) = (Some("web-1"), None);
    let cases: [(Vec<u8>, _); 12] = [
        (br#""host":"web-1","pid":7,"label":"a""#.to_vec(), (web, Some(7), Some("a"))),
        (br#""host":"web-1","pid":7,"label":42"#.to_vec(), (web, Some(7), none)),
        (format!(r#""host":"web-1","pid":7,"label":"{huge}""#).into(), (web, Some(7), none)),
        (format!(r#""host":"{huge}","pid":7"#).into(), (none, Some(7), none)),
        (b"\"host\":\"web-1\",\"label\":\"caf\xe9\"".to_vec(), (web, None, Some("caf\u{fffd}"))),
        (br#""host":"web-1","label":"a\u001b[2Jb""#.to_vec(), (web, None, none)),
        (br#""host":"web-1","label":"""#.to_vec(), (web, None, none)),
        (br#""host":["web-1"],"pid":"7","label":{"a":null}"#.to_vec(), (none, None, none)),
        (br#""host":"web-1","pid":-1"#.to_vec(), (web, None, none)),
        (br#""host":"web-1","pid":4294967296"#.to_vec(), (web, None, none)),
        (br#""host":null,"pid":7.5,"label":true"#.to_vec(), (none, None, none)),
        (br#""label":"a","label":"b","pid":8"#.to_vec(), (none, Some(8), Some("b"))),
    ];
    for (members, expected) in cases {
        let times = r#""expiresAtMs":9999999999999,"acquiredAtMs":1"#;
        let ours = format!(r#""lockId":"{id}","key":"{KEY}","fence":"0000000000000000007""#);
        let record = [b"{", ours.as_bytes(), b",", times.as_bytes(), b",", &members, b"}"].concat();
        let set = redis::cmd("SET").arg(MAIN).arg(&record).exec(&mut server.connection());
        set.unwrap();
        let about = String::from_utf8_lossy(&members[..members.len().min(80)]).into_owned();
        let found = deadline(locks.lookup(KEY)).await;
        let found = found.unwrap_or_else(|error| panic!("{about}: {error}")).expect("it is held");
        let shown = (found.host.as_deref(), found.pid, found.label.as_deref());
        assert_eq!(shown, expected, "{about}");
        let listed = deadline(locks.list(10)).await.unwrap();
        assert_eq!(listed, [found], "{about}");
        assert!(try_acquire(&client).await.is_none(), "{about}");
    }
}

/// A foreign key in the place of the record of waiters: waiters are not notified, and everything else works.
#[tokio::test]
async fn something_in_the_place_of_the_waiting_is_left_alone() {
    let server = Server::start();
    let (client, other) = (connect(&server.url()).await, connect(&server.url()).await);
    server.set(WAITING, "theirs");
    let held = acquire(&lock(&client, MINUTES)).await;
    let delay = Duration::from_millis(20);
    let retry = leasehold::Retry::default().delay(delay).max_delay(delay);
    let asking = other.lock(KEY).retry(retry).build().unwrap();
    let waiters = [Waiter::begin(&asking), Waiter::begin(&asking)];
    let before = server.command_count("evalsha");
    testkit::wait::eventually(async || server.command_count("evalsha") > before + 4).await;
    assert!(release(held).await);
    // Both together, because either may be granted first.
    let [one, two] = waiters.map(|waiter| async { release(waiter.granted().await.1).await });
    assert_eq!(tokio::join!(one, two), (true, true));
    assert_eq!(server.ask::<String>(&["GET", WAITING]), "theirs");
    assert_eq!(server.ask::<i64>(&["TTL", WAITING]), -1);
}

/// A record that outlived its expiry, as after a restore: the lock is free, but its fence still counts.
#[tokio::test]
async fn a_record_that_is_over_is_no_lock_and_cleaned_up_only_when_asked() {
    let server = Server::start();
    let client = connect(&server.url()).await;
    let locks = client.locks();
    let old = testkit::seed003::new_lock_id();
    let index = format!("syncguard:id:{old}");
    let put = || {
        let record = format!(
            r#"{{"lockId":"{old}","key":"{KEY}","fence":"0000000000000000007","expiresAtMs":2,"acquiredAtMs":1}}"#
        );
        server.set(MAIN, &record);
        server.set(&index, KEY);
        server.set("syncguard:fence:invoice:42", "7");
    };
    put();
    let before = server.dump();
    assert!(!deadline(locks.is_locked(KEY)).await.unwrap());
    assert_eq!(deadline(locks.lookup(KEY)).await.unwrap(), None);
    assert_eq!(server.dump(), before, "queries change nothing");
    assert!(!deadline(locks.clone().cleanup_in_is_locked(true).is_locked(KEY)).await.unwrap());
    assert_eq!(server.keys(), ["syncguard:fence:invoice:42"]);

    put();
    let guard = acquire(&lock(&client, MINUTES)).await;
    assert_eq!(guard.fence().get(), 8);
    assert!(!server.ask::<bool>(&["EXISTS", &index]), "the old index is gone");
    assert!(release(guard).await);
    put();
    assert!(!deadline(locks.release(&old.parse().unwrap())).await.unwrap());
    assert_eq!(server.keys(), ["syncguard:fence:invoice:42"]);
}
