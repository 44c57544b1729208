//! Which store is tortured.

use std::path::PathBuf;
use std::str::FromStr;

/// Each has its own faults and its own way to look inside.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Store {
    /// Servers of our own, behind proxies.
    Redis,
    /// A file on this host; without a path, one in the run's own directory.
    Local(Option<PathBuf>),
}

impl FromStr for Store {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("redis", "")) => Ok(Self::Redis),
            Some(("sqlite", "")) => Ok(Self::Local(None)),
            Some(("sqlite", path)) => Ok(Self::Local(Some(path.into()))),
            _ => Err("expected redis: or sqlite:PATH".to_owned()),
        }
    }
}

impl std::fmt::Display for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Redis => f.write_str("redis:"),
            Self::Local(path) => {
                let path = path.as_deref().unwrap_or_else(|| std::path::Path::new(""));
                write!(f, "sqlite:{}", path.display())
            }
        }
    }
}
