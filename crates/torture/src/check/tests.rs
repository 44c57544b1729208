//! Histories made by hand. Each rule is broken once, and also kept as narrowly as possible.

use super::*;
use crate::clock::MILLISECOND;
use crate::driver::LimitChange;
use crate::plan::{BACKSTOP, CONFIRM};
use crate::record::sum;

/// The events that one worker saw. Times are in milliseconds.
#[derive(Default)]
struct Record(Vec<Line>);

impl Record {
    fn line(mut self, at: Micros, event: Event) -> Self {
        self.0.push(Line { at: at * MILLISECOND, event });
        self
    }

    fn ask(self, at: Micros, op: u64) -> Self {
        self.ask_as(at, op, "-")
    }

    fn ask_as(self, at: Micros, op: u64, id: &str) -> Self {
        self.line(at, Event::Ask { op, thing: "x".to_owned(), id: id.to_owned() })
    }

    fn seen(self, at: Micros, op: u64) -> Self {
        self.line(at, Event::Queue { op, since: at * MILLISECOND, position: 0 })
    }

    fn grant(self, at: Micros, op: u64, fence: u64) -> Self {
        self.grant_of(at, op, fence, 1, 1)
    }

    fn grant_of(self, at: Micros, op: u64, fence: u64, slot: u32, weight: u32) -> Self {
        let fence = Some(fence * MILLISECOND);
        self.line(at, Event::Grant { op, fence, slot, weight })
    }

    fn holds(self, from: Micros, to: Micros, op: u64) -> Self {
        let hold = |at| Event::Hold { op, since: at * MILLISECOND };
        self.line(from, hold(from)).line(to, hold(to))
    }

    fn end(self, at: Micros, op: u64, how: How) -> Self {
        self.line(at, Event::End { op, how })
    }

    /// Requested, granted at once, and held until it is released.
    fn held(self, op: u64, from: Micros, to: Micros) -> Self {
        self.held_by(op, from, to, from)
    }

    fn held_by(self, op: u64, from: Micros, to: Micros, fence: u64) -> Self {
        let begun = self.ask(from, op).grant(from, op, fence);
        begun.holds(from, to, op).end(to, op, How::Released)
    }

    /// The same, with this weight and slot.
    fn held_as(self, op: u64, (from, to): (Micros, Micros), slot: u32, weight: u32) -> Self {
        let begun = self.ask(from, op).grant_of(from, op, from, slot, weight);
        begun.holds(from, to, op).end(to, op, How::Released)
    }

    fn writes(self, at: Micros, op: u64, version: u64, fence: u64, before: u64) -> Self {
        let sum = sum(before, version, fence);
        let intent = self.line(at, Event::Intend { op, fence, version, before, sum });
        intent.line(at, Event::Wrote { op, since: at * MILLISECOND, version })
    }
}

/// Workers, numbered in this order, that share one thing.
fn history(thing: Thing, records: Vec<Record>) -> History {
    let life = |(worker, record): (usize, Record)| {
        (Lifetime { worker, life: 1, foreign: false, end: LifetimeEnd::Done }, record.0)
    };
    let lives = records.into_iter().enumerate().map(life).collect();
    History { things: vec![thing], lives, ended: 600 * SECOND, ..History::default() }
}

fn fault(kind: Kind, scope: Scope, begin: Micros, end: Micros) -> Fault {
    Fault { kind, scope, begin: begin * MILLISECOND, end: end * MILLISECOND }
}

fn semaphore(capacity: u32) -> Thing {
    Thing::semaphore("x", capacity, 3 * SECOND)
}

#[track_caller]
fn assert_finds(history: &History, rules: &[Rule]) {
    let verdict = check(history);
    let found: Vec<_> = verdict.violations.iter().map(|found| found.rule).collect();
    assert_eq!(found, rules, "{verdict:#?}");
    assert!(verdict.doubts.is_empty(), "{verdict:#?}");
}

#[track_caller]
fn assert_passes(history: &History) {
    assert_finds(history, &[]);
}

#[test]
fn two_at_once_are_one_too_many() {
    let overlap = || vec![Record::default().held(1, 100, 300), Record::default().held(1, 200, 400)];
    assert_finds(&history(semaphore(1), overlap()), &[Rule::Limit]);
    assert_passes(&history(semaphore(2), overlap()));
    let hand_over = vec![Record::default().held(1, 100, 200), Record::default().held(1, 200, 400)];
    assert_passes(&history(semaphore(1), hand_over));
}

/// The second acquisition was granted while the first had not noticed that its lease had ended. But the first never
/// recorded after that that it held.
#[test]
fn a_hold_counts_only_between_two_certain_instants() {
    let silent = Record::default().ask(100, 1).grant(100, 1, 100).holds(110, 150, 1);
    let silent = silent.end(9000, 1, How::Lost);
    assert_passes(&history(semaphore(1), vec![silent, Record::default().held(1, 160, 400)]));
    let once = Record::default().ask(100, 1).grant(100, 1, 100).end(9000, 1, How::Lost);
    assert_passes(&history(semaphore(1), vec![once, Record::default().held(1, 160, 400)]));
}

#[test]
fn a_slot_beyond_the_last_is_one_too_many() {
    let grant = Event::Grant { op: 1, fence: None, slot: 3, weight: 1 };
    let record = Record::default().ask(1, 1).line(2, grant).end(3, 1, How::Released);
    assert_finds(&history(semaphore(2), vec![record]), &[Rule::Limit]);
}

#[test]
fn the_weight_of_all_holders_is_within_the_capacity() {
    let case = |one, other, from| {
        let first = Record::default().held_as(1, (100, 300), 1, one);
        let second = Record::default().held_as(1, (from, 400), 2, other);
        history(semaphore(4).weighed(4), vec![first, second])
    };
    assert_passes(&case(1, 3, 200));
    assert_finds(&case(2, 3, 200), &[Rule::Limit]);
    assert_passes(&case(2, 3, 300));
}

