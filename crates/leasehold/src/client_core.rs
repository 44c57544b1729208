//! The client core: the state of one name in one client, without I/O, clock or threads.
//!
//! A driver feeds the core with inputs, each with the current time: the calls of this client ([`acquire`], [`end`],
//! [`release`]), the store's answers ([`answered`]), its wake-ups and other messages ([`woken`], [`token_arrives`],
//! [`cancelled_elsewhere`]), new connections ([`connected`]), and the passing of time ([`timeout`]). After each input
//! the driver collects the outputs: the commands to send ([`take`], [`take_renewals`]), the next time-out
//! ([`next_timeout`]) and the [`Notice`]s for callers ([`notices`]). A driver also chooses how renewals and queries are
//! [spread](timing::Spread). The engine is one driver. The model checker and the simulation are others, so what they
//! check is the code that ships.
//!
//! # State
//!
//! - the acquisitions of this client, each waiting or holding, with the [`Delivery`] of its enqueue;
//! - the releases that are not answered yet;
//! - the commands that have to be sent, in order;
//! - the waiters, in the order of the store's queue, because periodic queries are about the first one;
//! - the timers.
//!
//! # Why nothing leaks
//!
//! Whatever happens to a request, one of these is always true of every id that the store may know (invariant 7):
//!
//! - it waits or holds here;
//! - its release is repeated until it is answered;
//! - so much time has passed that the store must have expired it.
//!
//! [`replies`] applies the store's answers. [`renewals`] keeps leases and places in the queue alive. [`timing`] says
//! when to renew and to query.
//!
//! [`acquire`]: NameCore::acquire
//! [`end`]: NameCore::end
//! [`release`]: NameCore::release
//! [`answered`]: NameCore::answered
//! [`woken`]: NameCore::woken
//! [`token_arrives`]: NameCore::token_arrives
//! [`cancelled_elsewhere`]: NameCore::cancelled_elsewhere
//! [`connected`]: NameCore::connected
//! [`timeout`]: NameCore::timeout
//! [`take`]: NameCore::take
//! [`take_renewals`]: NameCore::take_renewals
//! [`next_timeout`]: NameCore::next_timeout
//! [`notices`]: NameCore::notices

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::clock::{Moment, Span};
use crate::id::IdMap;
use crate::machine::{Command, Declared, Held, ReleaseHint, Terms};
use crate::{AcquisitionId, ClientId, Error, LossReason};

mod acquisition;
mod delivery;
mod notice;
mod renewals;
mod replies;
#[cfg(test)]
mod tests;
pub(crate) mod timing;
#[cfg(test)]
mod view;

use acquisition::{Acquisition, PendingRelease, expired_by};
pub(crate) use acquisition::{Request, why_ended};
pub(crate) use delivery::Delivery;
pub(crate) use notice::{Failure, Notice};
pub(crate) use replies::Answered;
use timing::{Place, Spread};
#[cfg(test)]
pub(crate) use view::Scale;

/// How long, and how many, answered releases are remembered. Replicas are rarely further behind.
const RECENT: Span = Span::from_millis(5000);
const MOST_RECENT: usize = 1024;

/// When `unsent` has this many commands, those that are no longer wanted are removed from it.
const CLEAN_UP_FROM: usize = 1024;

/// What distinguishes the permits of a semaphore from the lease of a lock or of a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// Whether all acquisitions have the same id in the store, as those of a lock id or a pool instance. Then the store
    /// has at most one lease for all of them, and it is released with the last one.
    pub(crate) is_one_lease: bool,
    /// Whether the store ends a lease with the TTL of its holder. If not, the client renews the lease until then, and
    /// releases it at the end.
    pub(crate) ends_with_ttl: bool,
    /// Whether renewals are spread over the second third of the lease. Otherwise they are sent when a third has passed.
    pub(crate) spreads: bool,
    /// The longest time between two renewals of a holder.
    pub(crate) longest_interval: Duration,
    /// How much earlier than the store a holder ends its own validity. `None` if that follows from the lease.
    pub(crate) margin: Option<Span>,
}

