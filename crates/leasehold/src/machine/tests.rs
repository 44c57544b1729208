//! Checks the invariants of the machine on random histories under injected time.
//!
//! A [`World`] sends commands of several clients, lets time pass, and makes clients unreachable. It observes the
//! machine only through outcomes and queries. It keeps its own record of the order of the queue and of what each holder
//! was promised. `scripts/break-the-rules` breaks one rule after the other and shows that the test of its invariant
//! fails.

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::vec;
use proptest::prelude::*;

use super::numbers::Numbers;
use super::queue::Queue;
use super::*;
use crate::ClientId;
use crate::clock::Span;

pub(crate) mod view;

/// An acquisition, by its client and number.
#[derive(Clone, Copy, Debug)]
struct Who {
    client: u64,
    number: u64,
}

impl Who {
    fn id(self) -> AcquisitionId {
        AcquisitionId::new(ClientId::from_bits(self.client + 1), self.number)
    }
}

#[derive(Clone, Debug)]
enum Step {
    Enqueue { who: Who, declared: Declared, wait: bool, terms: Terms, share: Share },
    ChangeLimits { client: u64, capacity: Option<u32>, change: LimitChange },
    Renew { who: Who, terms: Terms },
    Release { who: Who, hint: ReleaseHint },
    Sweep { client: u64 },
    Pass { micros: u64 },
    Reach { client: u64, reachable: bool },
}

fn who() -> impl Strategy<Value = Who> {
    (0..3_u64, 0..12_u64).prop_map(|(client, number)| Who { client, number })
}

fn span() -> impl Strategy<Value = Option<Span>> {
    prop_oneof![Just(None), (1..200_u64).prop_map(|micros| Some(Span::from_micros(micros)))]
}

fn terms() -> impl Strategy<Value = Terms> {
    (span(), span()).prop_map(|(lease, ttl)| Terms { lease, ttl })
}

/// Mostly the same capacity, so that queues grow, and no rate; sometimes another. `scale` is that of [`rate`].
pub(crate) fn declared(scale: u64) -> impl Strategy<Value = Declared> {
    let capacity = prop_oneof![9 => Just(2_u32), 1 => 1..5_u32];
    let rate = prop_oneof![9 => Just(None), 1 => rate(scale).prop_map(Some)];
    (capacity, any::<bool>(), rate, any::<bool>()).prop_map(
        |(capacity, is_new, rate, rate_is_new)| Declared { capacity, is_new, rate, rate_is_new },
    )
}

/// Up to 6 permits in 5 to 119 microseconds, times `scale`.
pub(crate) fn rate(scale: u64) -> impl Strategy<Value = Rate> {
    (5..120_u64, 1..7_u64, 1..4_u32).prop_map(move |(times, count, burst)| {
        let period = Span::from_micros(times * scale);
        Rate { count: count.max(burst.into()), period, burst }
    })
}

/// Mostly an ordinary permit.
pub(crate) fn share() -> impl Strategy<Value = Share> {
    let weight = prop_oneof![6 => Just(1_u32), 2 => Just(2), 1 => 3..6_u32];
    (weight, prop::bool::weighted(0.3)).prop_map(|(weight, numbered)| Share { weight, numbered })
}

/// What a client may know about an id. `ReleaseHint::Held` is left out, because the machine does not need it.
fn hint() -> impl Strategy<Value = ReleaseHint> {
    prop_oneof![3 => Just(ReleaseHint::Nothing), 1 => Just(ReleaseHint::Unused)]
}

