//! Files beside the database that other users created or can open: each is refused, and the error names it.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use testkit::local_store::LocalStore;

use super::files::{NOBODY, assert_says, mode, refused, write_private};
use super::{acquire, one, open, release};

/// The files that SQLite creates beside the database.
const SUFFIXES: [&str; 3] = ["-wal", "-shm", "-journal"];

fn beside(store: &LocalStore, suffix: &str) -> PathBuf {
    PathBuf::from(format!("{}{suffix}", store.path().display()))
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: only root can give a file to another user");
    }
    root
}

/// A store in a directory like /tmp: every user can create files there, and remove only their own.
fn in_public() -> LocalStore {
    let store = LocalStore::new();
    fs::set_permissions(store.directory(), Permissions::from_mode(0o1777)).unwrap();
    store
}

fn give_to_nobody(path: &Path) {
    chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
}

async fn works(store: &LocalStore) {
    assert!(release(acquire(&one(&open(store).await)).await).await);
}

/// Another user who creates the log before us could read every lock id in it.
#[tokio::test]
async fn a_file_that_another_user_made_before_us_is_refused() {
    if !is_root() {
        return;
    }
    for suffix in SUFFIXES {
        let store = in_public();
        let file = beside(&store, suffix);
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o666)).unwrap();
        give_to_nobody(&file);
        let words = ["belongs to user 65534", "directory where only you", "sudo -u", "use Redis"];
        assert_says(&refused(&store.path()).await, "Denied", &file, &words);
        assert_eq!((fs::read(&file).unwrap(), mode(&file)), (Vec::new(), 0o666));
        fs::remove_file(&file).unwrap();
        works(&store).await;
    }
}

#[tokio::test]
async fn a_file_of_another_user_beside_a_store_in_use_is_refused() {
    if !is_root() {
        return;
    }
    let store = in_public();
    let client = open(&store).await;
    let client_file = store.clients().join(client.id().to_string());
    for file in [beside(&store, "-wal"), beside(&store, "-shm"), client_file] {
        give_to_nobody(&file);
        let error = refused(&store.path()).await;
        assert_says(&error, "Denied", &file, &["belongs to user 65534"]);
        chown(&file, Some(0), Some(0)).unwrap();
    }
    drop(client);
    for file in [store.clients().join("turn"), store.clients()] {
        give_to_nobody(&file);
        let error = refused(&store.path()).await;
        assert_says(&error, "Denied", &file, &["belongs to user 65534"]);
        chown(&file, Some(0), Some(0)).unwrap();
    }
    works(&store).await;
}

#[tokio::test]
async fn a_file_beside_the_store_that_others_can_open_is_refused() {
    let store = LocalStore::new();
    let client = open(&store).await;
    let client_file = store.clients().join(client.id().to_string());
    let turn = store.clients().join("turn");
    for file in [beside(&store, "-wal"), beside(&store, "-shm"), turn, client_file] {
        for open_to in [0o640, 0o604, 0o620, 0o602] {
            fs::set_permissions(&file, Permissions::from_mode(open_to)).unwrap();
            let error = refused(&store.path()).await;
            assert_says(&error, "Unusable", &file, &["open to other users", "chmod 600"]);
        }
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    }
    works(&store).await;
}

#[tokio::test]
async fn a_link_in_the_place_of_a_log_is_refused() {
    for suffix in SUFFIXES {
        let store = LocalStore::new();
        let (file, precious) = (beside(&store, suffix), store.directory().join("precious"));
        write_private(&precious, b"a diary");
        symlink(&precious, &file).unwrap();
        let error = refused(&store.path()).await;
        assert_says(&error, "Unusable", &file, &["is not a regular file"]);
        fs::remove_file(&file).unwrap();
        fs::hard_link(&precious, &file).unwrap();
        let error = refused(&store.path()).await;
        assert_says(&error, "Unusable", &file, &["2 names"]);
        assert_eq!(fs::read(&precious).unwrap(), b"a diary");
    }
}

/// SQLite needs no journal once there is a log, but it still reads one.
#[tokio::test]
async fn a_journal_beside_a_store_that_has_a_log_is_looked_at() {
    let store = LocalStore::new();
    works(&store).await;
    let journal = beside(&store, "-journal");
    symlink(store.directory().join("nowhere"), &journal).unwrap();
    let error = refused(&store.path()).await;
    assert_says(&error, "Unusable", &journal, &["is not a regular file"]);
    fs::remove_file(&journal).unwrap();
    fs::write(&journal, "").unwrap();
    fs::set_permissions(&journal, Permissions::from_mode(0o602)).unwrap();
    let error = refused(&store.path()).await;
    assert_says(&error, "Unusable", &journal, &["open to other users"]);
    fs::remove_file(&journal).unwrap();
    works(&store).await;
}
