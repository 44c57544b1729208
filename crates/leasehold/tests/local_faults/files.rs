//! Files that are not what they should be: each is refused with advice, and left as it is.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::time::{Duration, Instant};

use leasehold::compat::sync_guard::Backend;
use leasehold::{Client, Error};
use rusqlite::Connection;
use testkit::child::{self, Child};
use testkit::local_store::LocalStore;
use testkit::wait::{deadline, eventually};

use super::{NOTICED, Waiter, acquire, look, one, open, release};

/// An unprivileged user.
pub(crate) const NOBODY: u32 = 65534;

/// In the child: opens a store, and reports the outcome.
pub(crate) async fn play(arguments: &[&str]) {
    child::say(&match Client::local(arguments[0]).await {
        Ok(_) => "opened".to_owned(),
        Err(error) => format!("{}: {error}", variant(&error)),
    });
    std::future::pending::<()>().await;
}

pub(crate) async fn refused(path: &Path) -> Error {
    deadline(Client::local(path)).await.expect_err("the store is refused")
}

/// Returns the name of the error's variant.
fn variant(error: &Error) -> String {
    let shown = format!("{error:?}");
    shown.split(' ').next().unwrap().to_owned()
}

#[track_caller]
pub(crate) fn assert_says(error: &Error, expected: &str, path: &Path, words: &[&str]) {
    let text = error.to_string();
    assert_eq!(variant(error), expected, "{text}");
    for word in words.iter().chain(&[path.to_str().unwrap()]) {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
    assert!(!text.contains('\n') && text.len() < 400, "{text:?}");
}

pub(crate) fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
}

pub(crate) fn write_private(path: &Path, content: &[u8]) {
    fs::write(path, content).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
}

#[tokio::test]
async fn new_files_are_for_their_owner_only() {
    let store = LocalStore::new();
    let path = store.directory().join("new/deep/store");
    let client = Client::local_builder(&path).create_directories().open().await.unwrap();
    assert!(release(acquire(&one(&client)).await).await);
    let beside = path.with_extension("clients");
    for directory in [path.parent().unwrap().parent().unwrap(), path.parent().unwrap(), &beside] {
        assert_eq!(mode(directory), 0o700, "{}", directory.display());
    }
    for file in [path.clone(), path.with_file_name("store-wal"), path.with_file_name("store-shm")] {
        assert_eq!(mode(&file), 0o600, "{}", file.display());
    }
    for file in ["turn", &client.id().to_string()] {
        assert_eq!(mode(&beside.join(file)), 0o600, "{file}");
    }
}

#[tokio::test]
async fn a_file_that_is_no_database_is_left_alone() {
    let store = LocalStore::new();
    let text = "a letter, and not a short one. ".repeat(100);
    write_private(&store.path(), text.as_bytes());
    let error = refused(&store.path()).await;
    assert_says(&error, "Unusable", &store.path(), &["choose another path"]);
    assert_eq!(fs::read_to_string(store.path()).unwrap(), text);
}

#[tokio::test]
async fn another_programs_database_is_left_alone() {
    for (application, tables) in [(7, ""), (0, "CREATE TABLE theirs (a)")] {
        let store = LocalStore::new();
        write_private(&store.path(), b"");
        let theirs = look(&store);
        theirs.execute_batch(tables).unwrap();
        theirs.pragma_update(None, "application_id", application).unwrap();
        drop(theirs);
        let before = fs::read(store.path()).unwrap();
        let error = refused(&store.path()).await;
        assert_says(&error, "Unusable", &store.path(), &["another program"]);
        assert_eq!(fs::read(store.path()).unwrap(), before);
        assert_eq!(
            fs::read_dir(store.directory()).unwrap().count(),
            1,
            "no file was created beside it"
        );
    }
}

#[tokio::test]
async fn a_newer_schema_is_not_touched() {
    let store = LocalStore::new();
    drop(open(&store).await);
    look(&store).pragma_update(None, "user_version", 1000).unwrap();
    let error = refused(&store.path()).await;
    assert_says(&error, "Unusable", &store.path(), &["schema 1000", "newer leasehold"]);
}

