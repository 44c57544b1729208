//! Processes that die or are stopped.

use std::future::pending;
use std::process::Command;
use std::time::{Duration, Instant};

use leasehold::{Client, Error};
use testkit::child::{self, Child};
use testkit::local_store::LocalStore;
use testkit::wait::{deadline, eventually};

use super::{NOTICED, SLACK, Waiter, acquire, count, held_and_waiting, one, open, release};

/// A semaphore with a rate.
const RATED: &str = "rated";

/// In the child: plays the named part.
pub(crate) async fn play(part: &str, arguments: &[&str]) {
    let mut from_test = child::lines_from_test();
    let client = Client::local(arguments[0]).await.unwrap();
    let semaphore = one(&client);
    match part {
        "holder" => {
            let permit = acquire(&semaphore).await;
            child::say(&permit.id().to_string());
            while from_test.recv().await.is_some() {
                permit.check().expect("it is held");
                child::say("holds");
            }
        }
        "crowd" => {
            for _ in 0..100 {
                tokio::spawn(semaphore.acquire());
            }
            pending::<()>().await;
        }
        "holder and crowd" => {
            let permit = acquire(&semaphore).await;
            for _ in 0..100 {
                tokio::spawn(semaphore.acquire());
            }
            child::say(&permit.id().to_string());
            pending::<()>().await;
        }
        "waiter" => {
            child::say("waits");
            let permit = semaphore.acquire().await.unwrap();
            child::say(&format!("granted {}", permit.fence()));
            pending::<()>().await;
        }
        "rated waiter" => {
            let permit = client.semaphore(RATED, 1).build().unwrap().acquire().await;
            unreachable!("{permit:?} was granted to a stopped process");
        }
        "parent" => {
            let permit = acquire(&semaphore).await;
            let lifeline = client.lifeline().unwrap().try_clone_to_owned().unwrap();
            let mut heir = Command::new("sleep").arg("60").stdin(lifeline).spawn().unwrap();
            child::say(&heir.id().to_string());
            from_test.recv().await;
            drop(permit);
            heir.wait().unwrap();
        }
        _ => unreachable!("unknown part {part:?}"),
    }
}

fn start(store: &LocalStore, part: &str) -> Child {
    Child::start(part, &[store.path().to_str().unwrap()])
}

/// Two of four in time are enough, because a busy machine may be late itself.
async fn mostly_within(limit: Duration, mut took: impl AsyncFnMut() -> Duration) {
    let mut all = Vec::new();
    while all.iter().filter(|took| **took <= limit).count() < 2 {
        assert!(all.len() < 4, "it took {all:?}");
        all.push(took().await);
    }
}

#[tokio::test]
async fn the_next_waiter_follows_a_killed_holder_at_once() {
    let store = LocalStore::new();
    let client = open(&store).await;
    mostly_within(NOTICED + SLACK, async || {
        let mut holder = start(&store, "holder");
        holder.says().await;
        let waiter = Waiter::join(&one(&client)).await;
        holder.kill();
        let killed = Instant::now();
        let (at, permit) = waiter.granted().await;
        assert!(release(permit).await);
        at - killed
    })
    .await;
    assert_eq!(held_and_waiting(&one(&client)).await, (0, 0));
    eventually(async || count(&store, "clients") == 1).await;
}

#[tokio::test]
async fn an_acquire_after_a_killed_holder_does_not_wait() {
    let store = LocalStore::new();
    let client = open(&store).await;
    let mut holder = start(&store, "holder");
    holder.says().await;
    assert!(deadline(one(&client).try_acquire()).await.unwrap().is_none());
    holder.kill();
    assert_eq!(held_and_waiting(&one(&client)).await, (0, 0), "dead holders are not counted");
    let permit = deadline(one(&client).try_acquire()).await.unwrap();
    assert!(release(permit.expect("the permit is free")).await);
    assert_eq!(count(&store, "clients"), 1, "the record of the dead client was removed");
}

