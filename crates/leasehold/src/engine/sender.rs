//! The sender of a client: it queues what names, locks and pools have to send, and packs requests.
//!
//! A *source* has commands to send. It is a semaphore name, or one call of a lock or a pool. A source joins the queue of
//! its destination once, however many commands it has. When a request may be sent, the sender takes from the sources in
//! queue the commands that are still wanted at that moment, up to [`MAX_IDS`] and [`MAX_PARTS`]. Commands leave the
//! client only here. So this is the only place that decides whether a command is still wanted.
//!
//! Two requests may be in flight to a destination, so that the store works on one while the client works on the other.
//! The renewals of holders do not wait for these two. They have a request of their own, because a permit may depend on
//! them.
//!
//! Nothing is taken while the destination is unreachable. So a command that was queued during an outage was never sent,
//! and dropping it costs nothing (see [`Delivery`](crate::client_core::Delivery)).

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::Error;
use crate::backend::{Answer, Destination, Part};
use crate::client_core::timing;
use crate::clock::{Moment, Span};
use crate::machine::Command;

/// The most ids in one request. [`MAX_PARTS`] is the most parts. The server serves no other client while it applies a
/// request, so both are bounded.
pub(crate) const MAX_IDS: usize = 256;
const MAX_PARTS: usize = 64;

/// The shortest pause after a request that failed with an error that may pass. A new connection ends the pause.
const SHORTEST_PAUSE: Duration = Duration::from_millis(20);

/// How long a source rests if the store cannot serve it at the moment, although it serves others: a twentieth of the
/// time that this has lasted, within these limits.
const SHORTEST_REST: Span = Span::from_millis(20);
const LONGEST_REST: Span = Span::from_millis(200);

/// The urgency of what a source has to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Urgency {
    /// Renewals of holders.
    Renewals,
    Ordinary,
}

impl Urgency {
    /// The more urgent one first.
    const ALL: [Self; 2] = [Self::Renewals, Self::Ordinary];

    /// The most requests in flight to one destination.
    fn in_flight(self) -> usize {
        match self {
            Self::Ordinary => 2,
            Self::Renewals => 1,
        }
    }

    /// The longest pause: see [`SHORTEST_PAUSE`].
    fn longest_pause(self) -> Duration {
        match self {
            Self::Ordinary => Duration::from_millis(500),
            // A permit may depend on the renewal.
            Self::Renewals => Duration::from_millis(50),
        }
    }
}

/// A source of commands.
pub(crate) trait Source: Send + Sync {
    fn destination(&self) -> Destination;

    /// Takes at most `room` commands that are still wanted. They count as sent from now on.
    fn take(self: Arc<Self>, urgency: Urgency, room: usize) -> Taken;

    /// Receives the answer to a part that was taken with `command` and sent at `sent`. With [`Error::Unavailable`] the outcome is
    /// unknown. `round_trip` is the slowest answer of the destination that is still normal.
    fn answered(
        self: Arc<Self>,
        part: &Part,
        command: Option<&Command>,
        answer: Result<Answer, Error>,
        sent: Moment,
        round_trip: Duration,
    );

    /// Fails the call, because the store refuses all requests or the engine has stopped.
    fn refuse(&self, _error: &Error) {}
}

/// A source in queue. A source that is dropped leaves the queue, because none of its commands is wanted any more.
type WaitingSource = Weak<dyn Source>;

/// When a queue has this many sources, those that were dropped are removed from it.
const CLEAN_UP_FROM: usize = 1024;

/// A part of a request, and the command from which it was made, unless the part contains it.
pub(crate) type TakenPart = (Part, Option<Command>);

/// The commands that a source had to send.
pub(crate) struct Taken {
    pub(crate) part: Option<TakenPart>,
    /// Whether there are more, so that the source joins the queue again.
    pub(crate) more: bool,
}

/// Commands that are sent to one destination in one request.
pub(crate) struct Request {
    pub(crate) to: Destination,
    pub(crate) parts: Arc<[Part]>,
    pub(crate) sources: Vec<(Arc<dyn Source>, Option<Command>)>,
    pub(crate) sent: Moment,
    urgency: Urgency,
}

impl Request {
    /// The number of ids in the request.
    pub(super) fn ids(&self) -> usize {
        self.parts.iter().map(Part::len).sum()
    }
}

/// The calling thread sends its own request if the previous request had at most this many ids. The answer to a larger
/// request wakes many tasks, which will send soon. The engine's thread takes a moment to wake up, and then sends their
/// commands together.
const FEW: usize = 4;

