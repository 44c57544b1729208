//! Tests of one name without a store: what follows from each answer.

use super::state::{CLEAN_UP_FROM, Want};
use super::*;
use crate::Client;
use crate::backend::Reply;
use crate::backend::simulated::Simulated;
use crate::engine::Settings;
use crate::machine::{Command, Declared, Known, Outcome, Role, Share, Terms};

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
    state.outcome_unknown(&claim, Moment::now());
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
        state.outcome_unknown(&release, Moment::now());
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

/// Every history of up to four waiters in up to three requests: each request is answered or lost, the losses are
/// reported in any order, and a waiter may join between them. What is sent again keeps the order.
#[test]
fn lost_requests_are_sent_again_in_their_order() {
    let reports = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    for (report, lost, sizes) in reports
        .iter()
        .flat_map(|report| (0..8_u8).map(move |lost| (report, lost)))
        .flat_map(|(report, lost)| [[1, 1, 1], [2, 1, 1], [1, 2, 1]].map(|own| (report, lost, own)))
    {
        let (mut state, held) = holding();
        let mut after = After::default();
        let enter = |state: &mut State| {
            let id = held.semaphore.named.core().next_id();
            let ticket = Ticket::waiting(id, held.semaphore.clone(), Share::ONE, true, None);
            state.add(&ticket, Life::Unsent);
            state.want_enqueue(id);
            id
        };
        let mut requests = Vec::new();
        let mut expected = Vec::new();
        for (at, size) in (0..).zip(sizes) {
            let ids: Vec<_> = (0..size).map(|_| enter(&mut state)).collect();
            if lost & (1 << at) != 0 {
                expected.extend(ids);
            }
            let sent = Moment::from_micros(1000 + at);
            requests.push((state.take(100, ONE), sent));
        }
        let mut joined = Vec::new();
        for at in report {
            let (commands, sent) = &requests[*at];
            if lost & (1 << at) != 0 {
                state.outcome_unknown(commands, *sent);
            } else {
                let outcomes = commands.iter().map(|_| Outcome::Waiting { ahead: 0 }).collect();
                let reply = Reply { outcomes, ..Default::default() };
                state.apply_reply(commands, reply, *sent, &mut after);
            }
            joined.push(enter(&mut state));
        }
        expected.append(&mut joined);
        let again: Vec<_> = state.take(100, ONE).iter().filter_map(Command::id).collect();
        assert_eq!(again, expected, "lost {lost:b}, reported {report:?}, sizes {sizes:?}");
    }
}

/// Another server has taken over without the release, and grants a permit that nobody waits for.
#[test]
fn a_wake_up_for_a_released_id_is_answered_with_a_release() {
    let (mut state, held) = holding();
    let (id, mut after) = (held.semaphore.named.core().next_id(), After::default());
    state.woken(id, None, &mut after);
    let release = state.take(100, ONE);
    assert!(matches!(release[..], [Command::Release { id: released, .. }] if released == id));
    // A wake-up that is older than the answer to the release needs none.
    state.woken(id, None, &mut after);
    let reply = Reply { outcomes: vec![Outcome::Removed(Role::Holder)], ..Default::default() };
    state.apply_reply(&release, reply, Moment::now(), &mut after);
    state.woken(id, None, &mut after);
    assert!(state.take(100, ONE).is_empty());
    // Another client's id is not released.
    state.woken(AcquisitionId::new(crate::ClientId::from_bits(7), 1), None, &mut after);
    assert!(state.take(100, ONE).is_empty());
}

/// The releases that another server may lack are repeated once, and are bounded.
#[test]
fn recent_releases_are_bounded() {
    let (mut state, held) = holding();
    let core = held.semaphore.named.core().clone();
    for _ in 0..5000 {
        state.ended_in_store(core.next_id());
    }
    state.release_recent();
    assert_eq!(state.take(usize::MAX, ONE).len(), 1024);
    state.release_recent();
    assert!(state.take(usize::MAX, ONE).is_empty());
}
