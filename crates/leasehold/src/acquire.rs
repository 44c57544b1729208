//! The futures that acquire a permit.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use crate::engine::name_state::Entered;
use crate::engine::semaphore_spec::SemaphoreSpec;
use crate::engine::ticket::Ticket;
use crate::engine::watch::{Acquiring, Id};
use crate::guard::{self, done_already};
use crate::machine::ReleaseHint;
use crate::name::positive;
use crate::semaphore::SemaphoreInner;
use crate::{AcquisitionId, Error, Permit};

/// A future that resolves to a [`Permit`]: see [`Semaphore::acquire`](crate::Semaphore::acquire).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::{Client, Error};
/// use std::time::Duration;
///
/// let api = Client::memory().semaphore("api", 1).build()?;
/// let held = api.acquire().await?;
/// let error = api.acquire().within(Duration::from_millis(10)).await.unwrap_err();
/// assert!(matches!(error, Error::TimedOut { .. }));
/// # drop(held);
/// # Ok(())
/// # }
/// ```
#[must_use = "the future does nothing unless awaited"]
#[derive(Debug)]
pub struct Acquire {
    id: AcquisitionId,
    /// `None` once the permit has been returned.
    semaphore: Option<Arc<SemaphoreInner>>,
    wait: bool,
    weight: u32,
    within: Option<Duration>,
    pending: Pending,
}

impl Acquire {
    #[inline]
    pub(crate) fn new(
        semaphore: Arc<SemaphoreInner>,
        wait: bool,
        within: Option<Duration>,
    ) -> Self {
        let id = semaphore.engine.core().next_id();
        Self {
            id,
            semaphore: Some(semaphore),
            wait,
            weight: 1,
            within,
            pending: Pending::default(),
        }
    }

    /// Sets the time limit of this acquire, which replaces the semaphore's
    /// [`within`](crate::SemaphoreBuilder::within).
    ///
    /// A limit of zero fails with [`Error::InvalidArgument`]: use [`try_acquire`](crate::Semaphore::try_acquire) to
    /// acquire without waiting.
    pub fn within(mut self, limit: Duration) -> Self {
        self.within = Some(limit);
        self
    }

    /// Acquires this many units of the capacity with one permit, instead of one unit.
    ///
    /// The units are granted all at once or not at all.
    ///
    /// Later acquires wait until this one is granted, even if there is room for them: no acquire overtakes a heavy
    /// waiter. A weight above the capacity fails at once with [`Error::TooHeavy`]. If the capacity
    /// shrinks below the weight during the wait, the acquire keeps waiting, and
    /// [`SemaphoreStats::waits_for`](crate::SemaphoreStats::waits_for) shows the reason. A semaphore that limits
    /// only a rate ([`Client::rate`](crate::Client::rate)) has no units, so every weight but 1 fails.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// # let client = leasehold::Client::memory();
    /// // The capacity is in megabytes.
    /// let memory = client.semaphore("memory", 16_000).build()?;
    /// let large = memory.acquire().weight(12_000).await?;
    /// assert!(memory.try_acquire().weight(6_000).await?.is_none());
    /// assert!(memory.try_acquire().weight(4_000).await?.is_some());
    /// # drop(large);
    /// # Ok(())
    /// # }
    /// ```
    pub fn weight(mut self, units: u32) -> Self {
        self.weight = units;
        self
    }