#[test]
fn no_two_have_one_slot_number() {
    let case = |thing, slot, from| {
        let first = Record::default().held_as(1, (100, 300), 1, 1);
        let second = Record::default().held_as(1, (from, 400), slot, 1);
        history(thing, vec![first, second])
    };
    let numbered = semaphore(2).numbered();
    assert_passes(&case(numbered, 2, 200));
    assert_finds(&case(numbered, 1, 200), &[Rule::Slots]);
    // One after the other may hold the same slot.
    assert_passes(&case(numbered, 1, 300));
    assert_finds(&case(numbered, 3, 200), &[Rule::Limit]);
    assert_finds(&case(numbered, 0, 200), &[Rule::Slots]);
    // Without slot numbers, the reported slot means nothing.
    assert_passes(&case(semaphore(2), 1, 200));
    // A store that lost its data grants the same number again, before the first holder can be notified.
    let mut lost = case(numbered, 1, 200);
    lost.faults.push(fault(Kind::RestartEmpty, Scope::Everybody, 150, 160));
    assert_passes(&lost);
    let mut restarted = case(numbered, 1, 200);
    restarted.faults.push(fault(Kind::Restart, Scope::Everybody, 150, 160));
    assert_finds(&restarted, &[Rule::Slots]);
}

/// Acquisitions that are requested and granted at these times.
fn paced(starts: &[(Micros, Micros)]) -> History {
    let started = |(op, (requested, granted)): (u64, &(Micros, Micros))| {
        let begun = Record::default().ask(*requested, op).grant(*granted, op, *granted);
        begun.end(*granted, op, How::Released)
    };
    // One interval is 112 ms: with two at once, ten in a second leave room for nine intervals.
    history(semaphore(5).paced(10, 2), (1..).zip(starts).map(started).collect())
}

#[test]
fn no_more_start_than_the_rate_allows() {
    assert_passes(&paced(&[(1000, 1000), (1001, 1001), (1112, 1112), (1223, 1223)]));
    assert_finds(&paced(&[(1000, 1000), (1001, 1001), (1109, 1109)]), &[Rule::Rate]);
    // The burst is available again after a quiet time, but not twice.
    assert_passes(&paced(&[(1000, 1000), (1001, 1001), (1300, 1300), (1301, 1301)]));
    let twice = [(1000, 1000), (1001, 1001), (1400, 1400), (1401, 1401), (1402, 1402)];
    assert_finds(&paced(&twice), &[Rule::Rate]);
    // Two in each interval are too many in the long run.
    let start = |at: Micros| (1000 + at, 1000 + at);
    let double: Vec<_> = (0..2).flat_map(|nth| [start(nth * 112), start(nth * 112 + 1)]).collect();
    assert_passes(&paced(&double[..3]));
    assert_finds(&paced(&double[..4]), &[Rule::Rate]);
    // Ten in a second, the burst included: the eleventh would be the burst on top of the rate.
    let spread: Vec<_> =
        [start(0)].into_iter().chain((0..18).map(|nth| start(112 * nth + 1))).collect();
    assert_passes(&paced(&spread));
    assert_finds(&paced(&[&spread[..10], &[start(960)]].concat()), &[Rule::Rate]);
}

#[test]
fn starts_that_may_be_earlier_do_not_count_for_a_rate() {
    assert_passes(&paced(&[(900, 1000), (1001, 1001), (1099, 1099)]));
    // It was seen in the queue after that.
    let mut seen = paced(&[(900, 1000), (1001, 1001), (1099, 1099)]);
    let queued = Event::Queue { op: 1, since: 1000 * MILLISECOND, position: 0 };
    seen.lives[0].1.insert(1, Line { at: 1000 * MILLISECOND, event: queued });
    assert_finds(&seen, &[Rule::Rate]);
}

#[test]
fn a_store_that_lost_its_data_or_its_time_may_start_a_burst_more() {
    let starts = |count: u64| paced(&(0..count).map(|n| (1000 + n, 1000 + n)).collect::<Vec<_>>());
    let kinds = [Kind::RestartEmpty, Kind::Promote, Kind::ClockForward, Kind::ClockBack];
    for kind in kinds {
        let during = |mut history: History, begin, end| {
            history.faults.push(fault(kind, Scope::Everybody, begin, end));
            history
        };
        assert_passes(&during(starts(5), 1002, 1003));
        assert_finds(&during(starts(6), 1002, 1003), &[Rule::Rate]);
        assert_finds(&during(starts(3), 3000, 3001), &[Rule::Rate]);
    }
    let mut restarted = starts(3);
    restarted.faults.push(fault(Kind::Restart, Scope::Everybody, 1001, 1002));
    assert_finds(&restarted, &[Rule::Rate]);
}

/// An operator makes a change at 1000 ms, which the store answers at 1010 ms, if it does. From 2000 ms on another
/// setting is in force.
fn operated(
    records: Vec<Record>,
    to: LimitChange,
    back: LimitChange,
    is_answered: bool,
) -> History {
    let change = |to, requested: Micros, answered: Option<Micros>| Change {
        thing: 0,
        to,
        requested: requested * MILLISECOND,
        answered: answered.map(|at| at * MILLISECOND),
    };
    let mut history = history(semaphore(3).operated(), records);
    history.changes.push(change(to, 1000, is_answered.then_some(1010)));
    history.changes.push(change(back, 2000, Some(2010)));
    history
}

