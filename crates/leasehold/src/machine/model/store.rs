//! The store's side of the model: the machine, and a watcher that checks what each command does.

use super::*;
use crate::machine::numbers::Numbers;

#[derive(Clone, Debug)]
pub(super) struct Store {
    pub(super) machine: Machine,
    /// The waiters, in the order in which the store answered that they wait. The watcher keeps this list itself,
    /// independently of the machine.
    pub(super) line: Vec<AcquisitionId>,
    newest_fence: Option<Fence>,
    /// Recent grants and their times. Used only where there is a rate.
    pub(super) grants: Vec<(Fence, Time)>,
    rated: bool,
    /// The rule that the last command broke.
    pub(super) wrong: Option<Wrong>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wrong {
    Limit,
    Paused,
    Order,
    LostWakeUp,
    Fence,
    Twice,
    Slots,
}

pub(super) fn fence(member: &Member) -> Option<Fence> {
    match member.stage {
        Stage::Holding { fence, .. } => Some(fence),
        Stage::Waiting { .. } => None,
    }
}

pub(super) fn pause() -> Steer {
    Steer::Pause { by: "an operator".into(), reason: None }
}

impl Store {
    pub(super) fn new(rated: bool) -> Self {
        let (line, grants) = (Vec::new(), Vec::new());
        let machine = Machine::new(0);
        Self { machine, line, newest_fence: None, grants, rated, wrong: None }
    }

    pub(super) fn knows(&self, id: AcquisitionId) -> bool {
        self.machine.rows.members.contains_key(&id)
    }

    /// Compares what a command did with what it was allowed to do.
    fn watch(
        &mut self,
        before: &Machine,
        asked: Option<(Ask, AcquisitionId)>,
        now: Time,
        in_reach: impl Fn(&AcquisitionId) -> bool,
    ) {
        let after = &self.machine;
        let member = |machine: &Machine, id: &AcquisitionId| {
            machine.rows.members.get(id).map(|(member, ())| *member)
        };
        let waits =
            |id: &AcquisitionId| member(after, id).is_some_and(|member| !member.is_holder());
        let fence_before = |id: &AcquisitionId| member(before, id).as_ref().and_then(fence);
        // The members that had not expired when the command arrived.
        let old = |id: &AcquisitionId| {
            let lasts = |member: &Member| member.ends().is_none_or(|ends| now < ends);
            member(before, id).filter(lasts)
        };
        self.wrong = None;

        // Invariant 1: a permit was granted only if one was free, and not during a pause. A steer grants what was free
        // before its change under the previous limits.
        let granted = |(id, (member, ())): (&AcquisitionId, &(Member, ()))| {
            member.is_holder() && fence(member) != fence_before(id)
        };
        if after.rows.members.iter().any(granted) {
            let (limits, was) = (after.limits(), before.limits());
            let capacity = match asked {
                Some(_) => limits.capacity(),
                None => limits.capacity().max(was.capacity()),
            };
            if after.units() > capacity {
                self.wrong = Some(Wrong::Limit);
            }
            if limits.paused().is_some() && (asked.is_some() || was.paused().is_some()) {
                self.wrong = Some(Wrong::Paused);
            }
        }

        // Invariant 2: if an id was granted a permit, no reachable waiter that was ahead of it still waits.
        self.line.retain(|id| old(id).is_some());
        for (new, (member, ())) in after.rows.members.iter() {
            if member.is_holder() && !old(new).is_some_and(|old| old.is_holder()) {
                let mut before_it = self.line.iter().take_while(|other| *other != new);
                if before_it.any(|other| waits(other) && in_reach(other)) {
                    self.wrong = Some(Wrong::Order);
                }
            }
        }
        self.line.retain(waits);
        if let Some((_, id)) = asked
            && waits(&id)
            && !self.line.contains(&id)
        {
            self.line.push(id);
        }

        // Invariant 3: every waiter before the first that does not fit is out of reach.
        let fits = |id: &&AcquisitionId| after.fits(after.rows.members[*id].0.weight(), now);
        if self.line.iter().take_while(fits).any(in_reach) {
            self.wrong = Some(Wrong::LostWakeUp);
        }

        // Invariant 4: every new fence is greater than all earlier ones.
        let minted = |(id, (member, ())): (&AcquisitionId, &(Member, ()))| {
            fence(member).filter(|new| fence_before(id) != Some(*new))
        };
        let mut minted: Vec<_> = after.rows.members.iter().filter_map(minted).collect();
        minted.sort_unstable();
        for fence in minted {
            if self.newest_fence >= Some(fence) {
                self.wrong = Some(Wrong::Fence);
            }
            self.newest_fence = Some(fence);
            if self.rated {
                self.grants.push((fence, now));
            }
        }

        // Invariant 5: no id is in two places, and an id that asks again keeps what it has.
        let members = || after.rows.members.values().map(|(member, ())| member);
        let holders = members().filter(|member| member.is_holder()).count();
        let places = after.rows.queue.iter().count();
        let weighs: u32 = members().filter(|own| own.is_holder()).map(Member::weight).sum();
        let once = holders == after.rows.row.holding as usize
            && holders + places == after.rows.members.len()
            && weighs == after.units();
        let kept = asked.is_none_or(|(ask, id)| {
            let had = old(&id).as_ref().and_then(fence);
            ask.releases() || had.is_none() || had == member(after, &id).as_ref().and_then(fence)
        });
        if !once || !kept || places != self.line.len() {
            self.wrong = Some(Wrong::Twice);
        }

        // Invariant 1: no two holders have the same slot number.
        let slots = after.holders().into_iter().filter_map(|row| row.slot_number);
        let mut slots: Vec<_> = slots.collect();
        slots.sort_unstable();
        if slots.windows(2).any(|pair| pair[0] == pair[1]) {
            self.wrong = Some(Wrong::Slots);
        }
    }
}

impl State {
    /// The store's clock. Its origin does not matter; here it is that of the world.
    pub(super) fn store_time(&self, now: Moment) -> Time {
        // If nothing may expire, time stands still.
        let stands_still = self.broken == Some(Broken::NoExpiry);
        Time::from_micros(if stands_still { 1 } else { now.micros() })
    }

