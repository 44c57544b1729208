//! Dead members are removed by either program, whichever they belong to.

use std::time::{Duration, Instant};

use testkit::seed000::new_id;
use testkit::wait::{deadline, eventually};

use crate::both::{Both, HEARTBEAT, NAME, SOON, key};

#[tokio::test]
async fn a_dead_holder_of_theirs_is_swept_by_us_with_all_that_it_left() {
    let both = Both::start().await;
    let heartbeat = Duration::from_secs(2);
    let acquire = both.theirs.acquire(NAME, 1, heartbeat, None, None);
    let holder = deadline(acquire).await.unwrap().id;
    assert!(both.score("ttl", &holder).is_some());
    let waiter = both.we_queue(&both.semaphore(1)).await;
    both.theirs.stop_heartbeat(&holder);
    let died = Instant::now();
    let permit = waiter.permit().await;
    assert!(died.elapsed() < SOON, "{:?}", died.elapsed());
    assert_eq!(both.members("main"), [permit.id().to_string()]);
    assert_eq!(both.members("ttl"), Vec::<String>::new(), "an orphan");
    // The dead holder continues, and learns that it has lost its permit.
    assert_eq!(both.theirs.ping(NAME, &holder).await.unwrap(), (0, 0));
    assert_eq!(both.theirs.release(NAME, &holder).await.unwrap(), 0);
    permit.release().await.unwrap();
    both.is_left_clean().await;
}

/// Their sweep leaves the entry of a TTL without its holder. It is removed when that TTL ends.
#[tokio::test]
async fn an_orphan_that_their_sweep_leaves_goes_with_its_time() {
    let both = Both::start().await;
    let (semaphore, orphan) = (both.semaphore(2), new_id());
    let permit = semaphore.acquire().await.unwrap();
    let past = format!("{:.6}", both.now() - 1.0);
    both.ask::<()>(&["ZADD", &key("ttl"), &past, &orphan]);
    let second = semaphore.acquire().await.unwrap();
    assert_eq!(both.score("ttl", &orphan), None);
    assert_eq!(both.members("main").len(), 2, "it was counted as a holder");
    drop((permit, second));
}

/// By their rule the key `semaphore_ttl` expires with their TTL, while their holder keeps renewing.
/// Then nothing would enforce the TTL. Our backstop extends the key, so that a TTL longer than the
/// backstop's second is enforced.
#[tokio::test]
async fn a_holder_of_theirs_whose_ttl_is_over_is_swept_by_us() {
    let both = Both::start().await;
    let ttl = Some(Duration::from_secs(4));
    let holder = deadline(both.theirs.acquire(NAME, 1, HEARTBEAT, ttl, None)).await.unwrap().id;
    let permit = both.we_queue(&both.semaphore(1)).await.permit().await;
    assert!(!both.holds(&holder));
    assert_eq!(both.score("ttl", &holder), None);
    permit.release().await.unwrap();
}

#[tokio::test]
async fn a_dead_waiter_of_theirs_holds_up_nobody() {
    let both = Both::start().await;
    let semaphore = both.semaphore(1);
    let permit = semaphore.acquire().await.unwrap();
    let dead = new_id();
    both.theirs.queue(NAME, &dead, Duration::from_millis(1), None).await.unwrap();
    let waiter = both.we_queue(&semaphore).await;
    assert_eq!(both.place(&dead), None);
    permit.release().await.unwrap();
    waiter.permit().await.release().await.unwrap();
    both.is_left_clean().await;
}

