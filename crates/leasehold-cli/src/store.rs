//! Which store is meant, and a client on it.

use std::env::{self, VarError};
use std::future::Future;
use std::path::{Path, PathBuf};

use leasehold::{Client, Error, LockLayout};
use redis::{ConnectionAddr, IntoConnectionInfo, TlsCertificates};

use crate::args::StoreArgs;
use crate::failure::{Failure, UNAVAILABLE};

/// Which store is meant, and where on it.
pub(crate) struct Store {
    url: String,
    /// Somebody has said which: it is not the file that everybody has.
    asked_for: bool,
    namespace: Option<String>,
    lock_prefix: Option<String>,
    lock_layout: LockLayout,
    /// As PEM.
    ca_certificate: Option<Vec<u8>>,
}

impl Store {
    pub(crate) fn new(arguments: &StoreArgs) -> Result<Self, Failure> {
        let (url, asked_for) = match asked_for(arguments)? {
            Some(url) => (url, true),
            None => (everybodys()?, false),
        };
        let mut store = Self {
            url,
            asked_for,
            namespace: None,
            lock_prefix: None,
            lock_layout: LockLayout::default(),
            ca_certificate: None,
        };
        let (redis, tls) = (!store.is_on_this_host(), store.is_over_tls());
        let given = |option, value: &Option<String>| match value {
            Some(_) if !redis => {
                let problem =
                    "is for Redis, and the store is a file: leave it out, or give --store";
                Err(Failure::usage(format!("{option} {problem}")))
            }
            value => Ok(value.clone()),
        };
        store.namespace =
            given("--namespace", &arguments.namespace)?.or(variable("LEASEHOLD_NAMESPACE", redis)?);
        store.lock_prefix = given("--lock-prefix", &arguments.lock_prefix)?
            .or(variable("LEASEHOLD_LOCK_PREFIX", redis)?);
        let layout = given("--lock-layout", &arguments.lock_layout)?
            .or(variable("LEASEHOLD_LOCK_LAYOUT", redis)?);
        if let Some(layout) = layout {
            store.lock_layout = layout.parse()?;
        }
        // If it is given for Redis without TLS, the library says what is wrong with that.
        let file = given("--ca-certificate", &arguments.ca_certificate)?
            .or(variable("LEASEHOLD_CA_CERTIFICATE", tls)?);
        store.ca_certificate = file.map(|file| read(&file)).transpose()?;
        Ok(store)
    }

    /// As people may see it.
    pub(crate) fn place(&self) -> String {
        without_secrets(&self.url)
    }

    /// Whether the kernel tells who is dead there, as `Client::lifeline` says of a client: permits need no renewal then.
    pub(crate) fn is_on_this_host(&self) -> bool {
        self.url.starts_with("sqlite:")
    }

    fn is_over_tls(&self) -> bool {
        let info = self.url.as_str().into_connection_info();
        info.is_ok_and(|info| matches!(info.addr(), ConnectionAddr::TcpTls { .. }))
    }

    pub(crate) async fn open(&self) -> Result<Client, Error> {
        // What is no URL of Redis, or none at all, the library has something to say about.
        if redis::parse_redis_url(&self.url).is_none() {
            return Client::open(&self.url).await;
        }
        let mut builder = Client::redis_builder(&self.url);
        if let Some(namespace) = &self.namespace {
            builder = builder.namespace(namespace);
        }
        if let Some(prefix) = &self.lock_prefix {
            builder = builder.lock_prefix(prefix);
        }
        builder = builder.lock_layout(self.lock_layout);
        if let Some(pem) = &self.ca_certificate {
            builder = builder.ca_certificate(pem.clone());
        }
        builder.open().await
    }

    /// For those who only look.
    pub(crate) async fn look(&self) -> Result<Client, Failure> {
        if let Some(path) = self.missing() {
            let message = format!("there is no store at {path}: `leasehold run` makes one");
            return Err(Failure::new(UNAVAILABLE, message));
        }
        Ok(self.open().await?)
    }

    /// The path of a file that is not there. Who only looks does not make it, unless it is the one that everybody has.
    pub(crate) fn missing(&self) -> Option<&str> {
        let path = self.url.strip_prefix("sqlite:")?;
        (self.asked_for && !Path::new(path).exists()).then_some(path)
    }

    /// The same server, for questions that the library does not ask.
    pub(crate) fn redis_client(&self) -> redis::RedisResult<redis::Client> {
        match &self.ca_certificate {
            Some(pem) => {
                let root_cert = Some(pem.clone());
                let certificates = TlsCertificates { client_tls: None, root_cert };
                redis::Client::build_with_tls(self.url.as_str(), certificates)
            }
            None => redis::Client::open(self.url.as_str()),
        }
    }