impl Default for Rules {
    fn default() -> Self {
        let longest_interval = timing::LONGEST_INTERVAL;
        Self {
            is_one_lease: false,
            ends_with_ttl: true,
            spreads: true,
            longest_interval,
            margin: None,
        }
    }
}

impl Rules {
    /// Returns the moment until which the holder may rely on its permit (invariant 6).
    fn valid_until(&self, held: &Held, terms: Terms, sent: Moment) -> Moment {
        match (held.valid_for, self.margin) {
            (Some(valid_for), Some(_)) => self.end_of(valid_for, sent),
            _ => held.valid_until(terms, sent),
        }
    }

    /// Returns the moment until which the holder may rely on a lease that the store lets end `valid_for` after `sent`.
    fn end_of(&self, valid_for: Span, sent: Moment) -> Moment {
        if crate::broken::is("margin") {
            return sent + valid_for + valid_for;
        }
        (sent + valid_for).minus(self.margin_of(valid_for))
    }

    fn margin_of(&self, lease: Span) -> Span {
        self.margin.unwrap_or_else(|| Terms { lease: Some(lease), ttl: None }.margin())
    }

    /// Returns the terms to send. A store of locks knows no TTL, so the lease of a lock is never longer than the rest of
    /// its TTL.
    fn terms_to_send<T>(&self, acquisition: &Acquisition<T>, now: Moment) -> Terms {
        let Terms { lease, ttl } = acquisition.terms();
        if !self.is_one_lease || !self.ends_with_ttl {
            return Terms { lease, ttl };
        }
        let left = |at: Moment| Span::from_duration(at.saturating_since(now));
        let left = acquisition.ttl_ends_at.map(left).or(ttl);
        Terms { lease: lease.into_iter().chain(left).min(), ttl }
    }
}

/// The state of one name in this client, or of one lease of a lock or a pool. `T` identifies the caller of an acquisition or a release.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
pub(crate) struct NameCore<T> {
    client: ClientId,
    /// How long the caller of a release waits for its outcome.
    answer_timeout: Span,
    rules: Rules,
    /// How renewals and queries of many clients are spread over time.
    spread: Spread,
    /// The slowest answer that is still normal.
    round_trip: Duration,
    /// Whether a request that was sent over an earlier connection may still be applied.
    has_stragglers: bool,
    acquisitions: IdMap<AcquisitionId, Acquisition<T>>,
    /// Each of them is in `unsent` or in flight, or has a timer that sends it again or ends it.
    releases: IdMap<AcquisitionId, PendingRelease<T>>,
    /// Whether every release has a timer for the moment when the store must have expired its id. The releases of a name
    /// need none while the client keeps the name.
    releases_expire: bool,
    /// Whether an acquisition that shared the lease has left its release to those that are left.
    owes_release: bool,
    /// The last ids that ended in the store, each with the moment when this client learnt it. If another server takes
    /// over, it may lack these releases, and then they are repeated. At most [`MOST_RECENT`], of [`RECENT`].
    recent: VecDeque<(Moment, AcquisitionId)>,
    /// When another server last took over, as far as this client knows.
    taken_over: Option<Moment>,
    /// The commands that have to be sent, in order. Those whose outcome is unknown come first, each with the moment
    /// when it was sent, in the order in which they were sent. The others have [`Moment::NEVER`].
    unsent: VecDeque<(Moment, Want)>,
    /// Holders whose renewal has to be sent.
    renewals: VecDeque<AcquisitionId>,
    /// How many groups of commands were taken and not answered yet.
    in_flight: usize,
    /// Since when the store has not been able to serve the name, although it serves others.
    unserved: Option<Moment>,
    /// The waiters in the order of the store's queue, so that the client can query the first one. That is not the
    /// order in which they were first enqueued: a waiter that expired in the store is queued again.
    waiting: BTreeMap<u64, AcquisitionId>,
    last_place: u64,
    timers: BTreeSet<(Moment, Timer)>,
    /// When to send the next periodic query about the first waiter.
    query_at: Option<Moment>,
    /// What the store last answered about our first waiter, and when.
    place_of_first: Option<(AcquisitionId, Place, Moment)>,
    /// When the token arrives that the first waiter in the queue waits for, if that waiter is ours.
    token_at: Option<Moment>,
    /// The error of a release that no caller waits for.
    failed_release: Option<Error>,
    warned_of_short_lease: bool,
    /// The longest lease of all acquisitions so far.
    longest_lease: Option<Span>,
    notices: Vec<Notice<T>>,
}

