//! The one sender of a client: it queues what names, locks and pools want to send, and packs requests.
//!
//! A *source* has commands to send: a semaphore's name, or one call of a lock or a pool. It stands in line for its
//! destination once, however many commands it has. When a request may be sent, the sender takes from the sources in
//! line what is still wanted at that moment, up to [`MAX_IDS`] and [`MAX_PARTS`]. This is the only place where commands
//! leave the client, and so the only one that decides whether a command is still wanted.
//!
//! Two requests are in flight to a destination, so that the store works on one while the client works on the other. The
//! renewals of holders do not wait for those: they have a request of their own, because a permit may depend on them. Nothing is taken
//! while the destination cannot be reached. So what was queued during an outage was never sent, and dropping it costs
//! nothing (see [`life`](super::life)).

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::timing;
use crate::Error;
use crate::backend::{Answer, Destination, Part};
use crate::clock::{Moment, Span};

/// How many ids, and how many parts, one request has. The server serves nobody else meanwhile.
pub(crate) const MAX_IDS: usize = 256;
const MAX_PARTS: usize = 64;

/// How long nothing is sent after a request that failed for a reason that may pass. A new connection ends the pause.
const SHORTEST_PAUSE: Duration = Duration::from_millis(20);

/// How urgent what a source wants to send is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Urgency {
    Ordinary,
    /// Renewals of holders.
    Renewals,
}

impl Urgency {
    /// How many requests are in flight to one destination.
    fn in_flight(self) -> usize {
        match self {
            Self::Ordinary => 2,
            Self::Renewals => 1,
        }
    }

    /// See [`SHORTEST_PAUSE`].
    fn longest_pause(self) -> Duration {
        match self {
            Self::Ordinary => Duration::from_millis(500),
            // A permit may depend on it.
            Self::Renewals => Duration::from_millis(50),
        }
    }
}

/// Has commands to send.
pub(crate) trait Source: Send + Sync {
    fn destination(&self) -> Destination;

    /// Takes the commands that are still wanted, at most `room`. They count as sent from now on.
    fn take(self: Arc<Self>, urgency: Urgency, room: usize) -> Taken;

    /// The answer to a part that was taken, sent at `sent`. With [`Error::Unavailable`] the outcome is unknown.
    fn settle(self: Arc<Self>, part: &Part, answer: Result<Answer, Error>, sent: Moment);

    /// Fails what has waited for the store until its deadline, where no timer does.
    fn expire(&self, _now: Moment) {}

    /// The store refuses everything, or the engine has stopped: whoever waits for this call is told.
    fn refuse(&self, _error: &Error) {}

    /// Leaves the line if nothing that it wanted to send is wanted any more.
    fn leave_if_unwanted(&self, urgency: Urgency) -> bool;
}

/// What a source had to send.
pub(crate) struct Taken {
    pub(crate) part: Option<Part>,
    /// There is more: it stands in line again.
    pub(crate) more: bool,
}

/// Some commands on their way to one destination.
pub(crate) struct Request {
    pub(crate) to: Destination,
    pub(crate) parts: Arc<[Part]>,
    pub(crate) sources: Vec<Arc<dyn Source>>,
    pub(crate) sent: Moment,
    urgency: Urgency,
}

/// The calling thread sends its own request if the previous request had at most this many ids. After a larger request more
/// tasks are about to ask, and the engine's thread, which takes a moment to wake up, sends them together.
const FEW: usize = 4;

#[derive(Default)]
pub(crate) struct Sender {
    lanes: Mutex<BTreeMap<Destination, Lane>>,
}

/// What follows when a source has come in line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// Nothing is in flight: it can be sent at once.
    Send,
    /// The engine's thread has to look.
    Look,
    /// As many requests as there may be are in flight: the next answer makes the thread look.
    Answer,
}

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ending {
    Answered,
    /// It was answered with an error that may pass.
    Trouble,
    /// It was not answered.
    Silence,
}

/// What goes to one destination.
#[derive(Default)]
struct Lane {
    ordinary: Line,
    renewals: Line,
    reach: Reachability,
    /// When something was last heard from there.
    heard: Option<Moment>,
    round_trip: RoundTrip,
}

#[derive(Default)]
struct Line {
    waiting: VecDeque<Arc<dyn Source>>,
    /// When each request in flight was sent.
    in_flight: VecDeque<Moment>,
    /// How many ids the last request had.
    last: usize,
    /// Nothing is sent before this moment: the last request failed for a reason that may pass.
    paused_until: Option<Moment>,
    pause: Duration,
}

impl Line {
    /// Longer each time, until something is answered again.
    fn pause(&mut self, longest: Duration, now: Moment) {
        self.pause = (self.pause * 2).clamp(SHORTEST_PAUSE, longest);
        self.paused_until = Some(now + Span::from_duration(self.pause));
    }
}

