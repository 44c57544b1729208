//! A state of the model: the store, the clients, and the messages between them.

use std::hash::{Hash, Hasher};

use super::*;

#[derive(Clone, Debug)]
pub(super) struct State {
    pub(super) rules: Rules,
    pub(super) now: Moment,
    pub(super) store: Arc<Store>,
    pub(super) clients: Vec<Arc<Client>>,
    pub(super) wire: Vec<Message>,
    /// Recent grants that a client has relied on. Used only where there is a rate.
    pub(super) starts: Vec<(Fence, Time)>,
}

/// The properties of the world that its states depend on.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::struct_excessive_bools)] // each is a property of its own
pub(super) struct Rules {
    pub(super) terms: Terms,
    pub(super) broken: Option<&'static str>,
    pub(super) ids: usize,
    pub(super) stragglers: bool,
    pub(super) heavy: bool,
    pub(super) acquisitions: usize,
    /// See [`Scale`](crate::client_core::Scale).
    pub(super) is_pipelined: bool,
    pub(super) is_rated: bool,
}

#[derive(Clone, PartialEq, Debug)]
pub(super) enum Message {
    Request(Arc<Request>),
    Answer(Arc<Answer>),
    /// `granted_at` is a time of the client's clock. The client knows it exactly, which is the worst that its bound on
    /// the age of a wake-up allows.
    WakeUp {
        id: AcquisitionId,
        held: Held,
        granted_at: Moment,
    },
    /// Another client has removed this waiter.
    Cancelled {
        id: AcquisitionId,
    },
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

#[derive(Clone, PartialEq, Debug)]
pub(super) struct Request {
    pub(super) from: ClientId,
    pub(super) commands: Vec<Command>,
    /// When it was sent, on the client's clock.
    pub(super) sent: Moment,
    pub(super) over: Over,
}

#[derive(Clone, PartialEq, Debug)]
pub(super) struct Answer {
    pub(super) to: Request,
    pub(super) outcomes: Vec<Outcome>,
    /// Other acquisitions of the same client that the commands granted.
    pub(super) granted: Vec<(AcquisitionId, Held)>,
}

impl Answer {
    /// As the core receives it. The model fires the timer of the periodic query at any time, so nothing is said about
    /// the next lease that ends and the next token.
    pub(super) fn reply(&self) -> Reply {
        let granted = self.granted.iter().map(|(id, held)| (*id, *held, ())).collect();
        let effects = Effects { granted, ..Effects::default() };
        Reply { outcomes: self.outcomes.clone(), effects, ..Reply::default() }
    }
}

impl Message {
    /// The request that the message is or answers. `None` for a message that may be lost and may arrive at any time.
    pub(super) fn request(&self) -> Option<&Request> {
        match self {
            Self::Request(request) => Some(request),
            Self::Answer(answer) => Some(&answer.to),
            Self::WakeUp { .. } | Self::Cancelled { .. } => None,
        }
    }

    pub(super) fn over(&self) -> Option<Over> {
        self.request().map(|request| request.over)
    }

    /// Whether the client waits for the message, or for its answer.
    pub(super) fn is_in_flight(&self) -> bool {
        matches!(self.over(), Some(Over::Current | Over::Old))
    }

    fn move_to(&mut self, to: Over) {
        match self {
            Self::Request(request) => Arc::make_mut(request).over = to,
            Self::Answer(answer) => Arc::make_mut(answer).to.over = to,
            Self::WakeUp { .. } | Self::Cancelled { .. } => {}
        }
    }

    pub(super) fn client(&self) -> ClientId {
        match self {
            Self::WakeUp { id, .. } | Self::Cancelled { id } => id.client(),
            Self::Request(request) => request.from,
            Self::Answer(answer) => answer.to.from,
        }
    }

    pub(super) fn slot(&self) -> usize {
        client::slot(self.client())
    }

    /// The ids that the message mentions.
    pub(super) fn ids(&self) -> impl Iterator<Item = AcquisitionId> {
        let alone = match self {
            Self::WakeUp { id, .. } | Self::Cancelled { id } => Some(*id),
            Self::Request(_) | Self::Answer(_) => None,
        };
        let commands = self.request().into_iter().flat_map(|request| &request.commands);
        let granted = match self {
            Self::Answer(answer) => answer.granted.as_slice(),
            _ => &[],
        };
        let granted = granted.iter().map(|(id, _)| *id);
        alone.into_iter().chain(commands.filter_map(Command::id)).chain(granted)
    }

    /// The enqueues of a request that was not answered yet.
    pub(super) fn enqueues(&self) -> impl Iterator<Item = AcquisitionId> {
        let commands = match self {
            Self::Request(request) => request.commands.as_slice(),
            _ => &[],
        };
        let enqueues = commands.iter().filter(|command| matches!(command, Command::Enqueue { .. }));
        enqueues.filter_map(Command::id)
    }
}

/// The place of the client that minted an id, whether that client lives or has died there.
pub(super) fn slot(id: AcquisitionId) -> usize {
    client::slot(id.client())
}

/// The clock of every client at this time. It runs at half the speed: while a permit is valid, it falls behind by the
/// whole margin, which is half of every lease of the model.
pub(super) fn local(now: Moment) -> Moment {
    Moment::from_micros(now.micros() / 2)
}

impl State {
    pub(super) fn local(&self) -> Moment {
        local(self.now)
    }