#[derive(Default)]
pub(crate) struct Sender {
    state: Mutex<SenderState>,
    /// Whether a destination refuses all requests. Read without the lock.
    is_refused: AtomicBool,
}

#[derive(Default)]
struct SenderState {
    destinations: BTreeMap<Destination, DestinationState>,
    /// Whether a thread sends at the moment. Only one at a time does, so that no request overtakes another.
    is_sending: bool,
}

/// The sources whose commands may be sent now, in one request to one destination.
struct Batch {
    to: Destination,
    urgency: Urgency,
    sources: VecDeque<WaitingSource>,
    /// The request counts as in flight from this moment on.
    sent: Moment,
}

/// The exclusive right to send. It ends when nothing may be sent any more, or when it is dropped.
pub(super) struct Turn<'a> {
    sender: &'a Sender,
    batch: Option<Batch>,
}

impl Turn<'_> {
    /// Sends everything that may be sent, request by request.
    pub(super) fn send_all(mut self, mut send: impl FnMut(Request)) {
        while let Some(batch) = self.batch.take() {
            let finished = batch.send(&mut send);
            self.batch = self.sender.finish(finished);
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(Batch { to, urgency, sources: left, sent }) = self.batch.take() {
            self.sender.finish(Finished { to, urgency, sent, ids: 0, left, again: Vec::new() });
        } else if !std::thread::panicking() {
            // The turn has ended, because nothing may be sent any more.
            return;
        }
        self.sender.state().is_sending = false;
    }
}

impl Batch {
    /// Takes commands from the sources, once from each. A source takes its own lock before the sender's, so the sender's
    /// lock is not held in the meantime. Returns what became of the sources.
    fn send(self, send: &mut impl FnMut(Request)) -> Finished {
        let Self { to, urgency, sources: mut waiting, sent } = self;
        let (mut parts, mut sources, mut again) = (Vec::new(), Vec::new(), Vec::new());
        let mut room = MAX_IDS;
        while room > 0
            && let Some(waiting) = waiting.pop_front()
        {
            let Some(source) = waiting.upgrade() else { continue };
            let Taken { part, more } = source.clone().take(urgency, room);
            if more {
                again.push(waiting);
            }
            if let Some((part, command)) = part {
                room = room.saturating_sub(part.len());
                parts.push(part);
                sources.push((source, command));
            }
        }
        let ids = MAX_IDS - room;
        if !parts.is_empty() {
            send(Request { to, parts: parts.into(), sources, sent, urgency });
        }
        Finished { to, urgency, sent, ids, left: waiting, again }
    }
}

/// What became of a batch.
struct Finished {
    to: Destination,
    urgency: Urgency,
    sent: Moment,
    /// The number of ids in the request. With 0, no command was wanted any more, and nothing was sent.
    ids: usize,
    /// The sources for which there was no room.
    left: VecDeque<WaitingSource>,
    /// The sources that have more commands.
    again: Vec<WaitingSource>,
}

impl SenderState {
    fn queue(&mut self, to: Destination, urgency: Urgency) -> &mut Queue {
        self.destinations.entry(to).or_default().queue(urgency)
    }

    /// Takes the sources of the next request that may be sent, to any destination.
    fn next_batch(&mut self, now: Moment) -> Option<Batch> {
        let (to, queue, urgency) = self.destinations.iter_mut().find_map(|(to, state)| {
            let urgency = Urgency::ALL.into_iter().find(|urgency| state.may_send(*urgency, now))?;
            Some((*to, state.queue(urgency), urgency))
        })?;
        let most = queue.waiting.len().min(MAX_PARTS);
        queue.in_flight.push_back(now);
        Some(Batch { to, urgency, sources: queue.waiting.drain(..most).collect(), sent: now })
    }
}

/// What has to happen after a source has joined the queue.
pub(super) enum Next<'a> {
    /// Nothing is in flight, so the calling thread sends the request at once.
    Send(Turn<'a>),
    /// The engine's thread has to look at the queue.
    WakeThread,
    /// Nothing: another thread sends and will look at the queue, or as many requests are in flight as allowed, and the
    /// next answer makes the engine's thread look.
    Answer,
}

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ending {
    Answered,
    /// It was answered with an error that may pass.
    TemporaryError,
    /// It was not answered.
    Unanswered,
}

