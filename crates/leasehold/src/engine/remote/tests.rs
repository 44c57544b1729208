//! Tests of one name without a store: what follows from each answer.

use super::state::{CLEAN_UP_FROM, Want};
use super::*;
use crate::Client;
use crate::backend::Reply;
use crate::backend::simulated::Simulated;
use crate::engine::Settings;
use crate::machine::{Command, Declared, Known, Outcome, Share, Terms};

const ONE: Declared = Declared::capacity(1, true);

/// A name that holds one permit.
fn holding() -> (State, Arc<Ticket>) {
    let client = Client::on(Arc::new(Simulated::default()), Settings::default());
    let semaphore = client.semaphore("s", 1).build().unwrap();
    let core = semaphore.inner.named.core().clone();
    let (id, until) = (core.next_id(), Moment::now() + Span::from_millis(60_000));
    let ticket = Ticket::held(id, semaphore.inner.declaration.clone(), until);
    let mut state = State::new(core, Destination::ONLY);
    state.add(&ticket, Life::Answered);
    (state, ticket)
}

/// Two claims of one permit may be in flight in two requests: one after a wake-up, and one that is sent once a second.
#[test]
fn a_claim_that_fails_after_another_was_answered_takes_nothing_away() {
    let (mut state, ticket) = holding();
    let claim = [Command::Renew { id: ticket.id, terms: Terms::default() }];
    let (refused, mut after) = (Error::Refused { what: "a test".into() }, After::default());
    state.apply_refusal(&claim, &refused, &mut after);
    // The answer to a try that was sent twice takes nothing away either.
    let reply = Reply { outcomes: vec![Outcome::Full], ..Default::default() };
    state.apply_reply(&claim, reply, Moment::now(), &mut after);
    state.outcome_unknown(&claim);
    ticket.check().unwrap();
    assert!(state.unsent.is_empty() && state.releases.is_empty());
}

/// A script decides about all of its ids together, so a batch must not contain the same command twice.
#[test]
fn no_id_has_two_equal_commands_in_one_batch() {
    let (mut state, held) = holding();
    let id = held.semaphore.named.core().next_id();
    state.add(&Ticket::waiting(id, held.semaphore.clone(), Share::ONE, true, None), Life::Unsent);
    for _ in 0..2 {
        state.want_enqueue(id);
        state.claim(id);
        state.renew(id, Moment::now());
    }
    assert_eq!(state.take(100, ONE).len(), 2);
}

/// Two renewals of a waiter are answered `Gone`, and the second answer arrives while its new enqueue is in flight.
#[test]
fn a_waiter_that_is_gone_is_enqueued_once() {
    let (mut state, held) = holding();
    let (id, mut after) = (held.semaphore.named.core().next_id(), After::default());
    state.add(&Ticket::waiting(id, held.semaphore.clone(), Share::ONE, true, None), Life::Answered);
    let question = [Command::Renew { id, terms: Terms::default() }];
    let gone = || Reply { outcomes: vec![Outcome::Gone], ..Default::default() };
    state.apply_reply(&question, gone(), Moment::now(), &mut after);
    assert_eq!(state.take(100, ONE).len(), 1);
    state.apply_reply(&question, gone(), Moment::now(), &mut after);
    assert!(state.take(100, ONE).is_empty(), "a second enqueue");
}

/// Its client is notified, or learns it from the answer to its query. Both may arrive.
#[test]
fn a_cancelled_waiter_is_not_enqueued_again() {
    for notified_first in [false, true] {
        let (mut state, held) = holding();
        let (id, mut after) = (held.semaphore.named.core().next_id(), After::default());
        let waiter = Ticket::waiting(id, held.semaphore.clone(), Share::ONE, true, None);
        state.add(&waiter, Life::Answered);
        if notified_first {
            assert!(state.cancelled(id, &mut after));
        }
        let question = [Command::Renew { id, terms: Terms::default() }];
        let reply = Reply { outcomes: vec![Outcome::Cancelled], ..Default::default() };
        state.apply_reply(&question, reply, Moment::now(), &mut after);
        assert!(!state.cancelled(id, &mut after), "it has ended");
        assert!(!waiter.is_waiting());
        // An enqueue that was sent twice may be applied after the cancel.
        assert!(matches!(state.take(100, ONE)[..], [Command::Release { .. }]));
    }
}

/// The permit was released by its id and enqueued again, while the client trusted an older wake-up. So the release must
/// also look in the queue.
#[test]
fn a_holder_that_may_be_in_the_queue_is_looked_for_there() {
    let (mut state, ticket) = holding();
    let mut after = After::default();
    let enqueue = state.command(Want::Enqueue(ticket.id), ONE).unwrap();
    let reply = Reply { outcomes: vec![Outcome::Waiting { ahead: 0 }], ..Default::default() };
    state.apply_reply(&[enqueue], reply, Moment::now(), &mut after);
    state.end(ticket.id);
    let release = state.take(100, ONE);
    assert!(matches!(release[..], [Command::Release { known: Known::Nothing, .. }]));
}

/// Dropping a command costs nothing only if it was never sent.
#[test]
fn an_id_is_released_unless_it_was_never_sent() {
    let lives = [Life::Unsent, Life::Sent, Life::Answered, Life::Unknown];
    for life in lives {
        let (mut state, held) = holding();
        let id = held.semaphore.named.core().next_id();
        state.add(&Ticket::waiting(id, held.semaphore.clone(), Share::ONE, true, None), life);
        state.end(id);
        assert_eq!(state.releases.contains_key(&id), life != Life::Unsent, "{life:?}");
    }
}

/// A release is repeated until it is answered, or until the store must have expired the id.
#[test]
fn a_release_is_repeated_until_the_store_must_have_expired_the_id() {
    let (mut state, ticket) = holding();
    let mut after = After::default();
    state.end(ticket.id);
    let release = state.take(100, ONE);
    for _ in 0..3 {
        state.outcome_unknown(&release);
        assert_eq!(state.take(100, ONE).len(), 1);
    }
    state.apply_refusal(&release, &Error::Refused { what: "a test".into() }, &mut after);
    let lease = ticket.semaphore.terms.lease.unwrap();
    state.fire(Moment::now() + lease, &mut after);
    assert_eq!(state.take(100, ONE).len(), 1, "the disk may have room again");
    state.apply_refusal(&release, &Error::Refused { what: "a test".into() }, &mut after);
    state.fire(Moment::now() + lease + lease + lease, &mut after);
    assert!(state.releases.is_empty() && state.take(100, ONE).is_empty());
}

/// However many commands wait to be sent, only those that are no longer wanted are removed.
#[test]
fn no_release_is_forgotten_however_many_there_are() {
    let (mut state, held) = holding();
    let core = held.semaphore.named.core().clone();
    for _ in 0..3 * CLEAN_UP_FROM {
        let id = core.next_id();
        state.add(
            &Ticket::waiting(id, held.semaphore.clone(), Share::ONE, true, None),
            Life::Answered,
        );
        state.end(id);
    }
    assert_eq!(state.take(usize::MAX, ONE).len(), 3 * CLEAN_UP_FROM);
}
