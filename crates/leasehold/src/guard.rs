//! What the guards of locks and pool leases have in common.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Instant;

use crate::Error;
use crate::client_core::Request;
use crate::clock::{Moment, Span};
use crate::engine::driver::{Driver, Protocol};
use crate::engine::lease_spec::LeaseSpec;
use crate::engine::name_state::Release;
use crate::engine::ticket::{Grant, Ticket};
use crate::machine::Share;
use crate::permit::Lost;

/// One acquisition of a lease, from its attempt on. Dropping it releases the lease in the background.
pub(crate) struct LeaseGuard<P: Protocol> {
    pub(crate) driver: Arc<Driver<P>>,
    pub(crate) ticket: Arc<Ticket>,
    /// Whether the attempt has ended without a grant, so that nothing has to be released.
    refused: bool,
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
        let mut guard = Self { driver, ticket, refused: false };
        guard.driver.acquire(&guard.ticket, request)?;
        let granted = poll_fn(|cx| guard.ticket.poll_granted(cx)).await;
        guard.refused = !matches!(granted, Ok(Some(_)));
        Ok(granted?.map(|grant| (guard, grant)))
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
