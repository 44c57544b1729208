//! The guard of a permit, and the future that reports a loss.

use std::fmt;
use std::future::poll_fn;
use std::num::NonZeroU32;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::callbacks::event;
use crate::clock::Moment;
use crate::engine::lease_spec::LeaseSpec;
use crate::engine::name_state::ReleasedBy;
use crate::engine::ticket::{Grant, Ticket};
use crate::engine::watch::Acquiring;
use crate::guard::Declared;
use crate::machine::ReleaseHint;
use crate::semaphore::SemaphoreInner;
use crate::{AcquisitionId, Error, Fence, LossReason, Primitive};

/// A guard that holds a permit until it is released or dropped.
///
/// Dropping the guard releases the permit in the background. This never blocks and works on any thread. To wait until
/// the store has confirmed the release, call [`release`](Self::release).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::Client;
///
/// let api = Client::memory().semaphore("api", 5).build()?;
/// let permit = api.acquire().await?;
/// println!("{} has fence {}", permit.id(), permit.fence());
/// permit.check()?; // is it still held?
/// permit.release().await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping the guard releases the permit"]
pub struct Permit {
    /// `None` once the permit was released or detached.
    semaphore: Option<Arc<SemaphoreInner>>,
    id: AcquisitionId,
    weight: u32,
    grant: Grant,
    /// `None` if only a release can end the permit and the acquire did not have to wait.
    ticket: Option<Arc<Ticket>>,
}

impl Permit {
    #[inline]
    pub(crate) fn new(
        semaphore: Arc<SemaphoreInner>,
        (id, weight): (AcquisitionId, u32),
        grant: Grant,
        ticket: Option<Arc<Ticket>>,
        watched: Option<Acquiring>,
    ) -> Self {
        // Create the guard first, because a tracing subscriber may panic.
        let mut permit = Self { semaphore: Some(semaphore), id, weight, grant, ticket };
        if let Some(watched) = watched {
            permit.watch(watched);
        }
        permit
    }

    /// Reports the acquire, and makes the permit's ticket report the end of the permit. If there is no ticket yet, this
    /// creates one.
    #[cold]
    fn watch(&mut self, watched: Acquiring) {
        let (id, grant) = (self.id, self.grant);
        let Some(semaphore) = &self.semaphore else { return };
        let hold = watched.acquired(Some(grant.fence), || report_acquired(semaphore, id, &grant));
        let attach = || semaphore.spec.named.attach(id, &semaphore.spec);
        self.ticket.get_or_insert_with(attach).watch(hold);
    }

    /// Returns the id of the permit in the store.
    ///
    /// [`Semaphore::release`](crate::Semaphore::release) releases a [detached](Self::detach) permit
    /// by it.
    #[must_use]
    pub fn id(&self) -> AcquisitionId {
        self.id
    }

    /// Returns how many units the permit takes: see [`Acquire::weight`](crate::Acquire::weight).
    #[must_use]
    pub fn weight(&self) -> u32 {
        self.weight
    }

    /// Returns the slot number: the lowest number from 1 that was free when the permit was granted.
    ///
    /// No other live permit of the semaphore has it, and it does not change until the permit ends.
    /// Returns `None` unless the semaphore is [`numbered`](crate::SemaphoreBuilder::numbered).
    ///
    /// The number is at most the capacity, but after the capacity shrinks it may be larger.
    #[must_use]
    pub fn slot_number(&self) -> Option<u32> {
        self.grant.slot_number.map(NonZeroU32::get)
    }

    /// Returns the name of the semaphore.
    #[must_use]
    pub fn name(&self) -> &str {
        self.semaphore.as_ref().map_or("", |semaphore| semaphore.spec.named.name().as_str())
    }