/// The state of one destination, with its two queues of sources.
#[derive(Default)]
struct DestinationState {
    /// One for each [`Urgency`].
    queues: [Queue; 2],
    reach: Reachability,
    /// When the destination last answered.
    last_answer: Option<Moment>,
    round_trip: RoundTrip,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<WaitingSource>,
    /// Sources that rest, each with the moment when it joins the queue again. Ordered by that moment.
    resting: VecDeque<(Moment, WaitingSource)>,
    /// When each request in flight was sent.
    in_flight: VecDeque<Moment>,
    /// The number of ids in the last request.
    last: usize,
    /// Nothing is sent before this moment, because the last request failed with an error that may pass.
    paused_until: Option<Moment>,
    pause: Duration,
}

impl Queue {
    /// Moves the sources that have rested long enough into the queue.
    fn wake(&mut self, now: Moment) {
        while self.resting.front().is_some_and(|(at, _)| *at <= now)
            && let Some((_, source)) = self.resting.pop_front()
        {
            self.waiting.push_back(source);
        }
    }

    /// Removes a request that was sent at that moment from those in flight.
    fn remove_in_flight(&mut self, sent: Moment) {
        if let Some(at) = self.in_flight.iter().position(|other| *other == sent) {
            self.in_flight.remove(at);
        }
    }

    fn is_paused(&self, now: Moment) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }

    /// Pauses the queue. Each pause is longer than the one before, until a request is answered again.
    fn pause(&mut self, longest: Duration, now: Moment) {
        self.pause = (self.pause * 2).clamp(SHORTEST_PAUSE, longest);
        self.paused_until = Some(now + Span::from_duration(self.pause));
    }
}

/// Whether a destination can be reached.
#[derive(Clone, Debug, Default)]
pub(crate) enum Reachability {
    /// The first connection is not up yet.
    #[default]
    Connecting,
    Up,
    Down {
        since: Moment,
        error: Error,
    },
}

/// The smoothed round-trip time and its deviation, estimated as in TCP. From these follows the slowest answer that is
/// still normal.
#[derive(Clone, Copy, Default)]
struct RoundTrip {
    smoothed: Duration,
    deviation: Duration,
}

impl RoundTrip {
    fn learn(&mut self, sample: Duration) {
        if self.smoothed.is_zero() {
            (self.smoothed, self.deviation) = (sample, sample / 2);
            return;
        }
        let error = sample.abs_diff(self.smoothed);
        self.deviation = (self.deviation * 3 + error) / 4;
        self.smoothed = (self.smoothed * 7 + sample) / 8;
    }

    fn slowest(&self) -> Duration {
        self.smoothed + 4 * self.deviation
    }
}

impl DestinationState {
    fn queue(&mut self, urgency: Urgency) -> &mut Queue {
        &mut self.queues[urgency as usize]
    }

    /// Returns since when the destination has not answered, if it has to answer anything.
    fn unanswered_since(&self) -> Option<Moment> {
        let oldest = *self.queues.iter().flat_map(|queue| &queue.in_flight).min()?;
        Some(oldest.max(self.last_answer.unwrap_or(oldest)))
    }

    fn down(&self) -> Option<(Moment, Error)> {
        match &self.reach {
            Reachability::Down { since, error } => Some((*since, error.clone())),
            _ => None,
        }
    }

    /// Whether another request may be sent now.
    fn may_send(&mut self, urgency: Urgency, now: Moment) -> bool {
        let queue = self.queue(urgency);
        queue.wake(now);
        let paused = queue.is_paused(now);
        let free = queue.in_flight.len() < urgency.in_flight() && !queue.waiting.is_empty();
        free && !paused && matches!(self.reach, Reachability::Up)
    }
}

impl Sender {
    /// Adds a source that the store has not been able to serve since that moment. It rests before it joins the queue,
    /// and must not be in queue already.
    pub(super) fn enqueue_later(&self, source: &Arc<dyn Source>, urgency: Urgency, since: Moment) {
        let now = Moment::now();
        let rest = Span::from_duration(now.saturating_since(since) / 20);
        let at = now + rest.max(SHORTEST_REST).min(LONGEST_REST);
        let mut state = self.state();
        let resting = &mut state.queue(source.destination(), urgency).resting;
        let place = resting.partition_point(|(other, _)| *other <= at);
        resting.insert(place, (at, Arc::downgrade(source)));
    }

