//! Tests of one name without a store, in virtual time: what follows from each input.

use super::*;
use crate::Fence;
use crate::machine::Reply;
use crate::machine::{Held, Outcome, Role, Share, Terms};

const ONE: Declared = Declared::capacity(1, true);
const LEASE: Span = Span::from_millis(30_000);
const ANSWER_TIMEOUT: Span = Span::from_millis(5000);

/// A core, its clock, and the ids that it mints.
struct Client {
    core: NameCore<AcquisitionId>,
    now: Moment,
    sequence: u64,
}

fn request() -> Request {
    let terms = Terms { lease: Some(LEASE), ttl: None };
    let (share, queues, claims_first) = (Share::ONE, true, false);
    Request { terms, share, queues, claims_first, gives_up_at: None, label: None }
}

fn held(valid_for: Span) -> Outcome {
    let (slot_number, fence) = (None, Fence::new(1));
    Outcome::Held(Held { slot_number, fence, valid_for: Some(valid_for) })
}

fn refused() -> Error {
    Error::Denied { problem: "a test".into() }
}

fn reply(outcomes: Vec<Outcome>) -> Answered {
    Answered::Applied(Reply { outcomes, ..Reply::default() })
}

impl Client {
    fn new() -> Self {
        let client = ClientId::from_bits(1);
        let core = NameCore::new(client, ANSWER_TIMEOUT, timing::scatter, false);
        Self { core, now: Moment::from_micros(1_000_000_000), sequence: 0 }
    }

    /// A client that holds one permit.
    fn holding() -> (Self, AcquisitionId) {
        let mut client = Self::new();
        let id = client.acquire(request());
        client.exchange(vec![held(LEASE)]);
        assert!(matches!(client.notices()[..], [Notice::Granted { .. }]));
        (client, id)
    }

    /// A client that holds one permit, and waits for another in the store's queue.
    fn holding_and_waiting() -> (Self, AcquisitionId) {
        let (mut client, _) = Self::holding();
        let id = client.acquire(request());
        client.exchange(vec![Outcome::Waiting { ahead: 0 }]);
        (client, id)
    }

    fn next_id(&mut self) -> AcquisitionId {
        self.sequence += 1;
        AcquisitionId::new(ClientId::from_bits(1), self.sequence)
    }

    fn acquire(&mut self, request: Request) -> AcquisitionId {
        let id = self.next_id();
        self.core.acquire(id, id, request, self.now);
        id
    }

    fn pass(&mut self, span: Span) {
        self.now = self.now + span;
        self.core.timeout(self.now);
    }

    fn take(&mut self) -> Vec<Command> {
        self.core.take(usize::MAX, ONE, self.now)
    }

    fn answer(&mut self, commands: &[Command], answer: Answered) {
        self.core.answered(commands, answer, self.now, self.now);
    }

    /// Sends everything, and answers it.
    fn exchange(&mut self, outcomes: Vec<Outcome>) {
        let commands = self.take();
        assert_eq!(commands.len(), outcomes.len(), "{commands:?}");
        self.answer(&commands, reply(outcomes));
    }

    fn notices(&mut self) -> Vec<Notice<AcquisitionId>> {
        std::mem::take(self.core.notices())
    }

    /// Sends a renewal of a holder or a waiter, even if one is in flight.
    fn renew(&mut self, id: AcquisitionId) -> Vec<Command> {
        self.core.claim(id, self.now);
        let mut commands = self.take();
        commands.append(&mut self.core.take_renewals(100, self.now));
        assert!(matches!(commands[..], [Command::Renew { .. }]), "{commands:?}");
        commands
    }
}

/// Two claims of one permit may be in flight in two requests: one after a wake-up, and one that is sent once a second.
#[test]
fn a_claim_that_fails_after_another_was_answered_takes_nothing_away() {
    let (mut client, id) = Client::holding();
    let claim = client.renew(id);
    client.answer(&claim, Answered::Refused(refused()));
    // The answer to a try that was sent twice takes nothing away either.
    let claim = client.renew(id);
    client.answer(&claim, reply(vec![Outcome::Full]));
    let claim = client.renew(id);
    client.answer(&claim, Answered::Elsewhere);
    assert!(client.core.owner(id).is_some() && client.core.releases.is_empty());
    assert!(!client.notices().iter().any(|notice| matches!(notice, Notice::Lost { .. })));
}

