//! The invariants of the machine, checked on random histories under injected time.
//!
//! A [`World`] sends commands of several clients, lets time pass and puts clients out of reach. It watches
//! the machine from outside, through outcomes and questions, and knows on its own who is queued in what
//! order and who was promised what. `scripts/break-the-rules` breaks one rule after the other and shows
//! that the test of its invariant fails.

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::ClientId;
use crate::clock::Span;

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
    Enqueue { who: Who, declared: Declared, wait: bool, terms: Terms },
    Steer { client: u64, capacity: Option<u32>, steer: Steer },
    Renew { who: Who, terms: Terms },
    Release { who: Who },
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

/// Mostly one capacity, so that queues grow; now and then another.
pub(crate) fn declared() -> impl Strategy<Value = Declared> {
    let capacity = prop_oneof![9 => Just(2_u32), 1 => 1..5_u32];
    (capacity, any::<bool>()).prop_map(|(capacity, is_new)| Declared { capacity, is_new })
}

/// Mostly a pause ends soon.
pub(crate) fn steer() -> impl Strategy<Value = Steer> {
    let reason = prop::option::of(Just("a reason with spaces".into()));
    prop_oneof![
        3 => (1..5_u32).prop_map(Steer::Declare),
        2 => (1..5_u32).prop_map(Steer::Pin),
        2 => Just(Steer::Unpin),
        2 => reason.prop_map(|reason| Steer::Pause { by: "an operator".into(), reason }),
        4 => Just(Steer::Resume),
        1 => Just(Steer::Forget),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (who(), declared(), prop::bool::weighted(0.9), terms())
            .prop_map(|(who, declared, wait, terms)| Step::Enqueue { who, declared, wait, terms }),
        2 => (0..3_u64, prop::option::of(1..5_u32), steer())
            .prop_map(|(client, capacity, steer)| Step::Steer { client, capacity, steer }),
        4 => (who(), terms()).prop_map(|(who, terms)| Step::Renew { who, terms }),
        4 => who().prop_map(|who| Step::Release { who }),
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
    /// Who was sent a wake-up and heard it.
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
    ends: BTreeMap<AcquisitionId, Time>,
}

impl Seen {
    /// Whether the time of this member was up when the command came.
    fn was_over(&self, id: AcquisitionId) -> bool {
        self.before.ends.get(&id).is_some_and(|ends| *ends <= self.now)
    }

    /// Whom the command itself removed.
    fn released(&self) -> Option<AcquisitionId> {
        match self.command {
            Command::Release { id, .. } => Some(id),
            _ => None,
        }
    }
}

impl Members {
    /// Without those whose time is up.
    fn at(&self, now: Time) -> Self {
        let lasts = |id: &AcquisitionId| self.ends.get(id).is_none_or(|ends| now < *ends);
        let mut own = self.clone();
        own.holders.retain(|id, _| lasts(id));
        own.waiters.retain(lasts);
        own.ends.retain(|_, ends| now < *ends);
        own
    }

    fn of(machine: &Machine) -> Self {
        let holders = machine.holders();
        let all = holders.iter().copied().chain(machine.waiters());
        Self {
            ends: all.filter_map(|row| Some((row.id, row.ends?))).collect(),
            holders: holders.iter().filter_map(|row| Some((row.id, row.fence?))).collect(),
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

    /// Takes a step, and answers what was seen if it was a command.
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
            Step::Enqueue { who, declared, wait, terms } => {
                let (id, label) = (who.id(), None);
                (who.client, Command::Enqueue { id, declared, wait, terms, label })
            }
            Step::Steer { client, capacity, steer } => (client, Command::Steer { capacity, steer }),
            Step::Renew { who, terms } => (who.client, Command::Renew { id: who.id(), terms }),
            Step::Release { who } => {
                (who.client, Command::Release { id: who.id(), known: Known::Nothing })
            }
        };
        Some(self.send(Who { client, number: 0 }.id().client(), command))
    }

    fn send(&mut self, from: ClientId, command: Command) -> Seen {
        let (limits, before) = (self.machine.limits().clone(), Members::of(&self.machine));
        let (mut effects, mut woken) = (Effects::default(), Vec::new());
        let outcome = self.machine.apply(
            &command,
            &mut Circumstances {
                from,
                now: self.now,
                confirm_within: Span::from_micros(50),
                wake: &mut |id, held| {
                    let heard = !self.out_of_reach.contains(&id.client());
                    woken.extend(heard.then_some((id, *held)));
                    heard
                },
                effects: &mut effects,
            },
        );
        let after = Members::of(&self.machine);
        Seen { command, outcome, effects, woken, from, now: self.now, limits, before, after }
    }

    fn reaches(&self, id: AcquisitionId, from: ClientId) -> bool {
        id.client() == from || !self.out_of_reach.contains(&id.client())
    }
}

/// Runs a random history and shows every command's doing to `check`.
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn invariant_1_nobody_is_granted_a_permit_beyond_the_capacity(steps in vec(step(), 1..120)) {
        watch(steps, |world, seen| {
            let granted = seen.after.holders.keys().any(|id| !seen.before.holders.contains_key(id));
            let held = seen.after.holders.len();
            let mut limits = vec![world.machine.limits()];
            // What was free before a change was granted under the limits before it.
            if let Command::Steer { .. } = seen.command {
                limits.push(&seen.limits);
            }
            let capacity = limits.iter().map(|own| own.capacity() as usize).max().unwrap();
            prop_assert!(!granted || held <= capacity, "{held} of {capacity} after a grant");
            let paused = limits.iter().all(|own| own.paused().is_some());
            prop_assert!(!granted || !paused, "a grant during a pause");
            Ok(())
        })?;
    }

    #[test]
    fn a_pin_counts_whatever_is_declared_and_the_newest_declaration_after_it(steps in vec(step(), 1..120)) {
        let (mut pinned, mut declared) = (None, 0);
        watch(steps, |world, seen| {
            match &seen.command {
                Command::Enqueue { declared: own, .. } if own.is_new || declared == 0 => {
                    declared = own.capacity;
                }
                Command::Steer { steer: Steer::Forget, .. }
                    if seen.outcome == Outcome::Steered(Steered::Done) =>
                {
                    (pinned, declared) = (None, 0);
                }
                Command::Steer { steer: Steer::Forget, .. } => {}
                Command::Steer { capacity, steer } => {
                    if declared == 0 {
                        declared = capacity.unwrap_or_default();
                    }
                    match steer {
                        _ if declared == 0 => {}
                        Steer::Declare(own) if pinned.is_none() => declared = *own,
                        Steer::Pin(own) => pinned = Some(*own),
                        Steer::Unpin => pinned = None,
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
    fn invariant_2_who_can_be_reached_is_granted_in_order(steps in vec(step(), 1..120)) {
        // The world's own idea of the queue: by when the machine said `Waiting`, not by how it keeps it.
        let mut queue: Vec<AcquisitionId> = Vec::new();
        watch(steps, |world, seen| {
            // Whoever came too late is gone, and if he comes back it is as somebody new.
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
            // A newcomer who was granted at once overtook everybody who still waits.
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
            let limits = world.machine.limits();
            let is_free = seen.after.holders.len() < limits.capacity() as usize;
            if is_free && limits.paused().is_none() {
                for id in &seen.after.waiters {
                    prop_assert!(!world.reaches(*id, seen.from), "{id} waits for a free permit");
                }
            }
            if seen.outcome == Outcome::Full {
                prop_assert!(!is_free || limits.paused().is_some());
            }
            Ok(())
        })?;
    }

    #[test]
    fn invariant_4_fences_strictly_increase(steps in vec(step(), 1..120)) {
        let mut last = None;
        watch(steps, |_, seen| {
            if let Command::Steer { steer: Steer::Forget, .. } = seen.command
                && seen.outcome == Outcome::Steered(Steered::Done)
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
            // What has a fence keeps it.
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
            let forgets = matches!(first.command, Command::Steer { steer: Steer::Forget, .. });
            // What is over may or may not be there: nobody waits for it.
            prop_assert_eq!(second.after.at(world.now), first.after.at(world.now));
            match (first.outcome, second.outcome) {
                // What was removed is not there to be removed again.
                (Outcome::Removed(_), second) => {
                    prop_assert_eq!(second, Outcome::Removed(Role::Nobody));
                }
                // Nor to be forgotten.
                (Outcome::Steered(_), second) if forgets => {
                    prop_assert!(matches!(second, Outcome::Steered(_)));
                }
                // How many hold besides it may have been found to be less.
                (Outcome::Held(first), Outcome::Held(second)) => {
                    let slot_number = first.slot_number;
                    prop_assert_eq!(first, Held { slot_number, ..second });
                }
                (first, second) => prop_assert_eq!(first, second),
            }
        }
    }

    #[test]
    fn invariant_6_a_holder_is_not_let_down_before_the_time_it_was_promised(
        steps in vec(step(), 1..120),
    ) {
        let mut promised: BTreeMap<AcquisitionId, Option<Time>> = BTreeMap::new();
        watch(steps, |_, seen| {
            if let Command::Release { id, .. } = &seen.command {
                promised.remove(id);
            }
            // Nobody minds a holder whose time is up while nobody waits.
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
            let told = match (&seen.command, seen.outcome) {
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
            let all = granted.chain(told).chain(woken);
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
                world.take(Step::Release { who: Who { client, number } });
            }
        }
        prop_assert!(world.machine.is_empty());
        prop_assert!(!world.machine.is_timed());
        prop_assert_eq!((world.machine.holding, world.machine.waiting()), (0, 0));
    }

    #[test]
    fn who_is_granted_is_told_exactly_once(steps in vec(step(), 1..120)) {
        watch(steps, |_, seen| {
            let mut told: Vec<_> = seen.woken.iter().map(|(id, _)| *id).collect();
            told.extend(seen.effects.granted.iter().map(|(id, ..)| *id));
            // Granted first, released by the command itself, and so to nobody's surprise gone.
            told.retain(|id| Some(*id) != seen.released());
            told.sort_unstable();
            let moved_up = |id: &&AcquisitionId| {
                seen.after.holders.contains_key(id) && !seen.was_over(**id)
            };
            let mut promoted: Vec<_> = seen.before.waiters.iter().filter(moved_up).copied().collect();
            promoted.sort_unstable();
            prop_assert_eq!(told, promoted);
            // A wake-up says what the store has; and only the sender's own are told in the reply.
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
    fn the_next_expiry_is_never_later_than_what_ends_next(steps in vec(step(), 1..120)) {
        watch(steps, |world, _| {
            let holders = world.machine.holders();
            let ends = holders.iter().filter_map(|row| row.ends).min();
            let head = world.machine.waiters().next().and_then(|row| row.ends);
            prop_assert_eq!(world.machine.next_expiry(), ends.into_iter().chain(head).min());
            Ok(())
        })?;
    }

    #[test]
    fn what_is_done_at_once_is_what_the_command_does(steps in vec(step(), 1..120)) {
        let mut world = World::new();
        for step in steps {
            let (mut machine, now) = (world.machine.clone(), world.now);
            let Some(seen) = world.take(step) else { continue };
            let outcome = match seen.command {
                Command::Enqueue { id, declared, terms, .. }
                    if terms == Terms::default() && machine.kept(id).is_none() =>
                {
                    machine.hold_at_once(id, declared, || now).map(Outcome::Held)
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
                plain.push((queue.join(id), id));
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
