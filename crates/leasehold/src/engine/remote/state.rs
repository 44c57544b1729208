//! The state of one name of a remote store in this client, and the transitions that need no answer.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use crate::backend::Destination;
use crate::clock::{Moment, Span};
use crate::engine::Core;
use crate::engine::in_process::timed_out;
use crate::engine::life::Life;
use crate::engine::ticket::{After, Ticket};
use crate::engine::timing::Place;
use crate::id::IdMap;
use crate::machine::{Command, Declared, Known, Share, Terms};
use crate::semaphore::Declaration;
use crate::{AcquisitionId, Error};

/// How long, and how many, answered releases are remembered. Replicas are rarely further behind.
const RECENT: Span = Span::from_millis(5000);
const MOST_RECENT: usize = 1024;

/// When `unsent` has this many commands, those that are no longer wanted are removed from it.
pub(super) const CLEAN_UP_FROM: usize = 1024;

pub(super) struct State {
    pub(super) core: Arc<Core>,
    /// The server that serves the name, as far as this client knows.
    pub(super) to: Destination,
    pub(super) closed: bool,
    pub(super) acquisitions: IdMap<AcquisitionId, Acquisition>,
    pub(super) releases: IdMap<AcquisitionId, Unreleased>,
    /// The last ids that ended in the store, each with the moment when this client learnt it. If another server takes
    /// over, it may lack these releases, and then they are repeated. At most [`MOST_RECENT`], of [`RECENT`].
    pub(super) recent: VecDeque<(Moment, AcquisitionId)>,
    /// When another server last took over, as far as this client knows.
    pub(super) taken_over: Option<Moment>,
    /// The commands that have to be sent, in order. Those whose outcome is unknown come first, each with the moment
    /// when it was sent, in the order in which they were sent. The others have [`Moment::NEVER`].
    pub(super) unsent: VecDeque<(Moment, Want)>,
    /// Holders whose renewal has to be sent.
    pub(super) renewals: VecDeque<AcquisitionId>,
    /// Whether this name is in the sender's line: for `unsent`, and for `renewals`.
    pub(super) in_line: (bool, bool),
    pub(super) in_flight: usize,
    /// Whether the name rests before it sends again, because the store could not serve it just now.
    pub(super) rests: bool,
    /// Since when the store has not been able to serve the name, although it serves others.
    pub(super) unserved: Option<Moment>,
    /// The waiters in the order of the store's queue, so that the client can ask about the first one. That is not the
    /// order in which they were first enqueued: a waiter that expired in the store is queued again.
    pub(super) waiting: BTreeMap<u64, AcquisitionId>,
    pub(super) last_place: u64,
    pub(super) timers: BTreeSet<(Moment, Timer)>,
    /// When the engine's thread fires the timer of this name.
    pub(super) timer_at: Option<Moment>,
    /// When to send the next periodic query about the first waiter.
    pub(super) ask_at: Option<Moment>,
    /// What the store last answered about our first waiter, and when.
    pub(super) place_of_first: Option<(AcquisitionId, Place, Moment)>,
    /// When the token arrives that the first waiter in the queue waits for, if that waiter is ours.
    pub(super) token_at: Option<Moment>,
    /// The error of a release that no caller waits for.
    pub(super) failed_release: Option<Error>,
    pub(super) warned_of_short_lease: bool,
    /// The longest lease of all acquisitions so far.
    pub(super) longest_lease: Option<Span>,
}

