//! The sender of a client: it queues what names, locks and pools have to send, and packs requests.
//!
//! A *source* has commands to send. It is a semaphore name, or one call of a lock or a pool. A source joins the line of
//! its destination once, however many commands it has. When a request may be sent, the sender takes from the sources in
//! line the commands that are still wanted at that moment, up to [`MAX_IDS`] and [`MAX_PARTS`]. Commands leave the
//! client only here. So this is the only place that decides whether a command is still wanted.
//!
//! Two requests may be in flight to a destination, so that the store works on one while the client works on the other.
//! The renewals of holders do not wait for these two. They have a request of their own, because a permit may depend on
//! them.
//!
//! Nothing is taken while the destination is unreachable. So a command that was queued during an outage was never sent,
//! and dropping it costs nothing (see [`Delivery`](crate::client_core::Delivery)).

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::thread::CHECK_CALLS;
use crate::Error;
use crate::backend::{Answer, Destination, Part};
use crate::client_core::timing;
use crate::clock::{Moment, Span};

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
    Ordinary,
    /// Renewals of holders.
    Renewals,
}

impl Urgency {
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

    /// Receives the answer to a part that was taken and sent at `sent`. With [`Error::Unavailable`] the outcome is
    /// unknown. `round_trip` is the slowest answer of the destination that is still normal.
    fn settle(
        self: Arc<Self>,
        part: &Part,
        answer: Result<Answer, Error>,
        sent: Moment,
        round_trip: Duration,
    );

    /// Fails the call if its deadline has passed. Sources that have a timer for this do nothing here.
    fn expire(&self, _now: Moment) {}

    /// Fails the call, because the store refuses all requests or the engine has stopped.
    fn refuse(&self, _error: &Error) {}

    /// Leaves the line if none of its commands is wanted any more. Returns whether it left.
    fn leave_if_unwanted(&self, urgency: Urgency) -> bool;
}

/// The commands that a source had to send.
pub(crate) struct Taken {
    pub(crate) part: Option<Part>,
    /// Whether there are more, so that the source joins the line again.
    pub(crate) more: bool,
}

/// Commands that are sent to one destination in one request.
pub(crate) struct Request {
    pub(crate) to: Destination,
    pub(crate) parts: Arc<[Part]>,
    pub(crate) sources: Vec<Arc<dyn Source>>,
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
    states: Mutex<BTreeMap<Destination, DestinationState>>,
}

/// What has to happen after a source has joined the line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// Nothing is in flight, so the request can be sent at once.
    Send,
    /// The engine's thread has to look at the line.
    Look,
    /// As many requests are in flight as allowed. The next answer makes the engine's thread look at the line.
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

/// The state of one destination, with its two lines of sources.
#[derive(Default)]
struct DestinationState {
    ordinary: Line,
    renewals: Line,
    reach: Reachability,
    /// When the destination last answered.
    heard: Option<Moment>,
    round_trip: RoundTrip,
}

#[derive(Default)]
struct Line {
    waiting: VecDeque<Arc<dyn Source>>,
    /// Sources that rest, each with the moment when it joins the line again. Ordered by that moment.
    resting: VecDeque<(Moment, Arc<dyn Source>)>,
    /// When each request in flight was sent.
    in_flight: VecDeque<Moment>,
    /// The number of ids in the last request.
    last: usize,
    /// Nothing is sent before this moment, because the last request failed with an error that may pass.
    paused_until: Option<Moment>,
    pause: Duration,
}

impl Line {
    /// Moves the sources that have rested long enough into the line.
    fn wake(&mut self, now: Moment) {
        while self.resting.front().is_some_and(|(at, _)| *at <= now)
            && let Some((_, source)) = self.resting.pop_front()
        {
            self.waiting.push_back(source);
        }
    }

    fn is_paused(&self, now: Moment) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }

    /// Pauses the line. Each pause is longer than the one before, until a request is answered again.
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
    fn line(&mut self, urgency: Urgency) -> &mut Line {
        match urgency {
            Urgency::Ordinary => &mut self.ordinary,
            Urgency::Renewals => &mut self.renewals,
        }
    }

    fn down(&self) -> Option<(Moment, Error)> {
        match &self.reach {
            Reachability::Down { since, error } => Some((*since, error.clone())),
            _ => None,
        }
    }

    /// Whether another request may be sent now.
    fn may_send(&mut self, urgency: Urgency, now: Moment) -> bool {
        let line = self.line(urgency);
        line.wake(now);
        let paused = line.is_paused(now);
        let free = line.in_flight.len() < urgency.in_flight() && !line.waiting.is_empty();
        free && !paused && matches!(self.reach, Reachability::Up)
    }
}

