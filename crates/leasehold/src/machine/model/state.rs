//! A state of the model: the store, the clients, and what is on its way between them.

use std::hash::{Hash, Hasher};

use super::*;

#[derive(Clone, Debug)]
pub(super) struct State {
    pub(super) terms: Terms,
    pub(super) broken: Option<Broken>,
    pub(super) ids: usize,
    pub(super) stragglers: bool,
    pub(super) heavy: bool,
    pub(super) now: Moment,
    pub(super) store: Arc<Store>,
    pub(super) clients: Vec<Client>,
    pub(super) wire: Vec<Message>,
    /// The grants that a client has believed in, not long ago: where there is a rate.
    pub(super) starts: Vec<(Fence, Time)>,
}

#[derive(Clone, PartialEq, Debug)]
pub(super) enum Message {
    Request { ask: Ask, id: AcquisitionId, sent: Moment, over: Over },
    Answer(Answer),
    WakeUp { id: AcquisitionId, held: Held, granted_at: Moment },
}

/// Which connection of its client a message goes over. Over one connection, nothing overtakes anything.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Over {
    Current,
    /// One that was replaced. The client does not know yet whether there will be an answer.
    Old,
    /// One that was replaced, or whose client died: nobody waits for an answer. A straggler.
    Closed,
}

/// What a client asks about an id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Ask {
    Enqueue,
    Renew,
    Release,
    /// The same, if it is known to hold: the store does not look for it in the queue.
    ReleaseHolder,
    /// The same, if nobody has seen the permit: its token goes back.
    ReleaseUnused,
}

impl Ask {
    pub(super) fn releases(self) -> bool {
        matches!(self, Self::Release | Self::ReleaseHolder | Self::ReleaseUnused)
    }
}

#[derive(Clone, PartialEq, Debug)]
pub(super) struct Answer {
    pub(super) ask: Ask,
    pub(super) id: AcquisitionId,
    pub(super) outcome: Outcome,
    /// Others of the same client that were granted by the way.
    pub(super) granted: Vec<(AcquisitionId, Held)>,
    pub(super) sent: Moment,
    pub(super) over: Over,
}

impl Message {
    /// None for a wake-up: it may be lost, and comes whenever it likes.
    pub(super) fn over(&self) -> Option<Over> {
        match self {
            Self::Request { over, .. } | Self::Answer(Answer { over, .. }) => Some(*over),
            Self::WakeUp { .. } => None,
        }
    }

    /// What is asked, or was.
    pub(super) fn ask(&self) -> Option<Ask> {
        match self {
            Self::Request { ask, .. } | Self::Answer(Answer { ask, .. }) => Some(*ask),
            Self::WakeUp { .. } => None,
        }
    }

    /// Whether somebody waits for what comes of it.
    pub(super) fn is_in_flight(&self) -> bool {
        matches!(self.over(), Some(Over::Current | Over::Old))
    }

    fn move_to(&mut self, to: Over) {
        match self {
            Self::Request { over, .. } | Self::Answer(Answer { over, .. }) => *over = to,
            Self::WakeUp { .. } => {}
        }
    }

    pub(super) fn id(&self) -> AcquisitionId {
        match self {
            Self::Request { id, .. }
            | Self::Answer(Answer { id, .. })
            | Self::WakeUp { id, .. } => *id,
        }
    }
}

/// Which of the clients an id belongs to, whether it lives or is a dead one that it took the place of.
pub(super) fn slot(id: AcquisitionId) -> usize {
    client::slot(id.client())
}

impl State {
    pub(super) fn put(&mut self, message: Message) {
        if !matches!(message, Message::WakeUp { .. }) || !self.wire.contains(&message) {
            self.wire.push(message);
        }
    }

    pub(super) fn take(&mut self, message: &Message) {
        if let Some(at) = self.wire.iter().position(|other| other == message) {
            self.wire.remove(at);
        }
    }

    pub(super) fn send(&mut self, slot: usize, ask: Ask, id: AcquisitionId) {
        self.clients[slot].sends(ask, id);
        self.put(Message::Request { ask, id, sent: self.now, over: Over::Current });
    }

    /// Whether no other message of the same kind is before it on the same connection.
    pub(super) fn is_next(&self, at: usize) -> bool {
        let same = |message: &Message| {
            let request = matches!(message, Message::Request { .. });
            (slot(message.id()), message.over(), request)
        };
        let message = &self.wire[at];
        !self.wire[..at].iter().any(|other| same(other) == same(message))
    }

