//! The semaphore in memory: the conformance suite, and what is specific to memory.

use std::fmt::Debug;
use std::time::Duration;

use leasehold::{
    Acquire, AcquisitionId, Client, ClientId, Error, Fence, FenceGate, HeldLock, Lock, LockBuilder,
    LockGuard, LockId, LockInfo, Locks, LossReason, Lost, MemoryBuilder, Observer, Permit, Retry,
    Semaphore, SemaphoreBuilder, SemaphoreStats, StaleFence, Stats,
};
use testkit::by_hand::ByHand;
use testkit::conformance::Store;
use testkit::counts::held_and_waiting;
use testkit::events::{self, RecordedEvent};
use testkit::wait::{deadline, eventually};
use tracing::Level;

/// In memory only clones of a client share its semaphores.
struct Memory(Client);

impl Store for Memory {
    async fn client(&self) -> Client {
        self.0.clone()
    }
}

testkit::conformance!(Memory(Client::memory()));

async fn acquire(semaphore: &Semaphore) -> Permit {
    deadline(semaphore.acquire()).await.unwrap()
}

#[tokio::test]
async fn the_process_has_one_client_in_common() {
    let here = Client::global().semaphore("memory.rs: common", 1).build().unwrap();
    let there = Client::global().semaphore("memory.rs: common", 1).build().unwrap();
    assert_eq!(Client::global().id(), Client::global().id());
    let held = acquire(&here).await;
    assert!(there.try_acquire().await.unwrap().is_none());
    held.release().await.unwrap();
    assert!(there.try_acquire().await.unwrap().is_some());
}

#[tokio::test]
async fn two_clients_share_nothing() {
    let (one, two) = (Client::memory(), Client::memory());
    assert_ne!(one.id(), two.id());
    let here = one.semaphore("same", 1).build().unwrap();
    let there = two.semaphore("same", 1).build().unwrap();
    let held = acquire(&here).await;
    let also = there.try_acquire().await.unwrap().expect("the other client's is free");
    assert!(!there.release(&held.id()).await.unwrap());
    held.check().unwrap();
    one.close().await.unwrap();
    also.check().unwrap();
}

#[tokio::test]
async fn a_permit_without_a_ttl_does_not_end_by_itself() {
    let semaphore = Client::memory().semaphore("no end", 1).build().unwrap();
    let permit = acquire(&semaphore).await;
    assert_eq!(permit.valid_until(), None);
    assert_eq!(semaphore.stats().await.unwrap().holders[0].expires_in, None);
    assert_eq!(permit.waited(), Duration::ZERO);
}

#[tokio::test]
async fn a_dropped_guard_notifies_whoever_waits_for_its_loss() {
    let semaphore = Client::memory().semaphore("dropped", 1).build().unwrap();
    let at_once = acquire(&semaphore).await;
    let waiting = tokio::spawn(semaphore.acquire());
    eventually(async || semaphore.stats().await.unwrap().waiting == 1).await;
    let (lost, watched) = (at_once.lost(), tokio::spawn(at_once.lost()));
    // On one thread the other task runs before this one continues.
    tokio::task::yield_now().await;
    drop(at_once);
    assert_eq!(deadline(watched).await.unwrap(), LossReason::Released);
    assert_eq!(deadline(lost).await, LossReason::Released);
    let waited = deadline(waiting).await.unwrap().unwrap();
    let lost = waited.lost();
    drop(waited);
    assert_eq!(deadline(lost).await, LossReason::Released);
    let nobody_waits = acquire(&semaphore).await;
    let lost = nobody_waits.lost();
    drop(nobody_waits);
    assert_eq!(deadline(lost).await, LossReason::Released);
}

#[tokio::test]
async fn a_guard_keeps_its_client_alive() {
    let permit = {
        let semaphore = Client::memory().semaphore("guard", 1).build().unwrap();
        acquire(&semaphore).await
    };
    permit.check().unwrap();
    assert!(permit.release().await.unwrap());
}

mod idle {
    use super::*;

    const IDLE: Duration = Duration::from_millis(50);