#[tokio::test]
async fn a_dead_holder_of_ours_is_swept_by_them() {
    let both = Both::start().await;
    // What a killed client of ours leaves behind, two seconds after its lease ended.
    let (dead, gone) = ("00000000001-7", format!("{:.6}", both.now() - 2.0));
    let later = format!("{:.6}", both.now() + 600.0);
    both.ask::<()>(&["SET", &key("max"), "1"]);
    both.ask::<()>(&["ZADD", &key("main"), &gone, dead]);
    both.ask::<()>(&["ZADD", &key("ttl"), &later, dead]);
    both.ask::<()>(&["HSET", &key("info"), dead, "1 1 180000000 - "]);
    let theirs = both.they_hold(1).await;
    assert_eq!(both.members("main"), [theirs.as_str()]);
    assert_eq!(both.theirs.card(NAME).await.unwrap(), 1);
    both.theirs.release(NAME, &theirs).await.unwrap();
    // Their sweep leaves our record of it. Our next script removes the record.
    assert_eq!(both.members("ttl"), [dead]);
    let permit = both.semaphore(1).acquire().await.unwrap();
    assert_eq!(both.members("main"), [permit.id().to_string()]);
    assert!(both.members("ttl").is_empty());
    assert_eq!(both.ask::<Vec<String>>(&["HKEYS", &key("info")]), [permit.id().to_string()]);
}

/// The same without a TTL: the renewal of another holder removes the record.
#[tokio::test]
async fn the_info_of_a_member_that_they_removed_is_removed_with_a_renewal() {
    let both = Both::start().await;
    let lease = Duration::from_secs(2);
    let permit =
        both.ours.semaphore(NAME, 2).lease(lease).build().unwrap().acquire().await.unwrap();
    both.ask::<()>(&["HSET", &key("info"), "00000000001-7", "1 1 180000000 - "]);
    let id = permit.id().to_string();
    eventually(async || both.ask::<Vec<String>>(&["HKEYS", &key("info")]) == [id.clone()]).await;
    permit.check().unwrap();
}

#[tokio::test]
async fn a_dead_waiter_of_ours_is_swept_by_them() {
    let both = Both::start().await;
    let (dead, gone) = ("00000000001-7", format!("{:.6}", both.now() - 2.0));
    both.ask::<()>(&["ZADD", &key("waiting"), &gone, dead]);
    both.ask::<()>(&["ZADD", &key("waiting_heartbeat"), &gone, dead]);
    let theirs = both.they_hold(1).await;
    assert_eq!(both.members("main"), [theirs]);
    assert_eq!(both.members("waiting"), Vec::<String>::new());
}

/// They consider a stopped client of ours dead: it learns of it at its next renewal.
#[tokio::test]
async fn a_holder_of_ours_that_they_removed_is_told() {
    let both = Both::start().await;
    let heartbeat = Duration::from_secs(3);
    let semaphore = both.ours.semaphore(NAME, 1).lease(heartbeat).build().unwrap();
    let permit = semaphore.acquire().await.unwrap();
    both.theirs.release(NAME, &permit.id().to_string()).await.unwrap();
    assert_eq!(deadline(permit.lost()).await, leasehold::LossReason::Missing);
    assert!(permit.check().is_err());
}

/// The waiter is granted a permit although it is dead, because its last heartbeat is still valid.
#[tokio::test]
async fn a_waiter_of_theirs_that_died_holds_a_permit_no_longer_than_its_heartbeat() {
    let both = Both::start().await;
    let semaphore = both.semaphore(1);
    let permit = semaphore.acquire().await.unwrap();
    let heartbeat = Duration::from_secs(6);
    let dead = new_id();
    both.theirs.queue(NAME, &dead, heartbeat, None).await.unwrap();
    let alive_by = both.score("waiting_heartbeat", &dead).unwrap();
    permit.release().await.unwrap();
    assert!(both.holds(&dead));
    let claim = both.score("main", &dead).unwrap() - both.now();
    let left = alive_by - both.now();
    // The rest of its heartbeat interval, or the time that our waiters have to claim a permit.
    assert!(claim < left.max(5.0) + 0.1, "the grant lasts {claim} s, and its heartbeat {left} s");
    let waiter = both.we_queue(&semaphore).await;
    waiter.permit().await.release().await.unwrap();
}
