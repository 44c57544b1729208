//! Tests of the engine with a simulated remote store, and of everything that can go wrong between them.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use testkit::by_hand::poll_once;
use testkit::wait::{deadline, eventually};
use tokio::time::Instant;

use super::ticket::Ticket;
use super::{Engine, Settings};
use crate::backend::simulated::Simulated;
use crate::clock::{Moment, Span};
use crate::machine::Command;
use crate::manual_clock::Clock;
use crate::name::Name;
use crate::virtual_time;
use crate::{
    Acquire, AcquisitionId, Client, ClientId, Error, Jitter, LossReason, Permit, Retry, Semaphore,
};

mod answers;
mod outages;
mod renewals;

const LEASE: Duration = Duration::from_millis(1200);
/// The answer time-out.
const ANSWER: Duration = Duration::from_millis(1500);
/// Far more than a round trip to a store without latency, and far less than every other time.
const AT_ONCE: Duration = Duration::from_millis(100);
/// Longer than everything else in a test.
const MINUTES: Duration = Duration::from_secs(300);

fn settings() -> Settings {
    Settings { answer_timeout: Span::from_duration(ANSWER), ..Settings::default() }
}

/// Returns whether a call that took this long ended at the answer time-out.
fn is_answer_time_out(took: Duration) -> bool {
    took >= ANSWER && took < ANSWER + AT_ONCE
}

/// Awaits the future, and returns how long that took.
async fn timed<F: Future>(future: F) -> (Duration, F::Output) {
    let begun = Instant::now();
    let output = deadline(future).await;
    (begun.elapsed(), output)
}

/// Retries only after minutes, so that a waiter that succeeds earlier was notified.
fn only_when_notified() -> Retry {
    Retry::default().delay(MINUTES).max_delay(MINUTES).jitter(Jitter::None)
}

fn lock(client: &Client) -> crate::Lock {
    client.lock("k").lease(MINUTES).retry(only_when_notified()).build().unwrap()
}

/// Opens a client in virtual time.
fn client(store: &Simulated) -> Client {
    virtual_time::begin();
    threaded_client(store)
}

/// Opens a client with a thread, in real time.
fn threaded_client(store: &Simulated) -> Client {
    Client::on(Arc::new(store.clone()), settings())
}

fn semaphore(client: &Client, capacity: u32) -> Semaphore {
    client.semaphore("s", capacity).lease(LEASE).build().unwrap()
}

/// Polls the future once, so that the acquire is sent.
async fn start<F: Future>(future: Pin<&mut F>) {
    let mut future = Some(future);
    poll_fn(|cx| {
        let pending = future.take().is_some_and(|future| future.poll(cx).is_pending());
        assert!(pending, "it was to wait");
        Poll::Ready(())
    })
    .await;
}

/// One permit that one client holds and another client waits for.
async fn one_holds_one_waits(
    store: &Simulated,
    here: &Client,
    there: &Client,
) -> (Permit, Pin<Box<Acquire>>) {
    let held = deadline(semaphore(here, 1).acquire()).await.unwrap();
    let mut waiting = Box::pin(semaphore(there, 1).acquire());
    start(waiting.as_mut()).await;
    eventually(async || store.world().count("s") == (1, 1)).await;
    (held, waiting)
}

#[tokio::test]
async fn an_uncontended_acquire_is_one_trip_and_a_release_one() {
    let store = Simulated::default();
    let semaphore = semaphore(&client(&store), 2);
    let permit = deadline(semaphore.acquire()).await.unwrap();
    assert_eq!((permit.slot_number(), store.world().count("s")), (None, (1, 0)));
    assert!(deadline(permit.release()).await.unwrap());
    let batches = store.world().batches.clone();
    assert!(matches!(batches[0][..], [Command::Enqueue { .. }]), "{batches:?}");
    assert!(matches!(batches[1][..], [Command::Release { .. }]), "{batches:?}");
    assert_eq!(batches.len(), 2);
}

