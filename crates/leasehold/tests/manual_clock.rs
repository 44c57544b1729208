//! The clock for users' tests: timers follow it, in order, and have been applied when `advance`
//! returns. No test here depends on the system clock: the times are hours, and nothing sleeps.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::{
    Acquire, Client, Error, LossReason, ManualClock, Observer, Operation, Permit, Retry,
};
use testkit::by_hand::ByHand;

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

fn just_under(time: Duration) -> Duration {
    time.saturating_sub(Duration::from_micros(1))
}

fn client() -> (ManualClock, Client) {
    let clock = ManualClock::new();
    let client = Client::memory_builder().manual_clock(&clock).build().unwrap();
    (clock, client)
}

/// Polls an acquire once, so that it is queued.
fn queued(acquire: Acquire) -> ByHand<'static, Result<Permit, Error>> {
    let mut waiting = ByHand::new(acquire);
    assert!(waiting.poll().is_none());
    waiting
}

#[track_caller]
fn ready<T>(waiting: &mut ByHand<'_, T>) -> T {
    waiting.poll().expect("the future is ready")
}

fn was_woken<T>(waiting: &ByHand<'_, T>) -> bool {
    waiting.is_woken_within(Duration::ZERO)
}

#[tokio::test]
async fn a_ttl_ends_when_the_clock_says_so() {
    let (clock, client) = client();
    let semaphore = client.semaphore("api", 1).ttl(HOUR).build().unwrap();
    let permit = semaphore.acquire().await.unwrap();
    let mut waiting = queued(semaphore.acquire());
    let mut lost = ByHand::new(permit.lost());
    assert!(lost.poll().is_none());

    clock.advance(just_under(HOUR));
    permit.check().unwrap();
    assert!(!was_woken(&lost) && !was_woken(&waiting), "woken a microsecond too early");

    clock.advance(Duration::from_micros(1));
    assert!(permit.check().is_err());
    assert!(was_woken(&lost) && was_woken(&waiting));
    assert_eq!(ready(&mut lost), LossReason::TtlEnded);
    let next = ready(&mut waiting).unwrap();
    assert_eq!(next.waited(), HOUR);
    assert_eq!(clock.elapsed(), HOUR);
    next.check().unwrap();
}

#[tokio::test]
async fn one_long_step_is_as_good_as_many_short_ones() {
    let (clock, client) = client();
    let semaphore = client.semaphore("api", 1).ttl(HOUR).build().unwrap();
    let events = Arc::new(Mutex::new(Vec::new()));
    let seen = events.clone();
    let observer = Observer::new(move |event| {
        if event.operation == Operation::Lose {
            seen.lock().unwrap().push(event.held_for);
        }
    });
    let watched = client.semaphore("api", 1).ttl(HOUR).observer(observer).build().unwrap();
    let first = watched.acquire().await.unwrap();
    let mut queue: Vec<_> = (0..3).map(|_| queued(semaphore.acquire())).collect();
    // Each waiter is granted the permit when the one before it expires, and expires an hour later.
    // All of that happens in one step.
    clock.advance(HOUR * 3 + HOUR / 2);
    assert_eq!(*events.lock().unwrap(), [Some(HOUR)]);
    assert!(first.check().is_err());
    for lost in &mut queue[..2] {
        assert!(matches!(ready(lost), Err(Error::Lost { reason: LossReason::TtlEnded, .. })));
    }
    let last = ready(&mut queue[2]).unwrap();
    last.check().unwrap();
    clock.advance(just_under(HOUR / 2));
    last.check().unwrap();
    clock.advance(Duration::from_micros(1));
    assert!(last.check().is_err());
}

