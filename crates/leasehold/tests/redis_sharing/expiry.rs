//! The expiry of the keys that both programs share.
//!
//! Their rule: a script that writes a key sets its expiry to the caller's TTL, however long others
//! still need the key. Our rule: an expiry only grows.
//!
//! Their keys expire ten seconds after their TTL, and one of our scripts renews every key of ours
//! at least every eight seconds.

use std::time::Duration;

use leasehold::{LossReason, Semaphore};
use testkit::seed000::new_id;
use testkit::wait::{deadline, eventually};

use crate::both::{Both, HEARTBEAT, NAME, key};

const SHARED: [&str; 3] = ["main", "waiting", "waiting_heartbeat"];

fn with_heartbeat(both: &Both, heartbeat: Duration) -> Semaphore {
    both.ours.semaphore(NAME, 1).lease(heartbeat).build().unwrap()
}

/// One of their waiters with a short TTL queues, renews and leaves.
async fn they_pass_by(both: &Both, ttl: Duration) {
    let id = new_id();
    both.theirs.queue(NAME, &id, HEARTBEAT, Some(ttl)).await.unwrap();
    both.theirs.ping(NAME, &id).await.unwrap();
    both.theirs.release(NAME, &id).await.unwrap();
}

#[tokio::test]
async fn their_short_ttl_does_not_outlast_our_renewals() {
    let both = Both::start().await;
    let semaphore = with_heartbeat(&both, Duration::from_secs(3));
    let permit = semaphore.acquire().await.unwrap();
    let waiter = both.we_queue(&semaphore).await;
    for kind in SHARED {
        assert!(both.left(kind) > 4000, "{kind}: {} ms", both.left(kind));
    }
    they_pass_by(&both, Duration::from_secs(1)).await;
    for kind in SHARED {
        // At most eleven seconds are left. A renewal within two seconds extends that.
        eventually(async || both.left(kind) > 11_000 || !both.exists(&key(kind))).await;
        assert!(both.exists(&key(kind)), "semaphore_{kind} expired with their TTL");
    }
    permit.check().unwrap();
    assert_eq!(both.place(&waiter.id), Some(0));
    permit.release().await.unwrap();
    waiter.permit().await.release().await.unwrap();
    both.is_left_clean().await;
}

/// Whatever its lease, a holder of ours renews within the ten seconds that their scripts leave to a key.
#[tokio::test]
async fn a_lone_holder_with_a_long_lease_survives_their_shortest_ttl() {
    let both = Both::start().await;
    let permit = with_heartbeat(&both, Duration::from_secs(180)).acquire().await.unwrap();
    they_pass_by(&both, Duration::from_secs(1)).await;
    assert!(both.left("main") <= 11_000, "their rule has changed: {} ms", both.left("main"));
    eventually(async || both.left("main") > 11_000 || !both.exists(&key("main"))).await;
    assert!(both.exists(&key("main")), "semaphore_main expired with their TTL");
    permit.check().unwrap();
    permit.release().await.unwrap();
}

/// They removed the permit: our holder is notified.
#[tokio::test]
async fn a_holder_whose_key_ended_is_notified() {
    let both = Both::start().await;
    let permit = with_heartbeat(&both, Duration::from_secs(9)).acquire().await.unwrap();
    both.ask::<()>(&["DEL", &key("main")]);
    both.they_hold(1).await;
    assert_eq!(deadline(permit.lost()).await, LossReason::Missing);
    assert!(permit.check().is_err());
}

/// A waiter whose place is gone queues again.
#[tokio::test]
async fn a_waiter_whose_queue_ended_by_their_ttl_queues_again() {
    let both = Both::start().await;
    let semaphore = with_heartbeat(&both, Duration::from_secs(3));
    let permit = semaphore.acquire().await.unwrap();
    let waiter = both.we_queue(&semaphore).await;
    // As if it had expired.
    both.ask::<()>(&["DEL", &key("waiting")]);
    eventually(async || both.place(&waiter.id).is_some()).await;
    permit.release().await.unwrap();
    waiter.permit().await.release().await.unwrap();
    both.is_left_clean().await;
}