    /// What a user of the server has to be allowed, in the words of its ACL.
    pub(crate) fn keys_and_channels(&self) -> String {
        let namespace = self.namespace.as_deref().unwrap_or("adv-sem");
        let prefix = self.lock_prefix.as_deref().unwrap_or("syncguard");
        let prefix = prefix.strip_suffix(':').unwrap_or(prefix);
        format!(
            "the keys {namespace}:*, {prefix}:* and semaphores:* and the channels {namespace}:wake:*"
        )
    }
}

/// What stands in for an option. It may be meant for other stores, and is only used where it applies.
fn variable(name: &str, applies: bool) -> Result<Option<String>, Failure> {
    match env::var(name) {
        Ok(value) => Ok(Some(value).filter(|value| applies && !value.is_empty())),
        Err(VarError::NotUnicode(_)) if applies => {
            Err(Failure::usage(format!("{name} is not UTF-8: give it another value, or none")))
        }
        Err(_) => Ok(None),
    }
}

fn read(file: &str) -> Result<Vec<u8>, Failure> {
    std::fs::read(file).map_err(|error| {
        Failure::usage(format!("the certificate {file:?} cannot be read: {error}"))
    })
}

/// The URL that somebody has given: `--store`, else `LEASEHOLD_STORE`.
fn asked_for(arguments: &StoreArgs) -> Result<Option<String>, Failure> {
    // A variable that is set to nothing is not set, as elsewhere in a shell. But who says `--store "$URL"` means some store.
    let unset = env::var_os("LEASEHOLD_STORE").is_some_and(|url| url.is_empty());
    match arguments.store.as_deref() {
        Some("") if !unset => Err(Failure::usage("--store is empty: give a URL, or leave it away")),
        Some(url) if url.starts_with("memory:") => {
            let problem =
                "is of one process, and would exclude nobody: give sqlite:PATH or a Redis URL";
            Err(Failure::usage(format!("--store memory: {problem}")))
        }
        Some(url) if !url.is_empty() => Ok(Some(url.to_owned())),
        _ => Ok(None),
    }
}

/// The URL of a file in the user's state directory.
fn everybodys() -> Result<String, Failure> {
    let directory = |variable| env::var_os(variable).map(PathBuf::from).filter(|p| p.is_absolute());
    let state = directory("XDG_STATE_HOME")
        .or_else(|| directory("HOME").map(|home| home.join(".local/state")))
        .ok_or_else(|| {
            Failure::usage("no store: give --store URL, or set LEASEHOLD_STORE or HOME")
        })?;
    let file = state.join("leasehold/store.db");
    let file = file.to_str().ok_or_else(|| {
        Failure::usage("the state directory is not UTF-8: give --store URL or set LEASEHOLD_STORE")
    })?;
    Ok(format!("sqlite:{file}"))
}

/// A URL as people may see it. Of one that does not parse only the scheme is left: nobody knows where its password is.
pub(crate) fn without_secrets(url: &str) -> String {
    let Some((scheme, _)) = url.split_once(':') else { return "…".to_owned() };
    if scheme == "sqlite" {
        return url.to_owned();
    }
    let Ok(info) = url.into_connection_info() else { return format!("{scheme}:…") };
    let place = match info.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            format!("{host}:{port}")
        }
        ConnectionAddr::Unix(path) => path.display().to_string(),
        _ => "…".to_owned(),
    };
    match info.redis_settings().db() {
        0 => format!("{scheme}://{place}"),
        database => format!("{scheme}://{place}/{database}"),
    }
}

/// Runs what a subcommand has to wait for. The leases have a thread of their own in the library; this one only waits.
pub(crate) fn block_on<T>(future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| Failure::internal("no runtime", error))?.block_on(future)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_see_of_a_url_has_no_secrets_in_it() {
        for (url, seen) in [
            ("redis://joe:hunter2@host:1/3", "redis://host:1/3"),
            ("redis://:hun@ter2@host", "redis://host:6379"),
            ("rediss://joe:hunter2@host?protocol=resp3", "rediss://host:6379"),
            ("unix:///tmp/x.sock?user=joe&pass=hunter2", "unix:///tmp/x.sock"),
            ("unix:///tmp/a@b.sock?pass=hun@ter2&db=2", "unix:///tmp/a@b.sock/2"),
            // Where the password ends is anybody's guess.
            ("redis://joe:hun?ter2@host", "redis:…"),
            ("redis://joe:hun/ter2@host:port", "redis:…"),
            ("zookeeper://joe:hunter2@host", "zookeeper:…"),
            ("hunter2@host", "…"),
            ("sqlite:/srv/a@b/c?d.db", "sqlite:/srv/a@b/c?d.db"),
        ] {
            assert_eq!(without_secrets(url), seen, "{url}");
        }
    }
}