/// Whether a destination can be reached.
#[derive(Clone, Debug, Default)]
pub(crate) enum Reachability {
    /// Not yet, or never was.
    #[default]
    Connecting,
    Up,
    Down {
        since: Moment,
        error: Error,
    },
}

/// The round-trip time, smoothed, and the slowest that is still normal: as TCP estimates it.
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

impl Lane {
    fn line(&mut self, urgency: Urgency) -> &mut Line {
        match urgency {
            Urgency::Ordinary => &mut self.ordinary,
            Urgency::Renewals => &mut self.renewals,
        }
    }

    /// Whether another request may be sent now.
    fn may_send(&mut self, urgency: Urgency, now: Moment) -> bool {
        let line = self.line(urgency);
        let paused = line.paused_until.is_some_and(|until| now < until);
        let free = line.in_flight.len() < urgency.in_flight() && !line.waiting.is_empty();
        free && !paused && matches!(self.reach, Reachability::Up)
    }
}

impl Sender {
    /// The source has something to send. It must not be in line already.
    pub(super) fn enqueue(&self, source: Arc<dyn Source>, urgency: Urgency) -> Next {
        let to = source.destination();
        let mut lanes = self.lanes();
        let lane = lanes.entry(to).or_default();
        let up = matches!(lane.reach, Reachability::Up);
        let own = lane.line(urgency);
        let (first, in_flight) = (own.waiting.is_empty(), own.in_flight.len());
        own.waiting.push_back(source);
        let paused = own.paused_until.is_some_and(|until| Moment::now() < until);
        if first && up && in_flight == 0 && !paused && own.last <= FEW {
            Next::Send
        } else if first || in_flight < urgency.in_flight() {
            Next::Look
        } else {
            Next::Answer
        }
    }

    /// Whether there is something that may be sent.
    pub(super) fn can_send(&self, now: Moment) -> bool {
        let may_send = |lane: &mut Lane| {
            lane.may_send(Urgency::Renewals, now) || lane.may_send(Urgency::Ordinary, now)
        };
        self.lanes().values_mut().any(may_send)
    }

    /// The next request that may be sent, to whatever destination. One thread at a time.
    pub(super) fn next_request(&self, now: Moment) -> Option<Request> {
        let destinations: Vec<_> = self.lanes().keys().copied().collect();
        let both = [Urgency::Renewals, Urgency::Ordinary];
        let lines = destinations.into_iter().flat_map(|to| both.map(|urgency| (to, urgency)));
        lines.into_iter().find_map(|(to, urgency)| self.pack(to, urgency, now))
    }