/// A command that has to be sent. The command itself is created when it is taken, from the state at that moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Want {
    Enqueue(AcquisitionId),
    Renew(AcquisitionId),
    Release(AcquisitionId),
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Timer {
    /// The acquire has reached its time limit.
    GiveUp(AcquisitionId),
    /// The holder must no longer rely on its permit.
    End(AcquisitionId),
    /// A renewal is due, or was not answered.
    Renew(AcquisitionId),
    /// A lease may have ended in the store, or a wake-up may have been lost, so the client queries the first waiter.
    Query,
    /// The caller of a release has waited long enough.
    ReleaseUnanswered(AcquisitionId),
    /// The id is released once more, unless the store must have expired it.
    ReleaseAgain(AcquisitionId),
    /// The store must have expired the id, so its release is no longer sent.
    ReleaseExpired(AcquisitionId),
}

/// What the core reports to its driver.
impl<T: Clone> NameCore<T> {
    pub(crate) fn new(
        client: ClientId,
        answer_timeout: Span,
        spread: Spread,
        has_stragglers: bool,
    ) -> Self {
        Self {
            client,
            answer_timeout,
            rules: Rules::default(),
            spread,
            round_trip: Duration::ZERO,
            has_stragglers,
            acquisitions: IdMap::default(),
            releases: IdMap::default(),
            releases_expire: false,
            owes_release: false,
            recent: VecDeque::new(),
            taken_over: None,
            unsent: VecDeque::new(),
            renewals: VecDeque::new(),
            in_flight: 0,
            unserved: None,
            waiting: BTreeMap::new(),
            last_place: 0,
            timers: BTreeSet::new(),
            query_at: None,
            place_of_first: None,
            token_at: None,
            failed_release: None,
            warned_of_short_lease: false,
            longest_lease: None,
            notices: Vec::new(),
        }
    }

    pub(crate) fn with_rules(self, rules: Rules) -> Self {
        Self { rules, releases_expire: rules.is_one_lease, ..self }
    }

    /// From now on, no release is sent after the store must have expired its id. An id that does not expire ends with its
    /// client, so it is not released at all.
    pub(crate) fn expire_releases(&mut self) {
        self.releases_expire = true;
        self.releases.retain(|_, release| release.until.is_some());
        let timers = self
            .releases
            .iter()
            .filter_map(|(id, release)| Some((release.until?, Timer::ReleaseExpired(*id))));
        self.timers.extend(timers);
    }

    /// Returns when [`timeout`](Self::timeout) has to be called.
    pub(crate) fn next_timeout(&self) -> Option<Moment> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// The notices since the driver last removed them.
    pub(crate) fn notices(&mut self) -> &mut Vec<Notice<T>> {
        &mut self.notices
    }