impl Sender {
    /// Adds a source that the store has not been able to serve since that moment. It rests before it joins the line,
    /// and must not be in line already.
    pub(super) fn enqueue_later(&self, source: Arc<dyn Source>, urgency: Urgency, since: Moment) {
        let now = Moment::now();
        let rest = Span::from_duration(now.saturating_since(since) / 20);
        let at = now + rest.max(SHORTEST_REST).min(LONGEST_REST);
        let mut states = self.states();
        let state = states.entry(source.destination()).or_default();
        let resting = &mut state.line(urgency).resting;
        resting.insert(resting.partition_point(|(other, _)| *other <= at), (at, source));
    }

    /// Adds a source to the line. It must not be in line already.
    pub(super) fn enqueue(&self, source: Arc<dyn Source>, urgency: Urgency) -> Next {
        let mut states = self.states();
        // Read under the lock. Otherwise the source could join the line of a destination that `reroute` has just
        // emptied.
        let state = states.entry(source.destination()).or_default();
        let up = matches!(state.reach, Reachability::Up);
        let own = state.line(urgency);
        let (first, in_flight) = (own.waiting.is_empty(), own.in_flight.len());
        own.waiting.push_back(source);
        let paused = own.is_paused(Moment::now());
        if first && up && in_flight == 0 && !paused && own.last <= FEW {
            Next::Send
        } else if first || in_flight < urgency.in_flight() {
            Next::Look
        } else {
            Next::Answer
        }
    }

    /// Whether a request can be sent now.
    pub(super) fn can_send(&self, now: Moment) -> bool {
        let may_send = |state: &mut DestinationState| {
            state.may_send(Urgency::Renewals, now) || state.may_send(Urgency::Ordinary, now)
        };
        self.states().values_mut().any(may_send)
    }

    /// Returns the next request that may be sent, to any destination. Only one thread at a time may call this.
    pub(super) fn next_request(&self, now: Moment) -> Option<Request> {
        let destinations: Vec<_> = self.states().keys().copied().collect();
        let both = [Urgency::Renewals, Urgency::Ordinary];
        let lines = destinations.into_iter().flat_map(|to| both.map(|urgency| (to, urgency)));
        lines.into_iter().find_map(|(to, urgency)| self.pack(to, urgency, now))
    }

    /// Takes commands from the sources in line, once from each. A source takes its own lock before the sender's. So the
    /// sender's lock is not held while a source is called.
    fn pack(&self, to: Destination, urgency: Urgency, now: Moment) -> Option<Request> {
        let (mut parts, mut sources, mut room) = (Vec::new(), Vec::new(), MAX_IDS);
        while parts.is_empty() {
            let mut in_line: VecDeque<_> = {
                let mut states = self.states();
                let state = states.get_mut(&to)?;
                if !state.may_send(urgency, now) {
                    return None;
                }
                let waiting = &mut state.line(urgency).waiting;
                let most = waiting.len().min(MAX_PARTS);
                waiting.drain(..most).collect()
            };
            let mut again = Vec::new();
            while room > 0
                && let Some(source) = in_line.pop_front()
            {
                let Taken { part, more } = source.clone().take(urgency, room);
                if more {
                    again.push(source.clone());
                }
                if let Some(part) = part {
                    room = room.saturating_sub(part.len());
                    parts.push(part);
                    sources.push(source);
                }
            }
            let mut states = self.states();
            // Sources for which there was no room go back to the front of the line. Their destination may have changed
            // since.
            for source in in_line.into_iter().rev() {
                let state = states.entry(source.destination()).or_default();
                state.line(urgency).waiting.push_front(source);
            }
            for source in again {
                let state = states.entry(source.destination()).or_default();
                state.line(urgency).waiting.push_back(source);
            }
            let line = states.entry(to).or_default().line(urgency);
            if !parts.is_empty() {
                line.last = MAX_IDS - room;
                line.in_flight.push_back(now);
            }
        }
        Some(Request { to, parts: parts.into(), sources, sent: now, urgency })
    }