/// One acquisition that waits or holds.
pub(super) struct Acquisition {
    pub(super) ticket: Arc<Ticket>,
    /// The life of its enqueue.
    pub(super) life: Life,
    /// Whether the store has answered any command about it.
    pub(super) known: bool,
    /// Whether one of its enqueues may have been applied, or may still be applied, without an answer.
    pub(super) doubtful: bool,
    /// Which of its commands are in `unsent`.
    pub(super) wants: Wants,
    /// Since when a renewal is waiting to be sent or answered.
    pub(super) renewal: Option<Moment>,
    /// Whether silence makes the connection suspect: see [`crate::engine::timing`].
    pub(super) silence_is_suspect: bool,
    /// Its place in `waiting`, once the store has answered that it waits.
    pub(super) place: Option<u64>,
    /// When the client began to hold the permit.
    pub(super) held_since: Option<Moment>,
    pub(super) renew_at: Option<Moment>,
    pub(super) ends_at: Option<Moment>,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Wants {
    pub(super) enqueue: bool,
    pub(super) renewal: bool,
}

/// A release that is not answered yet.
pub(super) struct Unreleased {
    pub(super) life: Life,
    pub(super) known: Known,
    /// See [`Acquisition::doubtful`].
    pub(super) doubtful: bool,
    /// Whether an answer about the id arrived after the release was sent, so that the id is released once more.
    pub(super) again: bool,
    /// How often the store has refused the release.
    pub(super) refused: u32,
    /// The ticket that waits for the outcome, and until when.
    pub(super) ticket: Option<(Arc<Ticket>, Moment)>,
    /// By then the store must have expired the id. `None` if it never expires.
    pub(super) until: Option<Moment>,
}

/// A command that has to be sent. The command itself is created when it is taken, from the state at that moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Want {
    Enqueue(AcquisitionId),
    Renew(AcquisitionId),
    Release(AcquisitionId),
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Timer {
    /// The acquire has reached its time limit.
    GiveUp(AcquisitionId),
    /// The holder must no longer rely on its permit.
    End(AcquisitionId),
    /// A renewal is due, or was not answered.
    Renew(AcquisitionId),
    /// A lease may have ended in the store, or a wake-up may have been lost, so the client queries the first waiter.
    Ask,
    /// The caller of a release has waited long enough.
    ReleaseUnanswered(AcquisitionId),
    /// The id is released once more, unless the store must have expired it.
    ReleaseAgain(AcquisitionId),
}

impl State {
    pub(super) fn new(core: Arc<Core>, to: Destination) -> Self {
        Self {
            core,
            to,
            closed: false,
            acquisitions: IdMap::default(),
            releases: IdMap::default(),
            recent: VecDeque::new(),
            taken_over: None,
            unsent: VecDeque::new(),
            renewals: VecDeque::new(),
            in_line: (false, false),
            in_flight: 0,
            rests: false,
            unserved: None,
            waiting: BTreeMap::new(),
            last_place: 0,
            timers: BTreeSet::new(),
            timer_at: None,
            ask_at: None,
            place_of_first: None,
            token_at: None,
            failed_release: None,
            warned_of_short_lease: false,
            longest_lease: None,
        }
    }

    pub(super) fn is_settled(&self) -> bool {
        self.in_flight == 0 && self.unsent.is_empty()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.is_settled() && self.acquisitions.is_empty() && self.releases.is_empty()
    }

    pub(super) fn add(&mut self, ticket: &Arc<Ticket>, life: Life) {
        if let Some(at) = ticket.gives_up_at {
            self.timers.insert((at, Timer::GiveUp(ticket.id)));
        }
        self.longest_lease = self.longest_lease.max(ticket.semaphore.terms.lease);
        let acquisition = Acquisition {
            life,
            known: life == Life::Answered,
            doubtful: false,
            wants: Wants::default(),
            renewal: None,
            silence_is_suspect: false,
            place: None,
            held_since: None,
            renew_at: None,
            ends_at: None,
            ticket: ticket.clone(),
        };
        self.acquisitions.insert(ticket.id, acquisition);
    }

    /// Removes the acquisition from this client. Nothing is sent.
    pub(super) fn forget(&mut self, id: AcquisitionId) -> Option<Acquisition> {
        self.remove_waiting(id);
        let acquisition = self.acquisitions.remove(&id)?;
        self.cancel_timer(acquisition.renew_at, Timer::Renew(id));
        self.cancel_timer(acquisition.ends_at, Timer::End(id));
        self.cancel_timer(acquisition.ticket.gives_up_at, Timer::GiveUp(id));
        Some(acquisition)
    }

    /// Ends the acquisition in this client, and in the store if the store may know it.
    pub(super) fn end(&mut self, id: AcquisitionId) -> Option<Arc<Ticket>> {
        let Acquisition { ticket, life, doubtful, .. } = self.forget(id)?;
        let was_seen = ticket.was_seen();
        // The store knows a permit that was seen, even if no answer to its enqueue has arrived: a wake-up and a renewal
        // may have reported it.
        if was_seen || life.needs_release() {
            let terms = ticket.semaphore.terms;
            let known = if !was_seen {
                Known::Unused
            } else if ticket.is_held()
                && ticket.share == Share::ONE
                && !doubtful
                && life == Life::Answered
            {
                Known::Held { limited: terms.ttl.is_some() }
            } else {
                Known::Nothing
            };
            self.add_release(id, terms, known, doubtful);
        }
        Some(ticket)
    }

    pub(super) fn add_release(
        &mut self,
        id: AcquisitionId,
        terms: Terms,
        known: Known,
        doubtful: bool,
    ) {
        let until = expired_by(terms);
        let (life, again, refused, ticket) = (Life::Unsent, false, 0, None);
        let release = Unreleased { life, known, doubtful, again, refused, ticket, until };
        self.releases.insert(id, release);
        self.want(Want::Release(id));
    }