#[test]
fn a_capacity_that_was_set_counts_for_later_acquires() {
    let case = |requested, granted, is_answered| {
        let older = Record::default().held(1, 100, 3000);
        let other = Record::default().held(1, 200, 3000);
        let later = Record::default().ask(requested, 1).grant(granted, 1, granted);
        let later = later.end(granted, 1, How::Released);
        let (to, back) = (LimitChange::Capacity(2), LimitChange::Capacity(3));
        operated(vec![older, other, later], to, back, is_answered)
    };
    assert_finds(&case(1020, 1030, true), &[Rule::Limit]);
    // It may have been granted before the change, or after the next one.
    assert_passes(&case(1005, 1030, true));
    assert_passes(&case(1020, 2001, true));
    // It is not known whether the change was applied.
    assert_passes(&case(1020, 1030, false));
    let mut lost = case(1120, 1130, true);
    lost.faults.push(fault(Kind::Promote, Scope::Everybody, 1100, 1110));
    assert_passes(&lost);
    let mut lost_before = case(1120, 1130, true);
    lost_before.faults.push(fault(Kind::Promote, Scope::Everybody, 50, 60));
    assert_finds(&lost_before, &[Rule::Limit]);
}

#[test]
fn a_shrink_keeps_existing_holders() {
    let holders = || (1..4).map(|n| Record::default().held(1, 100 * n, 1900)).collect();
    let (to, back) = (LimitChange::Capacity(1), LimitChange::Capacity(3));
    assert_passes(&operated(holders(), to, back, true));
    // A holder that may have released before the grant does not count.
    let gone = Record::default().held(1, 100, 1500);
    let next = Record::default().ask(1400, 1).grant(1600, 1, 1600).end(1700, 1, How::Released);
    assert_passes(&operated(vec![gone, next], to, back, true));
}

#[test]
fn nothing_is_granted_during_a_pause() {
    let case = |record: Record, is_answered| {
        let record = record.end(2500, 1, How::Released);
        operated(vec![record], LimitChange::Pause, LimitChange::Resume, is_answered)
    };
    let requested =
        |requested, granted| Record::default().ask(requested, 1).grant(granted, 1, granted);
    assert_finds(&case(requested(1020, 1030), true), &[Rule::Pause]);
    assert_passes(&case(requested(1005, 1030), true));
    assert_passes(&case(requested(1020, 2001), true));
    assert_passes(&case(requested(1020, 1030), false));
    // It was seen in the queue after the pause had begun.
    let waits = Record::default().ask(900, 1).seen(1100, 1).grant(1200, 1, 1200);
    assert_finds(&case(waits, true), &[Rule::Pause]);
    let mut lost = case(requested(1020, 1030), true);
    lost.faults.push(fault(Kind::RestartEmpty, Scope::Everybody, 1012, 1015));
    assert_passes(&lost);
}

#[test]
fn a_store_with_more_holders_than_permits_is_seen() {
    let mut history = history(semaphore(1), vec![]);
    history.crowded.push(Crowded { at: 5, thing: 0, held: 2 });
    assert_finds(&history, &[Rule::Limit]);
}

#[test]
fn a_store_that_came_back_empty_excuses_old_holders_until_they_are_connected() {
    let believes_until = |end| {
        let old = Record::default().held(1, 1000, end);
        let new = Record::default().held(1, 2100, 9000);
        let mut history = history(semaphore(1), vec![old, new]);
        history.faults.push(fault(Kind::RestartEmpty, Scope::Everybody, 2000, 2050));
        history
    };
    assert_passes(&believes_until(3400));
    assert_finds(&believes_until(3700), &[Rule::Limit]);
    // Its connection was dead for longer, so it could not be notified.
    let mut cut_off = believes_until(3700);
    cut_off.faults.push(fault(Kind::HalfOpen, Scope::Worker(0), 1500, 3600));
    assert_passes(&cut_off);
    // Another worker's connection was dead.
    let mut other = believes_until(3700);
    other.faults.push(fault(Kind::HalfOpen, Scope::Worker(1), 1500, 3600));
    assert_finds(&other, &[Rule::Limit]);
    // Two permits that the new server granted are still a violation.
    let mut both_new = believes_until(2000);
    both_new.lives.push((
        Lifetime { worker: 2, life: 1, foreign: false, end: LifetimeEnd::Done },
        Record::default().held_by(1, 2200, 2400, 2200).0,
    ));
    assert_finds(&both_new, &[Rule::Limit]);
}

#[test]
fn a_failover_excuses_only_what_was_not_copied_and_only_until_it_is_renewed() {
    let case = |granted, end| {
        let old = Record::default().held(1, granted, end);
        let new = Record::default().held(1, 5100, 12_000);
        let mut history = history(semaphore(1), vec![old, new]);
        history.faults.push(fault(Kind::Promote, Scope::Everybody, 5000, 5050));
        history
    };
    assert_passes(&case(4500, 8000));
    assert_finds(&case(4500, 9000), &[Rule::Limit]);
    assert_finds(&case(3000, 5500), &[Rule::Limit]);
}

#[test]
fn a_failover_of_another_node_excuses_nothing() {
    let on = |things: &[usize]| Scope::Things(things.iter().copied().collect());
    for kind in [Kind::PrimaryKilled, Kind::PrimaryPaused, Kind::OldPrimary] {
        let case = |scope| {
            let old = Record::default().held(1, 4500, 8000);
            let new = Record::default().held(1, 5100, 12_000);
            let mut history = history(semaphore(1), vec![old, new]);
            history.faults.push(fault(kind, scope, 5000, 5050));
            history
        };
        assert_passes(&case(on(&[0, 1])));
        assert_finds(&case(on(&[1])), &[Rule::Limit]);
    }
    let late = |scope| {
        let released = |record: Record| record.end(1000, 1, How::Released);
        let mut history = wait_for(released, LifetimeEnd::Done, 3700);
        history.faults.push(fault(Kind::SlotMoved, scope, 0, 20_000));
        history
    };
    assert_passes(&late(on(&[0])));
    assert_finds(&late(on(&[1])), &[Rule::Waiting]);
}

