//! Cancellation: a future that is dropped at any await point, during any event, leaves nothing
//! behind (invariant 7 of `docs/algorithm.md`).
//!
//! Nothing here runs in a runtime: futures are polled by hand, only when the test says so.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use leasehold::{AcquisitionId, Client, Error, LossReason, Permit, Semaphore};
use testkit::Rng;
use testkit::by_hand::{ByHand, block_on, step_aside, until};
use testkit::counts::{assert_all_are_free, held_and_waiting};

const NAME: &str = "cancelled";
const CAPACITY: u32 = 2;
/// The shortest time that the engine can measure.
const MOMENT: Duration = Duration::from_millis(1);
/// The label of the permits and waiters that do not belong to the operation.
const OTHERS: &str = "others";

/// The operation that is dropped half-way.
#[derive(Clone, Copy, Debug)]
enum Operation {
    Acquire,
    TryAcquire,
    /// Acquires, does something, releases.
    Release,
    /// Acquires, does something, drops the guard.
    Drop,
    /// Acquires, and waits for the loss.
    Lost,
    With,
}

const OPERATIONS: [Operation; 6] = {
    use Operation::{Acquire, Drop, Lost, Release, TryAcquire, With};
    [Acquire, TryAcquire, Release, Drop, Lost, With]
};

impl Operation {
    fn begin(self, semaphore: &Semaphore) -> ByHand<'static, Result<(), Error>> {
        let semaphore = semaphore.clone();
        ByHand::new(async move {
            match self {
                Self::Acquire => semaphore.acquire().await.map(drop),
                Self::TryAcquire => semaphore.try_acquire().await.map(drop),
                Self::Release => {
                    let permit = semaphore.acquire().await?;
                    step_aside(1).await;
                    permit.release().await.map(drop)
                }
                Self::Drop => {
                    let _permit = semaphore.acquire().await?;
                    step_aside(1).await;
                    Ok(())
                }
                Self::Lost => {
                    let permit = semaphore.acquire().await?;
                    permit.lost().await;
                    Ok(())
                }
                Self::With => semaphore.with(async |_| step_aside(2).await).await,
            }
        })
    }
}

/// What happens while the operation runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    Nothing,
    /// Another holder releases its permit, so that a waiter is granted one.
    Grant,
    /// The operation's time-out passes.
    Timeout,
    /// The permits that others held before expire: their TTL ends.
    OthersExpire,
    /// The operation's own permit expires, even before the operation has received it.
    Expiry,
    /// The operation's own permit is released by its id.
    ReleaseById,
    Close,
}

const EVENTS: [Event; 7] = {
    use Event::{Close, Expiry, Grant, Nothing, OthersExpire, ReleaseById, Timeout};
    [Nothing, Grant, Timeout, OthersExpire, Expiry, ReleaseById, Close]
};

/// One order of events: some polls, an event, more polls, another event, more polls, and the drop.
#[derive(Clone, Copy, Debug)]
struct Script {
    operation: Operation,
    held_by_others: u32,
    polls: [u32; 3],
    events: [Event; 2],
}

impl Script {
    /// Returns all scripts. No operation needs more than four polls from start to end.
    fn all() -> impl Iterator<Item = Self> {
        let polls = (0..=3).flat_map(|first| {
            (0..=2).flat_map(move |second| (0..=1).map(move |third| [first, second, third]))
        });
        OPERATIONS.into_iter().flat_map(move |operation| {
            let polls = polls.clone();
            [CAPACITY - 1, CAPACITY].into_iter().flat_map(move |held_by_others| {
                polls.clone().flat_map(move |polls| {
                    EVENTS.into_iter().flat_map(move |one| {
                        EVENTS.into_iter().map(move |two| Self {
                            operation,
                            held_by_others,
                            polls,
                            events: [one, two],
                        })
                    })
                })
            })
        })
    }