/// A script decides about all of its ids together, so a batch must not contain the same command twice.
#[test]
fn no_id_has_two_equal_commands_in_one_batch() {
    let mut client = Client::new();
    let id = client.acquire(request());
    for _ in 0..2 {
        client.core.want_enqueue(id, client.now);
        client.core.claim(id, client.now);
        client.core.renew(id, client.now);
    }
    assert_eq!(client.take().len(), 2);
}

/// Two renewals of a waiter are answered `Gone`, and the second answer arrives while its new enqueue is in flight.
#[test]
fn a_waiter_that_is_gone_is_enqueued_once() {
    let (mut client, id) = Client::holding_and_waiting();
    let queries = [client.renew(id), client.renew(id)];
    client.answer(&queries[0], reply(vec![Outcome::Gone]));
    assert!(matches!(client.take()[..], [Command::Enqueue { .. }]));
    client.answer(&queries[1], reply(vec![Outcome::Gone]));
    assert!(client.take().is_empty(), "a second enqueue");
}

/// Its client is notified, or learns it from the answer to its query. Both may arrive.
#[test]
fn a_cancelled_waiter_is_not_enqueued_again() {
    for notified_first in [false, true] {
        let (mut client, id) = Client::holding_and_waiting();
        let query = client.renew(id);
        if notified_first {
            client.core.cancelled_elsewhere(id, client.now);
        }
        client.answer(&query, reply(vec![Outcome::Cancelled]));
        client.core.cancelled_elsewhere(id, client.now);
        let cancelled = |notice: &&Notice<_>| {
            matches!(notice, Notice::Failed { failure: Failure::Cancelled, .. })
        };
        assert_eq!(client.notices().iter().filter(cancelled).count(), 1);
        // An enqueue that was sent twice may be applied after the cancel.
        assert!(matches!(client.take()[..], [Command::Release { .. }]));
    }
}

/// The permit was released by its id and enqueued again, while the client trusted an older wake-up. So the release must
/// also look in the queue.
#[test]
fn a_holder_that_may_be_in_the_queue_is_looked_for_there() {
    for queued_again in [false, true] {
        let mut client = Client::new();
        let id = client.acquire(request());
        let enqueue = client.take();
        let Outcome::Held(permit) = held(Span::from_millis(5000)) else { unreachable!() };
        client.core.woken(id, Some((permit, client.now)), client.now);
        let outcome = if queued_again { Outcome::Waiting { ahead: 0 } } else { held(LEASE) };
        client.answer(&enqueue, reply(vec![outcome]));
        client.core.end(id, true, client.now);
        let release = client.take();
        let [Command::Release { hint, .. }] = release[..] else { panic!("{release:?}") };
        assert_eq!(hint == ReleaseHint::Nothing, queued_again, "{hint:?}");
    }
}

/// Dropping a command costs nothing only if it was never sent.
#[test]
fn an_id_is_released_unless_it_was_never_sent() {
    use Delivery::{Answered as IsAnswered, Sent, Unknown, Unsent};
    for delivery in [Unsent, Sent, IsAnswered, Unknown] {
        let mut client = Client::new();
        let id = client.acquire(request());
        if delivery != Unsent {
            let enqueue = client.take();
            match delivery {
                IsAnswered => client.answer(&enqueue, reply(vec![Outcome::Waiting { ahead: 0 }])),
                Unknown => client.answer(&enqueue, Answered::Elsewhere),
                _ => {}
            }
        }
        client.core.end(id, false, client.now);
        assert_eq!(client.core.releases.contains_key(&id), delivery != Unsent, "{delivery:?}");
    }
}

