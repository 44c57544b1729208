//! The store under test.

use std::path::PathBuf;
use std::str::FromStr;

/// A kind of store. Each has its own faults, and its own way to be inspected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Store {
    /// Two Redis servers that the run starts, behind proxies.
    Redis,
    /// A Redis cluster that the run starts.
    Cluster,
    /// A primary, replicas and sentinels that the run starts.
    Sentinel,
    /// A file on this host. Without a path, one in the run's own directory.
    Local(Option<PathBuf>),
}

impl FromStr for Store {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("redis", "")) => Ok(Self::Redis),
            Some(("redis-cluster", "")) => Ok(Self::Cluster),
            Some(("redis-sentinel", "")) => Ok(Self::Sentinel),
            Some(("sqlite", "")) => Ok(Self::Local(None)),
            Some(("sqlite", path)) => Ok(Self::Local(Some(path.into()))),
            _ => Err("expected redis:, redis-cluster:, redis-sentinel: or sqlite:PATH".to_owned()),
        }
    }
}

impl std::fmt::Display for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Redis => f.write_str("redis:"),
            Self::Cluster => f.write_str("redis-cluster:"),
            Self::Sentinel => f.write_str("redis-sentinel:"),
            Self::Local(path) => {
                let path = path.as_deref().unwrap_or_else(|| std::path::Path::new(""));
                write!(f, "sqlite:{}", path.display())
            }
        }
    }
}