/// Resumes more often than it pauses. `scale` is that of [`rate`].
pub(crate) fn limit_change(scale: u64) -> impl Strategy<Value = LimitChange> {
    let reason = prop::option::of(Just("a reason with spaces".into()));
    prop_oneof![
        3 => (1..5_u32).prop_map(LimitChange::Declare),
        2 => (1..5_u32).prop_map(LimitChange::Pin),
        2 => Just(LimitChange::Unpin),
        1 => rate(scale).prop_map(|rate| LimitChange::Rate(Some(rate))),
        2 => Just(LimitChange::Rate(None)),
        2 => reason.prop_map(|reason| LimitChange::Pause { by: "an operator".into(), reason }),
        4 => Just(LimitChange::Resume),
        1 => Just(LimitChange::Forget),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (who(), declared(1), prop::bool::weighted(0.9), terms(), share()).prop_map(
            |(who, declared, wait, terms, share)| Step::Enqueue { who, declared, wait, terms, share }
        ),
        2 => (0..3_u64, prop::option::of(1..5_u32), limit_change(1))
            .prop_map(|(client, capacity, change)| Step::ChangeLimits { client, capacity, change }),
        4 => (who(), terms()).prop_map(|(who, terms)| Step::Renew { who, terms }),
        4 => (who(), hint()).prop_map(|(who, hint)| Step::Release { who, hint }),
        1 => (0..3_u64).prop_map(|client| Step::Sweep { client }),
        3 => (0..120_u64).prop_map(|micros| Step::Pass { micros }),
        2 => (0..3_u64, any::<bool>())
            .prop_map(|(client, reachable)| Step::Reach { client, reachable }),
    ]
}

/// What one command did.
struct Seen {
    command: Command,
    outcome: Outcome,
    effects: Effects,
    /// The wake-ups that a client received.
    woken: Vec<(AcquisitionId, Held)>,
    from: ClientId,
    now: Time,
    limits: Limits,
    before: Members,
    after: Members,
}

#[derive(Clone, PartialEq, Debug)]
struct Members {
    holders: BTreeMap<AcquisitionId, Fence>,
    waiters: Vec<AcquisitionId>,
    weights: BTreeMap<AcquisitionId, u32>,
    slots: BTreeMap<AcquisitionId, u32>,
    ends: BTreeMap<AcquisitionId, Time>,
}

impl Seen {
    /// Whether this member had expired when the command arrived.
    fn was_over(&self, id: AcquisitionId) -> bool {
        self.before.ends.get(&id).is_some_and(|ends| *ends <= self.now)
    }

    /// The id that the command itself removed.
    fn released(&self) -> Option<AcquisitionId> {
        match self.command {
            Command::Release { id, .. } => Some(id),
            _ => None,
        }
    }
}

impl Members {
    /// The members that have not expired.
    fn at(&self, now: Time) -> Self {
        let lasts = |id: &AcquisitionId| self.ends.get(id).is_none_or(|ends| now < *ends);
        let mut left = self.clone();
        left.holders.retain(|id, _| lasts(id));
        left.waiters.retain(lasts);
        left.weights.retain(|id, _| lasts(id));
        left.slots.retain(|id, _| lasts(id));
        left.ends.retain(|_, ends| now < *ends);
        left
    }

    fn of(machine: &Machine) -> Self {
        let holders = machine.holders();
        let all = || holders.iter().copied().chain(machine.waiters());
        let slot = |row: Row<'_, ()>| Some((row.id, row.member.slot_number()?.get()));
        Self {
            ends: all().filter_map(|row| Some((row.id, row.member.ends()?))).collect(),
            weights: all().map(|row| (row.id, row.member.weight())).collect(),
            slots: all().filter_map(slot).collect(),
            holders: holders.iter().filter_map(|row| Some((row.id, row.member.fence()?))).collect(),
            waiters: machine.waiters().map(|row| row.id).collect(),
        }
    }
}

struct World {
    machine: Machine,
    now: Time,
    out_of_reach: BTreeSet<ClientId>,
}

impl World {
    fn new() -> Self {
        let now = Time::from_micros(1_000_000);
        Self { machine: Machine::new(0), now, out_of_reach: BTreeSet::new() }
    }

    /// Takes a step. Returns what was seen if the step was a command.
    fn take(&mut self, step: Step) -> Option<Seen> {
        let (client, command) = match step {
            Step::Pass { micros } => {
                self.now = Time::from_micros(self.now.micros() + micros);
                return None;
            }
            Step::Reach { client, reachable } => {
                let client = Who { client, number: 0 }.id().client();
                if reachable {
                    self.out_of_reach.remove(&client);
                } else {
                    self.out_of_reach.insert(client);
                }
                return None;
            }
            Step::Sweep { client } => (client, Command::Sweep),
            Step::Enqueue { who, declared, wait, terms, share } => {
                let (id, label) = (who.id(), None);
                (who.client, Command::Enqueue { id, declared, wait, terms, share, label })
            }
            Step::ChangeLimits { client, capacity, change } => {
                (client, Command::ChangeLimits { capacity, change })
            }
            Step::Renew { who, terms } => {
                (who.client, Command::Renew { id: who.id(), terms, holds: true })
            }
            Step::Release { who, hint } => (who.client, Command::Release { id: who.id(), hint }),
        };
        Some(self.send(Who { client, number: 0 }.id().client(), command))
    }