/// Nothing in it is lost. What its records do not contain is reported as unknown.
#[tokio::test]
async fn a_store_of_the_first_version_is_opened() {
    let store = LocalStore::new();
    write_private(&store.path(), b"");
    let old = look(&store);
    old.execute_batch(include_str!("schema_1.sql")).unwrap();
    old.pragma_update(None, "application_id", 0x4c65_6173).unwrap();
    old.pragma_update(None, "user_version", 1).unwrap();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let (id, now) = (testkit::seed003::new_lock_id(), 1_700_000_000_000_i64);
    old.execute("INSERT INTO meta VALUES (1, ?1, ?2, 0)", (boot.trim(), now * 1000)).unwrap();
    // Later than any time since the machine was started.
    let ends = now + 100 * 365 * 86_400_000;
    let insert = "INSERT INTO locks VALUES ('invoice:42', 7, ?1, ?2, ?3)";
    old.execute(insert, (&id, now, ends)).unwrap();
    old.execute("INSERT INTO lock_ids VALUES (?1, 'invoice:42')", [&id]).unwrap();
    old.execute("INSERT INTO semaphores VALUES (1, 'x', 3, 0, 0, 0, 9)", []).unwrap();
    drop(old);

    // Twice: the second client finds the store as the first has upgraded it.
    for _ in 0..2 {
        let client = open(&store).await;
        let info = deadline(client.locks().lookup("invoice:42")).await.unwrap().unwrap();
        assert_eq!((info.fence.get(), info.host, info.pid, info.label), (7, None, None, None));
        let stats = deadline(client.stats().names(["x"]).unused()).await.unwrap();
        assert_eq!(stats[0].capacity, 3);
    }
    let client = open(&store).await;
    assert!(deadline(client.locks().release(&id.parse().unwrap())).await.unwrap());
    let lock = client.lock("invoice:42").label("nightly").build().unwrap();
    let guard = deadline(lock.acquire()).await.unwrap();
    assert!(guard.fence().get() > 7);
    let info = deadline(client.locks().lookup("invoice:42")).await.unwrap().unwrap();
    assert_eq!((info.pid, info.label.as_deref()), (Some(std::process::id()), Some("nightly")));
    let version = look(&store).pragma_query_value(None, "user_version", |row| row.get::<_, i32>(0));
    assert_eq!(version.unwrap(), 6);
}

#[tokio::test]
async fn a_damaged_file_is_told() {
    let store = LocalStore::new();
    let client = open(&store).await;
    assert!(release(acquire(&one(&client)).await).await);
    let checkpoint = "PRAGMA wal_checkpoint(TRUNCATE)";
    look(&store).query_row(checkpoint, [], |_| Ok(())).unwrap();
    let page: u32 = look(&store).pragma_query_value(None, "page_size", |row| row.get(0)).unwrap();
    drop(client);
    // After its first page, which identifies it as a store.
    let mut content = fs::read(store.path()).unwrap();
    content[page as usize..].fill(0xa5);
    write_private(&store.path(), &content);
    let error = match deadline(Client::local(store.path())).await {
        Err(error) => error,
        Ok(client) => deadline(one(&client).try_acquire()).await.unwrap_err(),
    };
    assert_says(&error, "Unusable", &store.path(), &["damaged", "backup"]);
}

#[tokio::test]
async fn a_file_that_others_can_read_or_write_is_refused() {
    let store = LocalStore::new();
    drop(open(&store).await);
    for open_to in [0o640, 0o644, 0o620, 0o602] {
        fs::set_permissions(store.path(), Permissions::from_mode(open_to)).unwrap();
        let error = refused(&store.path()).await;
        assert_says(&error, "Unusable", &store.path(), &["chmod 600"]);
    }
    fs::set_permissions(store.path(), Permissions::from_mode(0o600)).unwrap();
    fs::set_permissions(store.clients(), Permissions::from_mode(0o770)).unwrap();
    let error = refused(&store.path()).await;
    assert_says(&error, "Unusable", &store.clients(), &["chmod 700"]);
}

/// A mistyped path must not become a store of its own, where nobody else counts.
#[tokio::test]
async fn a_directory_that_does_not_exist_is_not_created() {
    let store = LocalStore::new();
    let path = store.directory().join("mistyped/deep/store");
    let words = ["there is no directory", "create it, or correct the path"];
    assert_says(&refused(&path).await, "InvalidArgument", &path, &words);
    assert_eq!(fs::read_dir(store.directory()).unwrap().count(), 0, "something was created");
    let relative = refused(Path::new("mistyped/store")).await;
    let directory = std::env::current_dir().unwrap().join("mistyped");
    assert_says(&relative, "InvalidArgument", &directory, &words);
}