    /// Makes sure that the id is released, whatever was sent before. No task of this client waits for the id any more,
    /// but the store may know it.
    pub(super) fn ensure_released(&mut self, id: AcquisitionId, doubtful: bool) {
        if let Some(release) = self.releases.get_mut(&id) {
            release.again |= release.life == Life::Sent;
            release.doubtful |= doubtful;
            // The id may be in the queue again, and its time to expire starts again.
            if release.known != Known::Unused {
                release.known = Known::Nothing;
            }
            let until = expired_by(Terms { lease: self.longest_lease, ttl: None });
            release.until = release.until.and(until);
            return;
        }
        let terms = Terms { lease: self.longest_lease, ttl: None };
        self.add_release(id, terms, Known::Unused, doubtful);
    }

    /// Remembers an id that has ended in the store.
    ///
    /// Older ones are removed only here. So during an outage, what was recent when it began stays recent.
    pub(super) fn ended_in_store(&mut self, id: AcquisitionId) {
        let now = Moment::now();
        while self.recent.len() >= MOST_RECENT
            || self.recent.front().is_some_and(|(at, _)| *at + RECENT <= now)
        {
            self.recent.pop_front();
        }
        self.recent.push_back((now, id));
    }

    /// Repeats the recent releases, because another server has taken over and may lack them.
    pub(super) fn release_recent(&mut self) {
        self.taken_over = Some(Moment::now());
        for (_, id) in std::mem::take(&mut self.recent) {
            if !self.acquisitions.contains_key(&id) && !self.releases.contains_key(&id) {
                let terms = Terms { lease: self.longest_lease, ttl: None };
                self.add_release(id, terms, Known::Nothing, false);
            }
        }
    }

    pub(super) fn cancel_timer(&mut self, at: Option<Moment>, timer: Timer) {
        if let Some(at) = at {
            self.timers.remove(&(at, timer));
        }
    }

    pub(super) fn want(&mut self, want: Want) {
        self.unsent.push_back((Moment::NEVER, want));
        // Acquires that are started and dropped during an outage must not accumulate here.
        if self.unsent.len() >= CLEAN_UP_FROM && self.unsent.len().is_power_of_two() {
            self.forget_unwanted();
        }
    }

    /// Queues a command that was sent at `sent`, and whose outcome is unknown. Of two lost requests, the second one may
    /// be reported first. So the order of `unsent` depends on when they were sent.
    pub(super) fn want_again(&mut self, want: Want, sent: Moment) {
        let at = self.unsent.partition_point(|(other, _)| *other <= sent);
        self.unsent.insert(at, (sent, want));
    }

    /// Removes the commands that are no longer wanted from `unsent`, and the releases of ids that the store must have
    /// expired.
    pub(super) fn forget_unwanted(&mut self) {
        let mut unsent = std::mem::take(&mut self.unsent);
        unsent.retain(|(_, want)| self.is_wanted(*want));
        self.unsent = unsent;
        let now = Moment::now();
        self.releases
            .retain(|_, own| own.ticket.is_some() || own.until.is_none_or(|until| now < until));
    }

    pub(super) fn want_enqueue(&mut self, id: AcquisitionId) {
        let Some(acquisition) = self.acquisitions.get_mut(&id) else { return };
        if !std::mem::replace(&mut acquisition.wants.enqueue, true) {
            self.want(Want::Enqueue(id));
        }
    }

    /// Queries whether a waiter holds a permit, even if such a query is in flight: its answer may be older than what
    /// the client knows.
    pub(super) fn claim(&mut self, id: AcquisitionId) {
        let Some(acquisition) = self.acquisitions.get_mut(&id) else { return };
        acquisition.renewal.get_or_insert_with(Moment::now);
        self.send_renewal(id);
    }

    pub(super) fn is_wanted(&self, want: Want) -> bool {
        let ticket = |id| self.acquisitions.get(&id).map(|own| &own.ticket);
        match want {
            Want::Enqueue(id) => ticket(id).is_some_and(|ticket| ticket.is_waiting()),
            Want::Renew(id) => self.acquisitions.contains_key(&id),
            Want::Release(id) => {
                let now = Moment::now();
                let due = |own: &Unreleased| own.until.is_none_or(|until| now < until);
                self.releases.get(&id).is_some_and(due)
            }
        }
    }

    /// Takes the commands that are still wanted. Releases come first, because they make room for what follows.
    pub(super) fn take(&mut self, room: usize, declared: Declared) -> Vec<Command> {
        let mut commands = Vec::with_capacity(self.unsent.len().min(room));
        while commands.len() < room
            && let Some((_, want)) = self.unsent.pop_front()
        {
            if self.is_wanted(want) {
                commands.extend(self.command(want, declared));
            }
        }
        commands.sort_by_key(|command| match command {
            Command::Release { .. } => 0,
            Command::Renew { .. } | Command::Steer { .. } | Command::Sweep => 1,
            Command::Enqueue { .. } => 2,
        });
        commands
    }

    pub(super) fn take_renewals(&mut self, room: usize) -> Vec<Command> {
        let mut commands = Vec::new();
        while commands.len() < room
            && let Some(id) = self.renewals.pop_front()
        {
            commands.extend(self.renewal(id));
        }
        commands
    }

