//! Random commands for comparing a machine with its implementation in a store.

#![cfg_attr(not(any(feature = "redis", feature = "local")), allow(dead_code))]

pub(crate) mod locks;
pub(crate) mod pools;
