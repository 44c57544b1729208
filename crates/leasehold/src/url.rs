//! The URLs of stores, parsed.
//!
//! [`Client::open`](crate::Client::open) takes a URL as it is. Parse it yourself to show it without its password, or to
//! find out which servers it names.
//!
//! ```
//! use leasehold::url::StoreUrl;
//!
//! let store = StoreUrl::parse("memory:")?;
//! assert!(matches!(store, StoreUrl::Memory));
//!
//! # #[cfg(feature = "redis")] {
//! let store = StoreUrl::parse("redis://app:secret@redis.internal/2")?;
//! assert_eq!(store.to_string(), "redis://redis.internal:6379/2");
//! # }
//! # Ok::<(), leasehold::Error>(())
//! ```

use std::fmt;
use std::path::PathBuf;

use crate::Error;

#[cfg(feature = "redis")]
mod deployment;
mod file;
#[cfg(feature = "redis")]
mod redis;

#[cfg(feature = "redis")]
pub(crate) use deployment::SentinelAccess;
#[cfg(feature = "redis")]
pub use deployment::{Deployment, Endpoint, SentinelSettings, ServerSettings};

/// The URLs of the stores that several processes share, for help texts and messages.
pub const SHARED: &str = "sqlite:PATH, redis://host:port, unix:///path/of/its/socket, redis-sentinel://host:port,…/name or \
                          redis-cluster://host:port,…; for TLS, write rediss instead of redis";

/// Every scheme of a URL, and what it names.
const SCHEMES: [(&str, Scheme); 13] = [
    ("memory", Scheme::Memory),
    ("sqlite", Scheme::File),
    ("redis", Scheme::Server { tls: false }),
    ("rediss", Scheme::Server { tls: true }),
    ("valkey", Scheme::Server { tls: false }),
    ("valkeys", Scheme::Server { tls: true }),
    ("unix", Scheme::Socket),
    ("redis+unix", Scheme::Socket),
    ("valkey+unix", Scheme::Socket),
    ("redis-sentinel", Scheme::Sentinel { tls: false }),
    ("rediss-sentinel", Scheme::Sentinel { tls: true }),
    ("redis-cluster", Scheme::Cluster { tls: false }),
    ("rediss-cluster", Scheme::Cluster { tls: true }),
];

#[derive(Clone, Copy, PartialEq, Debug)]
enum Scheme {
    Memory,
    File,
    Server { tls: bool },
    Socket,
    Sentinel { tls: bool },
    Cluster { tls: bool },
}

impl Scheme {
    fn named(name: &str) -> Option<Self> {
        SCHEMES.into_iter().find(|(known, _)| *known == name).map(|(_, scheme)| scheme)
    }

    fn is_redis(self) -> bool {
        !matches!(self, Self::Memory | Self::File)
    }
}

/// The store that a URL names.
///
/// It is displayed as a URL without user, password and parameters.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum StoreUrl {
    /// A store in memory.
    Memory,
    /// A file on this host.
    File(PathBuf),
    /// Servers of Redis.
    #[cfg(feature = "redis")]
    Redis(Deployment),
}

impl StoreUrl {
    /// Parses a URL.
    ///
    /// In the path of a file, `~/` at the start stands for the home directory. Errors do not repeat any part of the URL
    /// that may belong to a password.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the URL is invalid, or names Redis and the feature `redis` is disabled.
    pub fn parse(url: &str) -> Result<Self, Error> {
        let (name, rest) = url.split_once(':').unwrap_or_default();
        let parsed = match Scheme::named(name) {
            Some(Scheme::Memory) if rest.is_empty() => Ok(Self::Memory),
            Some(Scheme::Memory) => {
                Err("nothing may follow memory:, because every client has its own store".to_owned())
            }
            Some(Scheme::File) => file::parse(rest).map(Self::File),
            #[cfg(feature = "redis")]
            Some(scheme) if rest.starts_with("//") => {
                redis::parse(scheme, &rest["//".len()..]).map(Self::Redis)
            }
            _ => Err(problem(url)),
        };
        parsed.map_err(|problem| Error::invalid("store", problem))
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory:"),
            Self::File(path) => write!(f, "sqlite:{}", path.display()),
            #[cfg(feature = "redis")]
            Self::Redis(deployment) => deployment.fmt(f),
        }
    }
}