    /// Whether the store finds a client that receives a wake-up for this id.
    fn reaches(&self, id: AcquisitionId) -> bool {
        let client = &self.clients[slot(id)];
        if client.own_id == id.client() { client.connected } else { client.half_open }
    }

    pub(super) fn serve(
        &mut self,
        world: &World,
        ask: Ask,
        id: AcquisitionId,
        (sent, over): (Moment, Over),
    ) -> Answer {
        let before = self.store.clone();
        let mut store = Store::clone(&before);
        if world.is(Broken::FencesByClock) {
            store.machine.rows.row.last_fence = 0;
        }
        if world.is(Broken::AskedAnew) && ask == Ask::Enqueue {
            let Ok(_) = store.machine.remove(id, Known::Nothing);
        }
        let mut woken = Vec::new();
        let mut effects = Effects::default();
        let now = self.store_time(self.now);
        let wake = &mut |id, held: &Held| {
            let heard = self.reaches(id) && !(world.is(Broken::NoHandOver) && ask.releases());
            woken.extend(heard.then_some((id, *held)));
            heard.into()
        };
        let confirm_within = CONFIRM_WITHIN;
        let from = id.client();
        let mut call =
            Circumstances { from: Some(from), now, confirm_within, wake, effects: &mut effects };
        let mut command = self.command(world, ask, id);
        if ask == Ask::ReleaseHolder {
            // As in the scripts: they do not look for a holder among the waiters.
            if store.machine.position(id).is_some() {
                command = Command::Sweep;
            }
        }
        let fences = store.machine.last_fence();
        let paused = store.machine.limits().paused().is_some() && world.is(Broken::NoPause);
        if paused {
            store.machine.rows.row.limits.steer(&Steer::Resume, now, fences);
        }
        if world.is(Broken::SlotsByCount) {
            store.machine.rows.numbers = Numbers::default();
            (0..store.machine.rows.row.holding).for_each(|_| {
                let next = store.machine.rows.numbers.lowest_free();
                store.machine.rows.numbers.take(next);
            });
        }
        if world.is(Broken::Returns)
            && let Some(meter) = store.machine.rows.row.limits.meter_mut()
        {
            meter.returns_from = 0;
        }
        let Ok(outcome) = store.machine.apply(&command, &mut call);
        if world.is(Broken::Overtaking) {
            store.machine.let_the_light_overtake(&mut call);
        }
        if paused {
            store.machine.rows.row.limits.steer(&pause(), now, fences);
        }
        if world.is(Broken::Lifo) {
            store.machine.let_the_last_be_first(&before.machine);
        }
        let in_reach = |other: &AcquisitionId| other.client() == from || self.reaches(*other);
        store.watch(&before.machine, Some((ask, id)), now, in_reach);
        self.store = Arc::new(store);
        let granted_at = self.now;
        for (id, held) in woken {
            // A dead client receives nothing, even if the store believes that it is connected.
            if self.living(id).is_some() && !world.is(Broken::NoBackstop) {
                self.put(Message::WakeUp { id, held, granted_at });
            }
        }
        let granted = effects.granted.into_iter().map(|(id, held, ())| (id, held));
        let granted = granted.filter(|(other, _)| *other != id).collect();
        Answer { ask, id, outcome, granted, sent, over }
    }

