//! One name, as this client sees it: its store, its tickets, and what is to be done when.
//!
//! All of it is behind one lock, the *desk*. Nothing waits while it holds the desk, and wakers are called
//! after it is let go. A store that is here is applied under the desk, so that a grant and the ticket
//! that it belongs to can never miss each other; for a store that is away the desk keeps an outbox,
//! which the engine's thread empties.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;

use tokio::sync::Notify;

use super::desk::Desk;
use super::ticket::{After, Grant, Ticket};
use super::{Core, Message};
use crate::backend::{AwaySemaphore, Store};
use crate::clock::{Moment, Span};
use crate::machine::{Command, Held, Outcome, Role};
use crate::name::Name;
use crate::semaphore::Declaration;
use crate::{AcquisitionId, Error, LossReason};

/// One name of one client.
pub(crate) struct Named {
    name: Name,
    core: Arc<Core>,
    /// The newest declaration in this client.
    capacity: AtomicU32,
    capacity_changed: AtomicBool,
    desk: Mutex<Desk>,
    flushed: Notify,
    this: Weak<Self>,
}

/// How a release ends.
pub(crate) enum Release {
    /// True if it was held until now.
    Done(bool),
    /// This ticket will know.
    Sent(Arc<Ticket>),
}

impl Release {
    pub(crate) async fn done(self) -> Result<bool, Error> {
        match self {
            Self::Done(held) => Ok(held),
            Self::Sent(ticket) => poll_fn(|cx| ticket.poll_released(cx)).await,
        }
    }
}

/// How an acquire begins.
pub(crate) enum Entered {
    /// A permit was free. Without a ticket nothing can end it but its guard or a release by id.
    Held(Grant, Option<Arc<Ticket>>),
    Waiting(Arc<Ticket>),
    Full,
    Closed,
}

impl Named {
    pub(crate) fn new(name: Name, core: Arc<Core>) -> Arc<Self> {
        let store = core.backend.semaphore(&name, core.client);
        let desk = Desk::new(store);
        Arc::new_cyclic(|this| Self {
            name,
            core,
            capacity: AtomicU32::new(0),
            capacity_changed: AtomicBool::new(false),
            desk: Mutex::new(desk),
            flushed: Notify::new(),
            this: this.clone(),
        })
    }