    /// Acquires a permit and runs `work` under it: [`Semaphore::with`](crate::Semaphore::with) for an acquire that has
    /// its own time limit or weight.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use std::time::Duration;
    ///
    /// # let client = leasehold::Client::memory();
    /// let api = client.semaphore("api", 5).build()?;
    /// let answer = api.acquire().within(Duration::from_secs(2)).weight(3).with(async |_| 42).await?;
    /// assert_eq!(answer, 42);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The same as for [`Semaphore::with`](crate::Semaphore::with).
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`, then releases the permit in the background.
    pub async fn with<T>(self, work: impl AsyncFnOnce(&Permit) -> T) -> Result<T, Error> {
        guard::with(self.await?, work, |_| ()).await
    }

    /// Returns the id that the permit will have.
    ///
    /// [`Semaphore::position`](crate::Semaphore::position) takes it and returns the number of
    /// waiters ahead.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::Client;
    /// use std::time::Duration;
    ///
    /// let api = Client::memory().semaphore("api", 1).build()?;
    /// let held = api.acquire().await?;
    /// let waiting = api.acquire();
    /// let id = waiting.id();
    /// tokio::select! {
    ///     biased; // poll the acquire first, so that it is queued
    ///     permit = waiting => unreachable!("{permit:?} while another is held"),
    ///     position = api.position(&id) => assert_eq!(position?, Some(0)),
    /// }
    /// # drop(held);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn id(&self) -> AcquisitionId {
        self.id
    }

    /// The name of the semaphore; empty once the permit has been returned.
    #[cfg(feature = "tower")]
    pub(crate) fn name(&self) -> &str {
        self.semaphore.as_ref().map_or("", |semaphore| semaphore.spec.named.name().as_str())
    }

    /// Polls the acquire. `granted` makes the output from a permit, `full` makes it if no permit was free.
    #[inline]
    fn poll_as<T>(
        &mut self,
        cx: &mut Context<'_>,
        granted: impl FnOnce(Permit) -> T,
        full: impl FnOnce() -> Result<T, Error>,
    ) -> Poll<Result<T, Error>> {
        let (grant, ticket, watched) = if let Some(place) = &self.pending.0 {
            let grant = ready!(place.ticket.poll_granted(cx));
            // The wait has ended. If the store may still know the id, the engine releases it there.
            let (ticket, watched) = match self.pending.0.take() {
                Some(Place { ticket, watched }) => (Some(ticket), watched),
                None => (None, None),
            };
            match grant {
                Ok(Some(grant)) => (grant, ticket, watched),
                Ok(None) => return Poll::Ready(no_permit_now(watched, full)),
                Err(error) => return Poll::Ready(Err(failed(watched, error))),
            }
        } else {
            let Some(semaphore) = &self.semaphore else { return Poll::Ready(Err(done_already())) };
            let within = match &self.within {
                Some(limit) => Some(positive("within", *limit)?),
                None => None,
            };
            let SemaphoreInner { spec, .. } = &**semaphore;
            let Self { id, weight, wait, .. } = *self;
            if weight != 1 {
                check_weight(weight, spec)?;
            }
            let watched = spec.watch.begin(|| Id::Permit(id), weight);
            match spec.named.enter(id, spec, weight, wait, within, cx.waker()) {
                Entered::Held(grant, ticket) => (grant, ticket, watched),
                Entered::Full => return Poll::Ready(no_permit_now(watched, full)),
                Entered::Failed(error) => return Poll::Ready(Err(failed(watched, *error))),
                Entered::Registered(ticket) => {
                    self.pending.begin(ticket, watched, wait);
                    return Poll::Pending;
                }
                Entered::Waiting(ticket) => {
                    // Create the guard first, because the waker is the user's code and may panic.
                    let ticket = self.pending.begin(ticket, watched, wait);
                    // The waker is registered outside the name's lock. If the permit was granted in between, the next
                    // poll finds it.
                    if !ticket.register(cx.waker().clone()) {
                        cx.waker().wake_by_ref();
                    }
                    return Poll::Pending;
                }
            }
        };
        let Some(semaphore) = self.semaphore.take() else {
            return Poll::Ready(Err(done_already()));
        };
        Poll::Ready(Ok(granted(Permit::new(
            semaphore,
            (self.id, self.weight),
            grant,
            ticket,
            watched,
        ))))
    }
}

/// Reports that no permit was free, and makes the output.
fn no_permit_now<T>(
    watched: Option<Acquiring>,
    full: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    if let Some(watched) = watched {
        watched.refused();
    }
    full()
}

#[cold]
fn failed(watched: Option<Acquiring>, error: Error) -> Error {
    if let Some(watched) = watched {
        watched.failed(&error);
    }
    error
}

#[cold]
fn check_weight(weight: u32, spec: &SemaphoreSpec) -> Result<(), Error> {
    if weight == 0 {
        return Err(Error::invalid("weight", "it is 0; the minimum is 1"));
    }
    if spec.rate_only {
        let name = spec.named.name();
        let problem =
            format!("it is {weight}, but {name:?} limits only a rate, which counts starts");
        let advice = "acquire once for each start, or use a semaphore with a capacity";
        return Err(Error::invalid("weight", format!("{problem}: {advice}")));
    }
    Ok(())
}

#[cold]
fn no_permit() -> Error {
    Error::internal("a waiting acquire ended without a permit")
}

impl Future for Acquire {
    type Output = Result<Permit, Error>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.get_mut().poll_as(cx, |permit| permit, || Err(no_permit()))
    }
}

/// A future that resolves to a [`Permit`] if one is free now: see
/// [`Semaphore::try_acquire`](crate::Semaphore::try_acquire).
#[must_use = "the future does nothing unless awaited"]
#[derive(Debug)]
pub struct TryAcquire(pub(crate) Acquire);

impl TryAcquire {
    /// Acquires this many units of the capacity with one permit: see [`Acquire::weight`].
    pub fn weight(mut self, units: u32) -> Self {
        self.0 = self.0.weight(units);
        self
    }

    /// Acquires a permit and runs `work` under it, if a permit is free now; returns `None` otherwise.
    ///
    /// # Errors
    /// The same as for [`Semaphore::try_acquire`](crate::Semaphore::try_acquire), and [`Error::Lost`] if the permit is
    /// lost while `work` runs.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`, then releases the permit in the background.
    pub async fn with<T>(self, work: impl AsyncFnOnce(&Permit) -> T) -> Result<Option<T>, Error> {
        let Some(permit) = self.await? else { return Ok(None) };
        guard::with(permit, work, |_| ()).await.map(Some)
    }
}

impl Future for TryAcquire {
    type Output = Result<Option<Permit>, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.get_mut().0.poll_as(cx, Some, || Ok(None))
    }
}

/// A place in the queue, or a permit that the future has not returned yet. Dropping this releases it, unless it was
/// taken out before.
#[derive(Debug, Default)]
struct Pending(Option<Place>);

#[derive(Debug)]
struct Place {
    ticket: Arc<Ticket>,
    /// Dropped after the place is released, because `Pending::drop` runs before its fields are dropped.
    watched: Option<Acquiring>,
}

impl Pending {
    /// `waits` is true for an acquire that queues, false for one that only tries.
    #[inline]
    fn begin(
        &mut self,
        ticket: Arc<Ticket>,
        watched: Option<Acquiring>,
        waits: bool,
    ) -> &Arc<Ticket> {
        let place = self.0.insert(Place { ticket, watched });
        if let Some(watched) = place.watched.as_mut().filter(|_| waits) {
            watched.waits();
        }
        &place.ticket
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if crate::broken::is("leak") {
            return;
        }
        if let Some(Place { ticket, .. }) = &self.0 {
            ticket.spec.end(ticket.id, ReleaseHint::Unused);
        }
    }
}