/// The old primary renews permits while it does not know that it was replaced. These renewals are not copied.
#[test]
fn a_second_primary_excuses_all_workers_until_they_reconnect_to_the_first() {
    let case = |kind, granted, end| {
        let old = Record::default().held(1, 1000, end);
        let new = Record::default().held(1, granted, 12_000);
        let mut history = history(semaphore(1), vec![old, new]);
        history.faults.push(fault(kind, Scope::Everybody, 5000, 7000));
        history
    };
    for kind in [Kind::SentinelFailover, Kind::OldPrimary] {
        assert_passes(&case(kind, 7100, 8400));
        assert_finds(&case(kind, 7100, 8700), &[Rule::Limit]);
    }
    // A dead primary renews nothing and grants nothing.
    assert_finds(&case(Kind::PrimaryKilled, 6500, 6600), &[Rule::Limit]);
    assert_passes(&case(Kind::PrimaryKilled, 5500, 6600));
}

#[test]
fn nothing_is_lost_by_a_failover_that_waits_or_by_a_slot_that_moves() {
    for kind in [Kind::ManualFailover, Kind::SlotMoved, Kind::ClusterDown, Kind::ReplicaReset] {
        let old = Record::default().held(1, 1900, 3000);
        let new = Record::default().held(1, 2100, 4000);
        let mut history = history(semaphore(1), vec![old, new]);
        history.faults.push(fault(kind, Scope::Everybody, 2000, 2050));
        assert_finds(&history, &[Rule::Limit]);
    }
}

#[test]
fn a_restart_with_its_data_does_not_excuse_the_limit() {
    for kind in [Kind::Restart, Kind::Crash, Kind::Freeze, Kind::ClientKill, Kind::ScriptFlush] {
        let old = Record::default().held(1, 1000, 3000);
        let new = Record::default().held(1, 2100, 4000);
        let mut history = history(semaphore(1), vec![old, new]);
        history.faults.push(fault(kind, Scope::Everybody, 2000, 2050));
        assert_finds(&history, &[Rule::Limit]);
    }
}

#[test]
fn a_clock_that_is_set_forward_excuses_old_holders_for_a_lease() {
    let case = |kind, from, to| {
        let old = Record::default().held(1, from, to);
        let new = Record::default().held(1, 2100, 9000);
        let mut history = history(semaphore(1), vec![old, new]);
        history.faults.push(fault(kind, Scope::Everybody, 2000, 2001));
        history
    };
    assert_passes(&case(Kind::ClockForward, 1000, 4900));
    assert_finds(&case(Kind::ClockForward, 1000, 5100), &[Rule::Limit]);
    // An acquisition that was requested later has its lease by the new time.
    assert_finds(&case(Kind::ClockForward, 2050, 4900), &[Rule::Limit]);
    assert_finds(&case(Kind::ClockBack, 1000, 2900), &[Rule::Limit]);
    assert_finds(&case(Kind::WorkersClock, 1000, 2900), &[Rule::Limit]);
}

#[test]
fn fences_restart_if_data_are_lost_after_the_clock_was_set_back() {
    let granted = |before: Option<Micros>, faults: &[(Kind, Micros)]| {
        let first = Record::default().held_by(1, 100, 200, 50);
        let second =
            before.map_or_else(Record::default, |at| Record::default().held_by(1, at, at + 1, 51));
        let second = second.held_by(2, 300, 400, 49);
        let mut history = history(semaphore(1), vec![first, second]);
        let at = |(kind, at): &(Kind, Micros)| fault(*kind, Scope::Everybody, *at, at + 1);
        history.faults.extend(faults.iter().map(at));
        history
    };
    let case = |faults: &[(Kind, Micros)]| granted(None, faults);
    assert_passes(&case(&[(Kind::ClockBack, 210), (Kind::RestartEmpty, 250)]));
    assert_finds(&case(&[(Kind::ClockBack, 210)]), &[Rule::Fence]);
    // A grant of the new store, before its clock was set back, continued the old fences.
    let lost_first = [(Kind::RestartEmpty, 250), (Kind::ClockBack, 270)];
    assert_passes(&granted(None, &lost_first));
    assert_finds(&granted(Some(260), &lost_first), &[Rule::Fence]);
    assert_finds(&case(&[(Kind::ClockForward, 210), (Kind::RestartEmpty, 250)]), &[Rule::Fence]);
}

#[test]
fn fences_are_unique_and_grow() {
    let case = |fence, thing| {
        let first = Record::default().held_by(1, 100, 200, 50);
        let second = Record::default().held_by(1, 300, 400, fence);
        history(thing, vec![first, second])
    };
    assert_passes(&case(51, semaphore(1)));
    assert_finds(&case(50, semaphore(1)), &[Rule::Fence]);
    assert_finds(&case(49, semaphore(1)), &[Rule::Fence]);
    // The counter of a lock is lost with the store's data. The clock, from which a semaphore's fences are made, is not.
    let lost = |mut history: History| {
        history.faults.push(fault(Kind::RestartEmpty, Scope::Everybody, 250, 260));
        history
    };
    assert_passes(&lost(case(1, Thing::lock("x", SECOND))));
    assert_finds(&lost(case(1, semaphore(1))), &[Rule::Fence]);
    assert_finds(&case(1, Thing::lock("x", SECOND)), &[Rule::Fence]);
}

#[test]
fn fences_of_concurrent_acquires_may_have_any_order() {
    let first = Record::default().ask(100, 1).grant(300, 1, 300).end(301, 1, How::Released);
    let second = Record::default().ask(200, 1).grant(299, 1, 250).end(299, 1, How::Released);
    assert_passes(&history(semaphore(2), vec![first, second]));
}

/// One waits while another holds. A third asks later.
fn queue(later: Record, capacity: u32) -> History {
    let mut holders: Vec<_> = (1..=u64::from(capacity))
        .map(|fence| Record::default().held_by(1, 1, 500, fence))
        .collect();
    let waits = Record::default().ask(100, 1).seen(110, 1);
    let waits = waits.grant(600, 1, 600).end(610, 1, How::Released);
    holders.extend([waits, later]);
    history(semaphore(capacity), holders)
}

