//! What a client expects of a name on a server: what the store reported last, as long as it can be trusted.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock::{Moment, Span};
use crate::machine::{Outcome, Outlook, Reply};

/// After this time, somebody may wait by now. A release then takes the longer script at once, because a second request
/// would delay the next holder.
const TRUSTED_FOR: Span = Span::from_millis(1000);

/// For how long the script for all cases serves a name after a shorter one did not. A name that changes all the time
/// then costs a second request once a second at most.
const REMEMBERED_FOR: Span = Span::from_millis(1000);

/// The outlook of one name, and when the client learnt it. A new name is expected to have room, as most names have.
#[derive(Default)]
pub(super) struct LastOutlook {
    /// The outlook in the lowest two bits, and above them when the client learnt it.
    learnt: AtomicU64,
    /// Until when a script that did not serve its case is remembered.
    distrusted_until: AtomicU64,
}

impl LastOutlook {
    /// Returns what to expect now.
    pub(super) fn now(&self, now: Moment) -> Outlook {
        if now.micros() < self.distrusted_until.load(Ordering::Relaxed) {
            return Outlook::Special;
        }
        let learnt = self.learnt.load(Ordering::Relaxed);
        let is_old = Moment::from_micros(learnt >> 2) + TRUSTED_FOR <= now;
        match learnt & 3 {
            1 => Outlook::Full,
            2 => Outlook::Queue,
            3 => Outlook::Special,
            _ if is_old => Outlook::Quiet,
            _ => Outlook::Room,
        }
    }

    /// Learns from an answer.
    pub(super) fn learn(&self, reply: &Reply, now: Moment) {
        if reply.outcomes.contains(&Outcome::Unapplied) {
            let until = (now + REMEMBERED_FOR).micros();
            return self.distrusted_until.store(until, Ordering::Relaxed);
        }
        let Some(outlook) = reply.outlook else { return };
        let bits = match outlook {
            Outlook::Room | Outlook::Quiet => 0,
            Outlook::Full => 1,
            Outlook::Queue => 2,
            Outlook::Special => 3,
        };
        self.learnt.store(now.micros() << 2 | bits, Ordering::Relaxed);
    }
}