#[tokio::test]
async fn a_waiter_whose_sign_of_life_ended_by_their_ttl_keeps_its_place() {
    let both = Both::start().await;
    let semaphore = with_heartbeat(&both, Duration::from_secs(3));
    let permit = semaphore.acquire().await.unwrap();
    let waiter = both.we_queue(&semaphore).await;
    let place = both.score("waiting", &waiter.id).unwrap();
    both.ask::<()>(&["DEL", &key("waiting_heartbeat")]);
    eventually(async || both.score("waiting_heartbeat", &waiter.id).is_some()).await;
    let now = both.score("waiting", &waiter.id).expect("a place");
    assert!((now - place).abs() < f64::EPSILON, "{now}, and it was {place}");
    permit.release().await.unwrap();
    waiter.permit().await.release().await.unwrap();
    both.is_left_clean().await;
}

/// They also set the expiry of `semaphore_ttl`. When it expires, Redis forgets when our TTL ends.
#[tokio::test]
async fn a_ttl_of_ours_ends_though_theirs_made_redis_forget_it() {
    let both = Both::start().await;
    let (heartbeat, ttl) = (Duration::from_secs(3), Duration::from_secs(5));
    let builder = both.ours.semaphore(NAME, 2).ttl(ttl).lease(heartbeat);
    let permit = builder.build().unwrap().acquire().await.unwrap();
    let holder = permit.id().to_string();
    let ends = both.score("ttl", &holder).unwrap();
    // As if it had expired.
    both.ask::<()>(&["DEL", &key("ttl")]);
    assert_eq!(deadline(permit.lost()).await, LossReason::TtlEnded);
    let now = both.now();
    assert!(now < ends + 1.0, "{} s late", now - ends);
}

/// While holders and waiters renew, the keys that contain them do not expire.
#[tokio::test]
async fn no_key_of_ours_ends_before_those_who_stand_in_it() {
    let both = Both::start().await;
    let semaphore = with_heartbeat(&both, Duration::from_secs(3));
    let permit = semaphore.acquire().await.unwrap();
    let waiter = both.we_queue(&semaphore).await;
    let kinds = ["main", "waiting", "waiting_heartbeat", "info"];
    let first = kinds.map(|kind| both.ends(kind));
    for (kind, first) in kinds.iter().zip(first) {
        eventually(async || both.ends(kind) > first).await;
    }
    permit.check().unwrap();
    waiter.cancel();
}

#[tokio::test]
async fn a_short_ttl_of_ours_shortens_no_life() {
    let both = Both::start().await;
    let long = both.semaphore(2);
    let _held = long.acquire().await.unwrap();
    let _theirs = both.they_hold(2).await;
    let _waiter = both.we_queue(&long).await;
    let kinds = ["main", "ttl", "waiting", "waiting_heartbeat", "info"];
    let before = kinds.map(|kind| both.ends(kind));

    let other = both.another().await;
    let short = other.semaphore(NAME, 2).ttl(Duration::from_secs(1)).build().unwrap();
    // One waiter gives up; another acquire holds and releases.
    let gives_up = both.we_queue(&short).await;
    let place = gives_up.id.clone();
    gives_up.cancel();
    eventually(async || both.place(&place).is_none()).await;
    let third = other.semaphore(NAME, 4).ttl(Duration::from_secs(1)).build().unwrap();
    let permit = third.acquire().await.unwrap();
    assert!(both.holds(&permit.id().to_string()));
    let renewed = both.score("main", &permit.id().to_string());
    eventually(async || both.score("main", &permit.id().to_string()) != renewed).await;
    permit.release().await.unwrap();

    for (kind, before) in kinds.iter().zip(before) {
        let now = both.ends(kind);
        // A key that was removed because it has no members any more has not been shortened.
        assert!(now >= before || now == -2, "semaphore_{kind}: {} ms earlier", before - now);
    }
}