#[tokio::test]
async fn acquires_during_a_request_share_the_next_one() {
    let store = Simulated::default();
    let semaphore = semaphore(&client(&store), 1000);
    store.world().delay = Duration::from_millis(50);
    let acquires: Vec<_> = (0..300)
        .map(|_| {
            let semaphore = semaphore.clone();
            tokio::spawn(async move { semaphore.acquire().await })
        })
        .collect();
    let mut permits = Vec::new();
    for acquire in acquires {
        permits.push(deadline(acquire).await.unwrap().unwrap());
    }
    let sizes: Vec<_> = store.world().batches.iter().map(Vec::len).collect();
    assert!(sizes.len() <= 4, "300 acquires took batches of {sizes:?}");
    assert!(sizes.iter().all(|size| *size <= 256), "{sizes:?}");
    // In the order in which they were requested.
    assert!(permits.is_sorted_by_key(Permit::fence));
}

#[tokio::test]
async fn an_answer_that_is_lost_after_its_command_ran_grants_nothing_twice() {
    let store = Simulated::default();
    let semaphore = semaphore(&client(&store), 2);
    store.world().lose_answers = 2;
    let permit = deadline(semaphore.acquire()).await.unwrap();
    assert_eq!(store.world().count("s"), (1, 0));
    store.world().lose_answers = 1;
    // The second release finds no holder, and the result of the first one is not known.
    deadline(permit.release()).await.unwrap();
    assert_eq!(store.world().count("s"), (0, 0));
}

#[tokio::test]
async fn an_acquire_that_gives_up_while_its_outcome_is_unknown_leaves_nothing() {
    let store = Simulated::default();
    let client = client(&store);
    let semaphore = semaphore(&client, 2);
    store.world().lose_answers = usize::MAX;
    let limit = Duration::from_millis(300);
    let error = deadline(semaphore.acquire().within(limit)).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    // The commands did reach the store, each time.
    store.world().lose_answers = 0;
    let other = deadline(semaphore.acquire()).await.unwrap();
    eventually(async || store.world().count("s") == (1, 0)).await;
    other.check().unwrap();
}

#[tokio::test]
async fn an_acquire_that_is_dropped_at_any_time_leaves_nothing() {
    let store = Simulated::default();
    let client = client(&store);
    let semaphore = semaphore(&client, 1);
    for delay in [0, 1, 3, 8] {
        store.world().delay = Duration::from_millis(delay);
        for wait in [0, 1, 2, 4, 9, 12] {
            let limit = Duration::from_millis(wait);
            drop(tokio::time::timeout(limit, semaphore.acquire()).await);
        }
    }
    store.world().delay = Duration::ZERO;
    eventually(async || store.world().count("s") == (0, 0)).await;
}

#[tokio::test]
async fn a_release_hands_over_to_another_client() {
    let store = Simulated::default();
    let (here, there) = (client(&store), client(&store));
    let (held, waiting) = one_holds_one_waits(&store, &here, &there).await;
    held.release().await.unwrap();
    let permit = deadline(waiting).await.unwrap();
    permit.check().unwrap();
    // It was woken by the release, not found by a periodic query.
    assert!(permit.waited() < AT_ONCE, "{:?}", permit.waited());
}

#[tokio::test]
async fn a_lost_wake_up_is_found_by_the_periodic_query() {
    let store = Simulated::default();
    let (here, there) = (client(&store), client(&store));
    let held = deadline(semaphore(&here, 1).acquire()).await.unwrap();
    // Long enough that the periodic query comes before the renewal of its place.
    let semaphore = there.semaphore("s", 1).lease(Duration::from_secs(60)).build().unwrap();
    let mut waiting = pin!(semaphore.acquire());
    start(waiting.as_mut()).await;
    eventually(async || store.world().count("s") == (1, 1)).await;
    store.world().lose_wake_ups = usize::MAX;
    held.release().await.unwrap();
    let (took, permit) = timed(waiting).await;
    permit.unwrap().check().unwrap();
    // The client of the first waiter queries once a second, with a random delay.
    assert!(took < Duration::from_millis(1100) + AT_ONCE, "it took {took:?}");
}

