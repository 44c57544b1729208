//! The host and the process that this client runs in, as other clients see them.

use std::sync::{Arc, LazyLock};

use crate::machine::lock::Holder;
use crate::name::Name;

/// Returns the name of this host. `None` if the system has no name that can be stored.
pub(crate) fn host() -> Option<Arc<str>> {
    static HOST: LazyLock<Option<Arc<str>>> =
        LazyLock::new(|| Some(Name::new("host", &node_name()).ok()?.into_text()));
    HOST.clone()
}

/// Returns the description of this process as the holder of a lock.
pub(crate) fn holder(label: Option<Arc<str>>) -> Arc<Holder> {
    Arc::new(Holder { host: host(), pid: Some(std::process::id()), label })
}

#[cfg(unix)]
fn node_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(not(unix))]
fn node_name() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_default()
}