    /// Whether [`take`](Self::take) may return commands.
    pub(crate) fn has_commands(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Whether [`take_renewals`](Self::take_renewals) may return commands.
    pub(crate) fn has_renewals(&self) -> bool {
        !self.renewals.is_empty()
    }

    /// Whether nothing has to be sent and nothing is in flight.
    pub(crate) fn is_settled(&self) -> bool {
        self.in_flight == 0 && self.unsent.is_empty()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.is_settled() && self.acquisitions.is_empty() && self.releases.is_empty()
    }

    pub(crate) fn has_releases(&self) -> bool {
        !self.releases.is_empty()
    }

    pub(crate) fn is_one_lease(&self) -> bool {
        self.rules.is_one_lease
    }

    /// Returns since when the store has not been able to serve the name, although it serves others.
    pub(crate) fn unserved_since(&self) -> Option<Moment> {
        self.unserved
    }

    /// Removes and returns the error of a release that no caller waited for.
    pub(crate) fn take_failed_release(&mut self) -> Option<Error> {
        self.failed_release.take()
    }

    /// Returns the owner of an acquisition that waits or holds.
    pub(crate) fn owner(&self, id: AcquisitionId) -> Option<&T> {
        self.acquisitions.get(&id).map(|acquisition| &acquisition.owner)
    }

    /// Returns the owners of all acquisitions.
    pub(crate) fn owners(&self) -> impl Iterator<Item = &T> {
        self.acquisitions.values().map(|acquisition| &acquisition.owner)
    }

    /// Returns all ids in the order in which they end when the client is closed. Waiters come first, and among them the
    /// last one, so that no waiter is granted a permit only to lose it.
    pub(crate) fn ids_to_close(&self) -> Vec<AcquisitionId> {
        let mut ids: Vec<_> = self.acquisitions.keys().copied().collect();
        ids.sort_unstable_by_key(|id| {
            (self.acquisitions[id].is_held(), std::cmp::Reverse(id.sequence()))
        });
        ids
    }
}

/// The calls of this client.
impl<T: Clone> NameCore<T> {
    /// Starts an acquire.
    pub(crate) fn acquire(&mut self, id: AcquisitionId, owner: T, request: Request, now: Moment) {
        if let Some(at) = request.gives_up_at {
            self.timers.insert((at, Timer::GiveUp(id)));
        }
        self.longest_lease = self.longest_lease.max(request.terms.lease);
        if self.rules.is_one_lease {
            self.withdraw_releases();
        }
        self.acquisitions.insert(id, Acquisition::new(owner, request, now));
        self.want_enqueue(id, now);
    }

    /// Ends an acquisition that nobody is interested in any more, in this client, and in the store if the store may
    /// know it. `was_seen` says whether a caller may have used the permit.
    pub(crate) fn end(&mut self, id: AcquisitionId, was_seen: bool, now: Moment) -> Option<T> {
        let hint = if was_seen { self.acquisitions.get(&id)?.hint() } else { ReleaseHint::Unused };
        self.end_with(id, hint, now)
    }

    /// Releases an id, which need not belong to this client. `by_guard` says that a guard of this client releases it.
    /// Returns the caller that receives the outcome: `owner`, or the caller that already waits for it. Returns `None`
    /// if the store cannot know the id.
    pub(crate) fn release(
        &mut self,
        id: AcquisitionId,
        owner: T,
        (by_guard, lease): (bool, Option<Span>),
        now: Moment,
    ) -> Option<T> {
        if !self.releases.contains_key(&id) {
            if by_guard {
                return None;
            }
            self.add_release(id, lease, ReleaseHint::Nothing, false, now);
        }
        let release = self.releases.get_mut(&id)?;
        if let Some((caller, _)) = &release.caller {
            return Some(caller.clone());
        }
        let until = now + self.answer_timeout;
        release.caller = Some((owner.clone(), until));
        self.timers.insert((until, Timer::ReleaseUnanswered(id)));
        Some(owner)
    }

    /// Removes the acquisition from this client. Nothing is sent.
    pub(crate) fn forget(&mut self, id: AcquisitionId) -> Option<T> {
        self.remove(id).map(|acquisition| acquisition.owner)
    }

    /// Ends every wait with this error, because the store refuses all requests.
    pub(crate) fn refuse_waiters(&mut self, error: &Error, now: Moment) {
        let mut ids: Vec<_> = self.acquisitions.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            self.fail_waiter(id, Failure::Refused(error.clone()), now);
        }
        let ids: Vec<_> = self.releases.keys().copied().collect();
        for id in ids {
            self.answer_release(id, Err(Failure::Refused(error.clone())));
        }
    }
}