    /// Takes from the sources in line, each once. A source takes its own lock and then ours: so ours is not held
    /// while a source is asked.
    fn pack(&self, to: Destination, urgency: Urgency, now: Moment) -> Option<Request> {
        let (mut parts, mut sources, mut room) = (Vec::new(), Vec::new(), MAX_IDS);
        while parts.is_empty() {
            let mut in_line: VecDeque<_> = {
                let mut lanes = self.lanes();
                let lane = lanes.get_mut(&to)?;
                if !lane.may_send(urgency, now) {
                    return None;
                }
                let waiting = &mut lane.line(urgency).waiting;
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
            let mut lanes = self.lanes();
            let line = lanes.get_mut(&to)?.line(urgency);
            // Whom there was no room for stands first again.
            in_line.into_iter().rev().for_each(|source| line.waiting.push_front(source));
            line.waiting.extend(again);
            if !parts.is_empty() {
                line.last = MAX_IDS - room;
                line.in_flight.push_back(now);
            }
        }
        Some(Request { to, parts: parts.into(), sources, sent: now, urgency })
    }

    /// The request is no longer in flight.
    pub(super) fn settled(&self, request: &Request, verdict: Ending) {
        let mut lanes = self.lanes();
        let Some(lane) = lanes.get_mut(&request.to) else { return };
        let now = Moment::now();
        let own = lane.line(request.urgency);
        if let Some(at) = own.in_flight.iter().position(|sent| *sent == request.sent) {
            own.in_flight.remove(at);
        }
        match verdict {
            Ending::Answered => own.pause = Duration::ZERO,
            Ending::Trouble | Ending::Silence => own.pause(request.urgency.longest_pause(), now),
        }
        if verdict != Ending::Silence {
            lane.heard = Some(now);
            lane.round_trip.learn(now.saturating_since(request.sent));
        }
    }

    /// When a line that is paused can be sent from again.
    pub(super) fn next_resume(&self, now: Moment) -> Option<Moment> {
        let resumes = |line: &Line| line.paused_until.filter(|_| !line.waiting.is_empty());
        let lanes = self.lanes();
        let all =
            lanes.values().flat_map(|lane| [resumes(&lane.ordinary), resumes(&lane.renewals)]);
        all.flatten().filter(|until| now < *until).min()
    }

    pub(super) fn set_reach(&self, to: Destination, reach: Reachability) {
        let mut lanes = self.lanes();
        let lane = lanes.entry(to).or_default();
        lane.ordinary.paused_until = None;
        lane.renewals.paused_until = None;
        lane.reach = match (&lane.reach, reach) {
            // The first failure says since when.
            (Reachability::Down { since, .. }, Reachability::Down { error, .. }) => {
                Reachability::Down { since: *since, error }
            }
            (_, reach) => reach,
        };
    }

    /// Tells the calls that the store refuses everything, or that the engine has stopped.
    pub(super) fn refuse_calls(&self, error: &Error) {
        self.in_line().iter().for_each(|(_, _, source)| source.refuse(error));
    }

    /// Whether anything is in line or in flight.
    pub(super) fn is_busy(&self) -> bool {
        let busy = |line: &Line| !line.waiting.is_empty() || !line.in_flight.is_empty();
        self.lanes().values().any(|lane| busy(&lane.ordinary) || busy(&lane.renewals))
    }

    /// Fails the calls whose deadline has passed, and removes from the line what is no longer wanted. A source takes
    /// its own lock and then ours: so the lines are taken out meanwhile. Only on the engine's thread.
    pub(super) fn expire(&self, now: Moment) {
        let both = [Urgency::Renewals, Urgency::Ordinary];
        let destinations: Vec<_> = self.lanes().keys().copied().collect();
        for (to, urgency) in destinations.into_iter().flat_map(|to| both.map(|own| (to, own))) {
            let take = |lane: &mut Lane| std::mem::take(&mut lane.line(urgency).waiting);
            let mut waiting = self.lanes().get_mut(&to).map(take).unwrap_or_default();
            waiting.retain(|source| {
                source.expire(now);
                !source.leave_if_unwanted(urgency)
            });
            if let Some(lane) = self.lanes().get_mut(&to) {
                let line = lane.line(urgency);
                waiting.append(&mut line.waiting);
                line.waiting = waiting;
            }
        }
    }

    /// The engine has stopped: nothing is sent any more.
    pub(super) fn clear(&self) {
        let lanes = std::mem::take(&mut *self.lanes());
        drop(lanes);
    }

    fn in_line(&self) -> Vec<(Destination, Urgency, Arc<dyn Source>)> {
        let lanes = self.lanes();
        let all = lanes.iter().flat_map(|(to, lane)| {
            let renewals = lane.renewals.waiting.iter().map(|own| (Urgency::Renewals, own));
            let ordinary = lane.ordinary.waiting.iter().map(|own| (Urgency::Ordinary, own));
            renewals.chain(ordinary).map(|(urgency, own)| (*to, urgency, own.clone()))
        });
        all.collect()
    }

    pub(crate) fn round_trip(&self, to: Destination) -> Duration {
        self.lanes().get(&to).map_or(Duration::ZERO, |lane| lane.round_trip.slowest())
    }

    /// Since when the destination has not answered, if that is longer than it should be; with the reason, if it is known.
    pub(crate) fn silent_since(
        &self,
        to: Destination,
        now: Moment,
    ) -> Option<(Moment, Option<Error>)> {
        let lanes = self.lanes();
        let lane = lanes.get(&to)?;
        if let Reachability::Down { since, error } = &lane.reach {
            return Some((*since, Some(error.clone())));
        }
        let sent = lane.ordinary.in_flight.iter().chain(&lane.renewals.in_flight);
        let oldest = *sent.min()?;
        let silent = oldest.max(lane.heard.unwrap_or(oldest));
        let limit = timing::silence(lane.round_trip.slowest());
        (now.saturating_since(silent) >= limit).then_some((silent, None))
    }

    /// Whether nothing was heard from there since that moment.
    pub(crate) fn heard_nothing_since(&self, to: Destination, moment: Moment) -> bool {
        self.lanes().get(&to).is_none_or(|lane| lane.heard.is_none_or(|heard| heard < moment))
    }

    /// Why nothing can be sent there, if the store refuses us: then waiting does not help.
    pub(crate) fn refusal(&self, to: Destination) -> Option<Error> {
        match &self.lanes().get(&to)?.reach {
            Reachability::Down { error, .. } if !error.may_pass() => Some(error.clone()),
            _ => None,
        }
    }

    /// Since when which destination cannot be reached, and why.
    pub(crate) fn outage(&self) -> Option<(Moment, Error)> {
        self.lanes().values().find_map(|lane| match &lane.reach {
            Reachability::Down { since, error } => Some((*since, error.clone())),
            _ => None,
        })
    }

    fn lanes(&self) -> MutexGuard<'_, BTreeMap<Destination, Lane>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