/// A release is repeated until it is answered, or until the store must have expired the id.
#[test]
fn a_release_is_repeated_until_the_store_must_have_expired_the_id() {
    let (mut client, id) = Client::holding();
    client.core.end(id, true, client.now);
    let mut release = client.take();
    for _ in 0..3 {
        client.answer(&release, Answered::Elsewhere);
        release = client.take();
        assert_eq!(release.len(), 1);
    }
    client.answer(&release, Answered::Refused(refused()));
    client.pass(LEASE);
    release = client.take();
    assert_eq!(release.len(), 1, "the disk may have room again");
    client.answer(&release, Answered::Refused(refused()));
    client.pass(LEASE + LEASE + LEASE);
    assert!(client.core.is_idle() && client.take().is_empty());
}

/// A request may stay in flight for longer than the store keeps an id that is silent. The id is then released after the
/// answer, even if its first release was not sent in time.
#[test]
fn a_late_answer_is_followed_by_a_release_even_if_the_first_one_was_too_late_to_be_sent() {
    for is_answered in [true, false] {
        for is_cleaned_up in [true, false] {
            let mut client = Client::new();
            let id = client.acquire(request());
            let enqueue = client.take();
            client.core.end(id, false, client.now);
            client.pass(LEASE + LEASE + LEASE);
            if is_cleaned_up {
                client.core.forget_unwanted(client.now);
            }
            assert!(client.take().is_empty());
            let unknown = || Answered::Unknown(Error::unavailable("a test", true, None));
            let waiting = reply(vec![Outcome::Waiting { ahead: 0 }]);
            client.answer(&enqueue, if is_answered { waiting } else { unknown() });
            let release = client.take();
            assert!(matches!(release[..], [Command::Release { .. }]), "{release:?}");
            client.answer(&release, reply(vec![Outcome::Removed(Role::Waiter)]));
            assert!(client.core.is_idle());
        }
    }
}

/// A caller waits for the outcome of a release even if the store must have expired the id in the meantime.
#[test]
fn a_release_is_sent_as_long_as_a_caller_waits() {
    for is_cleaned_up in [true, false] {
        let (mut client, id) = Client::holding();
        client.core.end(id, true, client.now);
        client.pass(LEASE + LEASE + LEASE.divided_by(2));
        client.core.release(id, id, (false, Some(LEASE)), client.now);
        client.now = client.now + LEASE.divided_by(2);
        if is_cleaned_up {
            client.core.forget_unwanted(client.now);
        }
        client.notices();
        client.exchange(vec![Outcome::Removed(Role::Nobody)]);
        assert!(matches!(client.notices()[..], [Notice::Released { outcome: Ok(false), .. }]));
        assert!(client.core.is_idle());
    }
}

/// The store has not applied a command, and says so. What was sent after it, and was not applied either, stays behind it.
#[test]
fn a_command_that_was_not_applied_is_sent_again_before_later_ones() {
    let mut client = Client::new();
    let ids: Vec<_> = (0..3).map(|_| client.acquire(request())).collect();
    client.exchange(vec![Outcome::Unapplied; 3]);
    // The store does not know it, so nothing has to be released.
    client.core.end(ids[1], false, client.now);
    assert!(!client.core.has_releases());
    client.now = client.now + Span::from_millis(1);
    let later = client.acquire(request());
    let sent = |commands: &[Command]| commands.iter().filter_map(Command::id).collect::<Vec<_>>();
    let commands = client.take();
    assert_eq!(sent(&commands), [ids[0], ids[2], later]);
    client.answer(&commands, reply(vec![held(LEASE), Outcome::Unapplied, Outcome::Unapplied]));
    client.core.end(ids[0], true, client.now);
    client.exchange(vec![Outcome::Unapplied; 3]);
    assert_eq!(sent(&client.take()), [ids[0], ids[2], later]);
}

#[test]
fn a_reply_to_commands_that_were_not_applied_keeps_the_next_token() {
    let (mut client, _) = Client::holding_and_waiting();
    client.core.token_arrives(Span::from_millis(700), client.now);
    client.acquire(request());
    client.exchange(vec![Outcome::Unapplied]);
    assert_eq!(client.core.token_at, Some(client.now + Span::from_millis(700)));
}

