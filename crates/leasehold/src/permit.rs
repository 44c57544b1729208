//! The guard of a permit.

use std::fmt;
use std::future::poll_fn;
use std::num::NonZeroU32;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::clock::Moment;
use crate::engine::foreign::event;
use crate::engine::lease::Lease;
use crate::engine::name_state::ReleasedBy;
use crate::engine::ticket::{Grant, Ticket};
use crate::machine::Known;
use crate::semaphore::Handle;
use crate::{AcquisitionId, Error, Fence, LossReason};

/// A permit that is held until this guard is released or dropped.
///
/// Dropping it gives the permit back in the background, without blocking, from any thread. To know that
/// it has been given back, [`release`](Self::release) it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::Client;
///
/// let api = Client::memory().semaphore("api", 5).build()?;
/// let permit = api.acquire().await?;
/// println!("{} has fence {}", permit.id(), permit.fence());
/// permit.check()?; // still ours?
/// permit.release().await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a permit is given back when it is dropped"]
pub struct Permit {
    /// None once it has ended otherwise than by being dropped.
    semaphore: Option<Arc<Handle>>,
    id: AcquisitionId,
    grant: Grant,
    /// None where nothing but a release can end the permit, and it did not have to wait.
    ticket: Option<Arc<Ticket>>,
}

impl Permit {
    #[inline]
    pub(crate) fn new(
        semaphore: Arc<Handle>,
        id: AcquisitionId,
        grant: Grant,
        ticket: Option<Arc<Ticket>>,
    ) -> Self {
        // First of all the guard: a subscriber may panic.
        let permit = Self { semaphore: Some(semaphore), id, grant, ticket };
        if tracing::enabled!(tracing::Level::DEBUG)
            && let Some(semaphore) = &permit.semaphore
        {
            report_acquired(semaphore, id, &grant);
        }
        permit
    }

    /// What names this permit in the store, and releases it after it was [detached](Self::detach).
    #[must_use]
    pub fn id(&self) -> AcquisitionId {
        self.id
    }

    /// The lowest number from 1 to the capacity that no other live permit of this semaphore has. It stays the same until the
    /// permit ends. `None` unless the semaphore is [`numbered`](crate::SemaphoreBuilder::numbered).
    ///
    /// After a shrink it may be more than the capacity.
    #[must_use]
    pub fn slot_number(&self) -> Option<u32> {
        self.grant.slot_number.map(NonZeroU32::get)
    }

    pub(crate) fn name(&self) -> &str {
        self.semaphore.as_ref().map_or("", |semaphore| semaphore.named.name().as_str())
    }

    /// Larger than the fence of every permit of this name that was granted before.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.grant.fence
    }

    /// How long the acquire had to wait.
    #[must_use]
    pub fn waited(&self) -> Duration {
        Duration::from_micros(self.grant.waited_micros)
    }

    /// Until when this permit is good without another renewal; `None` if it does not end by itself. It
    /// moves on with every renewal, up to the TTL. Once the permit is lost, it is a moment in the past.
    #[must_use]
    pub fn valid_until(&self) -> Option<Instant> {
        let valid_until = self.ticket.as_ref()?.valid_until();
        if valid_until == Moment::NEVER {
            return None;
        }
        Some(Instant::now() + valid_until.saturating_since(Moment::now()))
    }

    /// Whether the permit is still yours.
    ///
    /// More than "it was, a moment ago" cannot be promised to a thread that may be stopped between two
    /// instructions. Where that matters, let the resource check the [fence](Self::fence).
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn check(&self) -> Result<(), Error> {
        match (&self.ticket, &self.semaphore) {
            (Some(ticket), _) => ticket.check().map_err(|reason| self.lost_error(reason)),
            (None, Some(semaphore)) => {
                semaphore.named.check(self.id).map_err(|reason| self.lost_error(reason))
            }
            (None, None) => Err(self.lost_error(LossReason::Released)),
        }
    }

    /// Resolves when the permit is lost, with the reason. After the guard was released or dropped it resolves, too, with
    /// [`LossReason::Released`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::{Client, LossReason};
    /// use std::time::Duration;
    ///
    /// let client = Client::memory();
    /// let api = client.semaphore("api", 5).ttl(Duration::from_millis(20)).build()?;
    /// let permit = api.acquire().await?;
    /// assert_eq!(permit.lost().await, LossReason::TtlEnded);
    /// assert!(permit.check().is_err());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Cancel safety
    /// Only listens.
    pub fn lost(&self) -> Lost {
        let ticket = match (&self.ticket, &self.semaphore) {
            (Some(ticket), _) => ticket.clone(),
            (None, Some(semaphore)) => semaphore.named.attach(self.id, &semaphore.declaration),
            (None, None) => unreachable!("only a permit that has ended has no semaphore"),
        };
        Lost { of: Of::Ticket(ticket), key: None }
    }

    /// Gives the permit back and waits until it has been. True if it was held until now, false if it had
    /// been lost.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the store does not answer in time: then the release goes on in the background, and the
    /// permit ends by itself with its lease. [`Error::Refused`] if the store does not allow it.
    ///
    /// # Cancel safety
    /// The release goes on if the future is dropped, even before it was first polled.
    pub async fn release(mut self) -> Result<bool, Error> {
        let Some(semaphore) = self.semaphore.take() else { return Ok(false) };
        if self.is_over() {
            semaphore.named.end(self.id, Known::Nothing);
            return Ok(false);
        }
        report_release(&semaphore, self.id);
        let by = ReleasedBy::Guard;
        semaphore.named.release(self.id, &semaphore.declaration, by).done().await
    }

    /// Lets go of the guard, but not of the permit: it stays held, and renewed, until it is released by
    /// this id with [`Semaphore::release`](crate::Semaphore::release), its TTL ends or its client goes.
    #[must_use = "without the id nobody can release the permit"]
    pub fn detach(mut self) -> AcquisitionId {
        self.semaphore = None;
        self.id
    }

    #[inline]
    fn is_over(&self) -> bool {
        self.ticket.as_ref().is_some_and(|ticket| ticket.check().is_err())
    }

    pub(crate) fn lost_error(&self, reason: LossReason) -> Error {
        let name = self.semaphore.as_ref().map(|semaphore| semaphore.named.name().to_string());
        let (what, id) = ("permit", self.id.to_string());
        Error::Lost { what, name: name.unwrap_or_default(), id, reason }
    }
}

