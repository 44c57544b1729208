//! The words of other programs with which this library shares keys.

pub mod sync_guard;