/// An acquire that may have been applied once, or that is dropped while it is in flight, is released whether or not a
/// later request applied it.
#[test]
fn a_drop_releases_an_enqueue_that_was_applied_by_an_earlier_request_or_not_at_all() {
    let mut client = Client::new();
    let [lost, dropped] = [(); 2].map(|()| client.acquire(request()));
    let commands = client.take();
    client.core.end(dropped, false, client.now);
    client.answer(&commands, Answered::Unknown(Error::unavailable("a test", true, None)));
    let commands = client.take();
    assert!(matches!(commands[..], [Command::Release { .. }, Command::Enqueue { .. }]));
    client.answer(&commands, reply(vec![Outcome::Unapplied; 2]));
    client.core.end(lost, false, client.now);
    let ids: Vec<_> = client.take().iter().filter_map(Command::id).collect();
    assert_eq!(ids, [dropped, lost]);
}

/// However many commands wait to be sent, only those that are no longer wanted are removed.
#[test]
fn no_release_is_forgotten_however_many_there_are() {
    let mut client = Client::new();
    let ids: Vec<_> = (0..3 * CLEAN_UP_FROM).map(|_| client.acquire(request())).collect();
    client.exchange(vec![Outcome::Waiting { ahead: 0 }; ids.len()]);
    for id in &ids {
        client.core.end(*id, false, client.now);
    }
    assert_eq!(client.take().len(), ids.len());
}

/// Every history of up to four waiters in up to three requests: each request is answered or lost, the losses are
/// reported in any order, and a waiter may join between them. What is sent again keeps the order.
#[test]
fn lost_requests_are_sent_again_in_their_order() {
    let reports = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    for (report, lost, sizes) in
        reports.iter().flat_map(|report| (0..8_u8).map(move |lost| (report, lost))).flat_map(
            |(report, lost)| [[1, 1, 1], [2, 1, 1], [1, 2, 1]].map(|sizes| (report, lost, sizes)),
        )
    {
        let mut client = Client::new();
        let (mut requests, mut expected) = (Vec::new(), Vec::new());
        for (at, size) in (0..).zip(sizes) {
            let ids: Vec<_> = (0..size).map(|_| client.acquire(request())).collect();
            if lost & (1 << at) != 0 {
                expected.extend(ids);
            }
            requests.push((client.take(), client.now));
            client.pass(Span::from_micros(1));
        }
        let mut joined = Vec::new();
        for at in report {
            let (commands, sent) = &requests[*at];
            let answer = if lost & (1 << at) != 0 {
                Answered::Elsewhere
            } else {
                reply(vec![Outcome::Waiting { ahead: 0 }; commands.len()])
            };
            client.core.answered(commands, answer, *sent, client.now);
            joined.push(client.acquire(request()));
        }
        expected.append(&mut joined);
        let again: Vec<_> = client.take().iter().filter_map(Command::id).collect();
        assert_eq!(again, expected, "lost {lost:b}, reported {report:?}, sizes {sizes:?}");
    }
}

/// Another server has taken over without the release, and grants a permit that nobody waits for.
#[test]
fn a_wake_up_for_a_released_id_is_answered_with_a_release() {
    let mut client = Client::new();
    let id = client.next_id();
    client.core.woken(id, None, client.now);
    let release = client.take();
    assert!(matches!(release[..], [Command::Release { id: released, .. }] if released == id));
    // A wake-up that is older than the answer to the release needs none.
    client.core.woken(id, None, client.now);
    client.answer(&release, reply(vec![Outcome::Removed(Role::Holder)]));
    client.core.woken(id, None, client.now);
    assert!(client.take().is_empty());
    // Another client's id is not released.
    let other = AcquisitionId::new(ClientId::from_bits(7), 1);
    client.core.woken(other, None, client.now);
    assert!(client.take().is_empty());
}

