//! A store that cannot be reached never looks like contention.

use std::fs::File;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;

use crate::support::{Looker, Running, Store, run, until};

/// How soon a command that does not wait says that the store does not answer.
const PROMPT: Duration = Duration::from_secs(8);

/// Runs commands that have to end with 69, all at once.
fn all_unreachable(store: &str) {
    std::thread::scope(|scope| {
        for kind in ["run", "lock"] {
            for wait in [&["--no-wait"][..], &["--wait", "2s"]] {
                scope.spawn(move || {
                    let words = [&[kind], wait, &["it", "--", "true"]].concat();
                    let begun = Instant::now();
                    let ended = run(store, &words);
                    assert_eq!(ended.code, 69, "{words:?}: {ended:?}");
                    assert_eq!(ended.stderr.lines().count(), 1, "{words:?}: {ended:?}");
                    assert!(begun.elapsed() < PROMPT, "{words:?} took {:?}", begun.elapsed());
                });
            }
        }
    });
}

#[test]
fn a_server_that_hangs_is_69() {
    let server = RedisServer::start();
    server.pause();
    all_unreachable(&server.url());
    server.resume();
}

/// It hangs when the command is in the queue already.
#[test]
fn a_wait_that_ends_while_the_server_hangs_is_69() {
    let server = RedisServer::start();
    let looker = Looker::new(&server.url());
    let _held = looker.hold("it");
    let lock = looker.client.lock("it").lease(Duration::from_secs(60)).build().unwrap();
    let _locked = looker.block_on(lock.acquire()).unwrap();
    let waiting = ["run", "lock"].map(|kind| {
        Running::start(&server.url(), &[kind, "-v", "--wait", "4s", "it", "--", "true"])
    });
    until(|| looker.census("it") == (1, 1));
    for waiting in &waiting {
        waiting.says("waiting for ");
    }
    server.pause();
    let begun = Instant::now();
    let ended = waiting.map(Running::end);
    assert!(begun.elapsed() < PROMPT, "they took {:?}", begun.elapsed());
    server.resume();
    for ended in ended {
        assert_eq!(ended.code, 69, "{ended:?}");
    }
}

/// What another process does that is stopped in the middle of a transaction.
fn block(store: &Store) -> File {
    let path = store.url().strip_prefix("sqlite:").unwrap().to_owned();
    let turn = File::open(format!("{path}.clients/turn")).unwrap();
    flock(&turn, FlockOperation::LockExclusive).unwrap();
    turn
}

#[test]
fn a_file_that_is_blocked_is_69() {
    let store = Store::local();
    assert_eq!(run(&store.url(), &["run", "it", "--", "true"]).code, 0);
    let turn = block(&store);
    all_unreachable(&store.url());
    drop(turn);
    assert_eq!(run(&store.url(), &["run", "it", "--", "true"]).code, 0);
}

/// It is running, and says why it does not serve us.
#[test]
fn a_server_that_is_full_is_69_and_quoted() {
    let server = RedisServer::start();
    let mut keeper = server.connection();
    redis::cmd("CONFIG").arg("SET").arg("maxclients").arg(1).exec(&mut keeper).unwrap();
    let ended = run(&server.url(), &["ls"]);
    assert_eq!(ended.code, 69, "{ended:?}");
    let advice = "max number of clients reached: the store cannot be reached: raise its maxclients";
    assert!(ended.stderr.contains(advice), "{ended:?}");
}

#[test]
fn an_outage_during_a_wait_is_reported_and_so_is_its_end() {
    let server = RedisServer::start();
    let url = server.url();
    let looker = Looker::new(&url);
    let held = looker.hold("it");
    let lock = looker.client.lock("it").lease(Duration::from_secs(600)).build().unwrap();
    let locked = looker.block_on(lock.acquire()).unwrap();
    let waiting = ["run", "lock"].map(|kind| Running::start(&url, &[kind, "it", "--", "true"]));
    until(|| looker.census("it") == (1, 1));
    server.pause();
    for waiting in &waiting {
        waiting.says("\n");
    }
    server.resume();
    for waiting in &waiting {
        waiting.says("again");
    }
    assert!(looker.block_on(held.release()).unwrap());
    assert!(looker.block_on(locked.release()).unwrap());
    for waiting in waiting {
        let ended = waiting.end();
        assert_eq!(ended.code, 0, "{ended:?}");
        let lines: Vec<_> = ended.stderr.lines().collect();
        let [begun, over] = lines[..] else { panic!("two lines: {ended:?}") };
        let cause = begun.strip_prefix(&format!("leasehold: waiting: {url} cannot be reached: "));
        assert!(matches!(cause, Some("connection lost" | "no answer in time")), "{begun}");
        let again = format!("leasehold: waiting: {url} can be reached again, after ");
        assert!(over.starts_with(&again), "{ended:?}");
    }
}

/// The permit is granted as soon as the connection is back, maybe before anybody has looked whether it is.
#[test]
fn an_outage_that_ends_with_a_grant_is_reported_as_ended() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let url = proxy.url();
    let looker = Looker::new(&server.url());
    let held = looker.hold("it");
    let waiting = Running::start(&url, &["run", "it", "--", "true"]);
    until(|| looker.census("it") == (1, 1));
    proxy.refuse(true);
    proxy.cut();
    waiting.says("\n");
    assert!(looker.block_on(held.release()).unwrap());
    proxy.heal();
    let ended = waiting.end();
    assert_eq!(ended.code, 0, "{ended:?}");
    let lines: Vec<_> = ended.stderr.lines().collect();
    let [begun, over] = lines[..] else { panic!("two lines: {ended:?}") };
    assert!(
        begun.starts_with(&format!("leasehold: waiting: {url} cannot be reached: ")),
        "{begun}"
    );
    let again = format!("leasehold: waiting: {url} can be reached again, after ");
    assert!(over.starts_with(&again), "{ended:?}");
}