// Events are written out of line: an acquire that nobody listens to pays for one comparison.

#[cold]
fn report_acquired(semaphore: &Handle, id: AcquisitionId, grant: &Grant) {
    event!(
        debug,
        name = semaphore.named.name().as_str(),
        %id,
        waited = ?Duration::from_micros(grant.waited_micros),
        slot_number = grant.slot_number,
        capacity = semaphore.named.capacity(),
        "permit acquired"
    );
}

#[inline]
fn report_release(semaphore: &Handle, id: AcquisitionId) {
    if tracing::enabled!(tracing::Level::DEBUG) {
        report_released(semaphore, id);
    }
}

#[cold]
fn report_released(semaphore: &Handle, id: AcquisitionId) {
    event!(debug, name = semaphore.named.name().as_str(), %id, "permit released");
}

impl Drop for Permit {
    #[inline]
    fn drop(&mut self) {
        if let Some(semaphore) = self.semaphore.take() {
            if !self.is_over() {
                report_release(&semaphore, self.id);
            }
            // First: if nobody else has the ticket, the engine has nobody to notify.
            self.ticket = None;
            semaphore.named.end(self.id, Known::Nothing);
        }
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.semaphore.as_ref().map(|semaphore| semaphore.named.name());
        f.debug_struct("Permit")
            .field("name", &name)
            .field("id", &self.id)
            .field("slot_number", &self.slot_number())
            .field("fence", &self.fence())
            .finish_non_exhaustive()
    }
}

/// Resolves when a permit, a lock or a lease is lost: see [`Permit::lost`]. It does not borrow the guard, so that
/// another task can wait for it.
#[must_use = "nobody is told unless this is awaited"]
#[derive(Debug)]
pub struct Lost {
    of: Of,
    key: Option<u64>,
}

#[derive(Debug)]
enum Of {
    Ticket(Arc<Ticket>),
    Lease(Arc<Lease>),
}

impl Lost {
    pub(crate) fn of_lease(lease: Arc<Lease>) -> Self {
        Self { of: Of::Lease(lease), key: None }
    }
}

impl Lost {
    /// Runs `work` until it is done or this resolves. Being told comes first: `work` must not run one step under what is
    /// gone.
    pub(crate) async fn or<T>(self, work: impl Future<Output = T>) -> Result<T, LossReason> {
        let (mut lost, mut work) = (self, pin!(work));
        poll_fn(|cx| match Pin::new(&mut lost).poll(cx) {
            Poll::Ready(reason) => Poll::Ready(Err(reason)),
            Poll::Pending => work.as_mut().poll(cx).map(Ok),
        })
        .await
    }
}

impl Future for Lost {
    type Output = LossReason;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<LossReason> {
        let this = self.get_mut();
        match &this.of {
            Of::Ticket(ticket) => ticket.poll_lost(&mut this.key, cx),
            Of::Lease(lease) => lease.poll_lost(&mut this.key, cx),
        }
    }
}

impl Drop for Lost {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            match &self.of {
                Of::Ticket(ticket) => ticket.forget_watcher(key),
                Of::Lease(lease) => lease.forget_watcher(key),
            }
        }
    }
}