    pub(super) fn client(&mut self, slot: usize) -> &mut Client {
        Arc::make_mut(&mut self.clients[slot])
    }

    pub(super) fn put(&mut self, message: Message) {
        if message.request().is_some() || !self.wire.contains(&message) {
            self.wire.push(message);
        }
    }

    pub(super) fn take(&mut self, message: &Message) {
        if let Some(at) = self.wire.iter().position(|other| other == message) {
            self.wire.remove(at);
        }
    }

    /// Takes the commands of a client, as its sender does.
    pub(super) fn pack(&mut self, world: &World, slot: usize, urgency: Urgency) -> Option<Request> {
        let now = self.local();
        let client = self.client(slot);
        let (from, over) = (client.own_id, Over::Current);
        let commands = client.take(world, urgency, now);
        // No two requests are sent in the same microsecond.
        let requests = self.wire.iter().filter(|message| message.slot() == slot);
        let others = requests.filter_map(Message::request).map(|request| request.sent);
        let last = others.chain(self.clients[slot].core.sent()).max();
        let earliest = now.minus(Span::from_micros(SENDS));
        let sent = last.map_or(earliest, |last| earliest.max(last + Span::from_micros(1)));
        let twice = |(at, command): (usize, &Command)| {
            commands[..at].iter().any(|other| other.id() == command.id() && same(other, command))
        };
        if commands.iter().enumerate().any(twice) {
            Arc::make_mut(&mut self.store).wrong = Some(Wrong::SentTwice);
        }
        (!commands.is_empty()).then_some(Request { from, commands, sent, over })
    }

    pub(super) fn send(&mut self, world: &World, slot: usize, urgency: Urgency) {
        if let Some(request) = self.pack(world, slot, urgency) {
            self.put(Message::Request(Arc::new(request)));
        }
    }

    /// Whether no other message of the same kind is before it on the same connection.
    pub(super) fn is_next(&self, at: usize) -> bool {
        let same = |message: &Message| {
            let request = matches!(message, Message::Request(_));
            (message.slot(), message.over(), request)
        };
        let message = &self.wire[at];
        !self.wire[..at].iter().any(|other| same(other) == same(message))
    }

    /// Replaces the connection. Without stragglers the old one is closed first, so the client knows which requests were
    /// not answered. It learns that in any order.
    pub(super) fn disconnect(&mut self, world: &World, slot: usize, reversed: bool) {
        let of =
            |message: &Message| message.slot() == slot && message.over() == Some(Over::Current);
        if world.stragglers > 0 {
            let mut wire = std::mem::take(&mut self.wire);
            wire.iter_mut()
                .filter(|message| of(message))
                .for_each(|message| message.move_to(Over::Old));
            self.wire = wire;
            return;
        }
        let (lost, wire) = std::mem::take(&mut self.wire).into_iter().partition(of);
        self.wire = wire;
        let mut lost: Vec<Message> = lost;
        if reversed {
            lost.reverse();
        }
        for message in &lost {
            self.unanswered(message);
        }
    }

    pub(super) fn reconnected(&mut self, slot: usize) {
        let now = self.local();
        let client = self.client(slot);
        client.connected = true;
        client.reconnected(now);
    }

    /// Lets the client learn that there will be no answer. A request may still be applied.
    pub(super) fn end_request(&mut self, message: &Message) {
        self.take(message);
        self.unanswered(message);
        if let Message::Request(_) = message {
            let mut straggler = message.clone();
            straggler.move_to(Over::Closed);
            self.put(straggler);
        }
    }

    fn unanswered(&mut self, message: &Message) {
        let now = self.local();
        if let (Some(request), Some(client)) = (message.request(), self.living(message.client())) {
            client.unanswered(&request.commands, request.sent, now);
        }
    }

    /// A client dies. Its requests may still be applied, but no client receives the answers.
    pub(super) fn crash(&mut self, world: &World, slot: usize) {
        self.client(slot).die(world.stragglers > 0);
        let of = |message: &Message| message.slot() == slot;
        self.wire.retain(|message| !of(message) || matches!(message, Message::Request(_)));
        let requests = self.wire.iter_mut().filter(|message| of(message));
        requests.for_each(|message| message.move_to(Over::Closed));
    }

    /// This client, unless it died.
    pub(super) fn living(&mut self, id: ClientId) -> Option<&mut Client> {
        let client = &mut self.clients[client::slot(id)];
        (client.own_id == id).then(|| Arc::make_mut(client))
    }

    pub(super) fn on_the_way(&self, slot: usize, over: Over) -> usize {
        let mine = |message: &&Message| message.over() == Some(over) && message.slot() == slot;
        self.wire.iter().filter(mine).count()
    }