    /// The connection is replaced. Without stragglers the old one is closed first, and then the client knows what was
    /// not answered.
    pub(super) fn disconnect(&mut self, world: &World, slot: usize) {
        let of = |message: &Message| {
            self::slot(message.id()) == slot && message.over() == Some(Over::Current)
        };
        if world.stragglers > 0 {
            let mut wire = std::mem::take(&mut self.wire);
            wire.iter_mut().filter(|message| of(message)).for_each(|own| own.move_to(Over::Old));
            self.wire = wire;
            return;
        }
        let (lost, wire) = std::mem::take(&mut self.wire).into_iter().partition(of);
        self.wire = wire;
        let lost: Vec<Message> = lost;
        for message in &lost {
            self.unanswered(world, message);
        }
    }

    /// The client learns that there will be no answer. A request may be applied all the same.
    pub(super) fn settle(&mut self, world: &World, message: &Message) {
        self.take(message);
        self.unanswered(world, message);
        if let Message::Request { .. } = message {
            let mut straggler = message.clone();
            straggler.move_to(Over::Closed);
            self.put(straggler);
        }
    }

    fn unanswered(&mut self, world: &World, message: &Message) {
        let now = self.now;
        if let (Some(ask), Some(client)) = (message.ask(), self.living(message.id())) {
            client.unanswered(world, ask, message.id(), now);
        }
    }

    /// A client dies. Its requests may be applied, and nobody hears of it.
    pub(super) fn crash(&mut self, slot: usize) {
        self.clients[slot].crash();
        let of = |message: &Message| self::slot(message.id()) == slot;
        self.wire.retain(|message| !of(message) || matches!(message, Message::Request { .. }));
        let own = self.wire.iter_mut().filter(|message| of(message));
        own.for_each(|message| message.move_to(Over::Closed));
    }

    /// The client of this id, unless it died.
    pub(super) fn living(&mut self, id: AcquisitionId) -> Option<&mut Client> {
        Some(&mut self.clients[slot(id)]).filter(|client| client.own_id == id.client())
    }

    pub(super) fn on_the_way(&self, slot: usize, over: Over) -> usize {
        let mine =
            |message: &&Message| message.over() == Some(over) && self::slot(message.id()) == slot;
        self.wire.iter().filter(mine).count()
    }

    /// Whether the client will hear of this id, or of what was asked of it.
    pub(super) fn is_in_flight(&self, id: AcquisitionId) -> bool {
        let concerns = |message: &&Message| match message {
            Message::Answer(answer) => {
                answer.id == id || answer.granted.iter().any(|(other, _)| *other == id)
            }
            message => message.id() == id,
        };
        self.wire.iter().filter(|message| message.is_in_flight()).any(|own| concerns(&own))
    }

    pub(super) fn is_being_renewed(&self, id: AcquisitionId) -> bool {
        let renews = |message: &&Message| message.ask() == Some(Ask::Renew) && message.id() == id;
        self.wire.iter().filter(|message| message.is_in_flight()).any(|own| renews(&own))
    }

