//! What a model checker needs to know of a core: the part of its state that decides its future, and its timers.
//!
//! Left out is what changes no command and no permit: how a failure is worded, whether silence makes a connection
//! suspect, what is measured. The deadlines of timers are left out, too, because the model fires a timer at any time.

use std::collections::BTreeSet;

use super::acquisition::Phase;
use super::delivery::Delivery;
use super::{NameCore, Timer, Want};
use crate::AcquisitionId;
use crate::clock::Moment;
use crate::machine::ReleaseHint;

/// How ids and times are written in a view, so that equal futures have equal views.
pub(crate) struct Scale<'a> {
    pub(crate) id: &'a dyn Fn(AcquisitionId) -> u8,
    /// The time until a deadline. Zero for one that has passed.
    pub(crate) until: &'a dyn Fn(Moment) -> u8,
    /// The place of a time among those at which requests in flight were sent.
    pub(crate) sent: &'a dyn Fn(Moment) -> u8,
    /// How long a release may still be repeated, as far as that makes a difference.
    pub(crate) repeated_until: &'a dyn Fn(AcquisitionId, Moment) -> u8,
    pub(crate) now: Moment,
    /// Whether several requests of a client can be on the way to the store. Otherwise an id that holds is not in the
    /// queue, so it makes no difference where its release looks for it.
    pub(crate) is_pipelined: bool,
    /// Whether requests take time. Otherwise a renewal that waits to be sent counts the same as one whose timer is set,
    /// because both may be sent now or later.
    pub(crate) delays_requests: bool,
    /// Whether there is a rate, so that it matters whether a caller has seen a permit.
    pub(crate) is_rated: bool,
}

impl<T: Clone> NameCore<T> {
    /// Adds what decides the future of this core.
    pub(crate) fn view(&self, scale: &Scale<'_>, view: &mut Vec<u8>) {
        let repeated: BTreeSet<_> = self.timers.iter().map(|(_, timer)| *timer).collect();
        let mut acquisitions: Vec<_> = self.acquisitions.iter().collect();
        acquisitions.sort_unstable_by_key(|(id, _)| **id);
        for (id, acquisition) in acquisitions {
            view.extend([1, (scale.id)(*id), acquisition.delivery as u8]);
            let is_renewed = self.is_renewed(*id) && !scale.delays_requests;
            // The query about the first waiter is also its renewal.
            let is_first = self.waiting.first_key_value().is_some_and(|(_, first)| first == id);
            view.push(flags(&[
                acquisition.doubtful && scale.is_pipelined,
                acquisition.wants_enqueue,
                acquisition.wants_renewal && !is_renewed,
                acquisition.renewal.is_some() && !is_renewed,
                acquisition.renew_at.is_some() && !is_first,
            ]));
            let place = acquisition.place.map(|place| self.waiting.range(..place).count() + 1);
            view.push(place.map_or(0, |place| u8::try_from(place).unwrap_or(u8::MAX)));
            match acquisition.phase {
                Phase::Waiting => view.push(0),
                Phase::Held { since, valid_until, limited_by_ttl, .. } => {
                    view.extend([1 + u8::from(limited_by_ttl), (scale.until)(valid_until)]);
                    // A renewal that is sent now was not sent after the grant.
                    view.push(u8::from(since == scale.now && scale.delays_requests));
                }
            }
        }
        let mut releases: Vec<_> = self.releases.iter().collect();
        releases.sort_unstable_by_key(|(id, _)| **id);
        for (id, release) in releases {
            let hint = match release.hint {
                ReleaseHint::Unused if scale.is_rated => 1,
                ReleaseHint::Held { .. } if scale.is_pipelined => 2,
                _ => 0,
            };
            let is_sent = release.delivery == Delivery::Sent;
            let again = repeated.contains(&Timer::ReleaseAgain(*id));
            let doubtful = release.doubtful && scale.is_pipelined;
            view.extend([2, (scale.id)(*id), hint]);
            view.push(flags(&[is_sent, doubtful, release.again, again]));
            view.push(release.until.map_or(0, |until| (scale.repeated_until)(*id, until)));
        }
        for (sent, want) in &self.unsent {
            let (kind, id) = match want {
                Want::Enqueue(id) => (3, *id),
                Want::Renew(id) => (4, *id),
                Want::Release(id) => (5, *id),
            };
            let is_merged = matches!(want, Want::Renew(id) if self.is_renewed(*id));
            if self.is_wanted(*want, scale.now) && (scale.delays_requests || !is_merged) {
                view.extend([kind, (scale.id)(id), (scale.sent)(*sent)]);
            }
        }
        for id in self.renewals.iter().filter(|id| self.acquisitions.contains_key(id)) {
            if scale.delays_requests || !self.is_renewed(*id) {
                view.extend([6, (scale.id)(*id)]);
            }
        }
        // Without a waiter, the query does nothing, and a new waiter sets it again.
        view.push(7 + u8::from(self.query_at.is_some() && !self.waiting.is_empty()));
    }

