//! Share scarce things fairly between tasks, processes and machines.
//!
//! A [`Semaphore`] gives out a fixed number of permits under a name, first come first served. A [`Lock`] is
//! exclusive, and fenced. A [`Pool`] has a fixed number of leases for instance ids of your own. What each hands
//! out is a lease: it is given back when its guard goes, ends by itself when its holder dies or its TTL is
//! over, and the holder is told when it is gone.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), leasehold::Error> {
//! use leasehold::Client;
//!
//! let client = Client::memory();
//! let api = client.semaphore("api", 5).build()?;
//!
//! // At most five of these run at once, in the order in which they asked.
//! let answer = api.with(async |_permit| "answer").await?;
//! # assert_eq!(answer, "answer");
//! # Ok(())
//! # }
//! ```
//!
//! # What is not guaranteed
//!
//! A lease is not mutual exclusion by itself. A holder that is stopped for longer than its lease, between
//! the check and the write, writes under a permit that somebody else has by then:
//!
//! ```text
//! A: check() is Ok        ... paused for a minute ...            A: writes, too late
//!                    B: acquires, writes, releases
//! ```
//!
//! Only the thing that is written to can refuse A, by comparing [fences](Permit::fence).

mod acquire;
mod backend;
#[cfg(feature = "broken")]
mod broken;
mod client;
mod clock;
mod engine;
mod error;
mod fence;
mod id;
mod lock;
mod machine;
mod name;
mod permit;
mod pool;
mod process;
mod retry;
mod semaphore;
mod stats;
mod steering;

pub use acquire::{Acquire, TryAcquire};
#[cfg(feature = "redis")]
pub use backend::redis::LockLayout;
#[cfg(all(feature = "local", target_os = "linux"))]
pub use client::LocalBuilder;
#[cfg(feature = "redis")]
pub use client::RedisBuilder;
pub use client::{Client, MemoryBuilder, Outage};
pub use engine::timing::shortest_lease;
pub use error::{Error, ErrorKind, LossReason};
pub use fence::{Fence, FenceGate, StaleFence};
pub use id::{AcquisitionId, ClientId};
pub use lock::{
    Capabilities, HeldLock, Lock, LockBuilder, LockEvent, LockGuard, LockId, LockInfo,
    LockOperation, LockReason, LockResult, Locks, Observer, RawLockInfo, TimeAuthority,
};
pub use permit::{Lost, Permit};
pub use pool::{
    AcquireStatus, Pool, PoolAnswer, PoolBuilder, PoolCount, PoolLease, PoolMember, PoolStats,
    Pools, ReleaseStatus, RenewStatus,
};
pub use retry::{Jitter, Retry};
pub use semaphore::{Semaphore, SemaphoreBuilder};
pub use stats::{Member, Paused, RateLimit, SemaphoreStats, Stats, WaitsFor};
pub use steering::{Drain, Pause};

/// Runs the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// Runs the examples of the guide.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/choosing.md")]
struct Choosing;

/// Runs those of the page on fences.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/fencing.md")]
struct Fencing;