#[tokio::test]
async fn paths_that_cannot_be_are_refused() {
    let store = LocalStore::new();
    let directory = store.directory();
    let error = refused(directory).await;
    assert_says(&error, "Unusable", directory, &["is not a regular file"]);
    let below = Path::new("/dev/null/store");
    let error = refused(below).await;
    assert_says(&error, "InvalidArgument", Path::new("/dev/null"), &["choose another path"]);
    let error = refused(Path::new("")).await;
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");

    drop(open(&store).await);
    fs::hard_link(store.path(), directory.join("other name")).unwrap();
    let error = refused(&store.path()).await;
    assert_says(&error, "Unusable", &store.path(), &["2 names"]);
}

#[tokio::test]
async fn urls_name_a_path() {
    let store = LocalStore::new();
    let path = store.path();
    for url in [format!("sqlite:{}", path.display()), format!("sqlite://{}", path.display())] {
        let client = deadline(Client::open(&url)).await.unwrap();
        assert_eq!(client.locks().capabilities().backend, "local");
    }
    for url in ["sqlite:", "sqlite://", "sqlite://host/path", "sqlite::memory:"] {
        let error = deadline(Client::open(url)).await.unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { argument: "store", .. }),
            "{url}: {error}"
        );
    }
}

/// The path of a socket is limited to 107 bytes; the path of a store may be longer.
#[tokio::test]
async fn a_long_path_and_a_link_are_one_store_and_wake_each_other() {
    let store = LocalStore::new();
    let deep = store.directory().join("d".repeat(200)).join("store with spaces");
    let here = Client::local_builder(&deep).create_directories().open().await.unwrap();
    let link = store.directory().join("link");
    std::os::unix::fs::symlink(&deep, &link).unwrap();
    let there = Client::local(&link).await.unwrap();
    let mut took = Vec::new();
    while took.iter().filter(|took| **took < NOTICED / 2).count() < 2 {
        assert!(took.len() < 6, "the waiter was not woken: it took {took:?}");
        let held = acquire(&one(&here)).await;
        let waiter = Waiter::join(&one(&there)).await;
        let released = Instant::now();
        assert!(release(held).await);
        let (at, permit) = waiter.granted().await;
        assert!(release(permit).await);
        took.push(at.saturating_duration_since(released));
    }
}

#[tokio::test]
async fn a_file_that_is_taken_away_is_noticed() {
    let store = LocalStore::new();
    let client = open(&store).await;
    let held = acquire(&one(&client)).await;
    fs::rename(store.path(), store.directory().join("elsewhere")).unwrap();
    let error = deadline(one(&client).acquire()).await.unwrap_err();
    assert_says(&error, "Unusable", &store.path(), &["was removed or replaced"]);
    // After the file is moved back, nothing is lost.
    fs::rename(store.directory().join("elsewhere"), store.path()).unwrap();
    assert!(release(held).await);
}

/// SQLite's files beside the database belong to the old one: a new one must not use them.
#[tokio::test]
async fn a_database_that_is_removed_under_a_client_is_the_reason_that_is_told() {
    for replaced in [false, true] {
        let store = LocalStore::new();
        let client = open(&store).await;
        let held = acquire(&one(&client)).await;
        if replaced {
            let copy = store.directory().join("copy");
            write_private(&copy, &fs::read(store.path()).unwrap());
            fs::rename(copy, store.path()).unwrap();
        } else {
            fs::remove_file(store.path()).unwrap();
        }
        let words = ["was removed or replaced", "1 client"];
        assert_says(&refused(&store.path()).await, "Unusable", &store.path(), &words);
        let error = deadline(one(&client).try_acquire()).await.unwrap_err();
        assert_says(&error, "Unusable", &store.path(), &["was removed or replaced"]);
        assert!(replaced || !store.path().exists(), "a new file was created in its place");

        // Once no client uses the old database, a new one can be created.
        drop((held, client));
        eventually(async || Client::local(store.path()).await.is_ok()).await;
        let client = open(&store).await;
        assert!(release(acquire(&one(&client)).await).await);
    }
}

