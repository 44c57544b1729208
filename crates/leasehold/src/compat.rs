//! The words of other programs with which this library shares keys.
//!
//! Each module has the codes of one program, built on the main API.

pub mod sync_guard;