    fn play(self) {
        let mut stage = Stage::set(self);
        let mut operation = self.operation.begin(&stage.cancelled);
        poll(&mut operation, self.polls[0]);
        // From here on another waiter is queued behind the operation, and must not be forgotten.
        let mut rival = ByHand::new(stage.others.acquire());
        let mut served = rival.poll();
        for (event, polls) in self.events.into_iter().zip(&self.polls[1..]) {
            stage.happen(event);
            poll(&mut operation, *polls);
        }

        drop(operation);
        stage.held_by_others.clear();
        let served = served.take().unwrap_or_else(|| rival.finish());
        match served {
            Ok(permit) => drop(permit),
            // The waiter was granted the permit, but the client closed before it received it.
            Err(Error::Closed | Error::Lost { reason: LossReason::Closed, .. }) if stage.closed => {
            }
            Err(error) => panic!("{error}"),
        }
        check_nothing_is_left(&stage.others, stage.closed);
    }
}

fn poll<T>(future: &mut ByHand<'_, T>, times: u32) {
    for _ in 0..times {
        future.poll();
    }
}

struct Stage {
    client: Client,
    cancelled: Semaphore,
    others: Semaphore,
    held_by_others: Vec<Permit>,
    closed: bool,
}

impl Stage {
    fn set(script: Script) -> Self {
        let client = Client::memory();
        let happens = |event| script.events.contains(&event);
        let mut cancelled = client.semaphore(NAME, CAPACITY);
        if happens(Event::Timeout) {
            cancelled = cancelled.within(MOMENT);
        }
        if happens(Event::Expiry) {
            cancelled = cancelled.ttl(MOMENT);
        }
        let others = client.semaphore(NAME, CAPACITY).label(OTHERS);
        let holding =
            if happens(Event::OthersExpire) { others.clone().ttl(MOMENT) } else { others.clone() };
        let (cancelled, others, holding) =
            (cancelled.build().unwrap(), others.build().unwrap(), holding.build().unwrap());
        let hold = |_| block_on(holding.acquire()).unwrap();
        let held_by_others = (0..script.held_by_others).map(hold).collect();
        Self { client, cancelled, others, held_by_others, closed: false }
    }

    /// Makes the event happen, and returns when it has.
    fn happen(&mut self, event: Event) {
        match event {
            Event::Nothing => {}
            Event::Grant => drop(self.held_by_others.pop()),
            // The only other waiter has no limit.
            Event::Timeout => until(|| block_on(held_and_waiting(&self.cancelled)).1 <= 1),
            Event::OthersExpire => {
                until(|| self.held_by_others.iter().all(|permit| permit.check().is_err()));
            }
            Event::Expiry => until(|| self.own_ids().is_empty()),
            Event::ReleaseById => {
                for id in self.own_ids() {
                    block_on(self.others.release(&id)).unwrap();
                }
            }
            Event::Close => {
                block_on(self.client.close()).unwrap();
                self.closed = true;
            }
        }
    }

    /// Returns the permits that the operation holds, whether or not it has received them.
    fn own_ids(&self) -> Vec<AcquisitionId> {
        let stats = block_on(self.cancelled.stats()).unwrap();
        let cancelled = stats.holders.iter().filter(|holder| holder.label.is_none());
        cancelled.map(|holder| holder.id.parse().unwrap()).collect()
    }
}

/// Does not wait: in memory there is nothing to drain.
fn check_nothing_is_left(semaphore: &Semaphore, closed: bool) {
    if closed {
        assert_eq!(block_on(held_and_waiting(semaphore)), (0, 0));
    } else {
        block_on(assert_all_are_free(semaphore));
    }
}

