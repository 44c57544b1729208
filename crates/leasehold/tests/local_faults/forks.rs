//! Processes that are killed while a forked copy of them lives.

use std::fs::File;
use std::future::pending;

use leasehold::Client;
use rustix::fs::{FlockOperation, flock};
use testkit::child::{self, Child, ForkedCopy};
use testkit::local_store::LocalStore;
use testkit::wait::{deadline, eventually};

use super::{Waiter, acquire, held_and_waiting, one, open, release};

/// In the child: plays the named part.
pub(crate) async fn play(part: &str, arguments: &[&str]) {
    let _told = child::lines_from_test();
    let client = Client::local(arguments[0]).await.unwrap();
    match part {
        "forked writer" => {
            say_copy();
            let busy = client.semaphore("busy", 1).build().unwrap();
            loop {
                assert!(acquire(&busy).await.release().await.unwrap());
            }
        }
        "forked crowd" => {
            let _held = acquire(&client.semaphore("held", 1).build().unwrap()).await;
            for _ in 0..10 {
                tokio::spawn(one(&client).acquire());
            }
            eventually(async || held_and_waiting(&one(&client)).await.1 == 10).await;
            say_copy();
            pending::<()>().await;
        }
        _ => unreachable!("unknown part {part:?}"),
    }
}

/// Forks a copy of this process, and reports its process id.
fn say_copy() {
    child::say(&lone_fork::fork_idle(60).unwrap().to_string());
}

fn is_locked(turn: &File) -> bool {
    let locked = flock(turn, FlockOperation::NonBlockingLockExclusive).is_err();
    if !locked {
        flock(turn, FlockOperation::Unlock).unwrap();
    }
    locked
}

#[tokio::test]
async fn a_process_killed_in_a_transaction_blocks_nobody_although_a_forked_copy_lives() {
    let store = LocalStore::new();
    let client = open(&store).await;
    let turn = File::open(store.directory().join("store.clients/turn")).unwrap();
    let mut writer = Child::start("forked writer", &[store.path().to_str().unwrap()]);
    let copy = ForkedCopy::new(&writer.says().await);
    eventually(async || {
        writer.stop();
        let in_transaction = is_locked(&turn);
        if !in_transaction {
            writer.go_on();
        }
        in_transaction
    })
    .await;
    writer.kill();
    let permit = acquire(&client.semaphore("busy", 1).build().unwrap()).await;
    assert!(release(permit).await);
    copy.assert_alive();
}

/// Its permits are free, too.
#[tokio::test]
async fn the_waiters_of_a_killed_process_are_skipped_although_a_forked_copy_lives() {
    let store = LocalStore::new();
    let client = open(&store).await;
    let permit = acquire(&one(&client)).await;
    let mut crowd = Child::start("forked crowd", &[store.path().to_str().unwrap()]);
    let copy = ForkedCopy::new(&crowd.says().await);
    let waiter = Waiter::join(&one(&client)).await;
    crowd.kill();
    assert!(release(permit).await);
    // If the dead waiters counted as reachable, each would cost the claim time: 50 s in all.
    assert!(release(waiter.granted().await.1).await);
    let held = client.semaphore("held", 1).build().unwrap();
    assert!(deadline(held.try_acquire()).await.unwrap().is_some());
    copy.assert_alive();
}
