//! Opening a store that another process blocks: it is bounded, can be cancelled, and does not delay other stores.

use std::fs::{self, File};
use std::time::{Duration, Instant};

use leasehold::{Client, Error};
use rusqlite::Connection;
use rustix::fs::{FlockOperation, flock};
use testkit::child::{self, Child};
use testkit::local_store::LocalStore;
use testkit::wait::{deadline, eventually};

use super::{acquire, count, look, one, open, release};

const LIMIT: Duration = Duration::from_millis(300);
/// How much a busy machine may add.
const SLACK: Duration = Duration::from_secs(2);

/// In the child: plays the named part.
pub(crate) async fn play(part: &str, arguments: &[&str]) {
    let _told = child::lines_from_test();
    if part == "blocker" {
        let turn = File::open(format!("{}.clients/turn", arguments[0])).unwrap();
        flock(&turn, FlockOperation::LockExclusive).unwrap();
        let connection = Connection::open(arguments[0]).unwrap();
        connection.execute_batch("BEGIN IMMEDIATE; DELETE FROM leases").unwrap();
        child::say("in the middle");
        std::future::pending::<()>().await;
    }
    for _ in 0..10 {
        let builder = Client::local_builder(arguments[0]);
        builder.answer_timeout(Duration::from_millis(50)).open().await.unwrap_err();
    }
    eventually(async || threads() <= 1).await;
    child::say(&threads().to_string());
}

/// Returns the number of store threads in this process.
fn threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.starts_with("leasehold-store")).count()
}

fn start(store: &LocalStore, part: &str) -> Child {
    Child::start(part, &[store.path().to_str().unwrap()])
}

fn assert_timed_out(error: &Error, store: &LocalStore) {
    assert!(matches!(error, Error::Unavailable { timed_out: true, .. }), "{error:?}");
    let expected = format!("opening {}: no answer in time", store.path().display());
    assert_eq!(error.to_string(), expected);
}

#[tokio::test]
async fn opening_is_bounded_while_a_process_is_stopped_in_its_transaction() {
    let (store, other) = (LocalStore::new(), LocalStore::new());
    drop(open(&store).await);
    let mut blocker = start(&store, "blocker");
    assert_eq!(blocker.says().await, "in the middle");
    blocker.stop();

    let began = Instant::now();
    let builder = Client::local_builder(store.path()).answer_timeout(LIMIT);
    assert_timed_out(&deadline(builder.open()).await.unwrap_err(), &store);
    assert!(began.elapsed() >= LIMIT && began.elapsed() < LIMIT + SLACK, "{:?}", began.elapsed());

    // The default time-out is 5 s; the caller may give up earlier.
    let began = Instant::now();
    let url = format!("sqlite:{}", store.path().display());
    tokio::time::timeout(LIMIT, Client::open(&url)).await.expect_err("the store is blocked");
    assert!(began.elapsed() < LIMIT + SLACK, "{:?}", began.elapsed());

    // Another store in this process is not delayed.
    let began = Instant::now();
    assert!(release(acquire(&one(&open(&other).await)).await).await);
    assert!(began.elapsed() < SLACK, "{:?}", began.elapsed());

    blocker.kill();
    let client = open(&store).await;
    assert!(release(acquire(&one(&client)).await).await);
    // The callers that gave up left nothing behind.
    eventually(async || count(&store, "clients") == 1).await;
}

/// Another program does not take turns with our clients through the `turn` file.
#[tokio::test]
async fn opening_is_bounded_while_another_program_has_the_database_locked() {
    let store = LocalStore::new();
    drop(open(&store).await);
    let theirs = look(&store);
    theirs.execute_batch("BEGIN EXCLUSIVE").unwrap();
    let began = Instant::now();
    let builder = Client::local_builder(store.path()).answer_timeout(LIMIT);
    assert_timed_out(&deadline(builder.open()).await.unwrap_err(), &store);
    assert!(began.elapsed() < LIMIT + SLACK, "{:?}", began.elapsed());
    theirs.execute_batch("ROLLBACK").unwrap();
    assert!(release(acquire(&one(&open(&store).await)).await).await);
}

/// Repeated attempts must not accumulate waiting threads.
#[tokio::test]
async fn attempts_that_were_given_up_do_not_pile_up() {
    let store = LocalStore::new();
    drop(open(&store).await);
    let mut blocker = start(&store, "blocker");
    assert_eq!(blocker.says().await, "in the middle");
    let mut impatient = start(&store, "impatient");
    let threads: usize = impatient.says().await.parse().unwrap();
    assert!(threads <= 1, "{threads} threads wait");
}
