//! Share scarce resources fairly between tasks, processes and machines.
//!
//! A [`Semaphore`] grants a fixed number of permits under a name, first come, first served. A [`Lock`] is exclusive
//! and fenced. A [`Pool`] has a fixed number of pool leases, each held by an instance id that you choose. Everything
//! that is acquired is a lease: it is released when its guard is dropped, expires when its holder dies or its TTL
//! ends, and notifies the holder if it is lost.
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
//! A lease alone does not guarantee mutual exclusion. A holder that is paused between the check and the write, for
//! longer than its lease, writes under a permit that another holder has acquired meanwhile:
//!
//! ```text
//! A: check() is Ok        ... paused for a minute ...            A: writes, too late
//!                    B: acquires, writes, releases
//! ```
//!
//! Only the resource that A writes to can reject the late write, by comparing [fences](Permit::fence).

#![cfg_attr(docsrs, feature(doc_cfg))]
// Parts of the engine serve only remote stores, and some fields of commands serve only Redis.
#![cfg_attr(not(feature = "redis"), allow(dead_code))]

mod acquire;
mod backend;
pub mod blocking;
#[cfg(not(leasehold_broken))]
mod broken;
#[cfg(leasehold_broken)]
#[doc(hidden)]
pub mod broken;
mod callbacks;
mod client;
mod client_core;
mod clock;
pub mod compat;
mod engine;
mod error;
mod fence;
mod guard;
mod id;
#[cfg(feature = "serde")]
mod json;
mod limits;
mod lock;
mod machine;
mod manual_clock;
#[cfg(feature = "metrics")]
pub mod metrics;
#[cfg(test)]
mod model;
mod name;
mod observer;
mod permit;
mod pool;
mod primitive;
mod process;
mod retry;
mod semaphore;
#[cfg(all(test, feature = "redis"))]
mod simulation;
mod stats;
#[cfg(test)]
mod tests;
#[cfg(feature = "tower")]
pub mod tower;
pub mod url;
#[cfg(test)]
mod virtual_time;

pub use acquire::{Acquire, TryAcquire};
#[cfg(all(feature = "local", target_os = "linux"))]
pub use client::LocalBuilder;
#[cfg(feature = "redis")]
pub use client::RedisBuilder;
pub use client::{Client, MemoryBuilder, Outage, Stats};
pub use client_core::timing::shortest_lease;
pub use error::{Error, LossReason};
pub use fence::{Fence, FenceGate, StaleFence};
pub use guard::Guard;
pub use id::{AcquisitionId, ClientId, LockId};
pub use limits::{Drain, Pause};
pub use lock::{
    AcquireLock, HeldLock, Lock, LockBuilder, LockGuard, LockInfo, LockRef, Locks, TryAcquireLock,
};
pub use manual_clock::ManualClock;
pub use observer::{Event, Observer, Operation, Outcome};
pub use permit::{Lost, Permit};
pub use pool::{AcquirePoolLease, Pool, PoolBuilder, PoolLease, Pools, TryAcquirePoolLease};
pub use primitive::Primitive;
pub use retry::{Jitter, Retry};
pub use semaphore::{Semaphore, SemaphoreBuilder};
pub use stats::{
    ClientInfo, Paused, PoolMember, PoolStats, RateLimit, SemaphoreLimits, SemaphoreMember,
    SemaphoreStats, WaitsFor,
};

/// Runs the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Runs the examples of the guide.
#[cfg(doctest)]
#[doc = include_str!("../docs/choosing.md")]
struct Choosing;

/// Runs the examples of the page on fences.
#[cfg(doctest)]
#[doc = include_str!("../docs/fencing.md")]
struct Fencing;

/// Runs the examples of the tutorial.
#[cfg(doctest)]
#[doc = include_str!("../docs/getting-started.md")]
struct GettingStarted;

/// Runs the examples of the how-to page.
#[cfg(all(doctest, feature = "metrics", feature = "tower"))]
#[doc = include_str!("../docs/how-to.md")]
struct HowTo;
