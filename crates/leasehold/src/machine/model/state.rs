//! A state of the model: the store, the clients, and what is on its way between them.

use std::hash::{Hash, Hasher};

use super::*;

#[derive(Clone, Debug)]
pub(super) struct State {
    pub(super) terms: Terms,
    pub(super) broken: Option<Broken>,
    pub(super) now: Moment,
    pub(super) store: Arc<Store>,
    pub(super) clients: Vec<Client>,
    pub(super) wire: Vec<Message>,
}

#[derive(Clone, PartialEq, Debug)]
pub(super) enum Message {
    Request { ask: Ask, id: AcquisitionId, sent: Moment },
    Answer(Answer),
    WakeUp(AcquisitionId),
}

/// What a client asks about an id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Ask {
    Enqueue,
    Confirm,
    Renew,
    Release,
}

#[derive(Clone, PartialEq, Debug)]
pub(super) struct Answer {
    pub(super) ask: Ask,
    pub(super) id: AcquisitionId,
    pub(super) outcome: Outcome,
    /// Others of the same client that were granted by the way.
    pub(super) granted: Vec<(AcquisitionId, Held)>,
    pub(super) sent: Moment,
}

impl Message {
    pub(super) fn id(&self) -> AcquisitionId {
        match self {
            Self::Request { id, .. } | Self::Answer(Answer { id, .. }) | Self::WakeUp(id) => *id,
        }
    }
}

/// Which of the clients an id belongs to, whether it lives or is a dead one that it took the place of.
pub(super) fn slot(id: AcquisitionId) -> usize {
    client::slot(id.client())
}

impl State {
    pub(super) fn put(&mut self, message: Message) {
        if !self.wire.contains(&message) {
            self.wire.push(message);
        }
    }

    pub(super) fn take(&mut self, message: &Message) {
        self.wire.retain(|other| other != message);
    }

    /// The client of this id, unless it died.
    pub(super) fn living(&mut self, id: AcquisitionId) -> Option<&mut Client> {
        Some(&mut self.clients[slot(id)]).filter(|client| client.own_id == id.client())
    }

    pub(super) fn on_the_way(&self, slot: usize) -> usize {
        let mine = |message: &&Message| {
            !matches!(message, Message::WakeUp(_)) && self::slot(message.id()) == slot
        };
        self.wire.iter().filter(mine).count()
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

    fn would_tell(&self, world: &World, message: &Message, wire: &[Message]) -> bool {
        let client = &self.clients[slot(message.id())];
        let lives = client.own_id == message.id().client();
        match message {
            Message::Request { .. } => true,
            Message::WakeUp(id) => {
                matches!(client.stage, ClientStage::Waiting { id: own, .. } if own == *id)
            }
            Message::Answer(answer) => {
                let mine = wire.iter().filter(|other| slot(other.id()) == slot(answer.id));
                let alone = mine.count() == 1;
                let mut told = client.clone();
                told.answered(world, answer, self.now);
                lives && !(alone && told == *client)
            }
        }
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