    /// Returns the fence of this permit.
    ///
    /// It is larger than the fence of every permit of this name that was granted before.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.grant.fence
    }

    /// Returns how long the acquire waited.
    #[must_use]
    pub fn waited(&self) -> Duration {
        Duration::from_micros(self.grant.waited_micros)
    }

    /// Returns the instant until which this permit is valid without another renewal, or `None` if
    /// the permit does not expire.
    ///
    /// Every renewal extends the validity, up to the TTL. Once the permit is lost, this returns the
    /// current instant.
    #[must_use]
    pub fn valid_until(&self) -> Option<Instant> {
        let ticket = self.ticket.as_ref()?;
        let valid_until = ticket.valid_until();
        if valid_until == Moment::NEVER {
            return None;
        }
        Some(Instant::now() + valid_until.saturating_since(ticket.spec.now()))
    }

    /// Checks that the permit is still held.
    ///
    /// The result describes the past: the thread may be paused right after the check, for longer than the lease. Where
    /// that matters, let the resource compare the [fence](Self::fence).
    ///
    /// # Errors
    /// [`Error::Lost`] if the permit is no longer held.
    pub fn check(&self) -> Result<(), Error> {
        match (&self.ticket, &self.semaphore) {
            (Some(ticket), _) => ticket.check().map_err(|reason| self.lost_error(reason)),
            (None, Some(semaphore)) => {
                semaphore.spec.named.check(self.id).map_err(|reason| self.lost_error(reason))
            }
            (None, None) => Err(self.lost_error(LossReason::Released)),
        }
    }

    /// Returns a future that resolves when the permit is lost, with the reason.
    ///
    /// If the guard is released, dropped or detached, the future resolves with
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
    /// Dropping the future only stops listening. The permit is not affected.
    pub fn lost(&self) -> Lost {
        let ticket = match (&self.ticket, &self.semaphore) {
            (Some(ticket), _) => ticket.clone(),
            (None, Some(semaphore)) => semaphore.spec.named.attach(self.id, &semaphore.spec),
            (None, None) => unreachable!("only a permit that has ended has no semaphore"),
        };
        Lost::of(ticket)
    }

    /// Releases the permit and waits until the store has confirmed it.
    ///
    /// Returns `true` if the permit was held until now, `false` if it had been lost.
    ///
    /// # Errors
    /// - [`Error::Unavailable`] if the store cannot be reached or does not answer in time.
    /// - [`Error::Denied`], [`Error::NoRoom`] or [`Error::Unusable`] if the store refuses the request.
    /// - [`Error::ForeignData`] if another program uses the semaphore's keys on Redis.
    /// - [`Error::Stopped`] if the client's background thread is not running.
    ///
    /// After every error except `Stopped`, the client repeats the release in the background. On Redis the permit
    /// expires with its lease at the latest.
    ///
    /// # Cancel safety
    /// If the future is dropped, even before its first poll, the release continues in the background.
    pub async fn release(mut self) -> Result<bool, Error> {
        let Some(semaphore) = self.semaphore.take() else { return Ok(false) };
        if self.has_ended() {
            semaphore.spec.named.end(self.id, ReleaseHint::Nothing);
            return Ok(false);
        }
        let by = ReleasedBy::Guard;
        semaphore.spec.named.release(self.id, &semaphore.spec, by).done().await
    }

    /// Drops the guard but keeps the permit, and returns its id.
    ///
    /// The client no longer renews it.
    ///
    /// [`Semaphore::extend`](crate::Semaphore::extend) and [`Semaphore::release`](crate::Semaphore::release) renew and
    /// release it by its id. On Redis it expires with its lease unless it is renewed. In memory and on one host, where
    /// permits need no renewal, it ends with its client. Its TTL ends it on every store.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// let api = leasehold::Client::memory().semaphore("api", 5).build()?;
    /// let id = api.acquire().await?.detach();
    /// assert!(api.extend(&id).await?);
    /// assert!(api.release(&id).await?);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use = "without its id the permit cannot be released"]
    pub fn detach(mut self) -> AcquisitionId {
        if let Some(semaphore) = self.semaphore.take() {
            semaphore.spec.named.detach(self.id);
        }
        self.id
    }

    #[inline]
    fn has_ended(&self) -> bool {
        self.ticket.as_ref().is_some_and(|ticket| ticket.check().is_err())
    }

    fn lost_error(&self, reason: LossReason) -> Error {
        let name = self.semaphore.as_ref().map(|semaphore| semaphore.spec.named.name().to_string());
        let (primitive, id) = (Primitive::Semaphore, self.id.to_string());
        Error::Lost { primitive, name: name.unwrap_or_default(), id, reason }
    }
}

#[cold]
fn report_acquired(semaphore: &SemaphoreInner, id: AcquisitionId, grant: &Grant) {
    event!(
        debug,
        name = semaphore.spec.named.name().as_str(),
        %id,
        waited = ?Duration::from_micros(grant.waited_micros),
        slot_number = grant.slot_number,
        capacity = semaphore.spec.named.capacity(),
        "permit acquired"
    );
}

impl Drop for Permit {
    #[inline]
    fn drop(&mut self) {
        if let Some(semaphore) = self.semaphore.take() {
            // Drop the ticket first: if nothing else has it, the engine has no task to notify.
            self.ticket = None;
            semaphore.spec.named.end(self.id, ReleaseHint::Nothing);
        }
    }
}

impl Declared for Permit {
    fn spec(&self) -> Option<Arc<dyn LeaseSpec>> {
        let semaphore = self.semaphore.as_ref()?;
        Some(semaphore.spec.clone())
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.semaphore.as_ref().map(|semaphore| semaphore.spec.named.name());
        f.debug_struct("Permit")
            .field("name", &name)
            .field("id", &self.id)
            .field("slot_number", &self.slot_number())
            .field("fence", &self.fence())
            .finish_non_exhaustive()
    }
}

/// A future that resolves when a permit, a lock or a pool lease is lost: see [`Permit::lost`].
///
/// It does not borrow the guard, so another task can await it.
#[must_use = "the future does nothing unless awaited"]
#[derive(Debug)]
pub struct Lost {
    ticket: Arc<Ticket>,
    key: Option<u64>,
}

impl Lost {
    pub(crate) fn of(ticket: Arc<Ticket>) -> Self {
        Self { ticket, key: None }
    }

    /// Polls for the error of a caller that finds its permit, lock or pool lease lost.
    pub(crate) fn poll_error(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        Pin::new(&mut *self).poll(cx).map(|reason| self.ticket.lost(reason))
    }

    /// Runs `work` until it finishes or the loss is reported. The loss is polled first, so that `work` is never polled
    /// after it.
    pub(crate) async fn or<T>(self, work: impl Future<Output = T>) -> Result<T, Error> {
        let (mut lost, mut work) = (self, pin!(work));
        poll_fn(|cx| match lost.poll_error(cx) {
            Poll::Ready(error) => Poll::Ready(Err(error)),
            Poll::Pending => work.as_mut().poll(cx).map(Ok),
        })
        .await
    }
}

impl Future for Lost {
    type Output = LossReason;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<LossReason> {
        let this = self.get_mut();
        this.ticket.poll_lost(&mut this.key, cx)
    }
}

impl Drop for Lost {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.ticket.forget_watcher(key);
        }
    }
}