    fn client() -> Client {
        Client::memory_builder().idle(IDLE).build().unwrap()
    }

    async fn is_known(client: &Client, name: &str) -> bool {
        !client.stats().names([name]).unused().await.unwrap().is_empty()
    }

    /// Waits until every name that was unused before this call is removed.
    async fn tidied(client: &Client) {
        drop(client.semaphore("canary", 1).build().unwrap());
        assert!(is_known(client, "canary").await);
        eventually(async || !is_known(client, "canary").await).await;
    }

    #[tokio::test]
    async fn unused_names_are_removed_and_their_fences_go_on() {
        let client = client();
        let mut last = Fence::new(0);
        for _ in 0..3 {
            // A burst, so that a fence that only followed the clock would fall behind.
            for _ in 0..2_000 {
                let semaphore = client.semaphore("seldom", 1).build().unwrap();
                let fence = acquire(&semaphore).await.fence();
                assert!(fence > last, "{fence} after {last}");
                last = fence;
            }
            assert!(is_known(&client, "seldom").await);
            eventually(async || !is_known(&client, "seldom").await).await;
        }
    }

    #[tokio::test]
    async fn names_in_use_stay() {
        let client = client();
        let build = |name| client.semaphore(name, 1).build().unwrap();
        let held = acquire(&build("held")).await;
        let detached = acquire(&build("detached")).await.detach();
        let handle = build("handle");
        // The holder is detached, and released below: only the waiter keeps the name.
        let evicted = acquire(&build("waiter")).await.detach();
        let mut waiter = ByHand::new(build("waiter").acquire());
        assert!(waiter.poll().is_none());

        tidied(&client).await;
        tidied(&client).await;
        for name in ["held", "detached", "handle", "waiter"] {
            assert!(is_known(&client, name).await, "{name}");
        }
        held.check().unwrap();
        assert!(build("detached").try_acquire().await.unwrap().is_none());
        assert!(build("detached").release(&detached).await.unwrap());
        assert!(build("waiter").release(&evicted).await.unwrap());
        let granted = waiter.poll().expect("the permit is free").unwrap();
        granted.check().unwrap();

        // They are removed when they are no longer used.
        drop((held, granted, handle));
        for name in ["held", "detached", "handle", "waiter"] {
            eventually(async || !is_known(&client, name).await).await;
        }
    }

    #[tokio::test]
    async fn a_name_that_is_used_again_in_time_stays() {
        let client = client();
        let build = || client.semaphore("busy", 1).build().unwrap();
        drop(acquire(&build()).await);
        let id = acquire(&build()).await.detach();
        tidied(&client).await;
        assert!(is_known(&client, "busy").await);
        assert!(build().release(&id).await.unwrap());
    }

    #[test]
    fn an_idle_time_of_zero_is_refused() {
        let error = Client::memory_builder().idle(Duration::ZERO).build().unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { argument: "idle", .. }), "{error}");
    }
}

mod logged {
    use super::*;

    fn messages(recorded: &[RecordedEvent]) -> Vec<&str> {
        recorded.iter().map(|event| event.message.as_str()).collect()
    }

    #[tokio::test]
    async fn acquires_and_releases_are_told() {
        events::listen();
        let semaphore = Client::memory().semaphore("logged: used", 2).numbered().build().unwrap();
        let first = acquire(&semaphore).await;
        let second = acquire(&semaphore).await;
        let third = tokio::spawn(semaphore.acquire());
        eventually(async || held_and_waiting(&semaphore).await == (2, 1)).await;
        let (first_id, second_id) = (first.id().to_string(), second.id().to_string());
        first.release().await.unwrap();
        let third = deadline(third).await.unwrap().unwrap();
        let (third_id, waited) = (third.id().to_string(), third.waited());
        drop((second, third));

        let recorded = events::about("logged: used");
        let acquired: Vec<_> = recorded.iter().filter(|t| t.message == "permit acquired").collect();
        let slots: Vec<_> = acquired
            .iter()
            .map(|t| (t.fields["id"].as_str(), t.fields["slot_number"].as_str()))
            .collect();
        assert_eq!(slots, [(&*first_id, "1"), (&*second_id, "2"), (&*third_id, "1")]);
        assert!(acquired.iter().all(|t| t.fields["capacity"] == "2" && t.level == Level::DEBUG));
        assert_eq!(acquired[0].fields["waited"], "0ns");
        assert_eq!(acquired[2].fields["waited"], format!("{waited:?}"));

        let released: Vec<_> = recorded.iter().filter(|t| t.message == "permit released").collect();
        let ids: Vec<_> = released.iter().map(|event| event.fields["id"].as_str()).collect();
        assert_eq!(ids, [&first_id, &second_id, &third_id]);
        assert_eq!(recorded.len(), 6, "{recorded:?}");
    }

