//! What the other program does not know: weights, slot numbers, rates and pauses.
//! docs/guarantees.md states the consequences.

use std::time::Duration;

use leasehold::{Client, Semaphore, WaitsFor};
use testkit::wait::{deadline, eventually};

use crate::both::{Both, NAME, Waiter, key, notification};

const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn they_count_holders_and_we_count_units() {
    let both = Both::start().await;
    let semaphore = both.semaphore(3);
    let heavy = semaphore.acquire().weight(3).await.unwrap();
    // For them one unit of three is held, so they grant a permit to one of theirs.
    let theirs = both.they_hold(3).await;
    let stats = semaphore.stats().await.unwrap();
    assert_eq!((stats.held_units, stats.held), (4, 2));
    // Our scripts grant nothing until there is room again.
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    assert_eq!(both.theirs.release(NAME, &theirs).await.unwrap(), 1);
    assert!(semaphore.try_acquire().await.unwrap().is_none(), "3 of 3 are held");
    assert!(heavy.release().await.unwrap());
    assert!(semaphore.acquire().weight(3).await.unwrap().release().await.unwrap());
    both.is_left_clean().await;
    assert!(!both.exists(&key("limits")), "no permit has more than one unit");
}

#[tokio::test]
async fn a_heavy_waiter_that_they_let_in_waits_until_it_fits() {
    let both = Both::start().await;
    let semaphore = both.ours.semaphore(NAME, 3).numbered().build().unwrap();
    let theirs = both.they_hold(3).await;
    let acquire = semaphore.acquire().weight(3);
    let id = acquire.id().to_string();
    let waiter = tokio::spawn(acquire);
    eventually(async || !both.members("waiting").is_empty()).await;
    assert_eq!(semaphore.stats().await.unwrap().waits_for, Some(WaitsFor::Room));
    // For them two units are free, and our waiter is the first in the queue.
    assert_eq!(both.they_wake(3).await, 1);
    eventually(async || both.place(&id) == Some(0)).await;
    assert!(!waiter.is_finished(), "it holds 3 units beside theirs");
    assert_eq!(both.theirs.release(NAME, &theirs).await.unwrap(), 1);
    let permit = deadline(waiter).await.unwrap().unwrap();
    assert_eq!(permit.slot_number(), Some(1));
    assert_eq!(semaphore.stats().await.unwrap().held_units, 3);
    assert!(permit.release().await.unwrap());
    both.is_left_clean().await;
}

/// Queues waiters of two clients of ours, in turn.
async fn queue_of(both: &Both, semaphore: &Semaphore, other: &Semaphore) -> Vec<Waiter> {
    let mut waiters = Vec::new();
    for semaphore in [semaphore, other, semaphore] {
        waiters.push(both.we_queue(semaphore).await);
    }
    waiters
}

/// Lets their script grant permits to all our waiters, and waits until they are back in the queue, in the same order.
async fn they_grant_in_vain(both: &Both, waiters: &[Waiter], limit: u64) {
    let ids: Vec<_> = waiters.iter().map(|waiter| waiter.id.clone()).collect();
    let granted = both.they_wake(limit).await;
    assert_eq!(granted, u64::try_from(ids.len()).unwrap(), "they did not grant all");
    eventually(async || both.members("waiting") == ids).await;
    for waiter in waiters {
        assert!(!both.holds(&waiter.id), "it waits and holds");
        assert!(!both.exists(&notification(&waiter.id)), "the list is still there");
    }
}

#[tokio::test]
async fn a_grant_of_theirs_does_not_start_during_a_pause() {
    let both = Both::start().await;
    let (semaphore, client) = (both.semaphore(3), both.another().await);
    drop(semaphore.acquire().await.unwrap());
    semaphore.pause().await.unwrap();
    let other = client.semaphore(NAME, 3).build().unwrap();
    let waiters = queue_of(&both, &semaphore, &other).await;
    for _ in 0..3 {
        they_grant_in_vain(&both, &waiters, 3).await;
    }
    assert!(waiters.iter().all(Waiter::is_waiting), "one has started during the pause");
    semaphore.resume().await.unwrap();
    let mut fences = Vec::new();
    for waiter in waiters {
        fences.push(waiter.permit().await);
    }
    assert!(fences.is_sorted_by_key(leasehold::Permit::fence), "{fences:?}");
    drop(fences);
    both.is_left_clean().await;
}