#[tokio::test]
async fn a_log_that_is_removed_under_a_client_is_the_reason_that_is_told() {
    for suffix in ["-wal", "-shm"] {
        let store = LocalStore::new();
        let client = open(&store).await;
        let held = acquire(&one(&client)).await;
        let file = store.path().with_file_name(format!("store{suffix}"));
        fs::remove_file(&file).unwrap();
        let error = deadline(one(&client).try_acquire()).await.unwrap_err();
        assert_says(&error, "Unusable", &file, &["was removed or replaced"]);
        let error = refused(&store.path()).await;
        assert_says(&error, "Unusable", &file, &["was removed or replaced", "1 client"]);
        assert!(!file.exists(), "a new file was created in its place");
        drop((held, client));
        eventually(async || Client::local(store.path()).await.is_ok()).await;
    }
}

/// SQLite itself reports "file is not a database".
#[tokio::test]
async fn a_damaged_log_is_told() {
    let store = LocalStore::new();
    let log = store.path().with_file_name("store-wal");
    let client = open(&store).await;
    let last = acquire(&one(&client)).await.fence();
    let size = fs::metadata(&log).unwrap().len();
    let mut file = fs::OpenOptions::new().write(true).open(&log).unwrap();
    file.write_all(&vec![0xa5; usize::try_from(size).unwrap()]).unwrap();
    let words = ["write-ahead log is damaged", "remove"];
    assert_says(&refused(&store.path()).await, "Unusable", &log, &words);

    // The same when no process has the log open, and SQLite would begin a new one.
    client_is_gone(&store, client).await;
    assert_says(&refused(&store.path()).await, "Unusable", &log, &words);
    // The advice of the error works, and fences still grow.
    fs::remove_file(&log).unwrap();
    fs::remove_file(store.path().with_file_name("store-shm")).unwrap();
    let next = acquire(&one(&open(&store).await)).await.fence();
    assert!(next > last, "{next} after {last}");
}

/// SQLite itself reports an input or output error, which could be temporary.
#[tokio::test]
async fn a_waiter_ends_if_the_log_is_cut_off() {
    for left in [0, 32, 5000] {
        let store = LocalStore::new();
        let log = store.path().with_file_name("store-wal");
        let (client, other) = (open(&store).await, open(&store).await);
        let permit = acquire(&one(&client)).await;
        let waiter = Waiter::join(&one(&other)).await;
        fs::OpenOptions::new().write(true).open(&log).unwrap().set_len(left).unwrap();
        let words = ["write-ahead log is damaged", "remove"];
        // A new client must read the log.
        assert_says(&refused(&store.path()).await, "Unusable", &log, &words);
        drop(permit);
        let (_, ended) = deadline(waiter.task).await.unwrap();
        match ended {
            Err(error) => assert_says(&error, "Unusable", &log, &words),
            // Its client had everything in memory.
            Ok(permit) => drop(permit),
        }
    }
}

/// A power cut may damage the log, and no process has survived it.
#[tokio::test]
async fn a_damaged_log_is_dropped_after_a_start_of_the_machine() {
    let store = LocalStore::new();
    let client = open(&store).await;
    client_is_gone(&store, client).await;
    look(&store).execute("UPDATE meta SET boot = 'another start'", []).unwrap();
    write_private(&store.path().with_file_name("store-wal"), &[0xa5; 10_000]);
    let client = open(&store).await;
    assert!(release(acquire(&one(&client)).await).await);
}

/// Drops a client, and waits until the lock of its lifeline is released.
pub(crate) async fn client_is_gone(store: &LocalStore, client: Client) {
    let file = store.clients().join(client.id().to_string());
    drop(client);
    eventually(async || {
        let Ok(file) = fs::File::open(&file) else { return true };
        rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockShared).is_ok()
    })
    .await;
}

/// A client whose file was removed is not considered dead.
#[tokio::test]
async fn a_missing_lifeline_proves_nothing() {
    let store = LocalStore::new();
    let (client, other) = (open(&store).await, open(&store).await);
    let held = acquire(&one(&client)).await;
    fs::remove_file(store.clients().join(client.id().to_string())).unwrap();
    fs::remove_file(store.clients().join(format!("{}.wake", client.id()))).unwrap();
    let late = one(&other).acquire().within(NOTICED * 3);
    deadline(late).await.expect_err("it is held");
    assert!(release(held).await);
}

