//! The future of an acquire.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use crate::engine::name_state::Entered;
use crate::engine::ticket::Ticket;
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
    within: Option<Duration>,
    pending: Pending,
}

impl Acquire {
    #[inline]
    pub(crate) fn new(semaphore: Arc<Handle>, wait: bool, within: Option<Duration>) -> Self {
        let id = semaphore.engine.core().next_id();
        Self { id, semaphore: Some(semaphore), wait, within, pending: Pending(None) }
    }

    /// Waits no longer than this, whatever the semaphore says. A limit of zero is refused: that is what
    /// [`try_acquire`](crate::Semaphore::try_acquire) is for.
    pub fn within(mut self, limit: Duration) -> Self {
        self.within = Some(limit);
        self
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
            match declaration.named.enter(self.id, declaration, self.wait, within, cx.waker()) {
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

/// Like [`Acquire`], but no permit is an answer.
#[derive(Debug)]
pub(crate) struct TryAcquire(pub(crate) Acquire);

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
            ticket.semaphore.named.end(ticket.id);
        }
    }
}