    #[tokio::test]
    async fn losses_are_told_once_with_their_reason() {
        events::listen();
        let client = Client::memory();
        let builder = client.semaphore("logged: lost", 3);
        let timed = builder.clone().ttl(Duration::from_millis(20)).build().unwrap();
        let labelled = builder.label("closed later").build().unwrap();
        let ended = acquire(&timed).await;
        let by_hand = acquire(&labelled).await;
        let closed = acquire(&labelled).await;
        let ids = [&ended, &by_hand, &closed].map(|permit| permit.id().to_string());

        assert_eq!(deadline(ended.lost()).await, LossReason::TtlEnded);
        labelled.release(&by_hand.id()).await.unwrap();
        client.close().await.unwrap();
        drop((ended, by_hand, closed));
        let reasons = [LossReason::TtlEnded, LossReason::Released, LossReason::Closed];
        for (id, reason) in ids.iter().zip(reasons) {
            // The engine's thread logs it, perhaps a moment after the guard has noticed.
            let lost = || {
                let mut recorded = events::about("logged: lost");
                recorded.retain(|t| t.message == "permit lost" && t.fields["id"] == *id);
                recorded
            };
            eventually(async || !lost().is_empty()).await;
            let [event] = &lost()[..] else { panic!("{:?}", lost()) };
            assert_eq!(
                (event.level, &*event.fields["reason"]),
                (Level::WARN, &*reason.to_string())
            );
        }
    }

    #[tokio::test]
    async fn a_second_capacity_is_told_once() {
        events::listen();
        let client = Client::memory();
        let declare = |capacity| client.semaphore("logged: capacity", capacity).build().unwrap();
        let first = (declare(3), declare(3));
        assert_eq!(events::about("logged: capacity").len(), 0);
        let second = (declare(5), declare(5), declare(3), declare(7));
        let recorded = events::about("logged: capacity");
        assert_eq!(
            messages(&recorded),
            ["the name was declared with another capacity; the latest declaration applies"]
        );
        assert_eq!((&*recorded[0].fields["before"], &*recorded[0].fields["now"]), ("3", "5"));
        assert_eq!(recorded[0].level, Level::WARN);
        drop((first, second));
    }
}

mod types {
    use super::*;

    fn anywhere<T: Send + Sync + Debug + Unpin + 'static>() {}

    #[test]
    fn every_type_may_go_anywhere() {
        anywhere::<Acquire>();
        anywhere::<AcquisitionId>();
        anywhere::<Client>();
        anywhere::<ClientId>();
        anywhere::<Error>();
        anywhere::<Fence>();
        anywhere::<FenceGate>();
        anywhere::<HeldLock>();
        anywhere::<Lock>();
        anywhere::<LockBuilder>();
        anywhere::<leasehold::Event>();
        anywhere::<LockGuard>();
        anywhere::<LockId>();
        anywhere::<LockInfo>();
        anywhere::<Locks>();
        anywhere::<LossReason>();
        anywhere::<Lost>();
        anywhere::<leasehold::SemaphoreMember>();
        anywhere::<MemoryBuilder>();
        anywhere::<Observer>();
        anywhere::<Permit>();
        anywhere::<Retry>();
        anywhere::<Semaphore>();
        anywhere::<SemaphoreBuilder>();
        anywhere::<SemaphoreStats>();
        anywhere::<StaleFence>();
        anywhere::<Stats>();
    }