/// The commands to send.
impl<T: Clone> NameCore<T> {
    /// Takes at most `room` commands that are still wanted. Releases come first, because they make room for what
    /// follows.
    pub(crate) fn take(&mut self, room: usize, declared: Declared, now: Moment) -> Vec<Command> {
        let mut commands = Vec::with_capacity(self.unsent.len().min(room));
        while commands.len() < room
            && let Some((_, want)) = self.unsent.pop_front()
        {
            if self.is_wanted(want, now) {
                commands.extend(self.command(want, declared, now));
            } else if let Want::Release(id) = want {
                self.end_expired_release(id);
            }
        }
        commands.sort_by_key(|command| match command {
            Command::Release { .. } => 0,
            Command::Renew { .. } | Command::ChangeLimits { .. } | Command::Sweep => 1,
            Command::Enqueue { .. } => 2,
        });
        self.in_flight += usize::from(!commands.is_empty());
        commands
    }

    /// Takes at most `room` renewals of holders.
    pub(crate) fn take_renewals(&mut self, room: usize, now: Moment) -> Vec<Command> {
        let mut commands = Vec::new();
        while commands.len() < room
            && let Some(id) = self.renewals.pop_front()
        {
            commands.extend(self.renewal(id, now));
        }
        self.in_flight += usize::from(!commands.is_empty());
        commands
    }

    /// Removes the commands that are no longer wanted, and the releases of ids that the store must have expired.
    pub(crate) fn forget_unwanted(&mut self, now: Moment) {
        let mut unsent = std::mem::take(&mut self.unsent);
        unsent.retain(|(_, want)| self.is_wanted(*want, now));
        self.unsent = unsent;
        self.releases.retain(|_, release| {
            release.caller.is_some() || release.until.is_none_or(|until| now < until)
        });
    }

    fn is_wanted(&self, want: Want, now: Moment) -> bool {
        match want {
            Want::Enqueue(id) => self.acquisitions.get(&id).is_some_and(Acquisition::is_waiting),
            Want::Renew(id) => self.acquisitions.contains_key(&id),
            Want::Release(id) => self.releases.get(&id).is_some_and(|release| {
                let lasts = release.until.is_none_or(|until| now < until);
                // An expired id of a semaphore is nobody else's, so its caller can learn the outcome.
                lasts || release.caller.is_some() && !self.rules.is_one_lease
            }),
        }
    }

    fn command(&mut self, want: Want, declared: Declared, now: Moment) -> Option<Command> {
        match want {
            Want::Enqueue(id) => {
                let acquisition = self.acquisitions.get_mut(&id)?;
                acquisition.wants_enqueue = false;
                acquisition.delivery = Delivery::Sent;
                let Request { share, queues, label, .. } = acquisition.request.clone();
                let terms = self.rules.terms_to_send(acquisition, now);
                Some(Command::Enqueue { id, declared, wait: queues, terms, share, label })
            }
            Want::Renew(id) => self.renewal(id, now),
            Want::Release(id) => {
                let release = self.releases.get_mut(&id)?;
                release.delivery = Delivery::Sent;
                release.again = false;
                Some(Command::Release { id, hint: release.hint })
            }
        }
    }

    fn renewal(&mut self, id: AcquisitionId, now: Moment) -> Option<Command> {
        let acquisition = self.acquisitions.get_mut(&id)?;
        acquisition.wants_renewal = false;
        let terms = self.rules.terms_to_send(acquisition, now);
        Some(Command::Renew { id, terms, holds: acquisition.is_held() })
    }

    fn want(&mut self, want: Want, now: Moment) {
        self.unsent.push_back((Moment::NEVER, want));
        // Acquires that are started and dropped during an outage must not accumulate here.
        if self.unsent.len() >= CLEAN_UP_FROM && self.unsent.len().is_power_of_two() {
            self.forget_unwanted(now);
        }
    }

    /// Queues a command that was sent at `sent`, and whose outcome is unknown. Of two lost requests, the second one may
    /// be reported first. So the order of `unsent` depends on when they were sent.
    fn want_again(&mut self, want: Want, sent: Moment) {
        let mut at = self.unsent.partition_point(|(other, _)| *other <= sent);
        if crate::broken::is("resent-in-order") {
            at = self.unsent.len();
        }
        self.unsent.insert(at, (sent, want));
    }