#[test]
fn later_acquires_are_served_later() {
    let later =
        |at, fence| Record::default().ask(200, 1).grant(at, 1, fence).end(at + 1, 1, How::Released);
    assert_passes(&queue(later(620, 620), 1));
    assert_finds(&queue(later(550, 550), 1), &[Rule::Order]);
    // With two permits, fences are not compared.
    assert_passes(&queue(later(590, 590), 2));
    // It asked before the first was seen in the queue.
    let early = Record::default().ask(105, 1).grant(550, 1, 550).end(560, 1, How::Released);
    assert_passes(&queue(early, 1));
    // The waiter that was skipped was out of reach.
    let mut cut_off = queue(later(550, 550), 1);
    cut_off.faults.push(fault(Kind::Cut, Scope::Worker(1), 300, 310));
    assert_passes(&cut_off);
    let mut flushed = queue(later(550, 550), 1);
    flushed.faults.push(fault(Kind::ScriptFlush, Scope::Nobody, 300, 310));
    assert_finds(&flushed, &[Rule::Order]);
}

#[test]
fn a_waiter_seen_in_the_queue_later_was_passed_over() {
    let waits = Record::default().ask(100, 1).seen(110, 1).seen(300, 1);
    let waits = waits.end(310, 1, How::Cancelled);
    let later = Record::default().ask(200, 1).grant(250, 1, 250).end(260, 1, How::Released);
    assert_finds(&history(semaphore(5), vec![waits, later]), &[Rule::Order]);
}

/// One holds and ends as `end` says. Another waits from 200 ms on, until it gives up.
fn wait_for(end: fn(Record) -> Record, life: LifetimeEnd, gives_up: Micros) -> History {
    let held = end(Record::default().ask(100, 1).grant(100, 1, 100).holds(100, 990, 1));
    let waits = Record::default().ask(200, 1).seen(210, 1).end(gives_up, 1, How::Cancelled);
    let mut history = history(semaphore(1), vec![held, waits]);
    history.lives[0].0.end = life;
    history
}

#[test]
fn no_acquire_waits_for_a_free_permit() {
    let released = |record: Record| record.end(1000, 1, How::Released);
    assert_finds(&wait_for(released, LifetimeEnd::Done, 3700), &[Rule::Waiting]);
    assert_passes(&wait_for(released, LifetimeEnd::Done, 3500));
    let dropped = |record: Record| record.end(1000, 1, How::Dropped);
    assert_passes(&wait_for(dropped, LifetimeEnd::Done, 3800));
    assert_finds(&wait_for(dropped, LifetimeEnd::Done, 4000), &[Rule::Waiting]);
}

#[test]
fn a_heavy_waiter_counts_only_when_all_is_free() {
    let case = |thing, held_until| {
        let held = Record::default().held_as(1, (100, held_until), 1, 1);
        let waits = Record::default().ask(200, 1).seen(210, 1).end(4700, 1, How::Cancelled);
        history(thing, vec![held, waits])
    };
    let weighed = semaphore(4).weighed(4);
    assert_passes(&case(weighed, 4000));
    assert_finds(&case(weighed, 1000), &[Rule::Waiting]);
    // A rate or an operator may be the reason for the wait.
    assert_passes(&case(semaphore(1).paced(10, 2), 1000));
    assert_passes(&case(semaphore(1).operated(), 1000));
}

#[test]
fn a_dead_holder_keeps_its_permit_for_a_lease_and_no_longer() {
    let aftermath = semaphore(1).aftermath() / MILLISECOND;
    assert_eq!(aftermath, 3000 + CONFIRM.min(3 * SECOND) / MILLISECOND + 1500);
    let killed = LifetimeEnd::Killed(1000 * MILLISECOND);
    assert_passes(&wait_for(|record| record, killed.clone(), 1000 + aftermath + 2500));
    assert_finds(&wait_for(|record| record, killed, 1000 + aftermath + 2700), &[Rule::Waiting]);
}

/// A process releases a permit, waits for another one, and is killed at 1000 ms.
#[test]
fn a_waiter_that_is_granted_by_its_own_client_keeps_the_permit_for_a_lease() {
    let thing = || Thing::semaphore("x", 1, 8 * SECOND);
    let case = |released, gives_up| {
        let dies = Record::default().ask(100, 1).grant(110, 1, 1).ask(200, 2).seen(210, 2);
        let dies = dies.seen(400, 2).end(released, 1, How::Released);
        let waits = Record::default().ask(1100, 1).seen(1110, 1).end(gives_up, 1, How::Cancelled);
        let mut history = history(thing(), vec![dies, waits]);
        history.lives[0].0.end = LifetimeEnd::Killed(1000 * MILLISECOND);
        history
    };
    let unclaimed = (CONFIRM + BACKSTOP) / MILLISECOND + 500;
    assert_finds(&case(500, 1000 + unclaimed + 2700), &[Rule::Waiting]);
    assert_passes(&case(900, 1000 + unclaimed + 2700));
    let aftermath = thing().aftermath() / MILLISECOND;
    assert_finds(&case(900, 1000 + aftermath + 2700), &[Rule::Waiting]);
}

/// One cancels an acquire at 2000 ms, while its connection flaps until 2100 ms. Another waits until it gives up.
fn wait_for_cancelled(life: LifetimeEnd, gives_up: Micros) -> History {
    let cancelled = Record::default().ask(1000, 1).end(2000, 1, How::Cancelled);
    let waits = Record::default().ask(2200, 1).seen(2300, 1).end(gives_up, 1, How::Cancelled);
    let thing = Thing::semaphore("x", 1, 8 * SECOND);
    let mut history = history(thing, vec![cancelled, waits]);
    history.lives[0].0.end = life;
    history.faults.push(fault(Kind::Flap, Scope::Worker(0), 1500, 2100));
    history
}