/// The releases that another server may lack are repeated once, and are bounded.
#[test]
fn recent_releases_are_bounded() {
    let mut client = Client::new();
    for _ in 0..5000 {
        let id = client.next_id();
        client.core.ended_in_store(id, client.now);
    }
    client.core.connected(true, client.now);
    assert_eq!(client.take().len(), 1024);
    client.core.connected(true, client.now);
    assert!(client.take().is_empty());
}

/// The holder notices the end of its validity by itself, whatever the store answers later.
#[test]
fn a_permit_whose_validity_has_ended_stays_lost() {
    let (mut client, id) = Client::holding();
    let renewal = client.renew(id);
    let sent = client.now;
    client.now = client.now + LEASE;
    client.core.answered(&renewal, reply(vec![held(LEASE)]), sent, client.now);
    assert!(!client.notices().iter().any(|notice| matches!(notice, Notice::Extended { .. })));
    client.core.timeout(client.now);
    let notices = client.notices();
    let lost =
        |notice: &Notice<_>| matches!(notice, Notice::Lost { reason: LossReason::NotRenewed, .. });
    assert!(notices.iter().any(lost), "{notices:?}");
}

/// A wake-up that is older than half of the time to claim is not trusted.
#[test]
fn only_a_recent_wake_up_is_trusted() {
    for (age, is_trusted) in [(0, true), (1900, true), (2600, false), (60_000, false)] {
        let (mut client, id) = Client::holding_and_waiting();
        client.notices();
        let Outcome::Held(permit) = held(Span::from_millis(5000)) else { unreachable!() };
        let granted_at = client.now.minus(Span::from_millis(age));
        client.core.woken(id, Some((permit, granted_at)), client.now);
        let granted = matches!(client.notices()[..], [Notice::Granted { .. }]);
        assert_eq!(granted, is_trusted, "{age} ms old");
        // The claim follows 20 ms later, or at once.
        let sends = |client: &mut Client| {
            !client.take().is_empty() || !client.core.take_renewals(9, client.now).is_empty()
        };
        assert_eq!(sends(&mut client), !is_trusted);
        client.pass(Span::from_millis(20));
        assert_eq!(sends(&mut client), is_trusted);
    }
}

/// The caller of a release is notified once: by the answer, or at the end of its time.
#[test]
fn the_caller_of_a_release_learns_its_outcome() {
    for answered in [true, false] {
        let (mut client, id) = Client::holding();
        client.notices();
        client.core.end(id, true, client.now);
        assert_eq!(client.core.release(id, id, (true, Some(LEASE)), client.now), Some(id));
        let release = client.take();
        if answered {
            client.answer(&release, reply(vec![Outcome::Removed(Role::Holder)]));
        }
        client.pass(ANSWER_TIMEOUT);
        let notices = client.notices();
        let [Notice::Released { ref outcome, .. }] = notices[..] else { panic!("{notices:?}") };
        match outcome {
            Ok(was_held) => assert!(answered && *was_held),
            Err(failure) => {
                assert!(!answered && matches!(failure, Failure::Unanswered { .. }), "{failure:?}");
            }
        }
    }
    // The store cannot know an id that was never sent.
    let mut client = Client::new();
    let id = client.acquire(request());
    client.core.end(id, false, client.now);
    assert_eq!(client.core.release(id, id, (true, Some(LEASE)), client.now), None);
}

/// Another server has taken over without the grant, and grants the permit once more. In between, another client may
/// have held it.
#[test]
fn a_permit_that_was_granted_twice_is_lost() {
    // Without another server, the store has only lost its record of the permit, and has made a new one.
    for (fence, fails_over) in [(1, true), (2, true), (2, false)] {
        let (mut client, id) = Client::holding();
        client.notices();
        client.pass(Span::from_millis(1));
        client.core.connected(fails_over, client.now);
        let renewal = client.renew(id);
        let (slot_number, fence) = (None, Fence::new(fence));
        let again = Outcome::Held(Held { slot_number, fence, valid_for: Some(LEASE) });
        client.answer(&renewal, reply(vec![again]));
        let lost =
            |notice: &Notice<_>| matches!(notice, Notice::Lost { reason: LossReason::Missing, .. });
        let notices = client.notices();
        let is_lost = fence == Fence::new(2) && fails_over;
        assert_eq!(notices.iter().any(lost), is_lost, "{notices:?}");
        assert_eq!(!client.take().is_empty(), is_lost, "it is released");
    }
}