#[tokio::test]
async fn renewals_keep_a_permit_for_as_long_as_it_is_held() {
    let store = Simulated::default();
    let client = client(&store);
    let permit = deadline(semaphore(&client, 1).acquire()).await.unwrap();
    let renewals = || {
        let world = store.world();
        let renewal = |command: &&Command| matches!(command, Command::Renew { .. });
        world.batches.iter().flatten().filter(renewal).count()
    };
    tokio::time::sleep(100 * LEASE).await;
    permit.check().unwrap();
    // Each renewal is due in the second third of the lease.
    assert!((150..=300).contains(&renewals()), "{} renewals", renewals());
    assert!(permit.release().await.unwrap());
}

#[test]
fn a_late_extension_does_not_revive_a_lease_that_has_ended() {
    let semaphore = semaphore(&threaded_client(&Simulated::default()), 1);
    let later = Moment::now() + Span::from_millis(60_000);
    let ticket = |valid_until| {
        let id = AcquisitionId::new(ClientId::from_bits(1), 1);
        Ticket::held(id, semaphore.inner.spec.clone(), valid_until)
    };
    let (ended, lasting) = (ticket(Moment::now()), ticket(later));
    for ticket in [&ended, &lasting] {
        ticket.extend(later + Span::from_millis(1));
    }
    assert_eq!(ended.check(), Err(LossReason::NotRenewed));
    assert!(lasting.check().is_ok() && lasting.valid_until() > later);
}

#[tokio::test]
async fn a_release_that_overtakes_a_renewal_receives_its_outcome() {
    let store = Simulated::default();
    let client = client(&store);
    let permit = deadline(semaphore(&client, 1).acquire()).await.unwrap();
    store.world().delay = Duration::from_millis(60);
    let renewing = || {
        let world = store.world();
        world.asked.iter().any(|command| matches!(command, Command::Renew { .. }))
    };
    eventually(async || renewing()).await;
    // The renewal reaches the store after the release, and is answered before the release.
    store.world().delay = Duration::ZERO;
    store.world().linger = Duration::from_millis(250);
    assert!(deadline(permit.release()).await.unwrap());
}

#[tokio::test]
async fn a_store_that_is_down_is_not_asked_without_end() {
    let store = Simulated::default();
    let (here, there) = (client(&store), client(&store));
    let (held, _waiting) = one_holds_one_waits(&store, &here, &there).await;
    store.world().cut_off.extend([here.id(), there.id()]);
    store.world().asked.clear();
    deadline(held.lost()).await;
    let asked = store.world().asked.len();
    assert!(asked < 40, "asked {asked} times in a second");
}

#[tokio::test]
async fn a_holder_that_is_cut_off_knows_before_anyone_else_is_granted() {
    let store = Simulated::default();
    let (here, there) = (client(&store), client(&store));
    let (held, waiting) = one_holds_one_waits(&store, &here, &there).await;
    store.world().cut_off.push(here.id());
    let permit = deadline(waiting).await.unwrap();
    assert!(held.check().is_err(), "two believe in one permit");
    assert_eq!(deadline(held.lost()).await, LossReason::NotRenewed);
    permit.check().unwrap();
}

#[tokio::test]
async fn a_store_that_forgot_everything_ends_permits_and_queues_waiters_again() {
    let store = Simulated::default();
    let (here, there) = (client(&store), client(&store));
    let (held, waiting) = one_holds_one_waits(&store, &here, &there).await;
    store.restart_empty();
    assert_eq!(deadline(held.lost()).await, LossReason::Missing);
    deadline(waiting).await.unwrap().check().unwrap();
}