    /// Whether a timer is set that renews this id.
    fn is_renewed(&self, id: AcquisitionId) -> bool {
        let is_first = self.waiting.first_key_value().is_some_and(|(_, first)| *first == id);
        let renew_at = self.acquisitions.get(&id).and_then(|acquisition| acquisition.renew_at);
        renew_at.is_some() || is_first && self.query_at.is_some()
    }

    /// The ids that this core still answers for, because the store may know them.
    pub(crate) fn answers_for(&self, id: AcquisitionId) -> bool {
        let acquisition = self.acquisitions.get(&id);
        acquisition.is_some_and(|acquisition| acquisition.delivery != Delivery::Unsent)
            || self.will_release(id)
    }

    /// Whether a release of this id is in flight, waits to be sent, or will be sent again.
    fn will_release(&self, id: AcquisitionId) -> bool {
        self.releases.contains_key(&id)
            && (self.awaits_release(id)
                || self.unsent.iter().any(|(_, want)| *want == Want::Release(id))
                || self.repeats_release(id))
    }

    /// All ids that this core has any state for.
    pub(crate) fn ids(&self) -> impl Iterator<Item = AcquisitionId> {
        self.acquisitions.keys().chain(self.releases.keys()).copied()
    }

    pub(crate) fn waits(&self, id: AcquisitionId) -> bool {
        self.acquisitions.get(&id).is_some_and(super::Acquisition::is_waiting)
    }

    /// When the client began to hold this permit.
    pub(crate) fn held_since(&self, id: AcquisitionId) -> Option<Moment> {
        match self.acquisitions.get(&id)?.phase {
            Phase::Held { since, .. } => Some(since),
            Phase::Waiting => None,
        }
    }

    /// Whether the last enqueue of this id was answered, and none has to be sent.
    pub(crate) fn is_answered(&self, id: AcquisitionId) -> bool {
        self.acquisitions.get(&id).is_some_and(|acquisition| {
            acquisition.delivery == Delivery::Answered && !acquisition.wants_enqueue
        })
    }

    /// Whether this id is being released, and waits for an answer.
    pub(crate) fn awaits_release(&self, id: AcquisitionId) -> bool {
        self.releases.get(&id).is_some_and(|release| release.delivery == Delivery::Sent)
    }

    /// Whether this release is repeated although the store has answered it.
    pub(crate) fn repeats_release(&self, id: AcquisitionId) -> bool {
        self.timers.iter().any(|(_, timer)| *timer == Timer::ReleaseAgain(id))
    }

    /// The times at which the unsent commands whose outcome is unknown were sent.
    pub(crate) fn sent(&self) -> impl Iterator<Item = Moment> {
        self.unsent.iter().map(|(sent, _)| *sent).filter(|sent| *sent != Moment::NEVER)
    }

    /// The timers that would change something now. The end of a permit is one of them only when it is due.
    pub(crate) fn useful_timers(&self, now: Moment) -> Vec<Timer> {
        let unanswered = |id: &AcquisitionId| {
            self.acquisitions.get(id).is_none_or(|acquisition| acquisition.renewal.is_some())
        };
        let is_useful = |(at, timer): &(Moment, Timer)| match timer {
            Timer::Renew(id) => !unanswered(id),
            Timer::Query => self.waiting.first_key_value().is_some_and(|(_, id)| !unanswered(id)),
            Timer::End(_) => *at <= now,
            Timer::ReleaseAgain(_) => true,
            Timer::GiveUp(_) | Timer::ReleaseUnanswered(_) | Timer::ReleaseExpired(_) => false,
        };
        self.timers.iter().filter(|entry| is_useful(entry)).map(|(_, timer)| *timer).collect()
    }

    /// Fires a timer, even if it is not due yet.
    pub(crate) fn fire_now(&mut self, timer: Timer, now: Moment) {
        if let Some(&entry) = self.timers.iter().find(|(_, other)| *other == timer) {
            self.fire(entry, now);
        }
    }
}

fn flags(flags: &[bool]) -> u8 {
    flags.iter().fold(0, |all, flag| all << 1 | u8::from(*flag))
}
