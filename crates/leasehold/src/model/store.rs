//! The store's side of the model: the machine, and a watcher that checks what each command does.

use super::*;

#[derive(Clone, Debug)]
pub(super) struct Store {
    pub(super) machine: Machine,
    /// The waiters, in the order in which the store answered that they wait. The watcher keeps this list itself,
    /// independently of the machine.
    pub(super) queue: Vec<AcquisitionId>,
    newest_fence: Option<Fence>,
    /// Recent grants and their times. Used only where there is a rate.
    pub(super) grants: Vec<(Fence, Time)>,
    rated: bool,
    /// Waiters that an operator has removed while their clients knew that they waited, each until its client may have
    /// to take it for lost.
    pub(super) cancelled: Vec<(AcquisitionId, Time)>,
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
    /// A client sends the same command about one id twice in one request.
    SentTwice,
    /// A client has sent its lost enqueues again in another order.
    Resent,
    /// A waiter that an operator removed is in the queue again.
    CameBack,
}

pub(super) fn pause() -> LimitChange {
    LimitChange::Pause { by: "an operator".into(), reason: None }
}

/// The id of an operator, which has no connection.
const OPERATOR: ClientId = ClientId::from_bits(1);

impl Store {
    pub(super) fn new(rated: bool) -> Self {
        let machine = Machine::new(0);
        let (queue, grants, cancelled) = (Vec::new(), Vec::new(), Vec::new());
        Self { machine, queue, newest_fence: None, grants, rated, cancelled, wrong: None }
    }

    pub(super) fn knows(&self, id: AcquisitionId) -> bool {
        self.machine.member(id).is_some()
    }

    /// Compares what a command did with what it was allowed to do.
    fn watch(
        &mut self,
        before: &Machine,
        command: &Command,
        now: Time,
        in_reach: impl Fn(&AcquisitionId) -> bool,
    ) {
        let after = &self.machine;
        let asked = command.id();
        let members: Vec<_> = after.members().collect();
        let earlier: Vec<_> = before.members().collect();
        let find = |all: &[MemberView], id: AcquisitionId| {
            all.iter().find(|member| member.id == id).copied()
        };
        let waits =
            |id: &AcquisitionId| find(&members, *id).is_some_and(|member| !member.is_holder());
        // The members that had not expired when the command arrived.
        let old = |id: AcquisitionId| {
            find(&earlier, id).filter(|member| member.ends().is_none_or(|ends| now < ends))
        };
        let fence_before = |id| find(&earlier, id).and_then(|member| member.fence);
        let granted =
            |member: &&MemberView| member.is_holder() && member.fence != fence_before(member.id);

        // Invariant 1: a permit was granted only if one was free, and not during a pause. A change grants what was free
        // before its change under the previous limits.
        let weighs: u32 =
            members.iter().filter(|member| member.is_holder()).map(|member| member.weight).sum();
        if members.iter().any(|member| granted(&member)) {
            let (limits, was) = (after.limits(), before.limits());
            let changes_limits = matches!(command, Command::ChangeLimits { .. });
            let capacity = if changes_limits {
                limits.capacity().max(was.capacity())
            } else {
                limits.capacity()
            };
            if weighs > capacity {
                self.wrong = Some(Wrong::Limit);
            }
            if limits.paused.is_some() && (!changes_limits || was.paused.is_some()) {
                self.wrong = Some(Wrong::Paused);
            }
        }

        // Invariant 2: if an id was granted a permit, no reachable waiter that was ahead of it still waits.
        self.queue.retain(|id| old(*id).is_some());
        for new in members.iter().filter(|member| member.is_holder()) {
            if !old(new.id).is_some_and(|member| member.is_holder()) {
                let mut before_it = self.queue.iter().take_while(|other| **other != new.id);
                if before_it.any(|other| waits(other) && in_reach(other)) {
                    self.wrong = Some(Wrong::Order);
                }
            }
        }
        self.queue.retain(waits);
        if let Some(id) = asked
            && waits(&id)
            && !self.queue.contains(&id)
        {
            self.queue.push(id);
        }

        // Invariant 3: every waiter before the first that does not fit is out of reach.
        let limits = after.limits();
        let has_token = limits.meter().is_none_or(|meter| meter.is_free(now));
        let open = limits.paused.is_none() && has_token;
        let room = limits.capacity().saturating_sub(weighs);
        let fits = |id: &&AcquisitionId| {
            open && find(&members, **id).is_some_and(|member| member.weight <= room)
        };
        if self.queue.iter().take_while(fits).any(in_reach) {
            self.wrong = Some(Wrong::LostWakeUp);
        }

        // Invariant 4: every new fence is greater than all earlier ones.
        let mut minted: Vec<_> =
            members.iter().filter(granted).filter_map(|member| member.fence).collect();
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

        // Invariant 5: no id is in two places, and an id that is enqueued or renewed again keeps what it has.
        let places = after.waiters().count();
        let holders = members.iter().filter(|member| member.is_holder()).count();
        let once = holders + places == members.len() && weighs == after.units();
        let releases = matches!(command, Command::Release { .. });
        let keeps_fence = asked.is_none_or(|id| {
            let had = old(id).and_then(|member| member.fence);
            releases || had.is_none() || had == find(&members, id).and_then(|member| member.fence)
        });
        if !once || !keeps_fence || places != self.queue.len() {
            self.wrong = Some(Wrong::Twice);
        }

        // Invariant 1: no two holders have the same slot number.
        let mut slots: Vec<_> = members.iter().filter_map(|member| member.slot_number).collect();
        slots.sort_unstable();
        if slots.windows(2).any(|pair| pair[0] == pair[1]) {
            self.wrong = Some(Wrong::Slots);
        }
    }
}