#[tokio::test]
async fn a_grant_of_theirs_starts_only_with_a_token() {
    let both = Both::start().await;
    let rated = |client: &Client| client.semaphore(NAME, 4).rate(1, HOUR).build().unwrap();
    let client = both.another().await;
    let (semaphore, other) = (rated(&both.ours), rated(&client));
    let first = semaphore.acquire().await.unwrap();
    let waiters = queue_of(&both, &semaphore, &other).await;
    for _ in 0..3 {
        they_grant_in_vain(&both, &waiters, 4).await;
    }
    assert!(waiters.iter().all(Waiter::is_waiting), "one has started without a token");
    semaphore.set_rate(1000, Duration::from_secs(1), 1).await.unwrap();
    let mut permits = vec![first];
    for waiter in waiters {
        permits.push(waiter.permit().await);
    }
    assert!(permits.is_sorted_by_key(leasehold::Permit::fence), "{permits:?}");
    drop(permits);
    both.is_left_clean().await;
}

#[tokio::test]
async fn a_grant_of_theirs_does_not_exceed_a_pin() {
    let both = Both::start().await;
    let numbered = |client: &Client| client.semaphore(NAME, 4).numbered().build().unwrap();
    let client = both.another().await;
    let (semaphore, other) = (numbered(&both.ours), numbered(&client));
    let first = semaphore.acquire().await.unwrap();
    semaphore.pin(1).await.unwrap();
    let waiters = queue_of(&both, &semaphore, &other).await;
    for _ in 0..3 {
        they_grant_in_vain(&both, &waiters, 4).await;
        assert_eq!(both.members("main"), [first.id().to_string()]);
    }
    assert!(waiters.iter().all(Waiter::is_waiting), "one has started beside the pin");
    semaphore.unpin().await.unwrap();
    let mut permits = vec![first];
    for waiter in waiters {
        permits.push(waiter.permit().await);
    }
    let slots: Vec<_> = permits.iter().filter_map(leasehold::Permit::slot_number).collect();
    assert_eq!(slots.len(), 4, "{slots:?}");
    assert!(slots.is_sorted(), "{slots:?}");
    drop(permits);
    both.is_left_clean().await;
}

#[tokio::test]
async fn a_dead_holder_that_they_remove_takes_its_units_with_it() {
    let both = Both::start().await;
    let semaphore = both.ours.semaphore(NAME, 3).numbered().build().unwrap();
    let dead = semaphore.acquire().weight(3).await.unwrap();
    // As their sweep removes it: our record of it stays.
    assert_eq!(both.ask::<u64>(&["ZREM", &key("main"), &dead.id().to_string()]), 1);
    let _other = both.ours.semaphore("another", 1).build().unwrap().acquire().await.unwrap();
    let permit = deadline(semaphore.acquire().weight(3)).await.unwrap();
    assert_eq!(permit.slot_number(), Some(1));
    assert_eq!(semaphore.stats().await.unwrap().held_units, 3);
    drop(permit);
    both.is_left_clean().await;
}

#[tokio::test]
async fn their_starts_take_a_token_only_if_ours_grant_them() {
    let both = Both::start().await;
    let semaphore = both.ours.semaphore(NAME, 3).rate(1, HOUR).build().unwrap();
    let first = semaphore.acquire().await.unwrap();
    let theirs = both.they_hold(3).await;
    assert!(semaphore.try_acquire().await.unwrap().is_none(), "their permit took no token");
    let waiting = both.they_queue().await;
    first.release().await.unwrap();
    assert!(both.place(&waiting).is_some(), "there is room, and no token");
    semaphore.set_rate(1000, Duration::from_secs(1), 1).await.unwrap();
    eventually(async || {
        let _ = semaphore.try_acquire().await;
        both.holds(&waiting)
    })
    .await;
    both.they_were_notified(&waiting).await;
    for id in [theirs, waiting] {
        assert_eq!(both.theirs.release(NAME, &id).await.unwrap(), 1);
    }
    both.is_left_clean().await;
}