#[tokio::test]
async fn a_waiter_that_cannot_be_reached_keeps_its_place() {
    let store = Simulated::default();
    let clients = [client(&store), client(&store), client(&store)];
    let long = Duration::from_secs(60);
    let semaphores =
        clients.each_ref().map(|client| client.semaphore("s", 1).lease(long).build().unwrap());
    let held = deadline(semaphores[0].acquire()).await.unwrap();
    let mut first = pin!(semaphores[1].acquire());
    start(first.as_mut()).await;
    eventually(async || store.world().count("s") == (1, 1)).await;
    let mut second = pin!(semaphores[2].acquire());
    start(second.as_mut()).await;
    eventually(async || store.world().count("s") == (1, 2)).await;

    store.world().cut_off.push(clients[1].id());
    held.release().await.unwrap();
    let overtook = deadline(second).await.unwrap();
    assert_eq!(store.world().count("s"), (1, 1));
    store.heal(clients[1].id());
    overtook.release().await.unwrap();
    deadline(first).await.unwrap().check().unwrap();
}

#[tokio::test]
async fn a_ttl_ends_a_permit_however_well_it_is_renewed() {
    let store = Simulated::default();
    let client = client(&store);
    let semaphore =
        client.semaphore("s", 1).lease(LEASE).ttl(Duration::from_secs(2)).build().unwrap();
    let permit = deadline(semaphore.acquire()).await.unwrap();
    assert_eq!(deadline(permit.lost()).await, LossReason::TtlEnded);
    assert!(!permit.release().await.unwrap());
    eventually(async || store.world().count("s") == (0, 0)).await;
}

#[tokio::test]
async fn closing_notifies_everyone_and_leaves_nothing() {
    let store = Simulated::default();
    let client = client(&store);
    let semaphore = semaphore(&client, 1);
    let held = deadline(semaphore.acquire()).await.unwrap();
    let mut waiting = pin!(semaphore.acquire());
    start(waiting.as_mut()).await;
    eventually(async || store.world().count("s") == (1, 1)).await;
    deadline(client.close()).await.unwrap();
    assert_eq!(store.world().count("s"), (0, 0));
    assert!(matches!(deadline(waiting).await, Err(Error::Closed)));
    assert_eq!(deadline(held.lost()).await, LossReason::Closed);
    assert!(matches!(deadline(semaphore.acquire()).await, Err(Error::Closed)));
}

#[test]
fn a_runtime_that_ends_takes_no_permit_with_it() {
    let store = Simulated::default();
    let client = threaded_client(&store);
    let semaphore = semaphore(&client, 1);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let held = runtime.block_on(deadline(semaphore.acquire())).unwrap();
    let waiting = semaphore.clone();
    let waiting = runtime.spawn(async move { waiting.acquire().await });
    let other = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    other.block_on(eventually(async || store.world().count("s") == (1, 1)));
    drop(runtime);
    drop(waiting);
    other.block_on(eventually(async || store.world().count("s") == (1, 0)));
    held.check().unwrap();
    drop(held);
    other.block_on(eventually(async || store.world().count("s") == (0, 0)));
}

#[test]
fn the_thread_ends_when_its_last_user_is_dropped() {
    let store = Simulated::default();
    let client = threaded_client(&store);
    let semaphore = semaphore(&client, 1);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let permit = runtime.block_on(deadline(semaphore.acquire())).unwrap();
    let core = Arc::downgrade(semaphore.inner.spec.named.core());
    drop((client, semaphore));
    assert!(core.upgrade().is_some(), "a permit is held");
    drop(permit);
    runtime.block_on(eventually(async || core.upgrade().is_none()));
    assert_eq!(store.world().count("s"), (0, 0));
}

/// The client stops repeating the release of a dropped permit when the store must have expired it. Then nothing is
/// left.
#[test]
fn the_thread_ends_although_the_store_is_not_reached_again() {
    let store = Simulated::default();
    let client = threaded_client(&store);
    let short = client.semaphore("s", 1).lease(Duration::from_millis(300)).build().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let permit = runtime.block_on(deadline(short.acquire())).unwrap();
    let core = Arc::downgrade(short.inner.spec.named.core());
    store.cut(client.id());
    runtime.block_on(eventually(async || client.outage().is_some()));
    drop((permit, short, client));
    runtime.block_on(eventually(async || core.upgrade().is_none()));
}