/// Even if the waiter at the head of the queue is dead as well.
#[tokio::test]
async fn the_next_waiter_follows_a_process_that_held_and_waited() {
    let store = LocalStore::new();
    let client = open(&store).await;
    mostly_within(NOTICED + SLACK, async || {
        let mut crowd = start(&store, "holder and crowd");
        crowd.says().await;
        eventually(async || held_and_waiting(&one(&client)).await == (1, 100)).await;
        let waiter = Waiter::join(&one(&client)).await;
        crowd.kill();
        let killed = Instant::now();
        let (at, permit) = waiter.granted().await;
        assert!(release(permit).await);
        at - killed
    })
    .await;
    assert_eq!((count(&store, "holders"), count(&store, "waiters")), (0, 0));
}

#[tokio::test]
async fn a_crowd_of_killed_waiters_does_not_hold_up_the_next() {
    let store = LocalStore::new();
    let (client, other) = (open(&store).await, open(&store).await);
    mostly_within(SLACK, async || {
        let held = acquire(&one(&client)).await;
        let mut crowd = start(&store, "crowd");
        eventually(async || held_and_waiting(&one(&client)).await == (1, 100)).await;
        let waiter = Waiter::join(&one(&other)).await;
        crowd.kill();
        let released = Instant::now();
        assert!(release(held).await);
        let (at, permit) = waiter.granted().await;
        assert!(release(permit).await);
        at.saturating_duration_since(released)
    })
    .await;
    assert_eq!((count(&store, "holders"), count(&store, "waiters")), (0, 0));
}

#[tokio::test]
async fn a_stopped_holder_keeps_its_permit() {
    let store = LocalStore::new();
    let client = open(&store).await;
    let mut holder = start(&store, "holder");
    holder.says().await;
    let waiter = Waiter::join(&one(&client)).await;
    holder.stop();
    // Long enough to be considered dead several times over.
    let late = one(&client).acquire().within(NOTICED * 6);
    deadline(late).await.expect_err("the holder is alive");
    holder.go_on();
    holder.tell("do you hold?");
    assert_eq!(holder.says().await, "holds");
    holder.kill();
    assert!(release(waiter.granted().await.1).await);
}

#[tokio::test]
async fn a_waiter_that_is_stopped_when_its_turn_comes_is_passed_over() {
    let limit = Duration::from_secs(1);
    let store = LocalStore::new();
    let builder = Client::local_builder(store.path()).claim_within(limit);
    let (client, other) = (builder.open().await.unwrap(), open(&store).await);
    let held = acquire(&one(&client)).await;
    let mut stopped = start(&store, "waiter");
    assert_eq!(stopped.says().await, "waits");
    eventually(async || held_and_waiting(&one(&client)).await == (1, 1)).await;
    let waiter = Waiter::join(&one(&other)).await;
    stopped.stop();
    let released = Instant::now();
    assert!(release(held).await);

    let (at, permit) = waiter.granted().await;
    let took = at - released;
    assert!(took >= limit, "it had {limit:?} to claim its permit, not {took:?}");
    // The waiter learns of the new deadline when it asks next, within a second.
    assert!(took < limit + Duration::from_secs(2), "it took {took:?}");
    let fence = permit.fence();
    stopped.go_on();
    assert_eq!(stopped.try_line(), None, "its grant has expired");
    assert!(release(permit).await);
    // It queues again, and is granted another permit.
    let granted = stopped.says().await;
    let later = granted.strip_prefix("granted ").unwrap().parse().unwrap();
    assert!(fence < later, "{fence} before {later}");
}