const MARGIN: Span = Span::from_millis(1);

impl Client {
    /// A client of one lock id, or of one pool instance, whose lease the store does not end with the TTL.
    fn of_a_lease(ends_with_ttl: bool) -> Self {
        let (longest_interval, margin) = (LEASE.duration(), Some(MARGIN));
        let rules =
            Rules { is_one_lease: true, ends_with_ttl, spreads: false, longest_interval, margin };
        let Self { core, now, sequence } = Self::new();
        Self { core: core.with_rules(rules), now, sequence }
    }

    /// Acquires the lease, and returns the moment until which it is valid.
    fn hold_the_lease(&mut self) -> (AcquisitionId, Moment) {
        let id = self.acquire(Request { queues: false, ..request() });
        self.exchange(vec![held(LEASE)]);
        match self.notices()[..] {
            [Notice::Granted { valid_until, .. }] => (id, valid_until),
            ref other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_shared_lease_is_released_with_the_last_acquisition() {
    let mut client = Client::of_a_lease(true);
    let (first, _) = client.hold_the_lease();
    let (second, _) = client.hold_the_lease();
    client.core.end(first, true, client.now);
    assert!(client.take().is_empty());
    client.core.end(second, true, client.now);
    assert!(matches!(client.take()[..], [Command::Release { .. }]));
}

/// The store never heard of the second acquisition, but has the lease of the first.
#[test]
fn the_last_acquisition_of_a_shared_lease_releases_it_even_if_it_was_never_sent() {
    let mut client = Client::of_a_lease(true);
    let (first, _) = client.hold_the_lease();
    let second = client.acquire(Request { queues: false, ..request() });
    client.core.end(first, true, client.now);
    client.core.end(second, false, client.now);
    assert!(matches!(client.take()[..], [Command::Release { .. }]));
}

/// Otherwise it would end the lease of the acquire that came later.
#[test]
fn a_release_that_is_not_in_flight_is_withdrawn_by_the_next_acquire() {
    let mut client = Client::of_a_lease(true);
    let (first, _) = client.hold_the_lease();
    client.core.end(first, true, client.now);
    let commands = client.take();
    client.answer(&commands, Answered::Unknown(refused()));
    let (second, _) = client.hold_the_lease();
    assert!(client.take().is_empty() && !client.core.has_releases());
    client.core.end(second, true, client.now);
    assert!(matches!(client.take()[..], [Command::Release { .. }]));
}

/// The acquire was dropped while its request was in flight, and another acquire of the same lease began.
#[test]
fn a_late_answer_does_not_release_a_lease_that_is_shared() {
    for is_answered in [true, false] {
        let mut client = Client::of_a_lease(true);
        let dropped = client.acquire(Request { queues: false, ..request() });
        let commands = client.take();
        client.core.end(dropped, false, client.now);
        let (next, _) = client.hold_the_lease();
        let late =
            if is_answered { reply(vec![held(LEASE)]) } else { Answered::Unknown(refused()) };
        client.answer(&commands, late);
        assert!(client.take().is_empty() && !client.core.has_releases());
        client.core.end(next, true, client.now);
        assert!(matches!(client.take()[..], [Command::Release { .. }]));
    }
}

/// The id of a pool instance may have another holder by then.
#[test]
fn a_lost_lease_is_not_released() {
    let mut client = Client::of_a_lease(false);
    client.hold_the_lease();
    client.pass(LEASE);
    let reason = LossReason::NotRenewed;
    assert!(client.notices().iter().any(|notice| is_lost(notice, reason)));
    assert!(client.take().is_empty() && !client.core.has_releases());
}

fn is_lost(notice: &Notice<AcquisitionId>, why: LossReason) -> bool {
    matches!(notice, Notice::Lost { reason, .. } if *reason == why)
}

/// A lock is renewed until its TTL ends and no longer. A pool lease is renewed until then as always.
#[test]
fn a_ttl_ends_a_lease_and_releases_it() {
    let half = LEASE.divided_by(2);
    for (is_lock, ttl) in [(true, half), (true, LEASE + half), (false, half), (false, LEASE + half)]
    {
        let mut client = Client::of_a_lease(is_lock);
        let terms = Terms { lease: Some(LEASE), ttl: Some(ttl) };
        let (id, ends) =
            (client.acquire(Request { terms, queues: false, ..request() }), client.now + ttl);
        let asked = |command: &Command, now: Moment| {
            let (Command::Enqueue { terms, .. } | Command::Renew { terms, .. }) = command else {
                panic!("{command:?}");
            };
            let lease = terms.lease.unwrap();
            // No lease of a lock reaches beyond the TTL.
            assert_eq!(
                lease,
                if is_lock {
                    LEASE.min(Span::from_duration(ends.saturating_since(now)))
                } else {
                    LEASE
                }
            );
            lease
        };
        let commands = client.take();
        let lease = asked(&commands[0], client.now);
        client.answer(&commands, reply(vec![held(lease)]));
        let mut end = None;
        while client.now < ends {
            client.pass(Span::from_millis(50));
            let commands = client.core.take_renewals(1, client.now);
            if let Some(command) = commands.first() {
                let lease = asked(command, client.now);
                client.answer(&commands, reply(vec![held(lease)]));
            }
            for notice in client.notices() {
                if is_lost(&notice, LossReason::TtlEnded) {
                    end = Some(client.now);
                }
                assert!(!is_lost(&notice, LossReason::NotRenewed), "{notice:?}");
            }
            if end.is_some() {
                break;
            }
        }
        let end = end.expect("the TTL has ended");
        assert!(end + MARGIN + Span::from_millis(50) >= ends, "lost too early");
        assert!(
            matches!(client.take()[..], [Command::Release { id: released, .. }] if released == id)
        );
    }
}

/// Another guard of the pool instance shares the lease.
#[test]
fn a_ttl_that_ends_does_not_release_a_shared_lease() {
    let mut client = Client::of_a_lease(false);
    let terms = Terms { lease: Some(LEASE), ttl: Some(LEASE.divided_by(2)) };
    client.acquire(Request { terms, queues: false, ..request() });
    client.exchange(vec![held(LEASE)]);
    client.notices();
    let (other, _) = client.hold_the_lease();
    client.pass(LEASE.divided_by(2));
    assert!(client.notices().iter().any(|notice| is_lost(notice, LossReason::TtlEnded)));
    assert!(client.take().is_empty());
    client.core.end(other, true, client.now);
    assert!(matches!(client.take()[..], [Command::Release { .. }]));
}

#[test]
fn an_extension_limits_the_validity_until_it_is_answered_and_delays_renewals() {
    let mut client = Client::of_a_lease(true);
    let (id, valid_until) = client.hold_the_lease();
    let shorter = LEASE.divided_by(2);
    client.core.extending(id, shorter, client.now);
    let limited = match client.notices()[..] {
        [Notice::Limited { valid_until, .. }] => valid_until,
        ref other => panic!("{other:?}"),
    };
    assert!(limited < valid_until && limited <= client.now + shorter);
    client.pass(LEASE.divided_by(3) + Span::from_millis(1));
    assert!(client.core.take_renewals(1, client.now).is_empty(), "the extension is in flight");
    let sent = client.now;
    client.core.extended(id, Some((LEASE, sent)), client.now);
    let extended = |notice: &Notice<_>| matches!(notice, Notice::Extended { valid_until, .. } if *valid_until > limited);
    assert!(client.notices().iter().any(extended));
    client.pass(LEASE.divided_by(3) + Span::from_millis(1));
    assert_eq!(client.core.take_renewals(1, client.now).len(), 1);
}