/// A query about the try overtakes it, so the store does not know the id yet. The client must not enqueue it as a
/// waiter.
#[tokio::test]
async fn a_try_does_not_become_a_wait_when_the_connection_is_new() {
    let store = Simulated::default();
    let (here, there) = (client(&store), client(&store));
    let held = deadline(semaphore(&here, 1).acquire()).await.unwrap();
    store.world().delay = Duration::from_millis(100);
    let semaphore = semaphore(&there, 1);
    let trial = semaphore.try_acquire();
    let mut trial = pin!(trial);
    start(trial.as_mut()).await;
    // The query overtakes the try.
    eventually(async || store.world().asked.len() == 2).await;
    store.world().delay = Duration::ZERO;
    store.heal(there.id());
    assert!(deadline(trial).await.unwrap().is_none());
    assert_eq!(store.world().count("s"), (1, 0));
    drop(held);
}

#[tokio::test]
async fn a_try_whose_answer_came_too_late_asks_again() {
    let store = Simulated::default();
    let client = client(&store);
    let short = Duration::from_millis(300);
    let semaphore = client.semaphore("s", 1).lease(short).build().unwrap();
    store.world().linger = 2 * short;
    let mut attempt = pin!(semaphore.try_acquire());
    start(attempt.as_mut()).await;
    eventually(async || !store.world().batches.is_empty()).await;
    store.world().linger = Duration::ZERO;
    deadline(attempt).await.unwrap().unwrap().check().unwrap();
}

/// The permit is no longer held. A renewal would have no time to be answered.
#[tokio::test]
async fn a_permit_that_is_being_released_is_not_renewed() {
    let store = Simulated::default();
    let client = client(&store);
    let permit = deadline(semaphore(&client, 1).acquire()).await.unwrap();
    store.world().delay = Duration::from_millis(100);
    let mut release = pin!(permit.release());
    start(release.as_mut()).await;
    eventually(async || store.world().asked.len() == 2).await;
    store.heal(client.id());
    assert!(deadline(release).await.unwrap());
    let asked = store.world().asked.clone();
    assert!(!asked.iter().any(|command| matches!(command, Command::Renew { .. })), "{asked:?}");
}

#[tokio::test]
async fn a_close_releases_what_was_granted_without_our_knowledge() {
    let store = Simulated::default();
    let client = client(&store);
    store.world().lose_answers = usize::MAX;
    let limit = Duration::from_millis(300);
    let error = deadline(semaphore(&client, 1).acquire().within(limit)).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    store.world().lose_answers = 0;
    deadline(client.close()).await.unwrap();
    assert_eq!(store.world().count("s"), (0, 0));
}

/// The caller of a release or a try receives the time-out. The release itself continues.
#[tokio::test]
async fn a_release_that_is_not_answered_fails_in_time_and_goes_on() {
    let store = Simulated::default();
    let client = client(&store);
    let permit = deadline(semaphore(&client, 1).acquire()).await.unwrap();
    store.cut(client.id());
    let error = deadline(permit.release()).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { silent_for: Some(_), .. }), "{error}");
    assert_eq!(store.world().count("s"), (1, 0));
    store.heal(client.id());
    eventually(async || store.world().count("s") == (0, 0)).await;
}

/// The release overtakes the enqueue, whose answer is lost. The id is released nevertheless.
#[tokio::test]
async fn a_cancelled_enqueue_that_is_applied_after_its_release_leaves_nothing() {
    let store = Simulated::default();
    let client = client(&store);
    let semaphore = semaphore(&client, 1);
    store.world().delay = Duration::from_millis(100);
    let mut acquire = Box::pin(semaphore.acquire());
    start(acquire.as_mut()).await;
    eventually(async || store.world().asked.len() == 1).await;
    // The release is not delayed.
    store.world().delay = Duration::ZERO;
    drop(acquire);
    eventually(async || store.world().batches.len() == 1).await;
    store.world().lose_answers = 1;
    eventually(async || store.world().batches.len() >= 2).await;
    eventually(async || store.world().count("s") == (0, 0)).await;
}

