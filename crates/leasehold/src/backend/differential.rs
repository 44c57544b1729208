//! What is asked of a machine and of its spelling in a store, to compare what they answer.

#![cfg_attr(not(any(feature = "redis", feature = "local")), allow(dead_code))]

pub(crate) mod locks;
pub(crate) mod pools;