/// A client that cannot be woken asks on its own.
#[tokio::test]
async fn a_missing_socket_costs_a_second() {
    let store = LocalStore::new();
    let (client, other) = (open(&store).await, open(&store).await);
    let held = acquire(&one(&client)).await;
    let waiter = Waiter::join(&one(&other)).await;
    fs::remove_file(store.clients().join(format!("{}.wake", other.id()))).unwrap();
    let released = Instant::now();
    assert!(release(held).await);
    let (at, permit) = waiter.granted().await;
    assert!(at - released < Duration::from_secs(3), "it took {:?}", at - released);
    assert!(release(permit).await);
}

/// Opens the store as another user than root, because root may do anything.
async fn as_nobody(path: &Path) -> Option<String> {
    let arguments = [path.to_str().unwrap()];
    let root = rustix::process::geteuid().is_root();
    let child = if root {
        Child::start_as(NOBODY, "stranger", &arguments)
    } else {
        Some(Child::start("stranger", &arguments))
    };
    Some(child?.says().await)
}

/// Gives a path to the user as which [`as_nobody`] runs.
fn give(path: &Path, mode: u32) {
    if rustix::process::geteuid().is_root() {
        chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

#[tokio::test]
async fn a_store_without_write_permission_is_refused() {
    let store = LocalStore::new();
    fs::set_permissions(store.directory(), Permissions::from_mode(0o755)).unwrap();
    let its_directory = store.directory().join("own");
    fs::create_dir(&its_directory).unwrap();
    give(&its_directory, 0o500);
    let Some(message) = as_nobody(&its_directory.join("store")).await else {
        return eprintln!("skipped: no other user may run this test");
    };
    assert!(
        message.starts_with("Denied: ") && message.contains("that you can write to"),
        "{message}"
    );
    assert!(message.contains(its_directory.to_str().unwrap()), "{message}");
    // A directory that the user may not even enter.
    let closed = store.directory().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, Permissions::from_mode(0o000)).unwrap();
    let message = as_nobody(&closed.join("store")).await.unwrap();
    assert!(message.starts_with("Denied: "), "{message}");

    give(&its_directory, 0o700);
    assert_eq!(as_nobody(&its_directory.join("store")).await.unwrap(), "opened");
    give(&its_directory.join("store"), 0o400);
    let message = as_nobody(&its_directory.join("store")).await.unwrap();
    assert!(message.starts_with("Denied: ") && message.contains("cannot be written"), "{message}");
}

#[tokio::test]
async fn a_store_of_another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root can give a file away");
    }
    let store = LocalStore::new();
    drop(open(&store).await);
    chown(store.path(), Some(NOBODY), None).unwrap();
    let error = refused(&store.path()).await;
    assert_says(&error, "Denied", &store.path(), &["belongs to user 65534"]);
}

/// What was committed before a power cut or a kill is still there afterwards.
#[tokio::test]
async fn commits_that_are_only_in_the_log_are_not_lost() {
    let store = LocalStore::new();
    let client = open(&store).await;
    let fence = acquire(&one(&client)).await.fence();
    // Copies the files while they are in use, as a power cut would leave them.
    let copy = LocalStore::new();
    for suffix in ["", "-wal"] {
        let from = format!("{}{suffix}", store.path().display());
        let to = format!("{}{suffix}", copy.path().display());
        fs::copy(from, to).unwrap();
    }
    let copied: i64 = Connection::open(copy.path())
        .unwrap()
        .query_row("SELECT last_fence FROM semaphores", [], |row| row.get(0))
        .unwrap();
    assert_eq!(copied.cast_unsigned(), fence.get());
}

/// Otherwise the next client to open the store would have to read the whole log.
#[tokio::test]
async fn a_log_that_is_not_yet_full_is_copied_back_when_nobody_asks_for_anything() {
    let store = LocalStore::new();
    let client = open(&store).await;
    let semaphore = one(&client);
    let modified = || std::fs::metadata(store.path()).unwrap().modified().unwrap();
    let before = modified();
    // A few pages each: enough to be copied back, and far from the 1000 pages at which that happens in any case.
    for _ in 0..60 {
        assert!(release(acquire(&semaphore).await).await);
    }
    eventually(async || modified() > before).await;
}
