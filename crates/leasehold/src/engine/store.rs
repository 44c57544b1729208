//! What the engine needs from a store, whether in this process or shared with other processes.

use std::sync::Arc;

use super::Core;
use super::call::{Asked, Done, Undo};
use super::name_state::NameState;
use crate::ClientInfo;
use crate::backend::{Later, Part, Profile};
use crate::clock::Moment;
use crate::machine::lock::Record;
use crate::machine::pool::PoolQuery;
use crate::name::Name;
use crate::stats::PoolStats;
use crate::stats::{Query, SemaphoreStats};

pub(crate) trait Store: Send + Sync {
    fn profile(&self) -> Profile;

    /// Opens a semaphore name that this client has not used before.
    fn open(&self, name: Name, core: Arc<Core>) -> Arc<dyn NameState>;

    /// Sends one command of a lock or a pool. Fails with [`Error::Unavailable`](crate::Error::Unavailable) if the store
    /// has not answered by `until`. `undo` runs if the store may have granted something that no caller waits for any
    /// more.
    fn ask(&self, core: &Arc<Core>, part: Part, until: Moment, undo: Option<Undo>) -> Asked;

    /// Sends one command in the background. No caller awaits the answer; `done` is called with it.
    fn ask_in_background(&self, core: &Arc<Core>, part: Part, until: Moment, done: Done);

    fn stats(&self, core: &Arc<Core>, query: Query) -> Later<Vec<SemaphoreStats>>;

    fn list_locks(&self, core: &Arc<Core>, limit: usize) -> Later<Vec<Record>>;

    fn list_pools(&self, core: &Arc<Core>, which: PoolQuery) -> Later<Vec<PoolStats>>;

    fn list_clients(&self, core: &Arc<Core>, limit: usize) -> Later<Vec<ClientInfo>>;

    /// The file descriptor whose lock proves that this client is alive (local store only).
    #[cfg(unix)]
    fn lifeline(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }
}