#[tokio::test]
async fn an_acquire_gives_up_when_the_clock_says_so() {
    let (clock, client) = client();
    let semaphore = client.semaphore("api", 1).within(HOUR * 2).build().unwrap();
    let held = semaphore.acquire().await.unwrap();
    let (mut short, mut long) =
        (queued(semaphore.acquire().within(HOUR)), queued(semaphore.acquire()));
    clock.advance(HOUR);
    assert!(matches!(ready(&mut short), Err(Error::TimedOut { limit, .. }) if limit == HOUR));
    assert!(long.poll().is_none());
    assert_eq!(semaphore.stats().await.unwrap().waiting, 1);
    clock.advance(just_under(HOUR));
    assert!(long.poll().is_none());
    clock.advance(Duration::from_micros(1));
    assert!(matches!(ready(&mut long), Err(Error::TimedOut { limit, .. }) if limit == HOUR * 2));
    held.check().unwrap();
}

#[tokio::test]
async fn tokens_of_a_rate_arrive_with_the_clock() {
    let (clock, client) = client();
    let rate = client.rate("mails", 60, HOUR).build().unwrap();
    drop(rate.acquire().await.unwrap());
    assert!(rate.try_acquire().await.unwrap().is_none());
    let minute = SECOND * 60;
    let mut queue: Vec<_> = (0..5).map(|_| queued(rate.acquire())).collect();
    clock.advance(minute * 3 + minute / 2);
    let granted = queue.iter_mut().filter_map(ByHand::poll).map(Result::unwrap);
    assert_eq!(granted.count(), 3, "one a minute");
    let stats = rate.stats().await.unwrap();
    assert_eq!(stats.next_token, Some(minute / 2));
}

#[tokio::test]
async fn locks_expire_and_are_extended_with_the_clock() {
    let (clock, client) = client();
    let plain = client.lock("plain").lease(HOUR).ttl(HOUR).build().unwrap();
    let guard = plain.acquire().await.unwrap();
    let mut lost = ByHand::new(guard.lost());
    assert!(lost.poll().is_none());
    let renewed = client.lock("renewed").lease(HOUR).build().unwrap();
    let renewed = renewed.acquire().await.unwrap();
    let before = renewed.expires_at();

    let retry = Retry::default().delay(HOUR * 10);
    let next = client.lock("plain").lease(HOUR).ttl(HOUR).retry(retry).build().unwrap();
    let mut waiting = ByHand::new(next.acquire());
    assert!(waiting.poll().is_none());

    clock.advance(HOUR);
    assert!(was_woken(&lost) && was_woken(&waiting));
    assert_eq!(ready(&mut lost), LossReason::TtlEnded);
    assert!(guard.check().is_err());
    let next = ready(&mut waiting).unwrap();
    assert!(next.fence() > guard.fence());

    // Extended in time, however far the clock advances in one step, and valid afterwards.
    clock.advance(HOUR * 100);
    renewed.check().unwrap();
    assert!(renewed.expires_at() > before + HOUR * 100);
    assert!(client.locks().is_locked("renewed").await.unwrap());
    assert!(!client.locks().is_locked("plain").await.unwrap());

    // A TTL that is longer than the lease ends a lock that was renewed, and frees it.
    let limited = client.lock("limited").lease(HOUR).ttl(HOUR * 10).build().unwrap();
    let guard = limited.acquire().await.unwrap();
    let mut lost = ByHand::new(guard.lost());
    assert!(lost.poll().is_none());
    clock.advance(HOUR * 9);
    guard.check().unwrap();
    clock.advance(HOUR);
    assert_eq!(ready(&mut lost), LossReason::TtlEnded);
    assert!(limited.try_acquire().await.unwrap().is_some());
}