    fn send(&mut self, from: ClientId, command: Command) -> Seen {
        let (limits, before) = (self.machine.limits().clone(), Members::of(&self.machine));
        let (mut effects, mut woken) = (Effects::default(), Vec::new());
        let Ok(outcome) = self.machine.apply(
            &command,
            &mut Circumstances {
                from: Some(from),
                now: self.now,
                confirm_within: Span::from_micros(50),
                wake: &mut |id, held| {
                    let is_reached = !self.out_of_reach.contains(&id.client());
                    woken.extend(is_reached.then_some((id, *held)));
                    is_reached.into()
                },
                effects: &mut effects,
            },
        );
        let after = Members::of(&self.machine);
        Seen { command, outcome, effects, woken, from, now: self.now, limits, before, after }
    }

    /// The reachable waiters before the first one that does not fit, in order.
    fn who_fits(&self, seen: &Seen) -> Vec<AcquisitionId> {
        let fits = |id: &&AcquisitionId| self.machine.fits(seen.after.weights[*id], seen.now);
        let reachable = |id: &&AcquisitionId| self.reaches(**id, seen.from);
        seen.after.waiters.iter().take_while(fits).filter(reachable).copied().collect()
    }

    fn reaches(&self, id: AcquisitionId, from: ClientId) -> bool {
        id.client() == from || !self.out_of_reach.contains(&id.client())
    }
}

/// Runs a random history, and passes what each command did to `check`.
fn watch(
    steps: Vec<Step>,
    mut check: impl FnMut(&World, &Seen) -> Result<(), TestCaseError>,
) -> Result<World, TestCaseError> {
    let mut world = World::new();
    for step in steps {
        if let Some(seen) = world.take(step) {
            check(&world, &seen)?;
        }
    }
    Ok(world)
}

/// A grant that may have been used.
#[derive(Debug)]
struct Start {
    fence: Fence,
    at: u64,
    /// How often the rate had changed before and after the command that made the grant, and the rate.
    before: Option<(usize, Rate)>,
    after: (usize, Rate),
}

