//! The process that this client runs in, as others see it.

use std::sync::{Arc, LazyLock};

use crate::machine::lock::Holder;
use crate::name::Name;

/// The name of this host; none if the system has none that can be stored.
pub(crate) fn host() -> Option<Arc<str>> {
    static HOST: LazyLock<Option<Arc<str>>> =
        LazyLock::new(|| Some(Name::new("host", &node_name()).ok()?.into_text()));
    HOST.clone()
}

/// What the locks of this process say about their holder.
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