    fn want_enqueue(&mut self, id: AcquisitionId, now: Moment) {
        let Some(acquisition) = self.acquisitions.get_mut(&id) else { return };
        if !std::mem::replace(&mut acquisition.wants_enqueue, true) {
            self.want(Want::Enqueue(id), now);
        }
    }
}

/// The passing of time, and connections.
impl<T: Clone> NameCore<T> {
    /// Does everything that is due.
    pub(crate) fn timeout(&mut self, now: Moment) {
        while let Some(&(at, timer)) = self.timers.first().filter(|(at, _)| *at <= now) {
            self.fire((at, timer), now);
        }
    }

    fn fire(&mut self, (at, timer): (Moment, Timer), now: Moment) {
        self.timers.remove(&(at, timer));
        match timer {
            Timer::GiveUp(id) => self.give_up(id, now),
            Timer::End(id) => self.end_validity(id, now),
            Timer::Renew(id) => self.renew_due(id, now),
            Timer::Query => self.query(now),
            Timer::ReleaseUnanswered(id) => {
                let since = at.minus(self.answer_timeout);
                self.answer_release(id, Err(Failure::Unanswered { since }));
            }
            Timer::ReleaseAgain(id) => self.release_again(id, now),
            Timer::ReleaseExpired(id) => self.release_expired(id, now),
        }
    }

    /// Handles a connection that is new, or a message that says that wake-ups were missed: every id that the store has
    /// answered before is queried. The other commands are sent again anyway. `to_another` says that the server may be
    /// another one than before, which may lack the last releases.
    pub(crate) fn connected(&mut self, to_another: bool, now: Moment) {
        if to_another {
            self.release_recent(now);
        }
        if crate::broken::is("reconnected") {
            return;
        }
        self.renew_all(now);
    }

    /// From now on, a request that was sent over an earlier connection may still be applied.
    pub(crate) fn expect_stragglers(&mut self) {
        self.has_stragglers = true;
    }

    /// Ends a permit whose holder no longer relies on it, because its validity has ended.
    pub(crate) fn validity_ended(&mut self, id: AcquisitionId, now: Moment) {
        if let Some(acquisition) = self.acquisitions.get(&id) {
            self.lose(id, acquisition.why_ended(), now);
        }
    }

    fn end_validity(&mut self, id: AcquisitionId, now: Moment) {
        let Some(acquisition) = self.acquisitions.get_mut(&id) else { return };
        acquisition.ends_at = None;
        match acquisition.ends() {
            Some(at) if at <= now => self.validity_ended(id, now),
            Some(at) => self.schedule_end(id, at),
            None => {}
        }
    }

    fn give_up(&mut self, id: AcquisitionId, now: Moment) {
        let Some(acquisition) = self.acquisitions.get(&id) else { return };
        // A try is answered at once. So if it reaches its time limit, it was not answered.
        let was_answered =
            acquisition.request.queues && acquisition.was_answered && self.unserved.is_none();
        let failure = if was_answered {
            let token_at = self.token_at.filter(|token_at| *token_at > now);
            let next_start = token_at.map(|token_at| token_at.saturating_since(now));
            Failure::TimedOut { next_start }
        } else {
            Failure::Unanswered { since: acquisition.began }
        };
        self.fail_waiter(id, failure, now);
    }

    fn release_again(&mut self, id: AcquisitionId, now: Moment) {
        if self.is_wanted(Want::Release(id), now) && !self.is_shared() {
            self.want(Want::Release(id), now);
        } else {
            self.remove_release(id);
        }
    }

    fn release_expired(&mut self, id: AcquisitionId, now: Moment) {
        let Some(release) = self.releases.get(&id) else { return };
        // A caller that waits for the outcome learns first that there is none.
        let caller_until = release.caller.as_ref().map(|(_, until)| *until);
        let Some(until) = release.until.map(|until| caller_until.map_or(until, |at| at.max(until)))
        else {
            return;
        };
        if now < until {
            self.timers.insert((until, Timer::ReleaseExpired(id)));
        } else {
            self.remove_release(id);
        }
    }