/// Returns the grants that may have been used, in their order. Grants that were never claimed or seen do not count.
fn starts(steps: Vec<Step>) -> Result<Vec<Start>, TestCaseError> {
    let (mut starts, mut unclaimed) = (Vec::<Start>::new(), BTreeMap::new());
    let mut rate = None;
    watch(steps, |world, seen| {
        for (id, fence) in &seen.before.holders {
            let gone = seen.after.holders.get(id) != Some(fence);
            let unused = match seen.command {
                Command::Release { id: released, hint } if released == *id => {
                    hint == ReleaseHint::Unused
                }
                _ => seen.was_over(*id) && unclaimed.get(id) == Some(fence),
            };
            if gone && unused {
                starts.retain(|start| start.fence != *fence);
            }
        }
        let (before, now) = (rate, world.machine.limits().meter().map(|meter| meter.rate));
        rate = match (before, now) {
            (Some((changes, known)), Some(now)) if known != now => Some((changes + 1, now)),
            (None, Some(now)) => Some((0, now)),
            (before, _) => before,
        };
        for (id, fence) in &seen.after.holders {
            if seen.before.holders.get(id) != Some(fence) {
                let after = rate.expect("every acquire declares a rate");
                starts.push(Start { fence: *fence, at: seen.now.micros(), before, after });
            }
        }
        unclaimed.extend(seen.woken.iter().map(|(id, held)| (*id, held.fence)));
        if let (Command::Enqueue { id, .. } | Command::Renew { id, .. }, Outcome::Held(_)) =
            (&seen.command, seen.outcome)
        {
            unclaimed.remove(id);
        }
        Ok(())
    })?;
    starts.sort_by_key(|start| start.fence);
    Ok(starts)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn invariant_1_nobody_is_granted_a_permit_beyond_the_capacity(steps in vec(step(), 1..120)) {
        watch(steps, |world, seen| {
            let granted = seen.after.holders.keys().any(|id| !seen.before.holders.contains_key(id));
            let held: usize = seen.after.holders.keys().map(|id| seen.after.weights[id] as usize).sum();
            prop_assert_eq!(held, world.machine.units() as usize);
            let mut limits = vec![world.machine.limits()];
            // What was free before a change was granted under the previous limits.
            if let Command::ChangeLimits { .. } = seen.command {
                limits.push(&seen.limits);
            }
            let capacity = limits.iter().map(|limits| limits.capacity() as usize).max().unwrap();
            prop_assert!(!granted || held <= capacity, "{held} of {capacity} after a grant");
            let paused = limits.iter().all(|limits| limits.paused.is_some());
            prop_assert!(!granted || !paused, "a grant during a pause");
            Ok(())
        })?;
    }

    #[test]
    fn invariant_1_slot_numbers_are_the_lowest_and_stay(steps in vec(step(), 1..120)) {
        watch(steps, |_, seen| {
            let taken: BTreeSet<_> = seen.after.slots.values().collect();
            prop_assert_eq!(taken.len(), seen.after.slots.len(), "two have the same number");
            let stayed = |id: &AcquisitionId| {
                seen.before.holders.get(id).is_some_and(|fence| seen.after.holders.get(id) == Some(fence))
            };
            let mut others: BTreeSet<_> = BTreeSet::new();
            for (id, slot) in &seen.after.slots {
                if stayed(id) {
                    prop_assert_eq!(seen.before.slots.get(id), Some(slot));
                    others.insert(*slot);
                }
            }
            // New holders have the lowest number that was free, in the order of the grants.
            let mut fresh: Vec<_> = seen.after.slots.iter().filter(|(id, _)| !stayed(id)).collect();
            fresh.sort_by_key(|(id, _)| seen.after.holders[*id]);
            for (_, slot) in fresh {
                let lowest = (1..u32::MAX).find(|number| !others.contains(number));
                // Unless another one was granted and then released by the same command.
                prop_assert!(Some(*slot) == lowest || seen.released().is_some());
                others.insert(*slot);
            }
            Ok(())
        })?;
    }

    #[test]
    fn invariant_1_no_more_starts_than_the_rate_allows(
        rate in rate(1),
        steps in vec(step(), 1..160),
    ) {
        let mut is_new = true;
        let steps = steps.into_iter().map(|mut step| {
            match &mut step {
                Step::Enqueue { declared, .. } => {
                    declared.rate = Some(rate);
                    declared.rate_is_new = std::mem::take(&mut is_new);
                }
                // The rate stays the same for the whole history.
                Step::ChangeLimits { change, .. } if matches!(change, LimitChange::Rate(_) | LimitChange::Forget) => {
                    *change = LimitChange::Resume;
                }
                _ => {}
            }
            step
        });
        let starts = starts(steps.collect())?;
        let (count, burst) = (usize::try_from(rate.count).unwrap(), rate.burst as usize);
        for (at, first) in starts.iter().enumerate() {
            for (more, later) in (1..).zip(starts.iter().skip(at + burst)) {
                let (least, span) = (rate.interval().micros() * more, later.at - first.at);
                prop_assert!(span >= least, "{} within {}", burst as u64 + more, span);
            }
            if let Some(later) = starts.get(at + count) {
                prop_assert!(later.at - first.at >= rate.period.micros(), "{rate:?}: {starts:?}");
            }
        }
    }

    #[test]
    fn invariant_1_a_change_of_the_rate_adds_no_tokens(
        rates in [rate(1), rate(1)],
        steps in vec((step(), any::<bool>(), prop::bool::weighted(0.2)), 1..160),
    ) {
        let mut is_first = true;
        let steps = steps.into_iter().map(|(mut step, other, changes)| {
            let rate = rates[usize::from(other)];
            match &mut step {
                Step::Enqueue { declared, .. } => {
                    declared.rate = Some(rate);
                    declared.rate_is_new = std::mem::take(&mut is_first) || changes;
                }
                Step::ChangeLimits { change, .. } if matches!(change, LimitChange::Rate(_) | LimitChange::Forget) => {
                    *change = LimitChange::Rate(Some(rate));
                }
                _ => {}
            }
            step
        });
        let starts = starts(steps.collect())?;
        let burst = rates.iter().map(|rate| rate.burst).max().unwrap() as usize;
        let interval = rates.iter().map(|rate| rate.interval()).min().unwrap();
        for (at, first) in starts.iter().enumerate() {
            // Never more than the larger burst and the faster rate allow, however often the rate changes.
            for (more, later) in (1..).zip(starts.iter().skip(at + burst)) {
                let least = interval.micros() * more;
                prop_assert!(later.at - first.at >= least, "{rates:?}: {starts:?}");
            }
            // In a period without a change, no more than its rate allows.
            let (changes, rate) = first.before.unwrap_or(first.after);
            if let Some(later) = starts.get(at + usize::try_from(rate.count).unwrap())
                && later.after == (changes, rate)
            {
                prop_assert!(later.at - first.at >= rate.period.micros(), "{rate:?}: {starts:?}");
            }
        }
    }

    #[test]
    fn a_pin_counts_whatever_is_declared_and_the_newest_declaration_after_it(steps in vec(step(), 1..120)) {
        let (mut pinned, mut declared) = (None, 0);
        watch(steps, |world, seen| {
            match &seen.command {
                // A refused acquire declares nothing.
                Command::Enqueue { id, .. }
                    if matches!(seen.outcome, Outcome::TooHeavy { .. })
                        && !seen.before.weights.contains_key(id) => {}
                Command::Enqueue { declared: new, .. } if new.is_new || declared == 0 => {
                    declared = new.capacity;
                }
                Command::ChangeLimits { change: LimitChange::Forget, .. }
                    if seen.outcome == Outcome::LimitsChanged(LimitsChanged::Done) =>
                {
                    (pinned, declared) = (None, 0);
                }
                Command::ChangeLimits { change: LimitChange::Forget, .. } => {}
                Command::ChangeLimits { capacity, change } => {
                    if declared == 0 {
                        declared = capacity.unwrap_or_default();
                    }
                    match change {
                        LimitChange::Declare(capacity) if pinned.is_none() => declared = *capacity,
                        LimitChange::Pin(capacity) => pinned = Some(*capacity),
                        LimitChange::Unpin => pinned = None,
                        _ => {}
                    }
                }
                _ => {}
            }
            prop_assert_eq!(world.machine.limits().capacity(), pinned.unwrap_or(declared));
            Ok(())
        })?;
    }

    #[test]
    fn invariant_2_reachable_waiters_are_granted_in_order(steps in vec(step(), 1..120)) {
        // The world's own record of the queue. It follows the `Waiting` outcomes, not the machine's queue.
        let mut queue: Vec<AcquisitionId> = Vec::new();
        watch(steps, |world, seen| {
            // An expired waiter is removed. If it comes back, it counts as new.
            queue.retain(|id| !seen.was_over(*id));
            if let (Command::Enqueue { id, .. }, Outcome::Waiting { .. }) = (&seen.command, seen.outcome)
                && !queue.contains(id)
            {
                queue.push(*id);
            }
            for (ahead, id) in queue.iter().enumerate() {
                if !seen.after.holders.contains_key(id) {
                    continue;
                }
                for earlier in &queue[..ahead] {
                    let overtaken = seen.after.waiters.contains(earlier);
                    let reachable = world.reaches(*earlier, seen.from);
                    prop_assert!(!(overtaken && reachable), "{id} was granted before {earlier}");
                }
            }
            // A newcomer that was granted at once overtook every waiter that is still queued.
            if let (Command::Enqueue { id, .. }, Outcome::Held(_)) = (&seen.command, seen.outcome)
                && !seen.before.holders.contains_key(id)
                && !queue.contains(id)
            {
                for earlier in &seen.after.waiters {
                    prop_assert!(!world.reaches(*earlier, seen.from), "{id} before {earlier}");
                }
            }
            queue.retain(|id| seen.after.waiters.contains(id));
            prop_assert_eq!(&queue, &seen.after.waiters, "the queue keeps its order");
            Ok(())
        })?;
    }

    #[test]
    fn invariant_3_no_permit_is_free_while_somebody_reachable_waits(steps in vec(step(), 1..120)) {
        watch(steps, |world, seen| {
            let fitting = world.who_fits(seen);
            prop_assert_eq!(fitting, [], "waits for a free permit");
            if let (Outcome::Full, Command::Enqueue { share, .. }) = (seen.outcome, &seen.command) {
                let fits =
                    |id: &AcquisitionId| world.machine.fits(seen.after.weights[id], seen.now);
                let before = |id: &AcquisitionId| world.reaches(*id, seen.from) || !fits(id);
                let before = seen.after.waiters.iter().any(before);
                prop_assert!(before || !world.machine.fits(share.weight, seen.now));
            }
            if let (Outcome::TooHeavy { capacity }, Command::Enqueue { share, .. }) = (seen.outcome, &seen.command) {
                prop_assert!(share.weight > capacity);
            }
            Ok(())
        })?;
    }

    #[test]
    fn invariant_4_fences_strictly_increase(steps in vec(step(), 1..120)) {
        let mut last = None;
        watch(steps, |_, seen| {
            if let Command::ChangeLimits { change: LimitChange::Forget, .. } = seen.command
                && seen.outcome == Outcome::LimitsChanged(LimitsChanged::Done)
            {
                last = None;
            }
            let known = seen.before.holders.values().collect::<BTreeSet<_>>();
            let fresh = seen.after.holders.values().filter(|fence| !known.contains(fence));
            let fresh: BTreeSet<_> = fresh.copied().collect();
            for fence in fresh {
                prop_assert!(last < Some(fence), "{fence} after {last:?}");
                prop_assert!(fence.get() >= seen.now.micros(), "{fence} is behind the clock");
                last = Some(fence);
            }
            // A holder keeps its fence.
            for (id, fence) in &seen.before.holders {
                if let Some(now) = seen.after.holders.get(id)
                    && !seen.was_over(*id)
                {
                    prop_assert_eq!(fence, now);
                }
            }
            Ok(())
        })?;
    }

    #[test]
    fn invariant_5_a_command_that_is_sent_again_changes_nothing(steps in vec(step(), 1..80)) {
        let mut world = World::new();
        for step in steps {
            let Some(first) = world.take(step) else { continue };
            let mut again = World {
                machine: world.machine.clone(),
                now: world.now,
                out_of_reach: world.out_of_reach.clone(),
            };
            let second = again.send(first.from, first.command.clone());
            let ends = matches!(&first.command, Command::ChangeLimits { change, .. } if !change.sets());
            // An expired member may or may not have been removed: no waiter depends on it.
            prop_assert_eq!(second.after.at(world.now), first.after.at(world.now));
            match (first.outcome, second.outcome) {
                // An id that was removed cannot be removed again.
                (Outcome::Removed(_), second) => {
                    prop_assert_eq!(second, Outcome::Removed(Role::Nobody));
                }
                // A name that was forgotten cannot be forgotten again. A pause that was all that was known about its
                // name, or a pin, cannot be ended again.
                (Outcome::LimitsChanged(_), second) if ends => {
                    let known = first.outcome == second;
                    prop_assert!(known || second == Outcome::LimitsChanged(LimitsChanged::Unknown));
                }
                (first, second) => prop_assert_eq!(first, second),
            }
        }
    }

    #[test]
    fn invariant_6_a_holder_keeps_its_permit_for_the_promised_time(
        steps in vec(step(), 1..120),
    ) {
        let mut promised: BTreeMap<AcquisitionId, Option<Time>> = BTreeMap::new();
        watch(steps, |_, seen| {
            if let Command::Release { id, .. } = &seen.command {
                promised.remove(id);
            }
            // While nothing waits, an expired holder may stay.
            let matters = !seen.after.waiters.is_empty()
                || matches!(seen.command, Command::Renew { .. } | Command::Sweep);
            for (id, until) in &promised {
                let due = until.is_some_and(|until| until <= seen.now);
                let held = seen.after.holders.contains_key(id);
                prop_assert!(due || held, "{id} was promised {until:?}, at {:?}", seen.now);
                prop_assert!(!(matters && due && seen.before.holders.contains_key(id) && held
                    && !matches!(seen.outcome, Outcome::Held(_))),
                    "{id} holds beyond {until:?}, at {:?}", seen.now);
            }
            promised.retain(|id, _| seen.after.holders.contains_key(id));
            let answered = match (&seen.command, seen.outcome) {
                (Command::Enqueue { id, .. } | Command::Renew { id, .. },
                    Outcome::Held(held)) => Some((*id, held)),
                _ => None,
            };
            let granted = seen.effects.granted.iter().map(|(id, held, ())| (*id, *held));
            // A wake-up promises no more than the time to claim the permit.
            let woken = seen.woken.iter().map(|(id, held)| {
                let ends = seen.after.ends.get(id).map(|ends| *ends - seen.now);
                (*id, Held { valid_for: held.valid_for.into_iter().chain(ends).min(), ..*held })
            });
            let all = granted.chain(answered).chain(woken);
            for (id, held) in all.filter(|(id, _)| Some(*id) != seen.released()) {
                promised.insert(id, held.valid_for.map(|valid_for| seen.now + valid_for));
            }
            Ok(())
        })?;
    }

    #[test]
    fn invariant_7_nothing_is_left_when_everybody_has_released(steps in vec(step(), 1..120)) {
        let mut world = watch(steps, |_, _| Ok(()))?;
        for client in 0..3 {
            for number in 0..12 {
                world.take(Step::Release { who: Who { client, number }, hint: ReleaseHint::Nothing });
            }
        }
        prop_assert!(world.machine.is_empty());
        prop_assert!(!world.machine.rows.may_expire());
        prop_assert_eq!((world.machine.rows.row.holding, world.machine.waiting()), (0, 0));
        prop_assert_eq!((world.machine.units(), &world.machine.rows.numbers), (0, &Numbers::default()));
    }

    #[test]
    fn each_grant_is_reported_exactly_once(steps in vec(step(), 1..120)) {
        watch(steps, |_, seen| {
            let mut notified: Vec<_> = seen.woken.iter().map(|(id, _)| *id).collect();
            notified.extend(seen.effects.granted.iter().map(|(id, ..)| *id));
            // An id can be granted first and then released by the same command.
            notified.retain(|id| Some(*id) != seen.released());
            notified.sort_unstable();
            let moved_up = |id: &&AcquisitionId| {
                seen.after.holders.contains_key(id) && !seen.was_over(**id)
            };
            let mut promoted: Vec<_> = seen.before.waiters.iter().filter(moved_up).copied().collect();
            promoted.sort_unstable();
            prop_assert_eq!(notified, promoted);
            // A wake-up says what the store has, and only the sender's own grants are in the reply.
            for (id, held) in &seen.woken {
                prop_assert_eq!(seen.after.holders.get(id), Some(&held.fence));
            }
            for (id, held, ()) in &seen.effects.granted {
                prop_assert_eq!(seen.after.holders.get(id), Some(&held.fence));
                prop_assert_eq!(id.client(), seen.from);
            }
            Ok(())
        })?;
    }

    #[test]
    fn a_waiter_learns_that_another_client_has_removed_it(steps in vec(step(), 1..120)) {
        watch(steps, |world, seen| {
            let Some(id) = seen.after.waiters.last().copied() else { return Ok(()) };
            let Stage::Waiting { terms, .. } = world.machine.rows.members[&id].0.stage else {
                return Ok(());
            };
            for (from, is_another) in [(id.client(), false), (ClientId::from_bits(9), true)] {
                let (machine, out_of_reach) = (world.machine.clone(), BTreeSet::new());
                let mut world = World { machine, now: seen.now, out_of_reach };
                let removed = world.send(from, Command::Release { id, hint: ReleaseHint::Nothing });
                prop_assert_eq!(removed.outcome, Outcome::Removed(Role::Waiter));
                let renewed = |world: &mut World| {
                    world.send(id.client(), Command::Renew { id, terms, holds: true }).outcome
                };
                let waiter_lease = terms.waiter_lease().filter(|_| is_another);
                let learns = if waiter_lease.is_some() { Outcome::Cancelled } else { Outcome::Gone };
                prop_assert_eq!(renewed(&mut world), learns);
                if let Some(waiter_lease) = waiter_lease {
                    world.now = seen.now + waiter_lease;
                    prop_assert_eq!(renewed(&mut world), Outcome::Gone, "the mark has expired");
                }
            }
            Ok(())
        })?;
    }

    #[test]
    fn the_next_expiry_is_never_later_than_what_ends_next(steps in vec(step(), 1..120)) {
        watch(steps, |world, _| {
            let holders = world.machine.holders();
            let ends = holders.iter().filter_map(|row| row.member.ends()).min();
            let head = world.machine.waiters().next().and_then(|row| row.member.ends());
            prop_assert_eq!(world.machine.next_expiry(), ends.into_iter().chain(head).min());
            Ok(())
        })?;
    }

    #[test]
    fn the_first_is_granted_when_its_token_comes(steps in vec(step(), 1..120)) {
        watch(steps, |world, seen| {
            let Some(at) = world.machine.next_token(seen.now) else { return Ok(()) };
            let head = seen.after.waiters[0];
            let mut later = World {
                machine: world.machine.clone(),
                now: Time::from_micros(at.micros() - 1),
                out_of_reach: BTreeSet::new(),
            };
            // With a burst, a sweep may wait for more than one token. And a token may be returned.
            let waits = world.machine.limits().meter().is_some_and(|meter| meter.rate.burst == 1);
            if waits && world.machine.next_expiry().is_none_or(|ends| at <= ends) {
                let early = later.send(seen.from, Command::Sweep);
                prop_assert!(!early.after.holders.contains_key(&head), "before its token");
            }
            later.now = at;
            let lasts = |ends: &Time| at < *ends;
            if seen.after.ends.get(&head).is_none_or(lasts) {
                let then = later.send(seen.from, Command::Sweep);
                prop_assert!(then.after.holders.contains_key(&head), "not with its token");
            }
            Ok(())
        })?;
    }

    #[test]
    fn each_shortcut_has_the_effect_of_its_command(steps in vec(step(), 1..120)) {
        let mut world = World::new();
        for step in steps {
            let (mut machine, now) = (world.machine.clone(), world.now);
            let Some(seen) = world.take(step) else { continue };
            let outcome = match seen.command {
                Command::Enqueue { id, declared, terms, share: Share::ONE, .. }
                    if terms == Terms::default()
                        && declared.rate.is_none()
                        && machine.tag(id).is_none() =>
                {
                    let capacity = (declared.capacity, declared.is_new);
                    machine.hold_at_once(id, capacity, || now).map(Outcome::Held)
                }
                Command::Release { id, .. } => {
                    machine.remove_at_once(id).map(|(role, ())| Outcome::Removed(role))
                }
                _ => None,
            };
            if let Some(outcome) = outcome {
                prop_assert_eq!(outcome, seen.outcome);
                prop_assert!(seen.effects.is_empty() && seen.woken.is_empty());
                prop_assert_eq!(Members::of(&machine), seen.after);
                prop_assert_eq!(machine.limits(), world.machine.limits());
                prop_assert_eq!(machine.last_fence(), world.machine.last_fence());
            }
        }
    }

    #[test]
    fn a_queue_with_gaps_is_a_queue(places in vec((any::<bool>(), 0..64_usize), 1..400)) {
        let mut queue = Queue::default();
        let mut plain: Vec<(u64, AcquisitionId)> = Vec::new();
        for (number, (join, which)) in (0..).zip(places) {
            if join || plain.is_empty() {
                let id = Who { client: 0, number }.id();
                queue.join(number, id);
                plain.push((number, id));
            } else {
                let (place, _) = plain.remove(which % plain.len());
                queue.leave(place);
            }
            prop_assert_eq!(queue.len(), plain.len());
            prop_assert_eq!(queue.first_from(0), plain.first().copied());
            prop_assert!(queue.places.len() <= 2 * plain.len() + 64, "gaps pile up");
            for (before, (place, _)) in plain.iter().enumerate() {
                prop_assert_eq!(queue.before(*place), before);
                prop_assert_eq!(queue.first_from(place + 1), plain.get(before + 1).copied());
            }
        }
        let ids: Vec<_> = queue.iter().collect();
        prop_assert_eq!(ids, plain.iter().map(|(_, id)| *id).collect::<Vec<_>>());
    }
}
