//! What the tickets of one semaphore handle, one lock or one pool instance have in common.

use std::sync::Arc;

use super::watch::{Id, Watch};
use crate::clock::Moment;
use crate::machine::{ReleaseHint, Terms};
use crate::name::Name;
use crate::{AcquisitionId, Primitive};

pub(crate) trait LeaseSpec: Send + Sync {
    /// The name, the clock, the metrics, the observer and the tracing spans.
    fn watch(&self) -> &Watch;

    fn terms(&self) -> Terms;

    /// Returns the id of an acquisition, for users.
    fn id(&self, id: AcquisitionId) -> Id;

    /// Releases what a dropped guard held, or cancels an acquire whose future was dropped, with [`ReleaseHint::Unused`]. The
    /// outcome is not reported.
    fn end(&self, id: AcquisitionId, hint: ReleaseHint);

    /// The label that statistics show.
    fn label(&self) -> Option<&Arc<str>> {
        None
    }

    fn primitive(&self) -> Primitive {
        self.watch().primitive
    }

    fn name(&self) -> &Name {
        &self.watch().name
    }

    /// Returns the client's current time.
    fn now(&self) -> Moment {
        self.watch().clock.now()
    }
}
