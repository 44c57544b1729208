//! What the core reports to its driver.

use std::time::Duration;

use crate::clock::Moment;
use crate::machine::Held;
use crate::{Error, LossReason};

/// Something that a caller, or the driver of the core, has to learn. `owner` is the value that the driver passed with
/// the acquisition or the release.
#[derive(Clone, Debug)]
pub(crate) enum Notice<T> {
    /// The acquire has its permit. The holder may rely on it until `valid_until`.
    Granted { owner: T, held: Held, valid_until: Moment, limited_by_ttl: bool },
    /// A renewal was answered, and the holder may rely on the permit until `valid_until`.
    Extended { owner: T, valid_until: Moment, limited_by_ttl: bool },
    /// The holder must not rely on the permit after `valid_until`, because its lease may become shorter.
    Limited { owner: T, valid_until: Moment },
    /// No permit was free, and the acquire does not wait.
    Full { owner: T },
    /// The acquire has failed.
    Failed { owner: T, failure: Failure },
    /// The holder has lost its permit.
    Lost { owner: T, reason: LossReason },
    /// A holder's renewal, sent at `sent`, was answered or has failed. `Ok(true)` means that the permit is still held.
    Renewed { owner: T, result: Result<bool, Error>, sent: Moment },
    /// A release was answered or has failed. `Ok(true)` means that the id was held until now.
    Released { owner: T, outcome: Result<bool, Failure> },
    /// The store refused to renew a holder. The core tries again.
    RenewalRefused { owner: T, error: Error },
    /// The lease cannot survive a lost connection at this round-trip time. Reported once for each name.
    ShortLease { owner: T, round_trip: Duration },
    /// A renewal is overdue. If the store has not answered anything since that moment, the connection is suspect.
    Overdue { since: Moment },
}

/// Why an acquire or a release has failed.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The acquire has reached its time limit in the queue. `next_start` is the time until the rate allows the next
    /// start, if that is what the acquire waits for.
    TimedOut { next_start: Option<Duration> },
    /// The store has not answered a request since that moment.
    Unanswered { since: Moment },
    /// The permit weighs more than the capacity.
    TooHeavy { capacity: u32 },
    /// Another client has removed the waiter by its id.
    Cancelled,
    /// The store, or the client, refuses the request with this error.
    Refused(Error),
}
