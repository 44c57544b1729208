//! The store of a client: in this process, or shared with other processes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Core;
use super::in_process::InProcessName;
use super::name_state::NameState;
use super::remote::RemoteName;
use crate::backend::memory::Memory;
use crate::backend::{BoxFuture, Destination, Profile, RemoteBackend, Slot, TimeAuthority};
use crate::clock::{Moment, Span};
use crate::machine::Subject;
use crate::name::Name;
use crate::{Error, LockId};

/// A request to a store without connections that is not answered for this long is an outage.
const LONG_SILENCE: Span = Span::from_millis(2000);

pub(crate) enum Store {
    /// It answers at once, under a lock of this client.
    Memory(Arc<Memory>),
    Shared(Arc<dyn RemoteBackend>),
}

impl Store {
    pub(super) fn profile(&self) -> Profile {
        match self {
            Self::Memory(_) => {
                let time_authority = TimeAuthority::Process;
                Profile { kind: "memory", needs_renewals: false, time_authority }
            }
            Self::Shared(backend) => backend.profile(),
        }
    }

    /// Opens a semaphore name that this client has not used before.
    pub(super) fn open(&self, name: Name, core: Arc<Core>) -> Arc<dyn NameState> {
        match self {
            Self::Memory(memory) => InProcessName::open(name, core, memory),
            Self::Shared(backend) => RemoteName::open(name, core, backend.clone()),
        }
    }

    pub(super) fn memory(&self) -> Option<&Memory> {
        match self {
            Self::Memory(memory) => Some(memory),
            Self::Shared(_) => None,
        }
    }

    pub(super) fn shared(&self) -> Option<&Arc<dyn RemoteBackend>> {
        match self {
            Self::Memory(_) => None,
            Self::Shared(backend) => Some(backend),
        }
    }
}

impl Core {
    pub(crate) fn profile(&self) -> Profile {
        self.store.profile()
    }

    #[cfg(unix)]
    pub(crate) fn lifeline(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.store.shared()?.lifeline()
    }

    /// Whether the store is in this process, so that no time passes between a grant and its answer.
    pub(crate) fn is_in_process(&self) -> bool {
        self.store.memory().is_some()
    }

    /// Returns the slot in which the store keeps this name, key or id.
    pub(crate) fn slot(&self, subject: Subject<'_>) -> Slot {
        self.store.shared().map_or(Slot::ONLY, |remote| remote.slot(subject))
    }

    /// Returns the server that serves a slot now.
    pub(crate) fn destination(&self, slot: Slot) -> Destination {
        self.store.shared().map_or(Destination::ONLY, |remote| remote.destination(slot))
    }

    /// Looks up the key of the lock that this id holds. Returns `None` if no lookup is needed, because the store finds
    /// the key when it applies the command.
    pub(crate) fn key_of_lock(&self, id: LockId) -> Option<BoxFuture<Option<Name>>> {
        self.store.shared()?.key_of_lock(id)
    }

    /// Returns [`Error::InvalidArgument`] if the store cannot keep anything under this name.
    pub(crate) fn check_name(&self, subject: Subject<'_>) -> Result<(), Error> {
        self.store.shared().map_or(Ok(()), |remote| remote.check(subject))
    }

    /// Returns the error of a call that was made at `asked` and not answered. It says how long this destination, or any
    /// destination, has been silent.
    pub(crate) fn unavailable(&self, to: Option<Destination>, asked: Moment, now: Moment) -> Error {
        let silent = match to {
            Some(to) => self.sender.silent_since(to, now),
            None => self.sender.outage().map(|(since, error)| (since, Some(error))),
        };
        let (since, error) = silent.unwrap_or((asked, None));
        let silent_for = Some(now.saturating_since(since));
        match error {
            Some(Error::Unavailable { attempt, timed_out, source, .. }) => {
                Error::Unavailable { attempt, timed_out, silent_for, source }
            }
            Some(error) => error,
            None => {
                let address = self.store.shared().map_or("the store", |remote| remote.address());
                let attempt = format!("request to {address}");
                Error::Unavailable { attempt, timed_out: true, silent_for, source: None }
            }
        }
    }

    /// Reports to the store that the destination has been silent for too long.
    pub(super) fn suspect(&self, to: Destination) {
        if let Some(remote) = self.store.shared() {
            remote.suspect(to);
        }
    }

    pub(super) fn has_stragglers(&self) -> bool {
        self.stragglers.load(Ordering::Acquire)
    }

    pub(super) fn set_stragglers(&self, stragglers: bool) {
        self.stragglers.fetch_or(stragglers, Ordering::AcqRel);
    }

    /// Returns since when the store cannot be reached, and why.
    pub(crate) fn outage(&self) -> Option<(Moment, Error)> {
        self.sender.outage().or_else(|| self.silence())
    }

    /// Returns since when a store without connections has not answered: another process may be stopped in the middle of
    /// a transaction. On other stores, a silent connection is closed, which is an outage.
    fn silence(&self) -> Option<(Moment, Error)> {
        #[cfg(unix)]
        let has_no_connection = self.lifeline().is_some();
        #[cfg(not(unix))]
        let has_no_connection = false;
        if !has_no_connection {
            return None;
        }
        let now = Moment::now();
        let (since, to) = self.sender.unanswered_for(LONG_SILENCE, now)?;
        Some((since, self.unavailable(Some(to), since, now)))
    }
}
