//! What all guards have in common, and what those of locks and pool leases have in common.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use crate::backend::BoxFuture;
use crate::client_core::Request;
use crate::clock::{Moment, Span};
use crate::engine::driver::{Driver, Protocol};
use crate::engine::lease_spec::LeaseSpec;
use crate::engine::name_state::Release;
use crate::engine::ticket::{Grant, Ticket};
use crate::machine::Share;
use crate::permit::Lost;
use crate::{Error, Fence, LockGuard, Permit, PoolLease};

/// What every guard can do: a [`Permit`](crate::Permit), a [`LockGuard`](crate::LockGuard) and a
/// [`PoolLease`](crate::PoolLease).
///
/// The types have methods of the same names. Use the trait for code that takes any of them. No other type can implement
/// it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::{Client, Guard};
///
/// fn describe(held: &impl Guard) -> String {
///     format!("{} of {}", held.id(), held.name())
/// }
///
/// let client = Client::memory();
/// let lease = client.pool("encoders", 4).build()?.acquire("worker-1").await?;
/// assert_eq!(describe(&lease), "worker-1 of encoders");
/// println!("{}", describe(&client.semaphore("api", 5).build()?.acquire().await?));
/// # Ok(())
/// # }
/// ```
pub trait Guard: Sealed + fmt::Debug + Send + Sync {
    /// Returns the name of the semaphore or the pool, or the key of the lock.
    fn name(&self) -> &str;

    /// Returns the id by which the store knows what is held.
    ///
    /// The id of a lock is a secret: it is enough to release the lock.
    fn id(&self) -> String;

    /// Returns the fence, which is larger than those of all earlier holders.
    ///
    /// Pool leases have none.
    fn fence(&self) -> Option<Fence>;

    /// Returns how long the acquire waited.
    fn waited(&self) -> Duration;

    /// Returns the instant until which it is valid without another renewal; `None` if it does not expire.
    fn valid_until(&self) -> Option<Instant>;

    /// Checks that it is still held.
    ///
    /// # Errors
    /// [`Error::Lost`] if it is no longer held.
    fn check(&self) -> Result<(), Error>;

    /// Returns a future that resolves when it is lost, with the reason.
    ///
    /// # Cancel safety
    /// Dropping the future only stops listening.
    fn lost(&self) -> Lost;

    /// Releases it and waits until the store has confirmed that.
    ///
    /// Returns `true` if it was held until now, `false` if it had been lost.
    ///
    /// # Errors
    /// The same as for [`Permit::release`](crate::Permit::release).
    ///
    /// # Cancel safety
    /// If the future is dropped, even before its first poll, the release continues in the background.
    fn release(self) -> impl Future<Output = Result<bool, Error>> + Send
    where
        Self: Sized;
}

/// Keeps other crates from implementing the traits of this one.
#[allow(unnameable_types)] // on purpose
pub trait Sealed {}

/// Implements [`Guard`] by a type's methods of the same names. Only the types of the id and the fence differ.
macro_rules! implement_guard {
    ($type:ident, $guard:ident, id: $id:expr, fence: $fence:expr) => {
        impl Sealed for $type {}

        impl Guard for $type {
            fn name(&self) -> &str {
                self.name()
            }

            fn id(&self) -> String {
                let $guard = self;
                $id
            }

            fn fence(&self) -> Option<Fence> {
                #[allow(unused_variables)] // a pool lease has no fence
                let $guard = self;
                $fence
            }

            fn waited(&self) -> Duration {
                self.waited()
            }

            fn valid_until(&self) -> Option<Instant> {
                self.valid_until()
            }

            fn check(&self) -> Result<(), Error> {
                self.check()
            }

            fn lost(&self) -> Lost {
                self.lost()
            }

            async fn release(self) -> Result<bool, Error> {
                self.release().await
            }
        }
    };
}

implement_guard!(Permit, permit, id: permit.id().to_string(), fence: Some(permit.fence()));
implement_guard!(LockGuard, lock, id: lock.id().to_string(), fence: Some(lock.fence()));
implement_guard!(PoolLease, lease, id: lease.id().to_owned(), fence: None);

/// What the library needs of its guards beside [`Guard`].
pub(crate) trait Declared: Guard {
    /// Returns how it was declared; `None` if it has ended.
    fn spec(&self) -> Option<Arc<dyn LeaseSpec>>;
}

