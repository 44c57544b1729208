//! The words of other programs, for those who move from one of them or share its keys.
//!
//! | module | for |
//! |---|---|
//! | [`sync_guard`] | `SyncGuard`, a lock for TypeScript |
//! | [`asyncio_advanced_semaphores`] | `asyncio-advanced-semaphores`, semaphores for Python |
//! | [`lua_pool`] | the Lua scripts of osparc's `DistributedSemaphore` |
//!
//! Everything here is built on the rest of the library, and shares its permits, locks and pool leases.

pub mod asyncio_advanced_semaphores;
pub mod lua_pool;
pub mod sync_guard;

use crate::guard::Sealed;

impl Sealed for crate::SemaphoreBuilder {}
impl Sealed for crate::LockBuilder {}
impl Sealed for crate::Locks {}
#[cfg(feature = "redis")]
impl Sealed for crate::RedisBuilder {}
