//! First in, first out, across both programs.

use std::time::Duration;

use testkit::wait::eventually;

use crate::both::{Both, NAME};

/// Two of our waiters, from two clients, and two of theirs take turns. Each releases in its own
/// way: our release hands over, and our backstop finds theirs.
#[tokio::test]
async fn the_order_is_kept_when_we_do_the_granting() {
    let both = Both::start().await;
    let (mine, other) = (both.semaphore(1), both.another().await);
    let others = other.semaphore(NAME, 1).build().unwrap();
    let first = mine.acquire().await.unwrap();

    let ours = both.we_queue(&mine).await;
    let theirs = both.they_queue().await;
    let ours_too = both.we_queue(&others).await;
    let theirs_too = both.they_queue().await;
    let order = [&ours.id, &theirs, &ours_too.id, &theirs_too].map(Clone::clone);
    assert_eq!(both.members("waiting"), order);

    first.release().await.unwrap();
    let permit = ours.permit().await;
    assert_eq!(both.members("waiting"), order[1..]);
    permit.release().await.unwrap();
    both.they_were_notified(&theirs).await;
    both.they_confirm(&theirs, 1).await;
    assert_eq!(both.members("waiting"), order[2..]);
    both.theirs.release(NAME, &theirs).await.unwrap();
    let permit = ours_too.permit().await;
    assert_eq!(both.members("waiting"), order[3..]);
    permit.release().await.unwrap();
    both.they_were_notified(&theirs_too).await;
    both.they_confirm(&theirs_too, 1).await;
    both.theirs.release(NAME, &theirs_too).await.unwrap();
    both.is_left_clean().await;
}

/// All permits are released by their script, which grants nothing. They are granted by their script
/// too, unless our backstop comes first. The order is the same.
#[tokio::test]
async fn the_order_is_kept_when_they_do_the_granting() {
    let both = Both::start().await;
    let semaphore = both.semaphore(1);
    let mut holder = both.they_hold(1).await;
    let ours = both.we_queue(&semaphore).await;
    let theirs = both.they_queue().await;
    let ours_too = both.we_queue(&semaphore).await;
    let theirs_too = both.they_queue().await;
    let order = [&ours.id, &theirs, &ours_too.id, &theirs_too].map(Clone::clone);
    assert_eq!(both.members("waiting"), order);

    let mut permits = Vec::new();
    let mut waiters = [Some(ours), None, Some(ours_too), None];
    for (turn, id) in order.iter().enumerate() {
        assert_eq!(both.theirs.release(NAME, &holder).await.unwrap(), 1);
        both.they_wake(1).await;
        assert_eq!(both.members("main"), [id.as_str()]);
        assert_eq!(both.members("waiting"), order[turn + 1..]);
        if let Some(waiter) = waiters[turn].take() {
            permits.push(waiter.permit().await);
        } else {
            both.they_were_notified(id).await;
            both.they_confirm(id, 1).await;
        }
        holder.clone_from(id);
    }
}

#[tokio::test]
async fn a_batch_of_ours_queues_in_the_order_in_which_it_asked() {
    let both = Both::start().await;
    let semaphore = both.semaphore(1);
    let holder = both.they_hold(1).await;
    let before = both.server.command_count("evalsha");
    let acquires: Vec<_> = (0..50).map(|_| semaphore.acquire()).collect();
    let ids: Vec<_> = acquires.iter().map(|acquire| acquire.id().to_string()).collect();
    let tasks: Vec<_> = acquires.into_iter().map(tokio::spawn).collect();
    eventually(async || both.members("waiting").len() == ids.len()).await;
    assert_eq!(both.members("waiting"), ids);
    let scores: Vec<_> = ids.iter().map(|id| both.score("waiting", id).unwrap()).collect();
    assert!(scores.is_sorted_by(|a, b| a < b), "{scores:?}");
    let batches = both.server.command_count("evalsha") - before;
    assert!(batches < 50, "{batches} scripts: no two came in one batch");
    both.theirs.release(NAME, &holder).await.unwrap();
    for task in tasks {
        task.await.unwrap().unwrap().release().await.unwrap();
    }
    both.is_left_clean().await;
}

/// A clock of theirs that is less than a second ahead does not let our waiters overtake theirs.
#[tokio::test]
async fn ours_queue_behind_a_tail_that_is_a_little_ahead() {
    let both = Both::start_with_skew(0.7).await;
    let semaphore = both.semaphore(1);
    let first = semaphore.acquire().await.unwrap();
    let theirs = both.they_queue().await;
    let tail = both.score("waiting", &theirs).unwrap();
    let ours = both.we_queue(&semaphore).await;
    let ours_too = both.we_queue(&semaphore).await;
    assert_eq!(both.members("waiting"), [theirs.clone(), ours.id.clone(), ours_too.id.clone()]);
    // A microsecond behind, unless the server's clock has passed that time meanwhile.
    let place = both.score("waiting", &ours.id).unwrap();
    assert!(place > tail && (place - tail < 2e-6 || place <= both.now()), "{place} after {tail}");

    first.release().await.unwrap();
    both.they_were_notified(&theirs).await;
    both.they_confirm(&theirs, 1).await;
    both.theirs.release(NAME, &theirs).await.unwrap();
    let permit = ours.permit().await;
    assert_eq!(both.place(&ours_too.id), Some(0));
    permit.release().await.unwrap();
    ours_too.permit().await.release().await.unwrap();
    both.is_left_clean().await;
}

#[tokio::test]
async fn one_who_does_not_wait_does_not_overtake_theirs() {
    let both = Both::start().await;
    let semaphore = both.semaphore(1);
    let permit = semaphore.acquire().await.unwrap();
    let theirs = both.they_queue().await;
    permit.release().await.unwrap();
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    assert!(both.theirs.wait_notification(&theirs, Duration::ZERO).await.unwrap());
}
