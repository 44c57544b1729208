//! What the lock of one name guards, and the rules by which it is kept.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::outbox::{MAX_BATCH, Outbox};
use super::ticket::{After, Grant, Ticket};
use crate::backend::Store;
use crate::backend::memory::Kept;
use crate::clock::{Moment, Span};
use crate::id::IdMap;
use crate::machine::{Command, Effects, Held, Outcome, Role, Terms};
use crate::{AcquisitionId, Error, LossReason};

mod away;
mod signs;

/// How often a name with waiters asks whether a wake-up was lost.
///
/// Not more seldom, even where no other program takes part: the answer also tells when the next lease ends. That may
/// be one that was granted since, by another client and for less time than any that we knew of, as to a waiter that
/// never claims its permit. Until we have asked we would sleep through its end.
const BACKSTOP: Span = Span::from_millis(1000);

pub(crate) struct Desk {
    pub(super) store: Store,
    pub(super) closed: bool,
    pub(super) outbox: Outbox,
    /// Signs of life that are due. They never queue behind a batch.
    pub(super) renewals: Vec<Command>,
    /// When the engine's thread looks at this desk next, as far as it has been told.
    pub(super) looked_at: Option<Moment>,
    /// For a store that is away. A store that is here keeps the tickets itself. By the whole id: there may be one of
    /// another client's, which is being released here.
    tickets: IdMap<AcquisitionId, Entry>,
    /// For a store that is away: who waits there, in the order of its queue, so that the backstop can ask about
    /// the first. Not the order in which they asked: whoever was taken for dead queues again.
    waiting: BTreeMap<u64, AcquisitionId>,
    last_place: u64,
    /// Whether the agenda has a backstop.
    backstopped: bool,
    agenda: BTreeSet<(Moment, Chore)>,
    /// What the last command did to others, in a store that is here; empty in between.
    effects: Effects<Kept>,
    sweep_at: Option<Moment>,
    /// Ids that were finished while what the store knows of them is not known. They are released again
    /// with the next sign of life.
    doubtful: Vec<AcquisitionId>,
    /// What went wrong with a release that nobody waits for.
    pub(super) failed_release: Option<Error>,
}

struct Entry {
    ticket: Arc<Ticket>,
    /// Where it stands in `waiting`, once the store has said that it waits.
    place: Option<u64>,
    renew_at: Option<Moment>,
    ends_at: Option<Moment>,
}

/// What the engine's thread does about one desk when its time has come.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Chore {
    /// The acquire has waited long enough.
    GiveUp(AcquisitionId),
    /// The holder may not believe in its permit any longer.
    End(AcquisitionId),
    /// The store wants a sign of life.
    Renew(AcquisitionId),
    /// Somebody's time is up in the store.
    Sweep,
    /// A wake-up may have been lost.
    Backstop,
    /// What the store knows of some ids is not known.
    Doubts,
}