#[tokio::test]
async fn pool_leases_expire_and_are_renewed_with_the_clock() {
    let (clock, client) = client();
    let pool = client.pool("encoders", 2).lease(HOUR).build().unwrap();
    let renewed = pool.acquire("renewed").await.unwrap();
    let _silent = pool.acquire("silent").await.unwrap().detach();
    clock.advance(HOUR / 2);
    assert!(pool.try_acquire("late").await.unwrap().is_none());
    clock.advance(HOUR);
    let late = pool.try_acquire("late").await.unwrap().unwrap();
    renewed.check().unwrap();

    // A TTL that is longer than the lease ends a lease that was renewed, and frees it.
    drop(late);
    let limited = client.pool("encoders", 2).lease(HOUR).ttl(HOUR * 10).build().unwrap();
    let lease = limited.acquire("limited").await.unwrap();
    let mut lost = ByHand::new(lease.lost());
    assert!(lost.poll().is_none());
    clock.advance(HOUR * 9);
    lease.check().unwrap();
    assert!(pool.try_acquire("late").await.unwrap().is_none());
    clock.advance(HOUR);
    assert_eq!(ready(&mut lost), LossReason::TtlEnded);
    assert!(pool.try_acquire("late").await.unwrap().is_some());
    assert!(renewed.release().await.unwrap());
}

#[tokio::test]
async fn unused_names_are_removed_with_the_clock() {
    let clock = ManualClock::new();
    let client = Client::memory_builder().manual_clock(&clock).idle(HOUR).build().unwrap();
    let names = async || client.stats().unused().await.unwrap().len();
    let held = client.semaphore("held", 1).build().unwrap().acquire().await.unwrap();
    drop(client.semaphore("unused", 1).build().unwrap());
    assert_eq!(names().await, 2);
    clock.advance(HOUR / 2);
    assert_eq!(names().await, 2);
    clock.advance(HOUR * 1000);
    assert_eq!(names().await, 1);
    drop(held);
    clock.advance(HOUR * 2);
    assert_eq!(names().await, 0);
}

#[tokio::test]
async fn it_stands_still_otherwise_and_clients_may_share_it() {
    let (clock, one) = client();
    let two = Client::memory_builder().manual_clock(&clock.clone()).build().unwrap();
    let short = Duration::from_millis(1);
    let here = one.semaphore("api", 1).ttl(short).build().unwrap().acquire().await.unwrap();
    let there = two.semaphore("api", 1).ttl(short).build().unwrap().acquire().await.unwrap();
    // On the system clock both would have expired by now.
    tokio::time::sleep(short * 20).await;
    here.check().unwrap();
    there.check().unwrap();
    assert_eq!(clock.elapsed(), Duration::ZERO);
    clock.advance(short);
    assert!(here.check().is_err() && there.check().is_err());
    // A dropped client does not affect the clock.
    drop((here, one));
    clock.advance(Duration::MAX);
    clock.advance(Duration::MAX);
    two.close().await.unwrap();
}

#[tokio::test]
async fn an_observer_may_advance_the_clock() {
    let (clock, client) = client();
    let further = clock.clone();
    let observer = Observer::new(move |event| {
        if event.operation == Operation::Lose {
            further.advance(HOUR);
        }
    });
    let watched = client.semaphore("api", 1).ttl(SECOND).observer(observer).build().unwrap();
    let other = client.semaphore("other", 1).ttl(HOUR).build().unwrap();
    let (_first, second) = (watched.acquire().await.unwrap(), other.acquire().await.unwrap());
    clock.advance(SECOND);
    assert_eq!(clock.elapsed(), HOUR + SECOND);
    assert!(second.check().is_err());
}

#[test]
fn threads_may_advance_it_together() {
    let (clock, client) = client();
    let semaphore = client.semaphore("api", 1).ttl(SECOND * 400).build().unwrap();
    let permit = ready(&mut ByHand::new(semaphore.acquire())).unwrap();
    let advance = || (0..100).for_each(|_| clock.advance(SECOND));
    std::thread::scope(|scope| {
        scope.spawn(advance);
        scope.spawn(advance);
        scope.spawn(advance);
    });
    assert_eq!(clock.elapsed(), SECOND * 300);
    permit.check().unwrap();
    clock.advance(SECOND * 100);
    assert!(permit.check().is_err());
}
