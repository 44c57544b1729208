//! The settings of one semaphore handle.

use std::sync::Arc;
use std::time::Duration;

use super::lease_spec::LeaseSpec;
use super::name_state::NameState;
use super::watch::{Id, Watch};
use crate::AcquisitionId;
use crate::machine::{ReleaseHint, Terms};

/// A semaphore as it was declared. Tickets keep this alive but not the client, so an acquisition that only the engine
/// knows, such as a detached permit, does not keep the client alive.
#[allow(clippy::struct_excessive_bools)] // independent settings
pub(crate) struct SemaphoreSpec {
    pub(crate) named: Arc<dyn NameState>,
    pub(crate) terms: Terms,
    /// Whether the handle declares its capacity. If not, the capacity is only a fallback for a semaphore that has none.
    pub(crate) declares: bool,
    /// The label that statistics show beside its permits.
    pub(crate) label: Option<Arc<str>>,
    /// Whether its permits have slot numbers.
    pub(crate) numbered: bool,
    /// Whether a waiter that is woken claims its permit before the acquire returns it.
    pub(crate) claims_first: bool,
    /// Whether it was declared to limit only a rate. Its permits then weigh one unit.
    pub(crate) rate_only: bool,
    /// Whether its permits have no lease, no TTL, no label and no slot number.
    pub(crate) is_plain: bool,
    pub(crate) within: Option<Duration>,
    /// The metrics, the observer and the tracing spans of this handle.
    pub(crate) watch: Arc<Watch>,
}

impl LeaseSpec for SemaphoreSpec {
    fn watch(&self) -> &Watch {
        &self.watch
    }

    fn terms(&self) -> Terms {
        self.terms
    }

    fn id(&self, id: AcquisitionId) -> Id {
        Id::Permit(id)
    }

    fn end(&self, id: AcquisitionId, hint: ReleaseHint) {
        self.named.end(id, hint);
    }

    fn label(&self) -> Option<&Arc<str>> {
        self.label.as_ref()
    }
}