    /// Removes a request that is no longer in flight. Returns the slowest answer that is still normal.
    pub(super) fn settled(&self, request: &Request, ending: Ending) -> Duration {
        let mut states = self.states();
        let Some(state) = states.get_mut(&request.to) else { return Duration::ZERO };
        let now = Moment::now();
        let own = state.line(request.urgency);
        if let Some(at) = own.in_flight.iter().position(|sent| *sent == request.sent) {
            own.in_flight.remove(at);
        }
        match ending {
            Ending::Answered => own.pause = Duration::ZERO,
            Ending::TemporaryError | Ending::Unanswered => {
                own.pause(request.urgency.longest_pause(), now);
            }
        }
        if ending != Ending::Unanswered {
            state.heard = Some(now);
            state.round_trip.learn(now.saturating_since(request.sent));
        }
        state.round_trip.slowest()
    }

    /// Returns when the next paused line or resting source can send again.
    pub(super) fn next_resume(&self, now: Moment) -> Option<Moment> {
        let resumes = |line: &Line| {
            let rested = line.resting.front().map(|(at, _)| *at);
            rested.into_iter().chain(line.paused_until.filter(|_| !line.waiting.is_empty())).min()
        };
        let states = self.states();
        let all =
            states.values().flat_map(|state| [resumes(&state.ordinary), resumes(&state.renewals)]);
        all.flatten().filter(|until| now < *until).min()
    }

    pub(super) fn set_reach(&self, to: Destination, reach: Reachability) {
        let mut states = self.states();
        let state = states.entry(to).or_default();
        state.ordinary.paused_until = None;
        state.renewals.paused_until = None;
        state.reach = match (&state.reach, reach) {
            // The first failure says since when the destination is down.
            (Reachability::Down { since, .. }, Reachability::Down { error, .. }) => {
                Reachability::Down { since: *since, error }
            }
            (_, reach) => reach,
        };
    }

    /// Moves each source to the line of its current destination, in the same order as before. Removes the destinations
    /// that are `gone`.
    pub(super) fn reroute(&self, gone: &[Destination]) {
        let mut states = self.states();
        for urgency in [Urgency::Renewals, Urgency::Ordinary] {
            let all = states.values_mut().flat_map(|state| {
                let line = state.line(urgency);
                let resting = std::mem::take(&mut line.resting).into_iter().map(|(_, own)| own);
                std::mem::take(&mut line.waiting).into_iter().chain(resting)
            });
            let sources: Vec<_> = all.collect();
            for source in sources {
                let state = states.entry(source.destination()).or_default();
                state.line(urgency).waiting.push_back(source);
            }
        }
        states.retain(|to, state| {
            let is_empty = state.ordinary.waiting.is_empty() && state.renewals.waiting.is_empty();
            !(is_empty && gone.contains(to))
        });
    }

    /// Fails the calls in line for this destination, or for all destinations, because the store refuses all requests or
    /// the engine has stopped.
    pub(super) fn refuse_calls(&self, to: Option<Destination>, error: &Error) {
        for source in self.in_line(to) {
            source.refuse(error);
        }
    }

    /// Whether anything is in line or in flight.
    pub(super) fn is_busy(&self) -> bool {
        let busy = |line: &Line| {
            !line.waiting.is_empty() || !line.resting.is_empty() || !line.in_flight.is_empty()
        };
        self.states().values().any(|state| busy(&state.ordinary) || busy(&state.renewals))
    }

    /// Fails the calls in line whose deadline has passed, and removes sources that are no longer wanted. If a
    /// destination has answered recently and its line is not paused, it serves the line soon, so only its resting
    /// sources are checked. A source takes its own lock before the sender's, so the lines are taken out in the
    /// meantime. Called only on the engine's thread.
    pub(super) fn expire(&self, now: Moment) {
        let both = [Urgency::Renewals, Urgency::Ordinary];
        let destinations: Vec<_> = self.states().keys().copied().collect();
        for (to, urgency) in destinations.into_iter().flat_map(|to| both.map(|own| (to, own))) {
            let is_silent = self.is_silent(to, now);
            let take = |state: &mut DestinationState| {
                let line = state.line(urgency);
                let waits = is_silent || line.is_paused(now);
                let waiting =
                    if waits { std::mem::take(&mut line.waiting) } else { VecDeque::new() };
                (waiting, std::mem::take(&mut line.resting))
            };
            let (mut waiting, mut resting) =
                self.states().get_mut(&to).map(take).unwrap_or_default();
            let stays = |source: &Arc<dyn Source>| {
                source.expire(now);
                !source.leave_if_unwanted(urgency)
            };
            waiting.retain(stays);
            resting.retain(|(_, source)| stays(source));
            let mut states = self.states();
            let line = states.entry(to).or_default().line(urgency);
            waiting.append(&mut line.waiting);
            resting.append(&mut line.resting);
            (line.waiting, line.resting) = (waiting, resting);
        }
    }