#[test]
fn an_acquire_cancelled_during_an_outage_is_released_after_it() {
    let back = 2100 + 2000;
    assert_passes(&wait_for_cancelled(LifetimeEnd::Done, back + 300 + 2500));
    assert_finds(&wait_for_cancelled(LifetimeEnd::Done, back + 300 + 2700), &[Rule::Waiting]);
    // It died before, so its lease has to end first.
    let killed = LifetimeEnd::Killed(3000 * MILLISECOND);
    assert_passes(&wait_for_cancelled(killed.clone(), back + 300 + 2700));
    assert_finds(&wait_for_cancelled(killed, 2000 + 13_500 + 2700), &[Rule::Waiting]);
}

#[test]
fn no_acquire_waits_for_a_free_lock_or_lease() {
    for thing in [Thing::lock("x", 8 * SECOND), Thing::pool("x", 1, 8 * SECOND)] {
        let waits_until = |end| {
            let cancelled = Record::default().ask(900, 1).end(1000, 1, How::Cancelled);
            let waits = Record::default().ask(1100, 1).end(end, 1, How::TimedOut);
            history(thing, vec![cancelled, waits])
        };
        assert_passes(&waits_until(1300 + 500 + 2400));
        assert_finds(&waits_until(1300 + 500 + 2600), &[Rule::Waiting]);
    }
}

/// One requests something at 100 ms, and gives it up at 1000 ms as `how` says. Samples of the store list it from 500 ms
/// until `to`.
fn given_up(thing: Thing, how: How, to: Micros) -> History {
    let record = Record::default().ask_as(100, 1, "a-1").end(1000, 1, how);
    let mut history = history(thing, vec![record]);
    history.listed.push(listed("a-1", 500, to));
    history
}

fn listed(id: &str, from: Micros, to: Micros) -> Listed {
    Listed { thing: 0, id: id.to_owned(), from: from * MILLISECOND, to: to * MILLISECOND }
}

fn long_semaphore() -> Thing {
    Thing::semaphore("x", 1, 10 * SECOND)
}

#[test]
fn a_cancelled_acquire_is_listed_briefly() {
    let things = [long_semaphore(), Thing::lock("x", 10 * SECOND), Thing::pool("x", 1, SECOND)];
    for thing in things {
        let hows = [How::Cancelled, How::TimedOut, How::Dropped, How::Lost, How::Full];
        for how in hows.into_iter().chain([How::Released]) {
            assert_passes(&given_up(thing, how, 1000 + 1500));
            assert_finds(&given_up(thing, how, 1000 + 1501), &[Rule::Leak]);
        }
    }
    // Listed again after it was not: each time for a moment only.
    let mut twice = given_up(long_semaphore(), How::Cancelled, 2400);
    twice.listed.push(listed("a-1", 2600, 4000));
    assert_passes(&twice);
    // It may hold or wait until it ends.
    let waits = Record::default().ask_as(100, 1, "a-1");
    let mut waits = history(long_semaphore(), vec![waits]);
    waits.listed.push(listed("a-1", 500, 20_000));
    assert_passes(&waits);
}

#[test]
fn a_failed_release_of_a_lease_without_a_guard_is_not_repeated() {
    assert_passes(&given_up(Thing::pool("x", 1, 10 * SECOND), How::Failed, 9000));
    assert_finds(&given_up(Thing::lock("x", 10 * SECOND), How::Failed, 9000), &[Rule::Leak]);
    assert_finds(&given_up(long_semaphore(), How::Failed, 9000), &[Rule::Leak]);
}

#[test]
fn an_id_that_is_used_again_may_be_listed_again() {
    let case = |again, to| {
        let record = Record::default().ask_as(100, 1, "a-task-1").end(1000, 1, How::Cancelled);
        let record = record.ask_as(again, 2, "a-task-1").grant(again, 2, again);
        let record = record.end(9000, 2, How::Released);
        let mut history = history(Thing::pool("x", 1, 10 * SECOND), vec![record]);
        history.listed.push(listed("a-task-1", 500, to));
        history
    };
    assert_passes(&case(2000, 9000 + 1500));
    assert_finds(&case(2000, 9000 + 1501), &[Rule::Leak]);
    assert_finds(&case(2600, 9000), &[Rule::Leak]);
}

#[test]
fn a_dead_process_releases_nothing() {
    let killed = |at| {
        let mut history = given_up(long_semaphore(), How::Cancelled, 11_000);
        history.lives[0].0.end = LifetimeEnd::Killed(at * MILLISECOND);
        history
    };
    assert_passes(&killed(1001));
    assert_passes(&killed(1000 + 1500));
    assert_finds(&killed(1000 + 1600), &[Rule::Leak]);
    // One that crashed wrote its last line at 1500 ms.
    let mut broke = given_up(long_semaphore(), How::Cancelled, 11_000);
    broke.lives[0].0.end = LifetimeEnd::Broke("signal: 11".to_owned());
    broke.lives[0].1.push(Line { at: 1500 * MILLISECOND, event: Event::Tick });
    assert_finds(&broke, &[Rule::Crash]);
}