/// An earlier version stored a rate as an interval and a burst. Values that are no rate count as none.
#[tokio::test]
async fn a_rate_of_an_earlier_version_still_limits() {
    let both = Both::start().await;
    let semaphore = both.semaphore(9);
    drop(semaphore.acquire().await.unwrap());
    let write = |numbers: &str| {
        let text = format!("{numbers}\n\n");
        assert_eq!(both.ask::<String>(&["SET", &key("limits"), &text]), "OK");
    };
    // One token in an hour, up to two are kept, and all are there.
    write("- - - 0 3600000000 2 0 0");
    let rate = semaphore.stats().await.unwrap().rate.unwrap();
    assert_eq!((rate.interval(), rate.burst), (HOUR, 2));
    let held = [semaphore.acquire().await.unwrap(), semaphore.acquire().await.unwrap()];
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    drop(held);
    assert_eq!(semaphore.stats().await.unwrap().rate, Some(rate));
    for nothing in [
        "- - - 0 0 1 0 0",
        "- - - 0 - 1 0 0",
        "- - - 0 5 0 0 0 0",
        "- - - 0 5 1e300 2 0 0",
        "- - - 0 0.5 nan -1 0 0",
        "- - - 0 x y z",
        "",
    ] {
        write(nothing);
        assert_eq!(semaphore.stats().await.unwrap().rate, None, "{nothing}");
        for _ in 0..3 {
            drop(semaphore.acquire().await.unwrap());
        }
    }
    // A burst that is too large is cut off.
    write("- - - 0 2 3600000000 7 0 0");
    let rate = semaphore.stats().await.unwrap().rate.unwrap();
    assert_eq!((rate.starts, rate.period, rate.burst), (2, HOUR, 2));
    let held = [semaphore.acquire().await.unwrap(), semaphore.acquire().await.unwrap()];
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    drop(held);
    both.is_left_clean().await;
}

#[tokio::test]
async fn they_do_not_know_of_a_pause() {
    let both = Both::start().await;
    let semaphore = both.semaphore(2);
    drop(semaphore.acquire().await.unwrap());
    semaphore.pause().await.unwrap();
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    let theirs = both.they_hold(2).await;
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    semaphore.resume().await.unwrap();
    drop(semaphore.acquire().await.unwrap());
    assert_eq!(both.theirs.release(NAME, &theirs).await.unwrap(), 1);
    both.is_left_clean().await;
}

/// As after a server that ran out of memory, and so could not record that they are free again.
#[tokio::test]
async fn units_and_numbers_that_nobody_has_are_found_out() {
    let both = Both::start().await;
    let semaphore = both.ours.semaphore(NAME, 3).numbered().build().unwrap();
    let first = semaphore.acquire().weight(2).await.unwrap();
    let limits: String = both.ask(&["GET", &key("limits")]);
    let changed = limits.replacen("- - - 1 ", "- - - 2 ", 1);
    assert_ne!(limits, changed);
    both.ask::<()>(&["SET", &key("limits"), &changed]);
    for taken in ["1", "2"] {
        both.ask::<u64>(&["SETBIT", &key("slots"), taken, "1"]);
    }
    let second = deadline(semaphore.acquire()).await.unwrap();
    assert_eq!((first.slot_number(), second.slot_number()), (Some(1), Some(2)));
    drop((first, second));
    both.is_left_clean().await;
}

/// The record of a dead holder may outlive the key of the holders. It is not counted twice.
#[tokio::test]
async fn a_key_of_holders_that_has_expired_takes_nothing_from_who_came_after() {
    let both = Both::start().await;
    let semaphore = both.ours.semaphore(NAME, 8).numbered().build().unwrap();
    let _dead = semaphore.acquire().weight(8).await.unwrap().detach();
    let waiter = both.we_queue(&semaphore).await;
    both.ask::<()>(&["DEL", &key("main")]);
    let held =
        deadline(both.ours.semaphore(NAME, 8).numbered().build().unwrap().acquire().weight(5));
    let (held, next) = (held.await.unwrap(), waiter.permit().await);
    let mut slots = [held.slot_number(), next.slot_number()];
    slots.sort_unstable();
    assert_eq!(slots, [Some(1), Some(2)]);
    drop(next);
    // Later requests find the record of the dead holder.
    let light = both.semaphore(8);
    for _ in 0..3 {
        let wide = light.try_acquire().weight(4).await.unwrap();
        assert!(wide.is_none(), "5 and 4 of 8");
        semaphore.stats().await.unwrap();
        light.set_capacity(8).await.unwrap();
    }
    let other = both.ours.semaphore(NAME, 8).numbered().build().unwrap().acquire().await.unwrap();
    assert_ne!(other.slot_number(), held.slot_number());
    drop((held, other));
    both.is_left_clean().await;
    assert!(!both.exists(&key("slots")) || both.left("slots") > 0, "the key never expires");
}