    /// Whether the client will still receive an answer about this id.
    pub(super) fn is_in_flight(&self, id: AcquisitionId) -> bool {
        let in_flight = self.wire.iter().filter(|message| message.is_in_flight());
        in_flight.flat_map(Message::ids).any(|other| other == id)
    }

    /// Every id of this client, and of the clients that died in its place, that is still known anywhere. In order.
    pub(super) fn ids_of(&self, slot: usize, present: &[MemberView]) -> Vec<AcquisitionId> {
        let mut ids: Vec<_> = self.clients[slot].core.ids().collect();
        let members = present.iter().map(|member| member.id);
        let messages = self.wire.iter().flat_map(Message::ids);
        ids.extend(members.chain(messages).filter(|id| self::slot(*id) == slot));
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// The members that have not expired, so that no command would remove them first.
    pub(super) fn present(&self) -> impl Iterator<Item = MemberView> {
        let now = self.store_time();
        let lasts = move |member: &MemberView| member.ends().is_none_or(|ends| now < ends);
        self.store.machine.members().filter(lasts)
    }

    /// Removes what makes no difference: messages that would not change their client; and the record that a dead client
    /// is still connected, once none of its ids is known any more. A message can always be lost, so removing one creates
    /// no new behaviour.
    ///
    /// A wake-up for an id that its client has released is removed, too. The core ignores it for five seconds, and then
    /// repeats the release. The simulation covers that.
    pub(super) fn tidy(&mut self) {
        self.drop_late();
        self.drop_repeated();
        let clients = &self.clients;
        self.wire.retain(|message| {
            let client = &clients[message.slot()];
            let lives = client.own_id == message.client();
            match message {
                Message::Request(_) => true,
                Message::WakeUp { id, .. } => lives && client.core.waits(*id),
                Message::Cancelled { id } => lives && client.usage(*id).is_some(),
                Message::Answer(_) => lives,
            }
        });
        for slot in 0..self.clients.len() {
            if self.clients[slot].half_open {
                let present: Vec<_> = self.present().collect();
                let living = self.clients[slot].own_id;
                let ids = self.ids_of(slot, &present);
                self.client(slot).half_open = ids.iter().any(|id| id.client() != living);
            }
        }
        let now = self.store_time();
        if self.store.cancelled.iter().any(|(_, until)| *until <= now) {
            Arc::make_mut(&mut self.store).cancelled.retain(|(_, until)| now < *until);
        }
    }

    /// Drops requests of an old connection that were not applied in time.
    fn drop_late(&mut self) {
        let now = self.local();
        let clients = &self.clients;
        self.wire.retain(|message| match message {
            Message::Request(request) if request.over == Over::Closed => {
                let lives = clients[message.slot()].own_id == request.from;
                !lives || now <= request.sent + local_span(STRAGGLES_FOR) + Span::from_micros(SENDS)
            }
            _ => true,
        });
    }

    /// Drops repeated wake-ups that are too old to be trusted: they all say only that the client should query.
    fn drop_repeated(&mut self) {
        if self.rules.broken.is_some() {
            return;
        }
        let (terms, now, mut old) = (self.rules.terms, self.local(), Vec::new());
        self.wire.retain(|message| match message {
            Message::WakeUp { id, held, granted_at }
                if held.valid_until(terms, *granted_at) <= now =>
            {
                let first = !old.contains(id);
                old.push(*id);
                first
            }
            _ => true,
        });
    }

    /// Records which clients have started to hold, and forgets old starts.
    pub(super) fn note_starts(&mut self, world: &World) {
        let Some(rate) = world.rate else { return };
        let horizon = rate.all().max(rate.period);
        let now = self.store_time();
        let recent = |(_, at): &(Fence, Time)| now < *at + horizon;
        for client in &self.clients {
            for (_, fence) in client.holders() {
                if !self.starts.iter().any(|(other, _)| *other == fence) {
                    let granted = self.store.grants.iter().find(|(other, _)| *other == fence);
                    self.starts.extend(granted);
                }
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

    /// The number of units that clients rely on.
    pub(super) fn relied_on(&self, world: &World) -> u32 {
        self.relying().map(|(slot, _)| world.share(slot).weight).sum()
    }

    /// The permits that clients rely on, each with the place of its client.
    pub(super) fn relying(&self) -> impl Iterator<Item = (usize, Use)> {
        let now = self.local();
        let uses = self.clients.iter().enumerate();
        uses.flat_map(|(slot, client)| client.uses.iter().map(move |usage| (slot, *usage)))
            .filter(move |(_, usage)| usage.is_valid(now))
    }

    /// Whether the store has every permit that a client relies on.
    pub(super) fn agrees(&self) -> bool {
        self.relying().all(|(_, usage)| {
            let fence = usage.held.map(|(fence, _)| fence);
            self.present().any(|member| member.id == usage.id && member.fence == fence)
        })
    }
}

/// The most requests that a client sends in one step of the clock.
const SENDS: u64 = 100;

/// A length of time on the client's clock.
pub(super) fn local_span(span: Span) -> Span {
    span.divided_by(2)
}

fn same(one: &Command, other: &Command) -> bool {
    std::mem::discriminant(one) == std::mem::discriminant(other)
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
