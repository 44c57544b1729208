//! The subcommands, one file each.

pub(crate) mod bench;
pub(crate) mod completions;
pub(crate) mod doctor;
pub(crate) mod limit;
pub(crate) mod lock;
pub(crate) mod lookup;
pub(crate) mod ls;
pub(crate) mod man;
pub(crate) mod release;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod show;
pub(crate) mod top;