impl State {
    /// The store's clock. Its origin does not matter; here it is that of the world.
    pub(super) fn store_time(&self) -> Time {
        Time::from_micros(self.now.micros())
    }

    /// Whether the store finds a client that receives a wake-up for this id.
    fn reaches(&self, id: AcquisitionId) -> bool {
        let client = &self.clients[slot(id)];
        if client.own_id == id.client() { client.connected } else { client.half_open }
    }

    /// Applies the commands of a request, one after the other.
    pub(super) fn serve(&mut self, request: &Request) -> Answer {
        let mut answer = Answer { to: request.clone(), outcomes: Vec::new(), granted: Vec::new() };
        let mut effects = Effects::default();
        for command in &request.commands {
            self.check_order(command);
            let outcome = self.apply(request.from, command, &mut effects);
            answer.outcomes.push(outcome);
        }
        let granted = effects.granted.into_iter().map(|(id, held, ())| (id, held));
        answer.granted = granted.collect();
        answer
    }

    /// Checks that the enqueues of one client arrive in the order in which its users asked, however often they are
    /// sent again.
    fn check_order(&mut self, command: &Command) {
        let Command::Enqueue { id, .. } = *command else { return };
        let now = self.store_time();
        let mut wrong = None;
        if self.store.cancelled.iter().any(|(other, until)| *other == id && now < *until) {
            wrong = Some(Wrong::CameBack);
        }
        let Some(client) = self.living(id.client()) else { return };
        if client.uses.iter().any(|usage| usage.id < id && !usage.applied) {
            wrong = Some(Wrong::Resent);
        }
        if let Some(usage) = client.uses.iter_mut().find(|usage| usage.id == id) {
            usage.applied = true;
        }
        if wrong.is_some() {
            Arc::make_mut(&mut self.store).wrong = wrong;
        }
    }

    fn apply(&mut self, from: ClientId, command: &Command, effects: &mut Effects) -> Outcome {
        let before = self.store.clone();
        let mut store = Store::clone(&before);
        let mut woken = Vec::new();
        let now = self.store_time();
        let wake = &mut |id, held: &Held| {
            let is_reached = self.reaches(id);
            woken.extend(is_reached.then_some((id, *held)));
            is_reached.into()
        };
        let confirm_within = CONFIRM_WITHIN;
        let mut call = Circumstances { from: Some(from), now, confirm_within, wake, effects };
        let outcome = match command {
            // As in the scripts: they do not look for a holder among the waiters.
            Command::Release { id, hint: ReleaseHint::Held { .. } }
                if store.machine.position(*id).is_some() =>
            {
                let Ok(_) = store.machine.apply(&Command::Sweep, &mut call);
                Outcome::Removed(Role::Nobody)
            }
            command => {
                let Ok(outcome) = store.machine.apply(command, &mut call);
                outcome
            }
        };
        let in_reach = |other: &AcquisitionId| other.client() == from || self.reaches(*other);
        store.watch(&before.machine, command, now, in_reach);
        self.store = Arc::new(store);
        let granted_at = self.local();
        for (id, held) in woken {
            // A dead client receives nothing, even if the store believes that it is connected.
            if self.living(id.client()).is_some() {
                self.put(Message::WakeUp { id, held, granted_at });
            }
        }
        outcome
    }

    /// An operator, which is not a client, changes the limits.
    pub(super) fn change_limits(&mut self, change: &LimitChange) {
        let command = Command::ChangeLimits { capacity: None, change: change.clone() };
        self.apply(OPERATOR, &command, &mut Effects::default());
    }

    /// An operator removes a waiter by its id. The store sends a message to its client.
    pub(super) fn cancel(&mut self, world: &World, id: AcquisitionId) {
        // If the outcome of an enqueue is not known, the waiter may be in the queue once more.
        let is_certain = self.clients[slot(id)].core.is_answered(id)
            && !self.wire.iter().flat_map(Message::enqueues).any(|other| other == id);
        let command = Command::Release { id, hint: ReleaseHint::Nothing };
        self.apply(OPERATOR, &command, &mut Effects::default());
        if let (true, Some(waiter_lease)) = (is_certain, world.terms.waiter_lease()) {
            let until = self.store_time() + waiter_lease;
            Arc::make_mut(&mut self.store).cancelled.push((id, until));
        }
        if self.reaches(id) && self.living(id.client()).is_some() {
            self.put(Message::Cancelled { id });
        }
    }

    /// Whether the store would forget every member that stays silent, and every living client answers for all of its
    /// ids that the store has. An id that would expire anyway is no exception.
    pub(super) fn leaves_nothing(&self, world: &World) -> bool {
        let mut machine = self.store.machine.clone();
        let longest = world.terms.waiter_lease().unwrap_or(TICK);
        let mut call = Circumstances {
            from: Some(OPERATOR),
            now: self.store_time() + longest,
            confirm_within: CONFIRM_WITHIN,
            wake: &mut |_, _| Reach::Silent,
            effects: &mut Effects::default(),
        };
        let Ok(_) = machine.apply(&Command::Sweep, &mut call);
        let forgotten = machine.is_empty() && !machine.rows.may_expire() && machine.waiting() == 0;
        let left = |id: AcquisitionId| {
            let client = &self.clients[slot(id)];
            let lives = client.own_id == id.client();
            lives && !client.core.answers_for(id) && !self.is_in_flight(id)
        };
        forgotten && !self.present().any(|member| left(member.id))
    }
}