    /// Adds a source to the queue. It must not be in queue already. If it can be sent at once, and `may_send` says that
    /// the calling thread may do that, the thread gets the turn.
    pub(super) fn enqueue(
        &self,
        source: &Arc<dyn Source>,
        urgency: Urgency,
        may_send: bool,
    ) -> Next<'_> {
        let now = Moment::now();
        let mut state = self.state();
        // Read under the lock. Otherwise the source could join the queue of a destination that `reroute` has just
        // emptied.
        let destination = state.destinations.entry(source.destination()).or_default();
        let is_up = matches!(destination.reach, Reachability::Up);
        let queue = destination.queue(urgency);
        let (first, in_flight) = (queue.waiting.is_empty(), queue.in_flight.len());
        if queue.waiting.len() >= CLEAN_UP_FROM && queue.waiting.len().is_power_of_two() {
            queue.waiting.retain(|waiting| waiting.strong_count() > 0);
        }
        queue.waiting.push_back(Arc::downgrade(source));
        let is_quiet = is_up && in_flight == 0 && !queue.is_paused(now) && queue.last <= FEW;
        if first && is_quiet && may_send && !state.is_sending {
            let batch = state.next_batch(now);
            state.is_sending = batch.is_some();
            return batch.map_or(Next::WakeThread, |batch| {
                Next::Send(Turn { sender: self, batch: Some(batch) })
            });
        }
        if state.is_sending || !first && in_flight >= urgency.in_flight() {
            Next::Answer
        } else {
            Next::WakeThread
        }
    }

    /// Puts back what a batch has left in queue, and takes the next one. The turn ends if there is none.
    fn finish(&self, finished: Finished) -> Option<Batch> {
        let Finished { to, urgency, sent, ids, left, again } = finished;
        // Dropped after the lock is released.
        let left: Vec<_> = left.iter().rev().filter_map(Weak::upgrade).collect();
        let again: Vec<_> = again.iter().filter_map(Weak::upgrade).collect();
        let mut state = self.state();
        // Their destination may have changed since.
        for source in &left {
            let queue = state.queue(source.destination(), urgency);
            queue.waiting.push_front(Arc::downgrade(source));
        }
        for source in &again {
            state.queue(source.destination(), urgency).waiting.push_back(Arc::downgrade(source));
        }
        let queue = state.queue(to, urgency);
        if ids > 0 {
            queue.last = ids;
        } else {
            queue.remove_in_flight(sent);
        }
        let next = state.next_batch(Moment::now());
        state.is_sending = next.is_some();
        next
    }

    /// Begins to send, unless another thread sends. That thread then sends what is in queue, too.
    pub(super) fn begin(&self, now: Moment) -> Option<Turn<'_>> {
        let mut state = self.state();
        if state.is_sending {
            return None;
        }
        let batch = state.next_batch(now)?;
        state.is_sending = true;
        Some(Turn { sender: self, batch: Some(batch) })
    }

    /// Removes a request that is no longer in flight. Returns the slowest answer that is still normal.
    pub(super) fn ended(&self, request: &Request, ending: Ending) -> Duration {
        let mut state = self.state();
        let Some(state) = state.destinations.get_mut(&request.to) else { return Duration::ZERO };
        let now = Moment::now();
        let queue = state.queue(request.urgency);
        queue.remove_in_flight(request.sent);
        match ending {
            Ending::Answered => queue.pause = Duration::ZERO,
            Ending::TemporaryError | Ending::Unanswered => {
                queue.pause(request.urgency.longest_pause(), now);
            }
        }
        if ending != Ending::Unanswered {
            state.last_answer = Some(now);
            state.round_trip.learn(now.saturating_since(request.sent));
        }
        state.round_trip.slowest()
    }

    /// Returns when the next paused queue or resting source can send again.
    pub(super) fn next_resume(&self, now: Moment) -> Option<Moment> {
        let resumes = |queue: &Queue| {
            let rested = queue.resting.front().map(|(at, _)| *at);
            rested.into_iter().chain(queue.paused_until.filter(|_| !queue.waiting.is_empty())).min()
        };
        let state = self.state();
        let queues = state.destinations.values().flat_map(|state| &state.queues);
        queues.filter_map(resumes).filter(|until| now < *until).min()
    }

    pub(super) fn set_reach(&self, to: Destination, reach: Reachability) {
        let mut state = self.state();
        let states = &mut state.destinations;
        let state = states.entry(to).or_default();
        state.queues.iter_mut().for_each(|queue| queue.paused_until = None);
        state.reach = match (&state.reach, reach) {
            // The first failure says since when the destination is down.
            (Reachability::Down { since, .. }, Reachability::Down { error, .. }) => {
                Reachability::Down { since: *since, error }
            }
            (_, reach) => reach,
        };
        let is_refused = |state: &DestinationState| matches!(&state.reach, Reachability::Down { error, .. } if !error.is_transient());
        self.is_refused.store(states.values().any(is_refused), Ordering::Release);
    }

    /// Moves each source to the queue of its current destination, in the same order as before. Removes the destinations
    /// that are `gone`.
    pub(super) fn reroute(&self, gone: &[Destination]) {
        // Dropped after the lock is released.
        let mut sources = Vec::new();
        let mut state = self.state();
        for urgency in Urgency::ALL {
            let all = state.destinations.values_mut().flat_map(|state| {
                let queue = state.queue(urgency);
                let resting = std::mem::take(&mut queue.resting).into_iter();
                let resting = resting.map(|(_, source)| source);
                std::mem::take(&mut queue.waiting).into_iter().chain(resting)
            });
            let first = sources.len();
            sources.extend(all.filter_map(|waiting| waiting.upgrade()));
            for source in &sources[first..] {
                state
                    .queue(source.destination(), urgency)
                    .waiting
                    .push_back(Arc::downgrade(source));
            }
        }
        state.destinations.retain(|to, state| {
            let is_empty = state.queues.iter().all(|queue| queue.waiting.is_empty());
            !(is_empty && gone.contains(to))
        });
    }

    /// Fails the calls in queue for this destination, or for all destinations, because the store refuses all requests or
    /// the engine has stopped.
    pub(super) fn refuse_calls(&self, to: Option<Destination>, error: &Error) {
        for source in self.queued(to) {
            source.refuse(error);
        }
    }

    /// Removes everything, because the engine has stopped.
    pub(super) fn clear(&self) {
        let destinations = std::mem::take(&mut self.state().destinations);
        drop(destinations);
    }

    fn queued(&self, to: Option<Destination>) -> Vec<Arc<dyn Source>> {
        let state = self.state();
        let served =
            state.destinations.iter().filter(|(served, _)| to.is_none_or(|to| to == **served));
        let queues = served.flat_map(|(_, state)| &state.queues);
        let sources = queues.flat_map(|queue| {
            queue.waiting.iter().chain(queue.resting.iter().map(|(_, source)| source))
        });
        sources.filter_map(Weak::upgrade).collect()
    }

    /// Returns since when the destination has not answered, if that is longer than normal, and the reason, if it is
    /// known.
    pub(crate) fn silent_since(
        &self,
        to: Destination,
        now: Moment,
    ) -> Option<(Moment, Option<Error>)> {
        let state = self.state();
        let state = state.destinations.get(&to)?;
        if let Reachability::Down { since, error } = &state.reach {
            return Some((*since, Some(error.clone())));
        }
        let silent = state.unanswered_since()?;
        let limit = timing::silence(state.round_trip.slowest());
        (now.saturating_since(silent) >= limit).then_some((silent, None))
    }

    /// Whether the destination has not answered since that moment.
    pub(crate) fn is_silent_since(&self, to: Destination, moment: Moment) -> bool {
        self.state()
            .destinations
            .get(&to)
            .is_none_or(|state| state.last_answer.is_none_or(|last_answer| last_answer < moment))
    }

    /// Returns why the store refuses all requests to this destination, if it does. Then waiting does not help.
    pub(crate) fn refusal(&self, to: Destination) -> Option<Error> {
        if !self.is_refused.load(Ordering::Acquire) {
            return None;
        }
        match &self.state().destinations.get(&to)?.reach {
            Reachability::Down { error, .. } if !error.is_transient() => Some(error.clone()),
            _ => None,
        }
    }

    /// Returns since when a destination is unreachable, and why. If there are several, it returns the one that failed
    /// first.
    pub(crate) fn outage(&self) -> Option<(Moment, Error)> {
        let state = self.state();
        state
            .destinations
            .values()
            .filter_map(DestinationState::down)
            .min_by_key(|(since, _)| *since)
    }

    /// Returns since when a request has not been answered, and the destination, if that is longer than `limit`.
    pub(crate) fn unanswered_for(&self, limit: Span, now: Moment) -> Option<(Moment, Destination)> {
        let state = self.state();
        let destinations = state.destinations.iter();
        let silences =
            destinations.filter_map(|(to, state)| Some((state.unanswered_since()?, *to)));
        silences.min_by_key(|(since, _)| *since).filter(|(since, _)| *since + limit <= now)
    }

    /// Returns since when this destination is unreachable, and why.
    pub(crate) fn down(&self, to: Destination) -> Option<(Moment, Error)> {
        self.state().destinations.get(&to)?.down()
    }

    fn state(&self) -> MutexGuard<'_, SenderState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