    /// Every id of this client and of those it took the place of, that anybody still knows of, in order.
    pub(super) fn ids_of(
        &self,
        slot: usize,
        present: &[(AcquisitionId, &Member<()>)],
    ) -> Vec<AcquisitionId> {
        let mut ids: Vec<_> = self.clients[slot].ids().collect();
        let mut know =
            |id: AcquisitionId| ids.extend(Some(id).filter(|id| self::slot(*id) == slot));
        for (id, _) in present {
            know(*id);
        }
        for message in &self.wire {
            know(message.id());
            if let Message::Answer(answer) = message {
                answer.granted.iter().for_each(|(id, _)| know(*id));
            }
        }
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Whom the store has and would not drop at the next command, whatever it is.
    pub(super) fn present(&self) -> impl Iterator<Item = (AcquisitionId, &Member<()>)> {
        let now = self.store_time(self.now);
        let lasts = move |member: &Member<()>| member.ends().is_none_or(|ends| now < ends);
        let members = self.store.machine.members.iter().map(|(id, member)| (*id, member));
        members.filter(move |(_, member)| lasts(member))
    }

    /// Takes away what nobody would notice: a message that tells its client nothing, when no other is on its way
    /// that could change that, and that a dead one was taken for connected when none is known of any more. Losing
    /// a message is always possible, so that nothing is made up by this.
    pub(super) fn tidy(&mut self, world: &World) {
        self.drop_late();
        self.drop_repeated(world);
        let wire = std::mem::take(&mut self.wire);
        for message in &wire {
            if self.would_tell(world, message, &wire) {
                self.wire.push(message.clone());
            }
        }
        for slot in 0..self.clients.len() {
            if self.clients[slot].half_open {
                let present: Vec<_> = self.present().collect();
                let living = self.clients[slot].own_id;
                let ids = self.ids_of(slot, &present);
                self.clients[slot].half_open = ids.iter().any(|id| id.client() != living);
            }
        }
    }

    /// Requests of an old connection that were not applied in time never are.
    fn drop_late(&mut self) {
        let now = self.now;
        let clients = &self.clients;
        self.wire.retain(|message| match message {
            Message::Request { id, sent, over: Over::Closed, .. } => {
                clients[slot(*id)].own_id != id.client() || now <= *sent + STRAGGLES_FOR
            }
            _ => true,
        });
    }

    /// Wake-ups that are too old to be believed all say the same: to ask.
    fn drop_repeated(&mut self, world: &World) {
        if world.is(Broken::OldWakeUp) {
            return;
        }
        let (now, mut old) = (self.now, Vec::new());
        self.wire.retain(|message| match message {
            Message::WakeUp { id, held, granted_at }
                if world.valid_until(held, *granted_at, now) <= now =>
            {
                let first = !old.contains(id);
                old.push(*id);
                first
            }
            _ => true,
        });
    }

    fn would_tell(&self, world: &World, message: &Message, wire: &[Message]) -> bool {
        let client = &self.clients[slot(message.id())];
        let lives = client.own_id == message.id().client();
        match message {
            Message::Request { .. } => true,
            Message::WakeUp { id, .. } => {
                matches!(client.stage, ClientStage::Waiting(waiting) if waiting.id == *id)
            }
            Message::Answer(answer) => {
                let mine = wire.iter().filter(|other| slot(other.id()) == slot(answer.id));
                let alone = mine.count() == 1;
                let mut told = client.clone();
                told.answered(world, answer, self.now);
                let mut lost = client.clone();
                lost.unanswered(world, answer.ask, answer.id, self.now);
                lives && !(alone && told == *client && lost == *client)
            }
        }
    }

    /// Notes who has begun, and forgets what was long ago.
    pub(super) fn note_starts(&mut self, world: &World) {
        let Some(rate) = world.rate else { return };
        let horizon = Span::from_micros(rate.interval.micros() * u64::from(rate.burst));
        let now = self.store_time(self.now);
        let recent = |(_, at): &(Fence, Time)| now < *at + horizon;
        for client in &self.clients {
            if let ClientStage::Held { fence, .. } = client.stage
                && !self.starts.iter().any(|(own, _)| *own == fence)
            {
                let granted = self.store.grants.iter().find(|(own, _)| *own == fence);
                self.starts.extend(granted);
            }
        }
        self.starts.retain(recent);
        self.starts.sort_unstable_by_key(|(fence, _)| *fence);
        if !self.store.grants.iter().all(recent) {
            Arc::make_mut(&mut self.store).grants.retain(recent);
        }
    }

    /// Whether there were no more starts than the rate allows, in any time.
    pub(super) fn keeps_the_rate(&self, world: &World) -> bool {
        let Some(rate) = world.rate else { return true };
        let burst = rate.burst as usize;
        (0..self.starts.len()).all(|first| {
            let later = self.starts.iter().skip(first + burst);
            (1..).zip(later).all(|(more, (_, at))| {
                let least = Span::from_micros(rate.interval.micros() * more);
                self.starts[first].1 + least <= *at
            })
        })
    }

    /// How many units are believed to be held.
    pub(super) fn believed(&self, world: &World) -> u32 {
        let slots = (0..).zip(&self.clients).filter(|(_, client)| client.believes(self.now));
        slots.map(|(slot, _)| world.share(slot).weight).sum()
    }

    pub(super) fn believers(&self) -> impl Iterator<Item = &Client> {
        self.clients.iter().filter(|client| client.believes(self.now))
    }
}

impl PartialEq for State {
    fn eq(&self, other: &Self) -> bool {
        self.view() == other.view()
    }
}

impl Hash for State {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.view().hash(hasher);
    }
}