/// As the command does it: a permit passes on only when the child process has ended as well.
#[tokio::test]
async fn a_process_that_inherits_the_lifeline_keeps_the_permit() {
    let store = LocalStore::new();
    let client = open(&store).await;
    let mut parent = start(&store, "parent");
    let heir: i32 = parent.says().await.parse().unwrap();
    parent.kill();
    let late = one(&client).acquire().within(NOTICED * 4);
    deadline(late).await.expect_err("the child is alive");
    assert_eq!(held_and_waiting(&one(&client)).await, (1, 0));

    let waiter = Waiter::join(&one(&client)).await;
    let heir = rustix::process::Pid::from_raw(heir).unwrap();
    rustix::process::kill_process(heir, rustix::process::Signal::KILL).unwrap();
    assert!(release(waiter.granted().await.1).await);
    eventually(async || count(&store, "clients") == 1).await;
}

/// The same after an orderly end of the client, which leaves its detached permit behind.
#[tokio::test]
async fn a_client_that_ends_leaves_its_permits_to_whoever_inherits_its_lifeline() {
    let store = LocalStore::new();
    let (client, other) = (open(&store).await, open(&store).await);
    let mine = client.id().to_string();
    let _held = acquire(&one(&client)).await.detach();
    let lifeline = client.lifeline().unwrap().try_clone_to_owned().unwrap();
    drop(client);
    // Its socket is closed: the client can no longer be woken.
    let socket = store.clients().join(format!("{mine}.wake"));
    let sender = std::os::unix::net::UnixDatagram::unbound().unwrap();
    eventually(async || sender.send_to(&[], &socket).is_err()).await;
    assert!(deadline(one(&other).try_acquire()).await.unwrap().is_none());
    assert_eq!(held_and_waiting(&one(&other)).await, (1, 0));

    let waiter = Waiter::join(&one(&other)).await;
    drop(lifeline);
    assert!(release(waiter.granted().await.1).await);
    assert!(!store.clients().join(mine).exists());
}

/// A process that is stopped in the middle of a transaction blocks all requests, but no client's timers.
#[tokio::test]
async fn nobody_hangs_while_somebody_is_stopped_in_his_turn() {
    let store = LocalStore::new();
    let builder = Client::local_builder(store.path()).answer_timeout(Duration::from_millis(100));
    let client = builder.open().await.unwrap();
    let held = acquire(&one(&client)).await;
    let turn = std::fs::File::open(store.clients().join("turn")).unwrap();
    rustix::fs::flock(&turn, rustix::fs::FlockOperation::LockExclusive).unwrap();

    let waits = one(&client).acquire().within(Duration::from_millis(300));
    let error = deadline(waits).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { timed_out: true, .. }), "{error}");
    held.check().expect("it is still held");
    let error = deadline(held.release()).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { timed_out: true, .. }), "{error}");

    // The release that failed is sent later.
    drop(turn);
    eventually(async || held_and_waiting(&one(&client)).await == (0, 0)).await;
    assert!(release(acquire(&one(&client)).await).await);
}

/// The process that was granted the token is stopped or dead. With two starts an hour, this test
/// would time out if the token were lost.
#[tokio::test]
async fn the_token_of_a_permit_that_is_never_claimed_goes_back() {
    for dies in [false, true] {
        let store = LocalStore::new();
        let builder = Client::local_builder(store.path()).claim_within(Duration::from_secs(1));
        let client = builder.open().await.unwrap();
        let hour = Duration::from_secs(3600);
        let semaphore = client.semaphore(RATED, 1).rate(2, hour).burst(2).build().unwrap();
        let held = acquire(&semaphore).await;
        let mut stopped = start(&store, "rated waiter");
        eventually(async || held_and_waiting(&semaphore).await == (1, 1)).await;
        let other = open(&store).await.semaphore(RATED, 1).build().unwrap();
        let waiter = Waiter::join(&other).await;
        stopped.stop();
        // The second token goes to the stopped process.
        assert!(release(held).await);
        if dies {
            stopped.kill();
        }
        let (_, permit) = waiter.granted().await;
        let stats = semaphore.stats().await.unwrap();
        assert!(stats.next_token.is_some(), "there is no third token");
        assert!(release(permit).await);
        stopped.kill();
    }
}