    /// An operator, which is not a client, changes the limits.
    pub(super) fn steer(&mut self, world: &World, steer: &Steer) {
        let before = self.store.clone();
        let mut store = Store::clone(&before);
        let (mut woken, mut effects) = (Vec::new(), Effects::default());
        let now = self.store_time(self.now);
        let wake = &mut |id, held: &Held| {
            let heard = self.reaches(id);
            woken.extend(heard.then_some((id, *held)));
            heard.into()
        };
        let (from, confirm_within) = (Some(ClientId::from_bits(1)), CONFIRM_WITHIN);
        let mut call = Circumstances { from, now, confirm_within, wake, effects: &mut effects };
        if world.is(Broken::NoGrantOnResume) {
            store.machine.rows.row.limits.steer(steer, now, store.machine.last_fence());
        } else {
            let command = Command::Steer { capacity: None, steer: steer.clone() };
            let Ok(_) = store.machine.apply(&command, &mut call);
        }
        store.watch(&before.machine, None, now, |other| self.reaches(*other));
        self.store = Arc::new(store);
        let granted_at = self.now;
        for (id, held) in woken {
            // A dead client receives nothing, even if the store believes that it is connected.
            if self.living(id).is_some() {
                self.put(Message::WakeUp { id, held, granted_at });
            }
        }
    }

    fn command(&self, world: &World, ask: Ask, id: AcquisitionId) -> Command {
        let terms = world.terms;
        match ask {
            Ask::Enqueue => {
                let capacity = world.capacity + u32::from(world.is(Broken::OneTooMany));
                let wait = true;
                // An operator's setting stays.
                let mut declared = Declared::capacity(capacity, !world.operator);
                declared.rate = world.rate.filter(|_| !world.is(Broken::NoRate));
                let share = world.share(slot(id));
                Command::Enqueue { id, declared, wait, terms, share, label: None }
            }
            Ask::Renew => Command::Renew { id, terms },
            Ask::Release | Ask::ReleaseHolder | Ask::ReleaseUnused => {
                let unused = ask == Ask::ReleaseUnused;
                let known = if unused { Known::Unused } else { Known::Nothing };
                let holders = self.store.machine.holders();
                let somebody = holders.first().map(|row| row.id);
                let anybody = world.is(Broken::NoOwnership) && !self.store.knows(id);
                let id = somebody.filter(|_| anybody).unwrap_or(id);
                Command::Release { id, known }
            }
        }
    }

    /// Whether the store would forget every member that stays silent, and every living client answers for all of its
    /// ids that the store has. An id that would expire anyway is no exception.
    pub(super) fn leaves_nothing(&self, world: &World) -> bool {
        let mut machine = self.store.machine.clone();
        let longest = world.terms.patience().unwrap_or(TICK);
        let mut call = Circumstances {
            from: Some(ClientId::from_bits(1)),
            now: self.store_time(self.now + longest),
            confirm_within: CONFIRM_WITHIN,
            wake: &mut |_, _| Reach::Silent,
            effects: &mut Effects::default(),
        };
        let Ok(_) = machine.apply(&Command::Sweep, &mut call);
        let forgotten = machine.is_empty() && !machine.rows.may_expire() && machine.waiting() == 0;
        let left = |id: AcquisitionId| {
            let client = &self.clients[slot(id)];
            let lives = client.own_id == id.client();
            lives && !client.answers_for(id) && !self.is_in_flight(id)
        };
        forgotten && !self.present().any(|(id, _)| left(id))
    }
}

impl Machine {
    /// Breaks the order: every waiter that fits is granted a permit, even if others wait ahead of it.
    fn let_the_light_overtake(&mut self, call: &mut Circumstances<'_>) {
        let order: Vec<_> = self.rows.queue.iter().collect();
        for id in order {
            let waiter = self.rows.members[&id].0;
            let Stage::Waiting { terms, share, .. } = waiter.stage else { continue };
            if self.fits(share.weight, call.now) {
                let own = Some(id.client()) == call.from;
                let Ok(_) = self.promote(id, &waiter, terms, share, own, call);
            }
        }
    }

    /// Breaks the order: a waiter that has just joined the queue moves to its head.
    fn let_the_last_be_first(&mut self, before: &Self) {
        let mut order: Vec<_> = self.rows.queue.iter().collect();
        if order.last().is_none_or(|last| before.position(*last).is_some()) {
            return;
        }
        order.rotate_right(1);
        let taken = self.rows.queue.places.iter_mut().filter(|(_, id)| id.is_some());
        for ((at, here), id) in taken.zip(order) {
            *here = Some(id);
            let stage = self.rows.members.get_mut(&id).map(|(member, ())| &mut member.stage);
            if let Some(Stage::Waiting { place, .. }) = stage {
                *place = *at;
            }
        }
    }
}