    /// Whether the destination has not answered for [`CHECK_CALLS`], the interval between two checks of deadlines.
    pub(super) fn is_silent(&self, to: Destination, now: Moment) -> bool {
        let states = self.states();
        let heard = states.get(&to).and_then(|state| state.heard);
        heard.is_none_or(|heard| heard + CHECK_CALLS <= now)
    }

    /// Removes everything, because the engine has stopped.
    pub(super) fn clear(&self) {
        let states = std::mem::take(&mut *self.states());
        drop(states);
    }

    fn in_line(&self, to: Option<Destination>) -> Vec<Arc<dyn Source>> {
        let states = self.states();
        let own = states.iter().filter(|(own, _)| to.is_none_or(|to| to == **own));
        let both = own.flat_map(|(_, state)| [&state.renewals, &state.ordinary]);
        let sources = both
            .flat_map(|line| line.waiting.iter().chain(line.resting.iter().map(|(_, own)| own)));
        sources.cloned().collect()
    }

    pub(crate) fn round_trip(&self, to: Destination) -> Duration {
        self.states().get(&to).map_or(Duration::ZERO, |state| state.round_trip.slowest())
    }

    /// Returns since when the destination has not answered, if that is longer than normal, and the reason, if it is
    /// known.
    pub(crate) fn silent_since(
        &self,
        to: Destination,
        now: Moment,
    ) -> Option<(Moment, Option<Error>)> {
        let states = self.states();
        let state = states.get(&to)?;
        if let Reachability::Down { since, error } = &state.reach {
            return Some((*since, Some(error.clone())));
        }
        let sent = state.ordinary.in_flight.iter().chain(&state.renewals.in_flight);
        let oldest = *sent.min()?;
        let silent = oldest.max(state.heard.unwrap_or(oldest));
        let limit = timing::silence(state.round_trip.slowest());
        (now.saturating_since(silent) >= limit).then_some((silent, None))
    }

    /// Whether the destination has not answered since that moment.
    pub(crate) fn heard_nothing_since(&self, to: Destination, moment: Moment) -> bool {
        self.states().get(&to).is_none_or(|state| state.heard.is_none_or(|heard| heard < moment))
    }

    /// Returns why the store refuses all requests to this destination, if it does. Then waiting does not help.
    pub(crate) fn refusal(&self, to: Destination) -> Option<Error> {
        match &self.states().get(&to)?.reach {
            Reachability::Down { error, .. } if !error.may_pass() => Some(error.clone()),
            _ => None,
        }
    }

    /// Returns since when a destination is unreachable, and why. If there are several, it returns the one that failed
    /// first.
    pub(crate) fn outage(&self) -> Option<(Moment, Error)> {
        let states = self.states();
        states.values().filter_map(DestinationState::down).min_by_key(|(since, _)| *since)
    }

    /// Returns since when a request has not been answered, and the destination, if that is longer than `limit`.
    pub(crate) fn unanswered_for(&self, limit: Span, now: Moment) -> Option<(Moment, Destination)> {
        let states = self.states();
        let silences = states.iter().filter_map(|(to, state)| {
            let sent = state.ordinary.in_flight.iter().chain(&state.renewals.in_flight);
            let oldest = *sent.min()?;
            Some((oldest.max(state.heard.unwrap_or(oldest)), *to))
        });
        silences.min_by_key(|(since, _)| *since).filter(|(since, _)| *since + limit <= now)
    }

    /// Returns since when this destination is unreachable, and why.
    pub(crate) fn down(&self, to: Destination) -> Option<(Moment, Error)> {
        self.states().get(&to)?.down()
    }

    fn states(&self) -> MutexGuard<'_, BTreeMap<Destination, DestinationState>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