#[test]
fn a_worker_that_was_hit_by_a_fault_releases_when_it_is_connected_again() {
    let case = |kind, scope, to| {
        let mut history = given_up(long_semaphore(), How::Cancelled, to);
        history.faults.push(fault(kind, scope, 900, 3000));
        history
    };
    let (worker, other) = (Scope::Worker(0), Scope::Worker(1));
    let things = |things: &[usize]| Scope::Things(things.iter().copied().collect());
    for (kind, recovered) in [(Kind::Flap, 5000), (Kind::Stop, 9000), (Kind::Stall, 9000)] {
        assert_passes(&case(kind, worker, recovered + 1500));
        assert_finds(&case(kind, worker, recovered + 1501), &[Rule::Leak]);
        assert_finds(&case(kind, other, 1000 + 1501), &[Rule::Leak]);
        assert_passes(&case(kind, Scope::Everybody, recovered + 1500));
        assert_passes(&case(kind, things(&[0]), recovered + 1500));
        assert_finds(&case(kind, things(&[1]), 1000 + 1501), &[Rule::Leak]);
    }
    // The fault began when the release was overdue.
    let mut late = given_up(long_semaphore(), How::Cancelled, 4000);
    late.faults.push(fault(Kind::Flap, worker, 2600, 5000));
    assert_finds(&late, &[Rule::Leak]);
    // The machine stood still for a while.
    let mut slow = given_up(long_semaphore(), How::Cancelled, 3000);
    let gap = Event::Gap { since: 1200 * MILLISECOND };
    slow.lives[0].1.push(Line { at: 1400 * MILLISECOND, event: gap.clone() });
    assert_finds(&slow, &[Rule::Leak]);
    let mut other = slow.clone();
    slow.lives[0].1.push(Line { at: 2100 * MILLISECOND, event: gap.clone() });
    assert_passes(&slow);
    let life = Lifetime { worker: 1, life: 1, foreign: false, end: LifetimeEnd::Done };
    other.lives.push((life, vec![Line { at: 2100 * MILLISECOND, event: gap }]));
    assert_finds(&other, &[Rule::Leak]);
}

/// The release was confirmed, and the new primary lacks it.
#[test]
fn a_failover_may_lose_a_release() {
    let case = |kind, things: &[usize], to| {
        let mut history = given_up(long_semaphore(), How::Released, 1010);
        history.listed.push(listed("a-1", 2000, to));
        let scope = Scope::Things(things.iter().copied().collect());
        history.faults.push(fault(kind, scope, 1500, 2000));
        history
    };
    let forgotten = 2000 + 6000 + 2 * 10_000 + 4000 + 1500;
    for kind in [Kind::Promote, Kind::PrimaryKilled, Kind::OldPrimary, Kind::SentinelFailover] {
        assert_passes(&case(kind, &[0], forgotten + 1500));
        assert_finds(&case(kind, &[0], forgotten + 1501), &[Rule::Leak]);
        assert_finds(&case(kind, &[1], 2000 + 1501), &[Rule::Leak]);
    }
    assert_finds(&case(Kind::Restart, &[0], forgotten + 1500), &[Rule::Leak]);
}

/// The other program has something of this kind until 1000 ms, and ends as `how` says. One of our workers waits from
/// 200 ms on.
fn wait_for_the_other_program(thing: Thing, granted: bool, how: How, gives_up: Micros) -> History {
    let theirs = Record::default().ask(100, 1);
    let theirs = if granted { theirs.grant(100, 1, 100).holds(100, 990, 1) } else { theirs };
    let waits = Record::default().ask(200, 1).seen(210, 1).end(gives_up, 1, How::Cancelled);
    let mut history = history(thing, vec![theirs.end(1000, 1, how), waits]);
    history.lives[0].0.foreign = true;
    history
}

#[test]
fn a_cancelled_acquire_of_the_other_program_delays_no_waiter() {
    for how in [How::Released, How::Cancelled, How::Lost, How::Full] {
        let granted = how == How::Released;
        let waits_until = |end| wait_for_the_other_program(semaphore(1), granted, how, end);
        // Until the acquisition ends, a waiter that no fault hit does not count as holding.
        let from = if granted { 1000 } else { 210 };
        assert_passes(&waits_until(from + 2500));
        assert_finds(&waits_until(from + 2700), &[Rule::Waiting]);
    }
}

#[test]
fn the_other_programs_dead_are_waited_for_no_longer_than_its_heartbeat() {
    let semaphore = Thing { shared: true, ..semaphore(1) };
    let lock = Thing { shared: true, ..Thing::lock("x", 3 * SECOND) };
    let pool = Thing { shared: true, ..Thing::pool("x", 1, 3 * SECOND) };
    for (thing, moment) in [(semaphore, 100), (lock, 500), (pool, 500)] {
        let waits_until = |end| wait_for_the_other_program(thing, true, How::Failed, end);
        let over = 1000 + 3000 + 1500 + moment;
        assert_passes(&waits_until(over + 2400));
        assert_finds(&waits_until(over + 2600), &[Rule::Waiting]);
        // A request that it sent during a fault may arrive after the fault.
        let mut stalled = waits_until(over + 2600);
        stalled.faults.push(fault(Kind::Stall, Scope::Worker(0), 900, 1500));
        assert_passes(&stalled);
    }
}

#[test]
fn a_disconnected_worker_waits() {
    let released = |record: Record| record.end(1000, 1, How::Released);
    let mut history = wait_for(released, LifetimeEnd::Done, 9000);
    history.faults.push(fault(Kind::Stall, Scope::Worker(1), 900, 4000));
    assert_passes(&history);
    // But not forever.
    let mut history = wait_for(released, LifetimeEnd::Done, 13_000);
    history.faults.push(fault(Kind::Stall, Scope::Worker(1), 900, 4000));
    assert_finds(&history, &[Rule::Waiting]);
}

#[test]
fn a_waiter_in_the_queue_holds_nothing() {
    let case = |seen: &[Micros]| {
        let released = |record: Record| record.end(1000, 1, How::Released);
        let mut history = wait_for(released, LifetimeEnd::Done, 5000);
        let mut other = Record::default().ask(300, 1);
        for at in seen {
            other = other.seen(*at, 1);
        }
        let other = other.end(6000, 1, How::Cancelled);
        let life = Lifetime { worker: 2, life: 1, foreign: false, end: LifetimeEnd::Done };
        history.lives.push((life, other.0));
        history.faults.push(fault(Kind::Delay, Scope::Worker(2), 900, 5500));
        history
    };
    // As far as is known, it was granted the permit but has not learned of it.
    assert_passes(&case(&[900]));
    let seen: Vec<_> = (900..5500).step_by(500).collect();
    assert_finds(&case(&seen), &[Rule::Waiting]);
}