    /// Repeats the recent releases, because another server has taken over and may lack them.
    fn release_recent(&mut self, now: Moment) {
        if crate::broken::is("taken-over") {
            return;
        }
        self.taken_over = Some(now);
        for (_, id) in std::mem::take(&mut self.recent) {
            // Another process may have the lease of a pool instance by now.
            if !self.rules.is_one_lease
                && !self.acquisitions.contains_key(&id)
                && !self.releases.contains_key(&id)
            {
                self.add_release(id, self.longest_lease, ReleaseHint::Nothing, false, now);
            }
        }
    }
}

/// How acquisitions and releases end.
impl<T: Clone> NameCore<T> {
    fn remove(&mut self, id: AcquisitionId) -> Option<Acquisition<T>> {
        self.remove_waiting(id);
        let acquisition = self.acquisitions.remove(&id)?;
        self.cancel_timer(acquisition.renew_at, Timer::Renew(id));
        self.cancel_timer(acquisition.ends_at, Timer::End(id));
        self.cancel_timer(acquisition.request.gives_up_at, Timer::GiveUp(id));
        Some(acquisition)
    }

    fn end_with(&mut self, id: AcquisitionId, hint: ReleaseHint, now: Moment) -> Option<T> {
        let acquisition = self.remove(id)?;
        // The store knows a permit that was seen, even if no answer to its enqueue has arrived: a wake-up and a renewal
        // may have reported it.
        let may_be_known = hint != ReleaseHint::Unused
            || acquisition.delivery.needs_release()
            || self.owes_release;
        if may_be_known && self.is_shared() {
            self.owes_release = true;
        } else if may_be_known {
            self.owes_release = false;
            self.add_release(id, acquisition.longest_lease, hint, acquisition.doubtful, now);
        }
        Some(acquisition.owner)
    }

    /// Ends the wait of an id, unless it holds by now: a second request about the same id may have been granted.
    fn fail_waiter(&mut self, id: AcquisitionId, failure: Failure, now: Moment) {
        if self.acquisitions.get(&id).is_some_and(Acquisition::is_waiting)
            && let Some(owner) = self.end_with(id, ReleaseHint::Unused, now)
        {
            self.notices.push(Notice::Failed { owner, failure });
        }
    }

    /// Ends a permit that its holder must no longer rely on, and releases it. The lease of a lock or a pool instance is
    /// released only if its TTL ended. Otherwise it has ended in the store, or ends soon, and another process may have
    /// the instance id by then.
    pub(crate) fn lose(&mut self, id: AcquisitionId, reason: LossReason, now: Moment) {
        let owner = if self.rules.is_one_lease && reason != LossReason::TtlEnded {
            self.forget(id)
        } else {
            self.end_with(id, ReleaseHint::Nothing, now)
        };
        if let Some(owner) = owner {
            self.notices.push(Notice::Lost { owner, reason });
        }
    }

    /// Removes an id that the store does not know. But an enqueue that was sent over an earlier connection may still be
    /// applied, or may have been applied after this answer. In that case the id is released.
    fn end_unknown(&mut self, id: AcquisitionId, hint: ReleaseHint, now: Moment) -> Option<T> {
        if self.has_stragglers { self.end_with(id, hint, now) } else { self.forget(id) }
    }

    fn add_release(
        &mut self,
        id: AcquisitionId,
        lease: Option<Span>,
        hint: ReleaseHint,
        doubtful: bool,
        now: Moment,
    ) {
        let until = if self.rules.is_one_lease {
            lease.map(|lease| now + lease + self.answer_timeout)
        } else {
            expired_by(lease, now)
        };
        let (delivery, again, refused, caller) = (Delivery::Unsent, false, 0, None);
        let release = PendingRelease { delivery, hint, doubtful, again, refused, caller, until };
        self.releases.insert(id, release);
        if let Some(until) = until.filter(|_| self.releases_expire) {
            self.timers.insert((until, Timer::ReleaseExpired(id)));
        }
        self.want(Want::Release(id), now);
    }