/// Several names, locks and pools share a request.
#[tokio::test]
async fn commands_of_many_names_share_requests() {
    let store = Simulated::default();
    let client = client(&store);
    drop(deadline(client.lock("warm-up").build().unwrap().acquire()).await.unwrap());
    store.world().requests.clear();
    store.world().delay = Duration::from_millis(50);
    let mut tasks = Vec::new();
    for number in 0..60 {
        let client = client.clone();
        tasks.push(tokio::spawn(async move {
            let lock = client.lock(&format!("lock {number}")).build().unwrap().acquire().await;
            let _ = lock.unwrap().detach();
        }));
    }
    for task in tasks {
        deadline(task).await.unwrap();
    }
    let requests = store.world().requests.clone();
    assert!(requests.len() <= 4, "60 locks took requests of {requests:?} parts");
}

/// Timers that are set again, or whose owner was dropped, leave nothing behind.
#[tokio::test]
async fn timers_do_not_accumulate() {
    let store = Simulated::default();
    let client = client(&store);
    let semaphore = semaphore(&client, 1);
    for _ in 0..200 {
        deadline(semaphore.acquire().within(Duration::from_secs(60)))
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    }
    assert!(semaphore.inner.spec.named.core().timers.len() <= 2);
}

/// A name whose only work is a release is not forgotten before the release is done.
#[tokio::test]
async fn a_release_that_failed_is_repeated_later() {
    let store = Simulated::default();
    let idle = Span::from_millis(100);
    let client = Client::on(Arc::new(store.clone()), Settings { idle, ..settings() });
    let permit = deadline(semaphore(&client, 1).acquire()).await.unwrap();
    store.world().cut_off.push(client.id());
    drop(permit);
    // By now the name has had nothing else to do for longer than `idle`, and the release is still repeated.
    let releases = || {
        let world = store.world();
        world.asked.iter().filter(|asked| matches!(asked, Command::Release { .. })).count()
    };
    eventually(async || releases() > 3).await;
    assert_eq!(store.world().count("s"), (1, 0));
    // No event reports that the store can be reached again.
    store.world().cut_off.clear();
    eventually(async || store.world().count("s") == (0, 0)).await;
    // The earlier failure is not reported any more.
    deadline(client.close()).await.unwrap();
}

/// A wait for a lock ends at its time limit, however often the task is woken to ask again.
#[tokio::test]
async fn a_wait_for_a_lock_ends_at_its_limit_while_wake_ups_keep_coming() {
    let clock = crate::ManualClock::new();
    let memory = crate::backend::memory::Memory::new(Clock::manual(clock.clone()));
    let engine = Engine::in_process(memory, Settings::default());
    let core = engine.core().clone();
    let waking = async {
        while clock.elapsed() < MINUTES {
            clock.advance(Duration::from_millis(1));
            core.lock_waiters.wake_all();
            tokio::task::yield_now().await;
        }
    };
    let locks = crate::Locks::new(engine);
    let limit = Duration::from_millis(200);
    let lock = locks.lock("k").lease(2 * MINUTES).within(limit).build().unwrap();
    let _held = lock.try_acquire().await.unwrap().unwrap();
    let error = tokio::select! {
        result = lock.acquire() => result.unwrap_err(),
        () = waking => panic!("it still waits after {MINUTES:?}"),
    };
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    assert!(clock.elapsed() < limit + AT_ONCE, "it ended after {:?}", clock.elapsed());
}

/// The second attempt begins 30 ms before the end of the wait, and is answered 120 ms after it.
#[tokio::test]
async fn an_attempt_at_the_end_of_a_wait_gets_time_for_its_answer() {
    let store = Simulated::default();
    let (holder, waiter) = (client(&store), client(&store));
    let limit = Duration::from_secs(1);
    let retry = Retry::default().delay(Duration::from_millis(970)).jitter(Jitter::None);
    let _held = deadline(holder.lock("k").build().unwrap().try_acquire()).await.unwrap().unwrap();
    let lock = waiter.lock("k").retry(retry).within(limit).build().unwrap();
    let mut acquire = pin!(lock.acquire());
    assert!(poll_once(acquire.as_mut()).await.is_none());
    // The first attempt is answered before this call.
    assert!(deadline(waiter.locks().is_locked("k")).await.unwrap());
    store.world().delay = Duration::from_millis(150);
    let error = deadline(acquire).await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");

    let _leased = deadline(holder.pool("p", 1).build().unwrap().acquire("a")).await.unwrap();
    let pool = waiter.pool("p", 1).retry(retry).within(limit).build().unwrap();
    let error = deadline(pool.acquire("b")).await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
}