/// A renewal extends every key to what all its members need, in time: the other program leaves at
/// least ten seconds, and a renewal comes within eight.
#[tokio::test]
async fn a_renewal_of_ours_gives_back_the_life_that_theirs_took() {
    let both = Both::start().await;
    let _long = both.semaphore(3).acquire().await.unwrap();
    they_pass_by(&both, Duration::from_secs(3)).await;
    assert!(both.left("main") <= 13_000);
    // Another client of ours, which needs the key only for a second, does not shorten its expiry further.
    let other = both.another().await;
    let short = other.semaphore(NAME, 3).ttl(Duration::from_secs(1)).build().unwrap();
    short.acquire().await.unwrap().release().await.unwrap();
    let mut least = i64::MAX;
    eventually(async || {
        let left = both.left("main");
        least = least.min(left);
        left > 30_000
    })
    .await;
    assert!(least > 2_000, "{least} ms were left to a holder with a lease of 30 s");
}

/// They let the capacity expire, or write an invalid one. No client declares it again, because all
/// have declared it already.
#[tokio::test]
async fn whatever_they_do_to_the_capacity_the_queue_goes_on() {
    let max = key("max");
    let damage: [&[&str]; 7] = [
        &["DEL", &max],
        &["SET", &max, "0"],
        &["SET", &max, "-3"],
        &["SET", &max, "many"],
        &["SET", &max, "inf"],
        &["SET", &max, "1.5"],
        &["PEXPIRE", &max, "1"],
    ];
    for damage in damage {
        let both = Both::start().await;
        let semaphore = both.semaphore(1);
        let permit = semaphore.acquire().await.unwrap();
        let waiter = both.we_queue(&semaphore).await;
        both.ask::<redis::Value>(damage);
        if damage[0] == "PEXPIRE" {
            eventually(async || !both.exists(&max)).await;
        }
        permit.release().await.unwrap();
        let permit = waiter.permit().await;
        assert_eq!(both.ask::<String>(&["GET", &max]), "1", "{damage:?}");
        assert_eq!(both.ask::<i64>(&["PTTL", &max]), -1, "{damage:?}");
        permit.release().await.unwrap();
    }
}

/// The only holder, which could restore the capacity, is theirs, and it is released by their script.
#[tokio::test]
async fn a_waiter_of_ours_restores_a_capacity_that_they_let_expire() {
    let both = Both::start().await;
    let theirs = both.they_hold(1).await;
    let waiter = both.we_queue(&both.semaphore(1)).await;
    both.ask::<redis::Value>(&["DEL", &key("max")]);
    both.theirs.release(NAME, &theirs).await.unwrap();
    waiter.permit().await.release().await.unwrap();
    assert_eq!(both.ask::<String>(&["GET", &key("max")]), "1");
}

/// Otherwise a client without a capacity of its own, like `leasehold run` without `-n`, would find none and declare 1.
#[tokio::test]
async fn the_capacity_does_not_expire_while_one_of_ours_is_there() {
    let both = Both::start().await;
    let max = key("max");
    let expiry = || both.ask::<i64>(&["PTTL", &max]);
    // As they leave it behind: the same capacity as ours, with an expiry.
    both.ask::<()>(&["SET", &max, "1", "EX", "11"]);
    let semaphore = with_heartbeat(&both, Duration::from_secs(3));
    let permit = semaphore.acquire().await.unwrap();
    assert_eq!(expiry(), -1, "after an acquire");
    // As they write it at every acquire while ours is held.
    both.ask::<()>(&["SET", &max, "1", "EX", "11"]);
    eventually(async || expiry() < 0).await;
    assert_eq!(expiry(), -1, "after a renewal");
    permit.release().await.unwrap();
}
