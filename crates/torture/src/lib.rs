//! Torture: worker processes that use leasehold while the store, the network and they themselves are ill-treated, and a
//! checker that reads what they saw.
//!
//! - `plan`: what they fight over.
//! - `worker`: a process that does so, and writes a `history`.
//! - `driver`: starts the store, the proxies and the workers, and does the [faults](fault).
//! - `check`: reads all histories and says what was broken, if anything.
//! - `report`: says it to people.

#![allow(missing_docs)] // read by us alone
#![allow(clippy::missing_panics_doc)] // a harness that cannot go on says so

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