    pub(crate) fn name(&self) -> &Name {
        &self.name
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// The newest declaration wins. That it changed is said once a name, as a warning: more often than
    /// not two parts of a program disagree.
    pub(crate) fn declare(&self, capacity: u32) {
        let before = self.capacity.swap(capacity, Ordering::Relaxed);
        if before != 0 && before != capacity && !self.capacity_changed.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                name = self.name.as_str(),
                before,
                now = capacity,
                "a second capacity was declared; the newest wins"
            );
        }
    }

    /// Whether anything of this client's is held or queued under this name.
    pub(crate) fn is_idle(&self) -> bool {
        self.desk().is_idle()
    }

    pub(super) fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` at the desk, then wakes whom it woke and tells the engine's thread what it needs to
    /// know.
    #[inline]
    pub(super) fn at_desk<T>(&self, work: impl FnOnce(&mut Desk, &mut After) -> T) -> T {
        let mut after = After::default();
        let mut desk = self.desk();
        let result = work(&mut desk, &mut after);
        let errands = if desk.has_errands() { self.errands(&mut desk) } else { None };
        drop(desk);
        if let Some(errands) = errands {
            errands.into_iter().flatten().for_each(|errand| self.core.tell(errand));
        }
        after.run();
        result
    }

    #[cold]
    fn errands(&self, desk: &mut Desk) -> Option<[Option<Message>; 2]> {
        let look = desk.next_look().map(|at| Message::LookAt(at, self.this.clone()));
        let flush = desk.outbox.start_flush();
        let renewals = std::mem::take(&mut desk.renewals);
        let send = (flush || !renewals.is_empty()).then(|| self.this.upgrade()).flatten();
        let send = send.map(|named| Message::Send { named, flush, renewals });
        (look.is_some() || send.is_some()).then_some([look, send])
    }

    /// The beginning of an acquire: a permit, a place in the queue, or neither.
    #[inline]
    pub(crate) fn enter(
        &self,
        id: AcquisitionId,
        semaphore: &Arc<Declaration>,
        wait: bool,
        within: Option<Span>,
        waker: &Waker,
    ) -> Entered {
        let waiting = || Ticket::waiting(id, semaphore.clone(), wait, within, waker.clone());
        self.at_desk(|desk, after| {
            if desk.closed {
                return Entered::Closed;
            }
            let (capacity, terms) = (self.capacity(), semaphore.terms);
            // A ticket only for whoever has to wait, can lose what he holds, or has a label to show.
            let mut ticket = None;
            let keep = |held: Option<&Held>| {
                ticket = match held {
                    None => Some(waiting()),
                    Some(Held { valid_for: None, .. }) if semaphore.label.is_none() => None,
                    Some(held) => {
                        let until = held.valid_for.map_or(Moment::NEVER, |v| Moment::now() + v);
                        Some(Ticket::held(id, semaphore.clone(), until))
                    }
                };
                ticket.clone()
            };
            match desk.enqueue_here(id, capacity, wait, terms, keep, after) {
                Some(Outcome::Held(held @ Held { fence: Some(fence), .. })) => {
                    Entered::Held(Grant::new(&held, fence), ticket)
                }
                Some(_) => match ticket {
                    Some(ticket) => {
                        if ticket.gives_up_at.is_some() {
                            desk.register(&ticket);
                        }
                        Entered::Waiting(ticket)
                    }
                    None => Entered::Full,
                },
                None => {
                    let ticket = waiting();
                    desk.register(&ticket);
                    let label = semaphore.label.clone();
                    desk.outbox.push(Command::Enqueue { id, capacity, wait, terms, label });
                    Entered::Waiting(ticket)
                }
            }
        })
    }

    /// Ends a permit whose guard is gone, or takes back an acquire whose future is gone, whatever has
    /// become of it. The outcome is told to nobody.
    #[inline]
    pub(crate) fn end(&self, id: AcquisitionId) {
        self.at_desk(|desk, after| {
            if let (_, Some(ticket)) = desk.remove(id, after) {
                ticket.start_release(after);
            }
        });
    }

    /// Ends a permit on behalf of its guard.
    pub(crate) fn give_back(&self, id: AcquisitionId, semaphore: &Arc<Declaration>) -> Release {
        self.release(id, semaphore, Ticket::start_release)
    }

    /// Ends a permit, or an acquire, by its id, which need not be one of this client's. Its guard or
    /// future, if it is elsewhere, is told that it is over.
    pub(crate) fn release_by_id(&self, id: AcquisitionId, semaphore: &Arc<Declaration>) -> Release {
        self.release(id, semaphore, |ticket, after| {
            ticket.lose(LossReason::Released, after);
            ticket.fail(ticket.lost(LossReason::Released), after);
        })
    }

    fn release(
        &self,
        id: AcquisitionId,
        semaphore: &Arc<Declaration>,
        tell: impl FnOnce(&Ticket, &mut After),
    ) -> Release {
        self.at_desk(|desk, after| {
            // Whoever asks again while a release is on its way learns what comes of that one.
            if let Some(ticket) = desk.ticket(id).filter(|ticket| ticket.is_releasing()) {
                return Release::Sent(ticket.clone());
            }
            let (role, ticket) = desk.remove(id, after);
            if let Some(ticket) = ticket {
                tell(&ticket, after);
            }
            if let Some(role) = role {
                return Release::Done(role == Role::Holder);
            }
            let ticket = Ticket::releasing(id, semaphore.clone());
            desk.register(&ticket);
            Release::Sent(ticket)
        })
    }

    /// The ticket of a permit that has none, so that somebody can be told of its loss. If it is lost
    /// already, the ticket says so.
    pub(crate) fn attach(&self, id: AcquisitionId, semaphore: &Arc<Declaration>) -> Arc<Ticket> {
        self.at_desk(|desk, after| {
            if let Some(ticket) = desk.ticket(id) {
                return ticket.clone();
            }
            let ticket = Ticket::held(id, semaphore.clone(), Moment::NEVER);
            match desk.check(id) {
                Ok(()) => desk.register(&ticket),
                Err(reason) => drop(ticket.lose(reason, after)),
            }
            ticket
        })
    }

    /// Whether a permit that was given out without a ticket is still there.
    pub(crate) fn check(&self, id: AcquisitionId) -> Result<(), LossReason> {
        self.desk().check(id)
    }

    /// The client is gone: whatever is still known here belongs to nobody. It is neither renewed nor
    /// released; in a store that is away it ends by itself.
    pub(super) fn abandon(&self) {
        // Dropped after the desk is let go: with the last ticket, this name may go as well.
        let abandoned = self.desk().abandon();
        drop(abandoned);
    }

    /// Ends everything this client waits for and holds here.
    pub(crate) fn close(&self) {
        self.at_desk(|desk, after| {
            desk.closed = true;
            desk.release_doubtful();
            for id in desk.own_ids() {
                if let (_, Some(ticket)) = desk.remove(id, after) {
                    ticket.fail(Error::Closed, after);
                    ticket.lose(LossReason::Closed, after);
                }
            }
        });
    }

    /// The engine's thread comes by: everything that is due is done.
    pub(super) fn look(&self, now: Moment) {
        self.at_desk(|desk, after| {
            desk.looked_at = None;
            desk.do_chores(now, after);
        });
    }

    /// A store that is away says that this waiter was granted a permit.
    pub(super) fn woken(&self, id: AcquisitionId) {
        #[cfg(feature = "broken")]
        if crate::broken::is("confirm") {
            return self.at_desk(|desk, after| desk.believe(id, after));
        }
        self.at_desk(|desk, _| desk.claim(id));
    }

    /// A store that is away says that somebody else has released this id.
    pub(super) fn evicted(&self, id: AcquisitionId) {
        self.at_desk(|desk, _| desk.ask_about(id));
    }

    /// The connection is new: whatever was asked or told before may be wrong.
    pub(super) fn reconnected(&self) {
        self.at_desk(|desk, _| desk.ask_about_everyone());
    }

    /// Waits until everything that was to be sent has been answered, or given up.
    pub(crate) async fn drained(&self) -> Result<(), Error> {
        loop {
            let flushed = self.flushed.notified();
            if self.desk().outbox.is_idle() {
                return self.desk().failed_release.take().map_or(Ok(()), Err);
            }
            flushed.await;
        }
    }

    pub(super) fn flushed(&self) {
        self.flushed.notify_waiters();
    }

    pub(crate) fn away(&self) -> Option<Arc<dyn AwaySemaphore>> {
        match &self.desk().store {
            Store::Here(_) => None,
            Store::Away(store) => Some(store.clone()),
        }
    }

    /// For questions that only a store in this process answers without a trip.
    pub(crate) fn here<T>(
        &self,
        ask: impl FnOnce(&crate::backend::memory::MemorySemaphore) -> T,
    ) -> Option<T> {
        match &self.desk().store {
            Store::Here(store) => Some(ask(store)),
            Store::Away(_) => None,
        }
    }
}