/// Runs `work` under a guard, and releases it. `work` stops if it is lost. `failed` is called with the error of a release
/// that fails.
pub(crate) async fn with<G: Declared, T>(
    guard: G,
    work: impl AsyncFnOnce(&G) -> T,
    failed: impl FnOnce(&Error),
) -> Result<T, Error> {
    let spec = guard.spec();
    let result = guard.lost().or(work(&guard)).await;
    if result.is_err() {
        // Released in the background: the store may be unreachable, and the caller must learn of the loss now.
        drop(guard);
    } else if let Err(error) = guard.release().await {
        if let Some(spec) = spec {
            let (name, what) = (spec.watch().public_name(), spec.primitive().grant());
            let name = &*name;
            tracing::warn!(name, %error, "the work is done, but its {what} could not be released");
        }
        failed(&error);
    }
    result
}

/// A future that is made when it is first polled.
#[derive(Default)]
pub(crate) enum OnFirstPoll<T> {
    #[default]
    NotPolled,
    Running(BoxFuture<T>),
    Done,
}

impl<T> OnFirstPoll<T> {
    /// Polls the future, which `begin` makes.
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        begin: impl FnOnce() -> Result<BoxFuture<T>, Error>,
    ) -> Poll<Result<T, Error>> {
        if let Self::NotPolled = self {
            *self = Self::Done;
            *self = Self::Running(begin()?);
        }
        let Self::Running(future) = self else { return Poll::Ready(Err(done_already())) };
        let output = ready!(future.as_mut().poll(cx));
        *self = Self::Done;
        Poll::Ready(output)
    }
}

impl<T> fmt::Debug for OnFirstPoll<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotPolled => "NotPolled",
            Self::Running(_) => "Running",
            Self::Done => "Done",
        })
    }
}

#[cold]
pub(crate) fn done_already() -> Error {
    Error::internal("an acquire was polled after it had completed")
}

/// One acquisition of a lease, from its attempt on. Dropping it releases the lease in the background.
pub(crate) struct LeaseGuard<P: Protocol> {
    pub(crate) driver: Arc<Driver<P>>,
    pub(crate) ticket: Arc<Ticket>,
    /// Whether the attempt has ended without a grant, so that nothing has to be released.
    refused: bool,
    waited: Duration,
}

impl<P: Protocol> LeaseGuard<P> {
    /// Makes one attempt, which may take until `until`. Returns `None` if nothing is free.
    ///
    /// # Cancel safety
    /// If the future is dropped, a lease that it may have been granted is released in the background.
    pub(crate) async fn acquire(
        driver: Arc<Driver<P>>,
        spec: Arc<dyn LeaseSpec>,
        until: Moment,
    ) -> Result<Option<(Self, Grant)>, Error> {
        let (id, share) = (driver.core.next_id(), Share::ONE);
        let within = Span::from_duration(until.saturating_since(driver.core.now()));
        let ticket = Ticket::waiting(id, spec, share, Some(within));
        let request = Request {
            terms: ticket.spec.terms(),
            share,
            queues: false,
            claims_first: false,
            gives_up_at: ticket.gives_up_at,
            label: None,
        };
        let mut guard = Self { driver, ticket, refused: false, waited: Duration::ZERO };
        guard.driver.acquire(&guard.ticket, request)?;
        let granted = poll_fn(|cx| guard.ticket.poll_granted(cx)).await;
        guard.refused = !matches!(granted, Ok(Some(_)));
        guard.set_waited_since(guard.ticket.queued_at);
        Ok(granted?.map(|grant| (guard, grant)))
    }

    /// Sets when the acquire began, of which this may be the last of several attempts.
    pub(crate) fn set_waited_since(&mut self, started: Moment) {
        self.waited = self.driver.core.now().saturating_since(started);
    }

    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    pub(crate) fn valid_until(&self) -> Instant {
        let now = self.driver.core.now();
        Instant::now() + self.ticket.valid_until().saturating_since(now)
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        self.ticket.check().map_err(|reason| self.ticket.lost(reason))
    }

    pub(crate) fn lost(&self) -> Lost {
        Lost::of(self.ticket.clone())
    }

    /// Releases the lease. The outcome is `true` if it was held until now.
    pub(crate) fn release(&self) -> Release {
        self.driver.release(&self.ticket)
    }
}

impl<P: Protocol> Drop for LeaseGuard<P> {
    fn drop(&mut self) {
        if !self.refused {
            self.driver.end(self.ticket.id);
        }
    }
}
