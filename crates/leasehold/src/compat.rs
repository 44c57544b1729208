//! The words of other programs that share a store with leasehold.

pub mod sync_guard;
