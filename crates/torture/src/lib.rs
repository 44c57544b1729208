//! The torture test: worker processes use leasehold while faults hit the store, the network and the workers. A checker
//! then reads what the workers saw.
//!
//! - `plan`: the semaphores, locks and pools that the workers share.
//! - `worker`: a process that uses them and writes a `history`.
//! - `driver`: starts the store, the proxies and the workers, and injects the [faults](fault).
//! - `check`: reads all histories and finds the promises that were broken.
//! - `report`: writes the result for people.

#![allow(missing_docs)] // internal
#![allow(clippy::missing_panics_doc)] // a harness that cannot continue panics

pub mod args;
pub mod check;
pub mod clock;
pub mod driver;
pub mod fault;
pub mod history;
pub mod plan;
pub mod record;
pub mod report;
pub mod store;
pub mod worker;