#[test]
fn whatever_is_dropped_at_any_await_point_leaves_nothing_behind() {
    // Many threads, because a script mostly waits for time to pass.
    let (scripts, played) = (Mutex::new(Script::all()), AtomicUsize::new(0));
    let next = || scripts.lock().unwrap().next();
    thread::scope(|scope| {
        for _ in 0..24 {
            scope.spawn(|| {
                while let Some(script) = next() {
                    let unfinished = Unfinished(script);
                    script.play();
                    std::mem::forget(unfinished);
                    played.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(played.into_inner(), 6 * 2 * (4 * 3 * 2) * (7 * 7));
}

/// Reports the script that failed.
struct Unfinished(Script);

impl Drop for Unfinished {
    fn drop(&mut self) {
        eprintln!("failed: {:?}", self.0);
    }
}

#[test]
fn a_release_that_is_never_polled_releases() {
    let semaphore = Client::memory().semaphore(NAME, CAPACITY).build().unwrap();
    let release = block_on(semaphore.acquire()).unwrap().release();
    assert_eq!(block_on(held_and_waiting(&semaphore)), (1, 0));
    drop(release);
    check_nothing_is_left(&semaphore, false);
}

#[test]
fn a_grant_that_nobody_sees_goes_to_the_next() {
    let semaphore = Client::memory().semaphore(NAME, 1).build().unwrap();
    let held = block_on(semaphore.acquire()).unwrap();
    let mut waiters: Vec<_> = (0..5).map(|_| ByHand::new(semaphore.acquire())).collect();
    for waiter in &mut waiters {
        assert!(waiter.poll().is_none());
    }
    drop(held);
    // Each waiter is granted the permit, is woken, and is dropped before it is polled again.
    let last = waiters.pop().unwrap();
    for waiter in waiters {
        assert!(waiter.is_woken_within(Duration::ZERO));
        assert!(!last.is_woken_within(Duration::ZERO));
        drop(waiter);
    }
    assert!(last.is_woken_within(Duration::ZERO));
    drop(last.finish().unwrap());
}

#[test]
fn the_last_waker_is_woken() {
    let semaphore = Client::memory().semaphore(NAME, 1).build().unwrap();
    let held = block_on(semaphore.acquire()).unwrap();
    let mut lost = held.lost();
    let mut acquire = semaphore.acquire();
    // Polled with two wakers in turn, as when a future moves from one task to another.
    assert!(ByHand::new(&mut lost).poll().is_none());
    assert!(ByHand::new(&mut acquire).poll().is_none());
    let mut lost = ByHand::new(&mut lost);
    let mut acquire = ByHand::new(&mut acquire);
    assert!(lost.poll().is_none());
    assert!(acquire.poll().is_none());

    block_on(semaphore.release(&held.id())).unwrap();
    assert!(lost.is_woken_within(Duration::ZERO));
    assert!(acquire.is_woken_within(Duration::ZERO));
    assert_eq!(lost.finish(), LossReason::Released);
    drop(acquire.finish().unwrap());
}

/// Drops operations of many kinds half-way, on many threads at once, all on one name.
fn scramble(seed: u64, closes: bool) {
    const THREADS: u64 = 4;
    const ROUNDS: u32 = 300;
    let client = Client::memory();
    let builder = client.semaphore(NAME, CAPACITY);
    let handles = [
        builder.clone().build().unwrap(),
        builder.clone().ttl(MOMENT).build().unwrap(),
        builder.clone().within(MOMENT).build().unwrap(),
        builder.clone().label(OTHERS).build().unwrap(),
        builder.clone().ttl(MOMENT).within(MOMENT).build().unwrap(),
    ];
    thread::scope(|scope| {
        // A future polled by one thread is dropped by another.
        let (hand_over, handed_over) = mpsc::channel();
        scope.spawn(move || handed_over.into_iter().for_each(drop));
        for thread in 0..THREADS {
            let (hand_over, client, handles) = (hand_over.clone(), &client, &handles);
            scope.spawn(move || {
                let mut rng = Rng::with_seed(seed ^ thread);
                for round in 0..ROUNDS {
                    if closes && thread == 0 && round == ROUNDS / 2 {
                        block_on(client.close()).unwrap();
                    }
                    let handle = &handles[rng.usize(..handles.len())];
                    let mut operation = OPERATIONS[rng.usize(..OPERATIONS.len())].begin(handle);
                    for _ in 0..rng.u32(0..5) {
                        operation.poll();
                        if rng.bool() {
                            let _or_not = operation.is_woken_within(MOMENT.mul_f64(rng.f64()));
                        }
                    }
                    if rng.bool() {
                        hand_over.send(operation).unwrap();
                    } else {
                        drop(operation);
                    }
                }
            });
        }
    });
    check_nothing_is_left(&handles[0], closes);
}

#[test]
fn operations_dropped_at_random_on_many_threads_leave_nothing_behind() {
    for seed in [0x5eed_0001, 0x5eed_0002] {
        scramble(seed << 8, false);
    }
}

#[test]
fn operations_dropped_at_random_while_the_client_closes_leave_nothing_behind() {
    for seed in [0x5eed_0003, 0x5eed_0004] {
        scramble(seed << 8, true);
    }
}
