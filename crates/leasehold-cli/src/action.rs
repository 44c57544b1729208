//! The actions of an operator in `top` and `serve`, and the descriptions of their effects.

use std::time::Duration;

use leasehold::{Client, Error};

use crate::failure::{Failure, INTERNAL, NOTHING_THERE, UNAVAILABLE};
use crate::monitor::Kind;
use crate::store::Store;

/// The longest lease of a pool.
const LONGEST_LEASE: Duration = Duration::from_secs(10_000_000_000);

/// One action on one thing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    /// Declares another capacity.
    Limit {
        capacity: u32,
    },
    Pin {
        capacity: u32,
    },
    Unpin,
    Pause {
        reason: Option<String>,
    },
    Resume,
    /// Pauses. The caller waits until nothing is held.
    Drain {
        reason: Option<String>,
    },
    Forget,
    /// Releases a permit of a semaphore.
    Release {
        id: String,
    },
    /// Removes a waiter from the queue of a semaphore.
    Cancel {
        id: String,
    },
    /// Releases the lock with this fence. Its id is secret, so it is not stored here.
    ReleaseLock {
        fence: String,
    },
    /// Releases the lease of an instance of a pool.
    ReleaseLease {
        instance: String,
    },
}

impl Action {
    /// Returns the kind of name that it applies to.
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::ReleaseLock { .. } => Kind::Lock,
            Self::ReleaseLease { .. } => Kind::Pool,
            _ => Kind::Semaphore,
        }
    }

    /// Whether the action has an effect on a semaphore that nobody has used yet.
    pub(crate) fn sets(&self) -> bool {
        matches!(
            self,
            Self::Limit { .. } | Self::Pin { .. } | Self::Pause { .. } | Self::Drain { .. }
        )
    }

    /// Returns the question for the confirmation. It contains text of other programs: escape it.
    pub(crate) fn question(&self, name: &str) -> String {
        match self {
            Self::Limit { capacity } => format!("Change the limit of {name} to {capacity}?"),
            Self::Pin { capacity } => format!("Pin the limit of {name} to {capacity}?"),
            Self::Unpin => format!("Unpin the limit of {name}?"),
            Self::Pause { .. } => format!("Pause {name}?"),
            Self::Resume => format!("Resume {name}?"),
            Self::Drain { .. } => format!("Drain {name}?"),
            Self::Forget => format!("Forget {name}?"),
            Self::Release { id } => format!("Release the permit {id} of {name}?"),
            Self::Cancel { id } => format!("Cancel the wait of {id} for {name}?"),
            Self::ReleaseLock { .. } => format!("Release the lock {name}?"),
            Self::ReleaseLease { instance } => {
                format!("Release the lease of {instance} in {name}?")
            }
        }
    }

    /// Returns the effect of the action. It contains text of other programs: escape it.
    pub(crate) fn effect(&self, name: &str) -> String {
        match self {
            Self::Limit { capacity } => format!(
                "{name} gets a limit of {capacity}, until a program declares another. Nobody loses a permit; waiters \
                 start when there is room."
            ),
            Self::Pin { capacity } => format!(
                "{name} keeps a limit of {capacity}, whatever programs declare, until it is unpinned. Nobody loses a permit."
            ),
            Self::Unpin => {
                format!("The limit that programs declared last applies to {name} again.")
            }
            Self::Pause { .. } => format!(
                "No more permits of {name} are granted until it is resumed. Holders continue; waiters keep their places."
            ),
            Self::Resume => {
                format!("Permits of {name} are granted again, in the order of the queue.")
            }
            Self::Drain { .. } => format!(
                "No more permits of {name} are granted. It is drained when the last holder has released its permit, and stays \
                 paused until it is resumed."
            ),
            Self::Forget => format!(
                "The limit, rate, pin, pause and last fence of {name} are removed. The next fence is taken from the clock. \
                 If the clock was set back, resources that check fences reject it. Fails while {name} is in use."
            ),
            Self::Release { .. } => format!(
                "The next waiter of {name} may start at once, while the old holder still runs. Until the old holder notices, more \
                 may run than the limit allows. Only a resource that checks fences is protected."
            ),
            Self::Cancel { .. } => format!(
                "The waiter leaves the queue of {name}, and its acquire fails. It does not queue again by itself, unless it belongs \
                 to another program."
            ),
            Self::ReleaseLock { .. } => format!(
                "Another process can acquire {name} at once, while the old holder still runs. Only a resource that checks fences \
                 is protected."
            ),
            Self::ReleaseLease { instance } => format!(
                "Another instance can acquire the lease in {name} at once, while {instance} still runs. Pools have no fences."
            ),
        }
    }

    /// Returns the text for the list of events.
    pub(crate) fn done(&self) -> String {
        let because = |reason: &Option<String>| {
            reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default()
        };
        match self {
            Self::Limit { capacity } => format!("limit set to {capacity}"),
            Self::Pin { capacity } => format!("limit pinned to {capacity}"),
            Self::Unpin => "limit unpinned".to_owned(),
            Self::Pause { reason } => format!("paused{}", because(reason)),
            Self::Resume => "resumed".to_owned(),
            Self::Drain { reason } => format!("draining{}", because(reason)),
            Self::Forget => "forgotten".to_owned(),
            Self::Release { id } => format!("permit {id} released"),
            Self::Cancel { id } => format!("wait of {id} cancelled"),
            Self::ReleaseLock { fence } => format!("lock with fence {fence} released"),
            Self::ReleaseLease { instance } => format!("lease of {instance} released"),
        }
    }

    /// Performs the action on behalf of `by`, with a new client, because the client that polls is read-only.
    pub(crate) async fn perform_in(
        &self,
        store: &Store,
        name: &str,
        by: &str,
    ) -> Result<(), Failure> {
        let nothing = |failure: Failure| failure.after("nothing was changed");
        let client = store.find().await.map_err(nothing)?;
        let done = self.perform(&client, name, by).await;
        let _ = client.close().await;
        done.map_err(|failure| match (failure.error(), failure.code) {
            (Some(Error::NoRoom { .. }), _) => nothing(failure),
            // The store may have applied it before the answer was lost.
            (_, UNAVAILABLE | INTERNAL) => {
                failure.after("the action may or may not have been applied")
            }
            _ => nothing(failure),
        })
    }

    async fn perform(&self, client: &Client, name: &str, by: &str) -> Result<(), Failure> {
        match self {
            Self::ReleaseLock { fence } => return release_lock(client, name, fence).await,
            Self::ReleaseLease { instance } => {
                // Every operation on a pool removes the instances that were silent for longer than the lease of that operation.
                // The lease of this pool is not known here, and a shorter one would remove live instances.
                let pool = client.pool(name, 1).lease(LONGEST_LEASE).build()?;
                let released = pool.release(instance).await?;
                return if released { Ok(()) } else { Err(gone(instance, name)) };
            }
            _ => {}
        }
        let semaphore = client.semaphore(name, 1).unless_declared().build()?;
        let pause = |reason: &Option<String>| {
            let pause = semaphore.pause().by(by);
            match reason {
                Some(reason) => pause.reason(reason),
                None => pause,
            }
        };
        match self {
            Self::Limit { capacity } => semaphore.set_capacity(*capacity).await?,
            Self::Pin { capacity } => semaphore.pin(*capacity).await?,
            Self::Unpin => semaphore.unpin().await?,
            Self::Pause { reason } | Self::Drain { reason } => pause(reason).await?,
            Self::Resume => semaphore.resume().await?,
            Self::Forget => semaphore.forget().await?,
            Self::Release { id } => {
                if !semaphore.release_member(id).await? {
                    return Err(gone(id, name));
                }
            }
            Self::Cancel { id } => {
                if !semaphore.release_member(id).await? {
                    let message = format!("{id} does not wait for {name} any more");
                    return Err(Failure::new(NOTHING_THERE, message));
                }
            }
            Self::ReleaseLock { .. } | Self::ReleaseLease { .. } => {}
        }
        Ok(())
    }
}

async fn release_lock(client: &Client, key: &str, fence: &str) -> Result<(), Failure> {
    let locks = client.locks();
    let found = locks.lookup(key).await?;
    let found = found.filter(|lock| lock.fence.to_string() == fence);
    match found {
        Some(lock) if locks.release(&lock.id).await? => Ok(()),
        _ => Err(gone(&format!("fence {fence}"), key)),
    }
}

fn gone(id: &str, name: &str) -> Failure {
    Failure::new(NOTHING_THERE, format!("{id} does not hold {name} any more"))
}