    #[tokio::test]
    async fn every_future_may_be_spawned() {
        let client = Client::memory();
        let semaphore = client.semaphore("spawned", 2).build().unwrap();
        let permit = tokio::spawn(semaphore.acquire()).await.unwrap().unwrap();
        let lost = tokio::spawn(permit.lost());
        assert!(tokio::spawn(permit.release()).await.unwrap().unwrap());
        assert_eq!(deadline(lost).await.unwrap(), LossReason::Released);

        let handle = semaphore.clone();
        let work = async move {
            let fence = handle.with(async |permit| {
                tokio::task::yield_now().await;
                permit.fence()
            });
            let fence = fence.await?;
            let id = handle.try_acquire().await?.expect("one is free").detach();
            handle.position(&id).await?;
            handle.locked().await?;
            handle.stats().await?;
            handle.release(&id).await?;
            client.stats().await?;
            client.close().await?;
            Ok::<_, Error>(fence)
        };
        assert!(tokio::spawn(work).await.unwrap().unwrap() > Fence::new(0));
    }

    #[tokio::test]
    async fn every_future_of_a_lock_may_be_spawned() {
        let client = Client::memory();
        let (lock, locks) = (client.lock("spawned").build().unwrap(), client.locks());
        let work = async move {
            let fence = lock.with(async |guard| {
                tokio::task::yield_now().await;
                guard.extend(Duration::from_secs(1)).await.map(|()| guard.fence())
            });
            let fence = fence.await??;
            let guard = lock.acquire().await?;
            assert!(lock.try_acquire().await?.is_none());
            let lost = tokio::spawn(guard.lost());
            assert!(locks.is_locked("spawned").await? && locks.owns(&guard.id()).await?);
            locks.lookup("spawned").await?;
            locks.extend(&guard.id(), Duration::from_secs(1)).await?;
            assert!(tokio::spawn(guard.release()).await.unwrap()?);
            assert_eq!(lost.await.unwrap(), LossReason::Released);
            let held = locks.try_acquire("spawned", Duration::from_secs(1)).await?.unwrap();
            locks.release(&held.id).await?;
            Ok::<_, Error>(fence)
        };
        assert!(tokio::spawn(work).await.unwrap().unwrap() > Fence::new(0));
    }

    #[tokio::test]
    async fn debug_output_names_the_type() {
        let semaphore = Client::memory().semaphore("shown", 2).build().unwrap();
        let permit = acquire(&semaphore).await;
        let shown = format!("{semaphore:?} {permit:?}");
        assert!(shown.contains("\"shown\"") && shown.contains(&permit.id().to_string()), "{shown}");
    }
}

/// Locks are stored in whole milliseconds: the holder must not count the fraction that the store has cut off.
#[tokio::test]
async fn a_lock_is_over_for_its_holder_before_another_has_it() {
    let short = Duration::from_millis(3);
    let lock = Client::memory().lock("short").lease(short).ttl(short).build().unwrap();
    for round in 0..50 {
        // On a busy machine it may be lost before this thread sees it.
        let Ok(first) = lock.acquire().await else { continue };
        let next = loop {
            if let Ok(Some(next)) = lock.try_acquire().await {
                break next;
            }
        };
        assert!(first.check().is_err(), "two holders in round {round}");
        next.release().await.unwrap();
    }
}

/// Fences protect resources that outlive this process, so those of the next process have to be larger.
#[tokio::test]
async fn fences_of_locks_begin_at_the_wall_clock_and_grow_over_all_keys() {
    let began = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let mut last = u64::try_from(began.as_micros()).unwrap();
    let client = Client::memory();
    for key in ["a", "b", "a"] {
        let lock = client.lock(key).lease(Duration::from_secs(60)).build().unwrap();
        let guard = lock.acquire().await.unwrap();
        assert!(guard.fence().get() > last, "{} after {last}", guard.fence().get());
        last = guard.fence().get();
        guard.release().await.unwrap();
    }
}