    fn renewal(&mut self, id: AcquisitionId) -> Option<Command> {
        let own = self.acquisitions.get_mut(&id)?;
        own.wants.renewal = false;
        Some(Command::Renew { id, terms: own.ticket.semaphore.terms })
    }

    pub(super) fn command(&mut self, want: Want, declared: Declared) -> Option<Command> {
        match want {
            Want::Enqueue(id) => {
                let own = self.acquisitions.get_mut(&id)?;
                own.wants.enqueue = false;
                own.life.send();
                let Declaration { terms, label, .. } = &*own.ticket.semaphore;
                Some(Command::Enqueue {
                    id,
                    declared,
                    wait: own.ticket.queues,
                    terms: *terms,
                    share: own.ticket.share,
                    label: label.clone(),
                })
            }
            Want::Renew(id) => self.renewal(id),
            Want::Release(id) => {
                let release = self.releases.get_mut(&id)?;
                release.life.send();
                release.again = false;
                Some(Command::Release { id, known: release.known })
            }
        }
    }

    /// Does everything that is due.
    pub(super) fn fire(&mut self, now: Moment, after: &mut After) {
        while let Some(&(at, timer)) = self.timers.first().filter(|(at, _)| *at <= now) {
            self.timers.remove(&(at, timer));
            match timer {
                Timer::GiveUp(id) => self.give_up(id, now, after),
                Timer::End(id) => self.end_validity(id, now, after),
                Timer::Renew(id) => self.renew_due(id, now),
                Timer::Ask => self.ask(now),
                Timer::ReleaseUnanswered(id) => {
                    let since = at.minus(self.core.settings.answer_timeout);
                    let error = self.core.unavailable(Some(self.to), since, now);
                    self.answer_release(id, Err(error), after);
                }
                Timer::ReleaseAgain(id) => self.release_again(id, now),
            }
        }
    }

    /// Reports the outcome of a release to the caller that waits for it. Returns whether a caller waited.
    pub(super) fn answer_release(
        &mut self,
        id: AcquisitionId,
        outcome: Result<bool, Error>,
        after: &mut After,
    ) -> bool {
        let waits = self.releases.get_mut(&id).and_then(|release| release.ticket.take());
        let Some((ticket, until)) = waits else { return false };
        self.timers.remove(&(until, Timer::ReleaseUnanswered(id)));
        ticket.finish_release(outcome, after);
        true
    }

    pub(super) fn release_again(&mut self, id: AcquisitionId, now: Moment) {
        let Some(release) = self.releases.get(&id) else { return };
        if release.until.is_some_and(|until| until <= now) {
            self.releases.remove(&id);
        } else {
            self.want(Want::Release(id));
        }
    }

    pub(super) fn give_up(&mut self, id: AcquisitionId, now: Moment, after: &mut After) {
        let Some(own) = self.acquisitions.get(&id) else { return };
        let ticket = own.ticket.clone();
        // A try is answered at once. So if it reaches its time limit, it was not answered.
        let answered = ticket.queues && own.known && self.unserved.is_none();
        let error = match self.core.sender.silent_since(self.to, now) {
            None if answered => {
                let token_at = self.token_at.filter(|token_at| *token_at > now);
                timed_out(&ticket, token_at.map(|token_at| token_at.saturating_since(now)))
            }
            _ => self.core.unavailable(Some(self.to), ticket.queued_at, now),
        };
        if ticket.fail(error, after) {
            self.end(id);
        }
    }

    pub(super) fn end_validity(&mut self, id: AcquisitionId, now: Moment, after: &mut After) {
        let Some(own) = self.acquisitions.get_mut(&id) else { return };
        own.ends_at = None;
        let ticket = own.ticket.clone();
        let valid_until = ticket.valid_until();
        if now < valid_until {
            return self.schedule_end(id, valid_until);
        }
        ticket.lose(ticket.why_ended(), after);
        self.end(id);
    }

    /// Ends every wait with this error.
    pub(super) fn fail_waiters(&mut self, error: &Error, after: &mut After) {
        let mut ids: Vec<_> = self.acquisitions.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            let ticket = self.acquisitions[&id].ticket.clone();
            if ticket.fail(error.clone(), after) {
                self.end(id);
            }
        }
        let ids: Vec<_> = self.releases.keys().copied().collect();
        for id in ids {
            self.answer_release(id, Err(error.clone()), after);
        }
    }
}

/// Returns when the store must have expired an id that is silent from now on. A waiter that is granted a permit at the
/// very end of its patience has up to one lease to claim it.
fn expired_by(terms: Terms) -> Option<Moment> {
    let (patience, lease) = terms.patience().zip(terms.lease)?;
    Some(Moment::now() + patience + lease)
}
