//! A state of the model: the store, the clients, and the messages between them.

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
    /// Recent grants that a client has believed in. Used only where there is a rate.
    pub(super) starts: Vec<(Fence, Time)>,
}

#[derive(Clone, PartialEq, Debug)]
pub(super) enum Message {
    Request { ask: Ask, id: AcquisitionId, sent: Moment, over: Over },
    Answer(Answer),
    WakeUp { id: AcquisitionId, held: Held, granted_at: Moment },
}

/// The connection of its client that a message uses. Over one connection, no message overtakes another.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Over {
    Current,
    /// It was replaced. The client does not know yet whether an answer will arrive.
    Old,
    /// It was replaced, or its client died. No client waits for an answer. Such a message is a straggler.
    Closed,
}

/// A client's request about an id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Ask {
    Enqueue,
    Renew,
    Release,
    /// A release of an id that is known to hold. The store does not look for it in the queue.
    ReleaseHolder,
    /// A release of a permit that no caller has seen. Its token is returned.
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
    /// Other acquisitions of the same client that the command granted.
    pub(super) granted: Vec<(AcquisitionId, Held)>,
    pub(super) sent: Moment,
    pub(super) over: Over,
}

impl Message {
    /// `None` for a wake-up, which may be lost and may arrive at any time.
    pub(super) fn over(&self) -> Option<Over> {
        match self {
            Self::Request { over, .. } | Self::Answer(Answer { over, .. }) => Some(*over),
            Self::WakeUp { .. } => None,
        }
    }

    /// The request that the message is or answers.
    pub(super) fn ask(&self) -> Option<Ask> {
        match self {
            Self::Request { ask, .. } | Self::Answer(Answer { ask, .. }) => Some(*ask),
            Self::WakeUp { .. } => None,
        }
    }

    /// Whether the client waits for the message, or for its answer.
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

/// The place of the client that minted an id, whether that client lives or has died there.
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

    /// Replaces the connection. Without stragglers the old one is closed first, so the client knows which requests were
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

    /// Lets the client learn that there will be no answer. A request may still be applied.
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

    /// A client dies. Its requests may still be applied, but no client receives the answers.
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

    /// Whether the client will still receive an answer about this id.
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

    /// Every id of this client, and of the clients that died in its place, that is still known anywhere. In order.
    pub(super) fn ids_of(
        &self,
        slot: usize,
        present: &[(AcquisitionId, &Member)],
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

    /// The members that have not expired, so that no command would remove them first.
    pub(super) fn present(&self) -> impl Iterator<Item = (AcquisitionId, &Member)> {
        let now = self.store_time(self.now);
        let lasts = move |member: &Member| member.ends().is_none_or(|ends| now < ends);
        let members =
            self.store.machine.rows.members.iter().map(|(id, (member, ()))| (*id, member));
        members.filter(move |(_, member)| lasts(member))
    }

    /// Removes what makes no difference: a message that would not change its client, if no other message in flight
    /// could change that; and the record that a dead client is still connected, once none of its ids is known any more.
    /// A message can always be lost, so removing one creates no new behaviour.
    pub(super) fn tidy(&mut self, world: &World) {
        self.drop_late();
        self.drop_repeated(world);
        let wire = std::mem::take(&mut self.wire);
        for message in &wire {
            if self.would_change_client(world, message, &wire) {
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

    /// Drops requests of an old connection that were not applied in time.
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

    /// Drops repeated wake-ups that are too old to be believed: they all say only that the client should ask.
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

    fn would_change_client(&self, world: &World, message: &Message, wire: &[Message]) -> bool {
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

    /// Records which clients have started to hold, and forgets old starts.
    pub(super) fn note_starts(&mut self, world: &World) {
        let Some(rate) = world.rate else { return };
        let horizon = rate.all().max(rate.period);
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

    /// Whether no period had more starts than the rate allows, and no shorter time more than tokens arrived.
    pub(super) fn keeps_the_rate(&self, world: &World) -> bool {
        let Some(rate) = world.rate else { return true };
        let (burst, count) = (rate.burst as usize, usize::try_from(rate.count).unwrap());
        (0..self.starts.len()).all(|first| {
            let later = self.starts.iter().skip(first + burst);
            (1..).zip(later).all(|(more, (_, at))| {
                let least = Span::from_micros(rate.interval().micros() * more);
                self.starts[first].1 + least <= *at
            }) && self
                .starts
                .iter()
                .skip(first)
                .nth(count)
                .is_none_or(|(_, at)| self.starts[first].1 + rate.period <= *at)
        })
    }

    /// The number of units that clients believe they hold.
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