/// The process id differs, as if the process had been forked from the one that started the thread.
#[test]
fn a_forked_process_must_open_another_client() {
    let engine = Engine::in_process(
        crate::backend::memory::Memory::new(Clock::default()),
        Settings::default(),
    );
    engine.core().process.set(0).expect("nobody has set it");
    let error = engine.core().stopped().expect("it cannot work");
    assert!(matches!(error, Error::Stopped { .. }), "{error:?}");
    assert!(error.to_string().contains("forked"), "{error}");
    assert!(engine.core().send_message(super::Message::WakeUp).is_err());
}

/// A query that is in flight was applied before the eviction, so its answer says that the permit is held.
#[tokio::test]
async fn an_eviction_during_a_query_is_noticed() {
    let store = Simulated::default();
    let client = client(&store);
    let semaphore = client.semaphore("s", 1).lease(Duration::from_secs(3600)).build().unwrap();
    let permit = deadline(semaphore.acquire()).await.unwrap();
    let renewals = || {
        let batches = store.world().batches.clone();
        batches
            .into_iter()
            .flatten()
            .filter(|command| matches!(command, Command::Renew { .. }))
            .count()
    };
    store.world().linger = Duration::from_millis(300);
    store.heal(client.id());
    eventually(async || renewals() == 1).await;
    let evicted = Instant::now();
    store.evict(&Name::new("name", "s").unwrap(), permit.id());
    assert_eq!(deadline(permit.lost()).await, LossReason::Missing);
    // The next renewal would follow after six seconds, and on one host there is none.
    assert!(evicted.elapsed() < Duration::from_secs(5), "it took {:?}", evicted.elapsed());
}

/// A replica takes over that has the waiter and not the grant. The holder learns it from its next renewal.
#[tokio::test]
async fn a_holder_whose_grant_was_lost_in_a_failover_does_not_hold() {
    let store = Simulated::default();
    let (here, there) = (client(&store), client(&store));
    let (held, waiting) = one_holds_one_waits(&store, &here, &there).await;
    let replica = store.replica();
    drop(held);
    let permit = deadline(waiting).await.unwrap();
    // Otherwise the release could be repeated first, and the replica would grant the permit to the same holder again.
    store.world().cut_off.push(here.id());
    store.fail_over(replica);
    assert_eq!(deadline(permit.lost()).await, LossReason::Missing);
    store.heal(here.id());
    // Neither the permit that was released nor the one that was lost blocks anything.
    eventually(async || store.world().count("s") == (0, 0)).await;
    assert!(deadline(semaphore(&here, 1).try_acquire()).await.unwrap().is_some());
}

/// A replica takes over that lacks the last releases: of holders, of waiters, and of a permit of another client.
#[tokio::test]
async fn releases_that_a_failover_loses_are_repeated() {
    let store = Simulated::default();
    let (here, there) = (client(&store), client(&store));
    let slow = |client: &Client| {
        client.semaphore("s", 2).lease(Duration::from_secs(3600)).build().unwrap()
    };
    let held = deadline(slow(&here).acquire()).await.unwrap();
    let detached = deadline(slow(&there).acquire()).await.unwrap().detach();
    let mut waiting = Box::pin(slow(&here).acquire());
    start(waiting.as_mut()).await;
    eventually(async || store.world().count("s") == (2, 1)).await;
    let replica = store.replica();
    drop(waiting);
    assert!(deadline(held.release()).await.unwrap());
    assert!(deadline(slow(&here).release(&detached)).await.unwrap());
    eventually(async || store.world().count("s") == (0, 0)).await;
    store.fail_over(replica);
    eventually(async || store.world().count("s") == (0, 0)).await;
}
