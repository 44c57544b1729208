//! The store of a client: in this process, or shared with other processes.

use std::sync::Arc;

use super::Core;
use super::in_process::InProcessName;
use super::name_state::NameState;
use super::remote::RemoteName;
use crate::backend::memory::Memory;
use crate::backend::{Profile, RemoteBackend, TimeAuthority};
use crate::name::Name;

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
            Self::Shared(_) => RemoteName::open(name, core),
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