    /// Ends a release that was not sent before the store must have expired its id. If a late answer shows that the store
    /// knows the id after all, a new release follows.
    fn end_expired_release(&mut self, id: AcquisitionId) {
        // The release of a lease ends together with the wait of its caller.
        if self.releases.get(&id).is_some_and(|release| release.caller.is_none()) {
            self.remove_release(id);
        }
    }

    fn remove_release(&mut self, id: AcquisitionId) {
        let until = self.releases.remove(&id).and_then(|release| release.until);
        if self.releases_expire {
            self.cancel_timer(until, Timer::ReleaseExpired(id));
        }
    }

    /// Whether the store has one lease for all acquisitions, and one of them is left. Then the lease is not released.
    pub(crate) fn is_shared(&self) -> bool {
        self.rules.is_one_lease && !self.acquisitions.is_empty()
    }

    /// Drops the releases that are not in flight, because another acquisition shares the lease from now on.
    fn withdraw_releases(&mut self) {
        let withdrawn = |(id, release): (&AcquisitionId, &PendingRelease<T>)| {
            (release.delivery != Delivery::Sent).then_some(*id)
        };
        let ids: Vec<_> = self.releases.iter().filter_map(withdrawn).collect();
        for id in ids {
            self.answer_release(id, Ok(true));
            self.remove_release(id);
            self.owes_release = true;
        }
    }

    /// Makes sure that the id is released, whatever was sent before. No task of this client waits for the id any more,
    /// but the store may know it.
    fn ensure_released(&mut self, id: AcquisitionId, doubtful: bool, now: Moment) {
        if self.is_shared() {
            self.owes_release = true;
            return;
        }
        let Some(release) = self.releases.get_mut(&id) else {
            if crate::broken::is("late-answer") {
                return;
            }
            return self.add_release(id, self.longest_lease, ReleaseHint::Unused, doubtful, now);
        };
        release.again |= release.delivery == Delivery::Sent && !crate::broken::is("released-again");
        release.doubtful |= doubtful;
        // The id may be in the queue again, and its time to expire starts again.
        if release.hint != ReleaseHint::Unused {
            release.hint = ReleaseHint::Nothing;
        }
        release.until = release.until.and(expired_by(self.longest_lease, now));
    }

    /// Remembers an id that has ended in the store.
    ///
    /// Older ones are removed only here. So during an outage, what was recent when it began stays recent.
    fn ended_in_store(&mut self, id: AcquisitionId, now: Moment) {
        while self.recent.len() >= MOST_RECENT
            || self.recent.front().is_some_and(|(at, _)| *at + RECENT <= now)
        {
            self.recent.pop_front();
        }
        self.recent.push_back((now, id));
    }

    /// Reports the outcome of a release to the caller that waits for it. Returns whether a caller waited.
    fn answer_release(&mut self, id: AcquisitionId, outcome: Result<bool, Failure>) -> bool {
        let caller = self.releases.get_mut(&id).and_then(|release| release.caller.take());
        let Some((owner, until)) = caller else { return false };
        self.timers.remove(&(until, Timer::ReleaseUnanswered(id)));
        self.notices.push(Notice::Released { owner, outcome });
        true
    }

    fn cancel_timer(&mut self, at: Option<Moment>, timer: Timer) {
        if let Some(at) = at {
            self.timers.remove(&(at, timer));
        }
    }

    /// Records that the id waits in the store. If it did not wait before, it is behind all other waiters of this
    /// client.
    fn add_waiting(&mut self, id: AcquisitionId) {
        let Some(acquisition) = self.acquisitions.get_mut(&id) else { return };
        if acquisition.place.is_none() {
            self.last_place += 1;
            acquisition.place = Some(self.last_place);
            self.waiting.insert(self.last_place, id);
        }
    }

    fn remove_waiting(&mut self, id: AcquisitionId) {
        let acquisition = self.acquisitions.get_mut(&id);
        if let Some(place) = acquisition.and_then(|acquisition| acquisition.place.take()) {
            self.waiting.remove(&place);
        }
    }
}