impl Desk {
    pub(super) fn new(store: Store) -> Self {
        Self {
            store,
            closed: false,
            outbox: Outbox::default(),
            renewals: Vec::new(),
            looked_at: None,
            tickets: IdMap::default(),
            waiting: BTreeMap::new(),
            last_place: 0,
            backstopped: false,
            agenda: BTreeSet::new(),
            effects: Effects::default(),
            sweep_at: None,
            doubtful: Vec::new(),
            failed_release: None,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        let here = match &self.store {
            Store::Here(store) => store.machine().is_empty(),
            Store::Away(_) => true,
        };
        here && self.tickets.is_empty() && self.doubtful.is_empty() && self.outbox.is_idle()
    }

    /// Whether there may be something to tell the engine's thread.
    #[inline]
    pub(super) fn has_errands(&self) -> bool {
        !self.agenda.is_empty() || matches!(self.store, Store::Away(_))
    }

    /// When the engine's thread has to be told to come by, if earlier than it means to.
    pub(super) fn next_look(&mut self) -> Option<Moment> {
        let &(due, _) = self.agenda.first()?;
        if self.looked_at.is_some_and(|at| at <= due) {
            return None;
        }
        self.looked_at = Some(due);
        Some(due)
    }

    pub(super) fn ticket(&self, id: AcquisitionId) -> Option<&Arc<Ticket>> {
        match &self.store {
            Store::Here(store) => store.machine().kept(id)?.as_ref(),
            Store::Away(_) => self.tickets.get(&id).map(|entry| &entry.ticket),
        }
    }

    /// From now on the engine sees to this ticket.
    pub(super) fn register(&mut self, ticket: &Arc<Ticket>) {
        let id = ticket.id;
        if let Some(at) = ticket.gives_up_at {
            self.agenda.insert((at, Chore::GiveUp(id)));
        }
        match &mut self.store {
            Store::Here(store) => {
                if let Some(kept) = store.kept_mut(id) {
                    *kept = Some(ticket.clone());
                }
            }
            Store::Away(_) => {
                let (ticket, place) = (ticket.clone(), None);
                let entry = Entry { ticket, place, renew_at: None, ends_at: None };
                self.tickets.insert(id, entry);
            }
        }
    }

    fn strike(&mut self, at: Option<Moment>, chore: Chore) {
        if let Some(at) = at {
            self.agenda.remove(&(at, chore));
        }
    }

    /// Everything this client waits for and holds.
    pub(super) fn own_ids(&self) -> Vec<AcquisitionId> {
        // Waiters first, the last one first: nobody is granted a permit only to lose it again.
        let (mut waiters, holders): (Vec<_>, Vec<_>) = match &self.store {
            Store::Here(store) => (
                store.machine().waiters().map(|row| row.id).collect(),
                store.machine().holders().iter().map(|row| row.id).collect(),
            ),
            Store::Away(_) => {
                let mut ids: Vec<_> = self.tickets.values().map(|entry| entry.ticket.id).collect();
                ids.sort_unstable();
                ids.into_iter().partition(|id| self.tickets[id].ticket.is_waiting())
            }
        };
        waiters.reverse();
        waiters.extend(holders);
        waiters
    }

    /// Whether an id is held, for who has no ticket to ask.
    pub(super) fn check(&self, id: AcquisitionId) -> Result<(), LossReason> {
        let held = match &self.store {
            Store::Here(store) => store.machine().holds(id),
            Store::Away(_) => self.ticket(id).is_some(),
        };
        match held {
            true => Ok(()),
            false if self.closed => Err(LossReason::Closed),
            false => Err(LossReason::Released),
        }
    }

    /// Lets go of all tickets but those that a release has yet to be told to.
    pub(super) fn abandon(&mut self) -> Vec<Arc<Ticket>> {
        let unless_releasing = |ticket: &Arc<Ticket>| !ticket.is_releasing();
        match &mut self.store {
            Store::Here(store) => store.forget_everyone(),
            Store::Away(_) => {
                let tickets = self.tickets.values().map(|entry| entry.ticket.clone());
                let held: Vec<_> = tickets.filter(unless_releasing).collect();
                held.iter().filter_map(|ticket| self.forget(ticket.id)).collect()
            }
        }
    }

    /// A permit, a place in the queue or neither, if the store is here.
    #[inline]
    pub(super) fn enqueue_here(
        &mut self,
        id: AcquisitionId,
        capacity: u32,
        wait: bool,
        terms: Terms,
        keep: impl FnOnce(Option<&Held>) -> Kept,
        after: &mut After,
    ) -> Option<Outcome> {
        let Store::Here(store) = &mut self.store else { return None };
        let outcome = store.enqueue(id, capacity, wait, terms, keep, &mut self.effects);
        self.settle_here(after);
        Some(outcome)
    }

    /// Removes an id: at once if the store is here, with the next batch if it is away. Then there is no
    /// role to tell yet. The engine no longer sees to its ticket.
    #[inline]
    pub(super) fn remove(
        &mut self,
        id: AcquisitionId,
        after: &mut After,
    ) -> (Option<Role>, Option<Arc<Ticket>>) {
        let Store::Here(store) = &mut self.store else {
            if self.ticket(id).is_some_and(|ticket| ticket.is_releasing()) {
                return (None, None);
            }
            let ticket = self.forget(id);
            let confirmed = ticket.as_ref().is_some_and(|ticket| ticket.is_held());
            self.outbox.push(Command::Release { id, confirmed });
            return (None, ticket);
        };
        let (role, ticket) = store.release(id, &mut self.effects);
        if let Some(ticket) = &ticket {
            self.strike(ticket.gives_up_at, Chore::GiveUp(id));
        }
        self.settle_here(after);
        (Some(role), ticket)
    }

    fn sweep(&mut self, after: &mut After) {
        let Store::Here(store) = &mut self.store else {
            return self.outbox.push(Command::Sweep);
        };
        store.sweep(&mut self.effects);
        self.settle_here(after);
    }

    /// What a command did to others, in a store that is here. First who lost a permit, then who got one,
    /// so that no two ever believe in the same.
    #[inline]
    fn settle_here(&mut self, after: &mut After) {
        if !self.effects.is_empty() {
            self.settle_effects(after);
        }
        if let Store::Here(store) = &self.store
            && let Some(delay) = store.next_expiry()
        {
            self.sweep_in(delay, Moment::now());
        }
    }

    fn settle_effects(&mut self, after: &mut After) {
        let Self { effects, agenda, .. } = self;
        for (_, ticket) in &effects.expired {
            if let Some(ticket) = ticket {
                ticket.lose(LossReason::TtlEnded, after);
            }
        }
        effects.expired.clear();
        for (id, held, ticket) in &effects.granted {
            if let (Some(ticket), Some(fence)) = (ticket, held.fence) {
                if let Some(at) = ticket.gives_up_at {
                    agenda.remove(&(at, Chore::GiveUp(*id)));
                }
                let until = held.valid_for.map_or(Moment::NEVER, |span| Moment::now() + span);
                ticket.grant(Grant::new(held, fence), until, after);
            }
        }
        effects.granted.clear();
    }

    /// Does everything that is due.
    pub(super) fn do_chores(&mut self, now: Moment, after: &mut After) {
        while let Some(&(at, chore)) = self.agenda.first().filter(|(at, _)| *at <= now) {
            self.agenda.remove(&(at, chore));
            match chore {
                Chore::GiveUp(id) => self.give_up(id, after),
                Chore::End(id) => self.end(id, now, after),
                Chore::Renew(id) => self.renew_from(id, now),
                Chore::Sweep => {
                    self.sweep_at = None;
                    self.sweep(after);
                }
                Chore::Doubts => self.release_doubtful(),
                #[cfg(feature = "broken")]
                Chore::Backstop if crate::broken::is("wakeup") => {}
                Chore::Backstop => {
                    self.ask_oldest_from(0);
                    self.backstopped = !self.waiting.is_empty();
                    if self.backstopped {
                        self.agenda.insert((now + BACKSTOP, Chore::Backstop));
                    }
                }
            }
        }
    }

    fn give_up(&mut self, id: AcquisitionId, after: &mut After) {
        let Some(ticket) = self.ticket(id).cloned() else { return };
        let limit = ticket.gives_up_at.unwrap_or(Moment::NEVER);
        let limit = limit.saturating_since(ticket.queued_at);
        let name = ticket.semaphore.named.name().to_string();
        if ticket.fail(Error::TimedOut { what: "permit", name, limit, full: None }, after) {
            self.remove(id, after);
        }
    }

    fn end(&mut self, id: AcquisitionId, now: Moment, after: &mut After) {
        let Some(entry) = self.tickets.get_mut(&id) else { return };
        entry.ends_at = None;
        let ticket = entry.ticket.clone();
        let valid_until = ticket.valid_until();
        if now < valid_until {
            return self.schedule_end(id, valid_until);
        }
        ticket.lose(ticket.why_ended(), after);
        self.remove(id, after);
    }

    fn sweep_in(&mut self, delay: Span, now: Moment) {
        let at = now + delay;
        if self.sweep_at.is_some_and(|earlier| earlier <= at) {
            return;
        }
        if let Some(later) = self.sweep_at.replace(at) {
            self.agenda.remove(&(later, Chore::Sweep));
        }
        self.agenda.insert((at, Chore::Sweep));
    }

    /// Whether a command that waits in the outbox still makes sense.
    pub(super) fn wants(&self, command: &Command) -> bool {
        match command {
            Command::Enqueue { id, .. } | Command::Confirm { id, .. } => {
                self.ticket(*id).is_some_and(|ticket| ticket.is_waiting())
            }
            Command::Renew { id, .. } => self.ticket(*id).is_some(),
            Command::Release { .. } | Command::Sweep => true,
        }
    }
}

/// Spreads numbers evenly; nothing secret.
fn scatter(number: u64) -> u64 {
    let mixed = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
