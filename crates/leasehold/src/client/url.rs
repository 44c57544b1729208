//! The store that a URL names.

#[cfg(all(feature = "local", target_os = "linux"))]
use std::path::PathBuf;

#[cfg(all(feature = "local", target_os = "linux"))]
use super::path::sqlite_path;
use crate::Error;

/// The URLs that are accepted, for error messages.
const EXPECTED: &str = "expected memory:, sqlite:/path/to/a/file, redis://host:port, redis-sentinel://host:port/name or \
                        redis-cluster://host:port";

/// The store that a URL names.
///
/// It is public only for the Python package. It is not part of the API.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StoreUrl {
    /// A store in memory.
    Memory,
    /// A file on this host.
    #[cfg(all(feature = "local", target_os = "linux"))]
    File(PathBuf),
    /// Redis. The rest of the URL is not parsed yet.
    #[cfg(feature = "redis")]
    Redis,
}

impl StoreUrl {
    /// Parses a URL. Errors repeat at most the scheme or a host with its port, because the rest may contain a password.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the URL is invalid, or names a store that is not part of this build.
    pub fn parse(url: &str) -> Result<Self, Error> {
        match url.split_once(':') {
            Some(("memory", "")) => Ok(Self::Memory),
            Some(("memory", _)) => {
                let problem = "nothing may follow memory:, because every client has its own store";
                Err(Error::invalid("store", problem))
            }
            #[cfg(all(feature = "local", target_os = "linux"))]
            Some(("sqlite", _)) => Ok(Self::File(sqlite_path(url)?)),
            #[cfg(feature = "redis")]
            Some((
                "redis" | "rediss" | "unix" | "valkey" | "valkeys" | "redis+unix"
                | "redis-sentinel" | "rediss-sentinel" | "redis-cluster" | "rediss-cluster",
                _,
            )) => Ok(Self::Redis),
            Some((_, port)) if port.parse::<u16>().is_ok() && !url.contains('@') => {
                let problem =
                    format!("{url:?} is not a URL: for a Redis server write redis://{url}");
                Err(Error::invalid("store", problem))
            }
            Some((scheme, _)) if !scheme.contains('@') => {
                let problem = format!("this build supports no store \"{scheme}:\"");
                Err(Error::invalid("store", format!("{problem}: {EXPECTED}")))
            }
            _ => {
                let problem = "it is not a URL, and the path of a file needs sqlite: before it";
                Err(Error::invalid("store", format!("{problem}: {EXPECTED}")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_with_a_port_gets_a_hint() {
        let error = StoreUrl::parse("localhost:6379").unwrap_err();
        assert!(error.to_string().ends_with("write redis://localhost:6379"), "{error}");
    }

    #[test]
    fn errors_repeat_only_the_scheme() {
        assert_eq!(StoreUrl::parse("memory:").unwrap(), StoreUrl::Memory);
        for url in [
            "memory:hunter2",
            "zookeeper://joe:hunter2@host",
            "joe-hunter2@host",
            "hunter2@host:6379",
        ] {
            let error = StoreUrl::parse(url).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { what: "store", .. }), "{error}");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }
}
