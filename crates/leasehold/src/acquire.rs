//! The future of an acquire.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use crate::engine::name_state::Entered;
use crate::engine::ticket::Ticket;
use crate::machine::Known;
use crate::name::positive;
use crate::semaphore::Handle;
use crate::{AcquisitionId, Error, Permit};

/// A permit to come: see [`Semaphore::acquire`](crate::Semaphore::acquire).
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
#[must_use = "an acquire does nothing until it is awaited"]
#[derive(Debug)]
pub struct Acquire {
    id: AcquisitionId,
    /// Taken when it is done.
    semaphore: Option<Arc<Handle>>,
    wait: bool,
    weight: u32,
    within: Option<Duration>,
    pending: Pending,
}

impl Acquire {
    #[inline]
    pub(crate) fn new(semaphore: Arc<Handle>, wait: bool, within: Option<Duration>) -> Self {
        let id = semaphore.engine.core().next_id();
        Self { id, semaphore: Some(semaphore), wait, weight: 1, within, pending: Pending(None) }
    }

    /// Waits no longer than this, whatever the semaphore says. A limit of zero is refused: that is what
    /// [`try_acquire`](crate::Semaphore::try_acquire) is for.
    pub fn within(mut self, limit: Duration) -> Self {
        self.within = Some(limit);
        self
    }

    /// Takes so many units of the capacity instead of one, all or nothing, with one permit.
    ///
    /// Later acquires wait until this one has been granted, even if there is room for them: nothing overtakes a heavy
    /// waiter. A weight above the capacity is refused at once. If the limit shrinks below the weight while it waits, it
    /// waits on, and [`SemaphoreStats::waits_for`](crate::SemaphoreStats::waits_for) says so.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// # let client = leasehold::Client::memory();
    /// // In megabytes.
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

    /// Runs `work` under the permit: [`Semaphore::with`](crate::Semaphore::with), for one that has a limit or a weight of
    /// its own.
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
    /// As for [`Semaphore::with`](crate::Semaphore::with).
    ///
    /// # Cancel safety
    /// As for [`Semaphore::with`](crate::Semaphore::with).
    pub async fn with<T>(self, work: impl AsyncFnOnce(&Permit) -> T) -> Result<T, Error> {
        let permit = self.await?;
        let name = permit.name().to_owned();
        let result = permit.lost().or(work(&permit)).await;
        let result = result.map_err(|reason| permit.lost_error(reason));
        if let Err(error) = permit.release().await {
            tracing::warn!(name, %error, "release failed after the work was done");
        }
        result
    }

    /// The id that the permit will have. With it, [`Semaphore::position`](crate::Semaphore::position)
    /// tells how many come before.
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
    ///     biased; // the acquire first: only then does it wait
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

    /// `granted` and `full` make the answer out of a permit, and out of none.
    #[inline]
    fn poll_as<T>(
        &mut self,
        cx: &mut Context<'_>,
        granted: impl FnOnce(Permit) -> T,
        full: impl FnOnce() -> Result<T, Error>,
    ) -> Poll<Result<T, Error>> {
        let (grant, ticket) = if let Some(ticket) = &self.pending.0 {
            let grant = ready!(ticket.poll_granted(cx));
            // The wait has ended, and the engine removes the id from the store if that is needed.
            let ticket = self.pending.0.take();
            match grant? {
                Some(grant) => (grant, ticket),
                None => return Poll::Ready(full()),
            }
        } else {
            let Some(semaphore) = &self.semaphore else { return Poll::Ready(Err(done_already())) };
            let within = match &self.within {
                Some(limit) => Some(positive("within", *limit)?),
                None => None,
            };
            let Handle { declaration, .. } = &**semaphore;
            let Self { id, weight, wait, .. } = *self;
            if weight == 0 {
                return Poll::Ready(Err(weightless()));
            }
            match declaration.named.enter(id, declaration, weight, wait, within, cx.waker()) {
                Entered::Held(grant, ticket) => (grant, ticket),
                Entered::Full => return Poll::Ready(full()),
                Entered::Failed(error) => return Poll::Ready(Err(*error)),
                Entered::Registered(ticket) => {
                    self.pending.0 = Some(ticket);
                    return Poll::Pending;
                }
                Entered::Waiting(ticket) => {
                    // The guard first: foreign code may panic.
                    let ticket = self.pending.0.insert(ticket);
                    // Outside of the name's lock. If it was granted in between, the next poll sees it.
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
        Poll::Ready(Ok(granted(Permit::new(semaphore, self.id, grant, ticket))))
    }
}

#[cold]
fn done_already() -> Error {
    Error::internal("an acquire was polled after it was done")
}

#[cold]
fn weightless() -> Error {
    Error::invalid("weight", "0 units are no permit: at least 1")
}

#[cold]
fn no_permit() -> Error {
    Error::internal("an acquire that waits was told that there is no permit")
}

impl Future for Acquire {
    type Output = Result<Permit, Error>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.get_mut().poll_as(cx, |permit| permit, || Err(no_permit()))
    }
}

/// A permit now or never: see [`Semaphore::try_acquire`](crate::Semaphore::try_acquire).
#[must_use = "a try does nothing until it is awaited"]
#[derive(Debug)]
pub struct TryAcquire(pub(crate) Acquire);

impl TryAcquire {
    /// Takes so many units of the capacity: see [`Acquire::weight`].
    pub fn weight(mut self, units: u32) -> Self {
        self.0 = self.0.weight(units);
        self
    }
}

impl Future for TryAcquire {
    type Output = Result<Option<Permit>, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.get_mut().0.poll_as(cx, Some, || Ok(None))
    }
}

/// A place in the queue, or a permit on its way, that is given up unless it is taken out.
#[derive(Debug)]
struct Pending(Option<Arc<Ticket>>);

impl Drop for Pending {
    fn drop(&mut self) {
        #[cfg(feature = "broken")]
        if crate::broken::is("leak") {
            return;
        }
        if let Some(ticket) = &self.0 {
            ticket.semaphore.named.end(ticket.id, Known::Unused);
        }
    }
}
