//! Fixtures and checks that the tests of leasehold share.

#![allow(missing_docs)] // not published
#![allow(clippy::missing_panics_doc)] // a test fails by panicking

pub mod by_hand;
pub mod child;
pub mod conformance;
pub mod counts;
pub mod events;
pub mod local_store;
pub mod proxy;
#[cfg(test)]
mod query;
pub mod redis_cluster;
pub mod redis_sentinel;
pub mod redis_server;
pub mod seed000;
pub mod seed002;
pub mod seed003;
pub mod users;
pub mod wait;

pub use fastrand::Rng;