#[test]
fn a_machine_that_stood_still_is_no_violation() {
    let released = |record: Record| record.end(1000, 1, How::Released);
    let mut history = wait_for(released, LifetimeEnd::Done, 3700);
    let gap = Event::Gap { since: 1500 * MILLISECOND };
    history.lives[1].1.insert(2, Line { at: 3000 * MILLISECOND, event: gap });
    assert_passes(&history);
    assert_eq!(check(&history).facts.slow, [(1, 1500 * MILLISECOND)]);
    // Unless it was stopped: that is a fault, not slowness.
    history.faults.push(fault(Kind::Stop, Scope::Worker(1), 1400, 3010));
    assert_eq!(check(&history).facts.slow, []);
}

/// The process is stopped by someone else and never continues.
#[test]
fn a_process_without_further_ticks_stood_still() {
    let released = |record: Record| record.end(1000, 1, How::Released);
    let mut history = wait_for(released, LifetimeEnd::Done, 9000);
    history.lives[1].1.pop();
    history.lives[1].0.end = LifetimeEnd::Stuck(20 * SECOND);
    assert_finds(&history, &[Rule::Waiting, Rule::Waiting]);
    let tick = |at| Line { at: at * MILLISECOND, event: Event::Tick };
    history.lives[1].1.push(tick(1200));
    let verdict = check(&history);
    assert_eq!(verdict.violations, []);
    assert_eq!(verdict.doubts.len(), 1);
    // While it records that it is running, it is not exempt.
    history.lives[1].1.extend((1..118).map(|nth| tick(1200 + 500 * nth)));
    assert_finds(&history, &[Rule::Waiting, Rule::Waiting]);
}

#[test]
fn an_update_that_is_lost_is_found() {
    let thing = Thing::lock("x", SECOND);
    let first = |version| {
        let held = Record::default().ask(100, 1).grant(100, 1, 1);
        held.writes(150, 1, version, 1000, 0).end(200, 1, How::Released)
    };
    let second = |version, before| {
        let held = Record::default().ask(300, 1).grant(300, 1, 2);
        held.writes(350, 1, version, 2000, before).end(400, 1, How::Released)
    };
    let sum_1 = sum(0, 1, 1000);
    let state = |version, sum| (0, Contents { version, floor: 2000, sum });
    let mut good = history(thing, vec![first(1), second(2, sum_1)]);
    good.records.push(state(2, sum(sum_1, 2, 2000)));
    assert_passes(&good);
    let lost = history(thing, vec![first(1), second(1, 0)]);
    assert_finds(&lost, &[Rule::Record]);
    let out_of_nothing = history(thing, vec![first(1), second(2, 77)]);
    assert_finds(&out_of_nothing, &[Rule::Record]);
    good.records[0] = state(1, sum_1);
    assert_finds(&good, &[Rule::Record]);
}

#[test]
fn an_overwritten_update_is_found() {
    let case = || {
        let first = Record::default().ask(100, 1).grant(100, 1, 1);
        let first = first.line(400, Event::Conflict { op: 1, fence: 1000, version: 7 });
        let second = Record::default().ask(200, 1).grant(200, 1, 2).writes(300, 1, 7, 1000, 5);
        let made_from = Record::default().ask(1, 1).writes(2, 1, 6, 1, 4);
        let records = vec![made_from, first, second];
        let mut history = history(Thing::lock("x", SECOND), records);
        history.lives[0].1.retain(|line| !matches!(line.event, Event::Wrote { .. }));
        for line in &mut history.lives[0].1 {
            if let Event::Intend { sum, .. } = &mut line.event {
                *sum = 5;
            }
        }
        history
    };
    assert_finds(&case(), &[Rule::Record]);
    let mut lost = case();
    lost.faults.push(fault(Kind::RestartEmpty, Scope::Everybody, 150, 160));
    assert_passes(&lost);
}

#[test]
fn a_refused_holder_must_stop_believing() {
    let case = |believes: bool| {
        let old = Record::default().ask(100, 1).grant(100, 1, 1).holds(110, 120, 1);
        let old = old.line(400, Event::Refused { op: 1, fence: 1000, floor: 2000 });
        let old = if believes { old.holds(401, 410, 1) } else { old };
        let new = Record::default().ask(300, 1).grant(300, 1, 2).end(320, 1, How::Released);
        history(Thing::lock("x", SECOND), vec![old.end(500, 1, How::Released), new])
    };
    assert_passes(&case(false));
    assert_finds(&case(true), &[Rule::Record]);
    let mut lost = case(true);
    lost.faults.push(fault(Kind::RestartEmpty, Scope::Everybody, 200, 210));
    assert_passes(&lost);
}

#[test]
fn a_stale_release_releases_nothing() {
    let again =
        |released| Record::default().line(5, Event::Stale { thing: "x".to_owned(), released });
    assert_passes(&history(semaphore(1), vec![again(false)]));
    assert_finds(&history(semaphore(1), vec![again(true)]), &[Rule::Ownership]);
}

#[test]
fn leftovers_and_broken_workers_are_reported() {
    let mut history = history(semaphore(1), vec![Record::default()]);
    history.leftovers.push("the key x".to_owned());
    assert_finds(&history, &[Rule::Leftovers]);
    history.leftovers.clear();
    history.lives[0].0.end = LifetimeEnd::Broke("signal: 11".to_owned());
    assert_finds(&history, &[Rule::Crash]);
    history.lives[0].0.end = LifetimeEnd::Stuck(5);
    assert_finds(&history, &[Rule::Waiting]);
    history.faults.push(fault(Kind::Slow, Scope::Everybody, 10, 1000));
    assert_eq!(check(&history).violations, []);
    assert_eq!(check(&history).doubts.len(), 1);
}

#[test]
fn an_error_that_cannot_be_is_a_crash() {
    let record = Record::default().ask(1, 1).end(2, 1, How::Internal);
    assert_finds(&history(semaphore(1), vec![record]), &[Rule::Crash]);
}