/// Returns what is wrong with a text that names no store, and what to write.
fn problem(url: &str) -> String {
    let may_have_password = url.contains('@');
    let not_a_url = |hint: &str| format!("{url:?} is not a URL: {hint}");
    if let Some((scheme, wrong)) = misspelled(url) {
        return format!("write \"{scheme}://\" instead of {wrong:?}");
    }
    match url.split_once(':') {
        Some((_, port)) if port.parse::<u16>().is_ok() && !may_have_password => {
            not_a_url(&format!("for a Redis server write redis://{url}"))
        }
        Some((name, _)) if !name.contains('@') => {
            let lower = name.to_ascii_lowercase();
            match Scheme::named(&lower) {
                Some(_) if lower != name => format!("write \"{lower}:\" instead of \"{name}:\""),
                Some(_) if cfg!(feature = "redis") => {
                    format!("write \"{name}://\" instead of \"{name}:\"")
                }
                Some(_) => without_feature("redis"),
                None => format!("there is no store \"{name}:\": expected memory:, {SHARED}"),
            }
        }
        _ if may_have_password => format!("it is not a URL: expected memory:, {SHARED}"),
        _ if url.starts_with('/') => {
            let socket = format!("for the socket of a Redis server unix://{url}");
            not_a_url(&format!("for a file write sqlite:{url}, {socket}"))
        }
        _ if url.starts_with(['.', '~']) => not_a_url(&format!("for a file write sqlite:{url}")),
        // It may be a password.
        _ => "it is not a URL: for a file write sqlite:PATH, for a Redis server redis://host"
            .to_owned(),
    }
}

/// Returns the scheme of a URL whose colon or slash is missing, as in `redis//host` and `redis:/host`, and its wrong
/// spelling.
fn misspelled(url: &str) -> Option<(&'static str, &str)> {
    let redis = SCHEMES.into_iter().filter(|(_, scheme)| scheme.is_redis());
    redis.filter(|(_, scheme)| *scheme != Scheme::Socket).find_map(|(name, _)| {
        let marks = url.strip_prefix(name)?;
        let rest = marks.strip_prefix("//").or_else(|| marks.strip_prefix(":/"))?;
        (!rest.starts_with('/')).then(|| (name, &url[..url.len() - rest.len()]))
    })
}

/// Returns the problem of a URL whose store is not part of this build.
pub(crate) fn without_feature(feature: &str) -> String {
    format!("this build has no such store: enable the feature {feature} of the crate leasehold")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(url: &str) -> String {
        StoreUrl::parse(url).unwrap_err().to_string()
    }

    #[test]
    fn errors_say_what_to_write() {
        for (url, says) in [
            ("localhost:6379", "for a Redis server write redis://localhost:6379"),
            ("redis:6379", "for a Redis server write redis://redis:6379"),
            ("hunter2", "for a file write sqlite:PATH, for a Redis server redis://host"),
            ("redis:hunter2", "write \"redis://\" instead of \"redis:\""),
            ("/var/lib/x", "for a file write sqlite:/var/lib/x, for the socket"),
            ("REDIS://joe:hunter2@host", "write \"redis:\" instead of \"REDIS:\""),
            ("redis//127.0.0.1", "write \"redis://\" instead of \"redis//\""),
            ("redis:/127.0.0.1:6379", "write \"redis://\" instead of \"redis:/\""),
            ("rediss//joe:hunter2@host", "write \"rediss://\" instead of \"rediss//\""),
            ("redis-cluster//a,b", "write \"redis-cluster://\" instead of \"redis-cluster//\""),
            (
                "zookeeper://joe:hunter2@host",
                "there is no store \"zookeeper:\": expected memory:, ",
            ),
            ("joe-hunter2@host", "it is not a URL"),
            ("hunter2@host:6379", "it is not a URL"),
            ("memory:hunter2", "nothing may follow memory:"),
        ] {
            let message = message(url);
            assert!(message.contains(says) && !message.contains("hunter2"), "{url}: {message}");
        }
    }

    #[cfg(feature = "redis")]
    #[test]
    fn a_displayed_url_has_no_secrets() {
        for (url, seen) in [
            ("redis://joe:hunter2@host:1/3", "redis://host:1/3"),
            ("redis://:hun@ter2@host", "redis://host:6379"),
            ("rediss://joe:hunter2@host?protocol=resp3", "rediss://host:6379"),
            ("unix:///tmp/x.sock?user=joe&pass=hunter2", "unix:///tmp/x.sock"),
            ("unix:///tmp/a@b.sock?pass=hun@ter2&db=2", "unix:///tmp/a@b.sock/2"),
            ("redis://joe:hunter2@[::1]:1", "redis://[::1]:1"),
            ("redis-cluster://joe:hunter2@a,b:1", "redis-cluster://a:6379,b:1"),
            ("rediss-cluster://:hunter2@a", "rediss-cluster://a:6379"),
            (
                "redis-sentinel://joe:hunter2@a,b:1/mymaster/2?sentinel_password=hunter2",
                "redis-sentinel://a:26379,b:1/mymaster/2",
            ),
            ("sqlite:/srv/a@b/c?d.db", "sqlite:/srv/a@b/c?d.db"),
            ("memory:", "memory:"),
        ] {
            let store = StoreUrl::parse(url).unwrap();
            assert_eq!(store.to_string(), seen, "{url}");
            assert!(!format!("{store:?}").contains("hunter2"), "{store:?}");
        }
    }
}