#[tokio::test]
async fn a_member_that_they_removed_is_not_subtracted_twice() {
    let both = Both::start().await;
    let semaphore = both.semaphore(8);
    let first = semaphore.acquire().weight(5).await.unwrap().detach().to_string();
    let second = semaphore.acquire().weight(3).await.unwrap();
    assert_eq!(both.ask::<u64>(&["ZREM", &key("main"), &first]), 1);
    // An operator's change cleans up what they have left behind.
    semaphore.set_capacity(8).await.unwrap();
    assert!(semaphore.try_acquire().weight(7).await.unwrap().is_none(), "3 and 7 of 8");
    let third = semaphore.acquire().weight(5).await.unwrap();
    assert_eq!(semaphore.stats().await.unwrap().held_units, 8);
    drop((second, third));
    both.is_left_clean().await;
}

/// The key of the slot numbers may expire before that of the holders, because acquires without a
/// number do not extend it.
#[tokio::test]
async fn numbers_whose_key_has_expired_are_still_taken() {
    let both = Both::start().await;
    let numbered = both.ours.semaphore(NAME, 3).numbered().build().unwrap();
    let first = numbered.acquire().await.unwrap();
    both.ask::<()>(&["DEL", &key("slots")]);
    let second = numbered.acquire().await.unwrap();
    assert_eq!((first.slot_number(), second.slot_number()), (Some(1), Some(2)));
    both.ask::<()>(&["DEL", &key("slots")]);
    assert!(first.release().await.unwrap());
    assert!(!both.exists(&key("slots")), "a number that is freed makes no key");
    let third = numbered.acquire().await.unwrap();
    assert_eq!((second.slot_number(), third.slot_number()), (Some(2), Some(1)));
    drop((second, third));
    both.is_left_clean().await;
}

/// Adds as many infos of members that no longer exist as there are members of theirs.
fn hide(both: &Both, theirs: usize) {
    for number in 0..theirs {
        let id = format!("stale567890-{number}");
        both.ask::<()>(&["HSET", &key("info"), &id, "1 1 30000000 - "]);
    }
    let count = |command: &str, kind: &str| both.ask::<usize>(&[command, &key(kind)]);
    assert_eq!(count("HLEN", "info"), count("ZCARD", "main") + count("ZCARD", "waiting"));
}

#[tokio::test]
async fn their_releases_are_found_although_stale_infos_hide_them() {
    const QUEUE: usize = 40;
    let both = Both::start().await;
    let semaphore = both.semaphore(1);
    drop(semaphore.acquire().await.unwrap());
    let mut theirs = vec![both.they_hold(1).await];
    for _ in 0..QUEUE {
        theirs.push(both.they_queue().await);
    }
    hide(&both, theirs.len());
    let waiter = both.we_queue(&semaphore).await;
    let renewed = || both.score("waiting_heartbeat", &waiter.id).unwrap();
    let joined = renewed();
    // The client's first query. Without another program, the next would follow after 20 s.
    eventually(async || renewed() > joined).await;
    for id in theirs {
        both.theirs.release(NAME, &id).await.unwrap();
    }
    let permit = waiter.permit().await;
    drop(permit);
    both.is_left_clean().await;
}

/// Their clock may be ahead, and may remove a permit that is not claimed.
#[tokio::test]
async fn a_wake_up_is_not_trusted_although_stale_infos_hide_them() {
    let both = Both::start().await;
    let semaphore = both.semaphore(2);
    let held = semaphore.acquire().await.unwrap();
    let theirs = both.they_hold(2).await;
    hide(&both, 1);
    let client = both.another().await;
    let waiter = both.we_queue(&client.semaphore(NAME, 2).build().unwrap()).await;
    let renewed = || both.score("waiting_heartbeat", &waiter.id).unwrap();
    let joined = renewed();
    eventually(async || renewed() > joined).await;
    let mut connection = both.server.connection();
    let mut wake_ups = connection.as_pubsub();
    wake_ups.psubscribe("adv-sem:wake:*").unwrap();
    assert!(held.release().await.unwrap());
    let message = wake_ups.get_message().unwrap().get_payload::<String>().unwrap();
    let fields: Vec<_> = message.split(' ').collect();
    assert_eq!((fields[0], fields[4]), (&*waiter.id, "0"), "{message}");
    drop(waiter.permit().await);
    assert_eq!(both.theirs.release(NAME, &theirs).await.unwrap(), 1);
}
