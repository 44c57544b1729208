//! The store that the command uses: its URL, its settings, and clients on it.

use std::env::{self, VarError};
use std::fs::File;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

use leasehold::compat::sync_guard::{LockLayout, StoreSettings};
use leasehold::url::{Deployment, Endpoint, ServerSettings, StoreUrl};
use leasehold::{Client, Error, RedisBuilder};
use redis::{ConnectionAddr, IntoConnectionInfo, TlsCertificates};

use crate::args::StoreArgs;
use crate::failure::{Failure, UNAVAILABLE, log_line};

/// A store, and the settings of its clients.
pub(crate) struct Store {
    url: String,
    parsed: StoreUrl,
    /// Whether the user named it, so that it is not the default.
    given_url: bool,
    namespace: Option<String>,
    lock_prefix: Option<String>,
    lock_layout: LockLayout,
    /// As PEM.
    ca_certificate: Option<Vec<u8>>,
}

impl Store {
    pub(crate) fn new(arguments: &StoreArgs) -> Result<Self, Failure> {
        let (url, given_url) = match given_url(arguments)? {
            Some(url) => (url, true),
            None => (default()?, false),
        };
        let mut store = Self {
            parsed: StoreUrl::parse(&url)?,
            url,
            given_url,
            namespace: None,
            lock_prefix: None,
            lock_layout: LockLayout::default(),
            ca_certificate: None,
        };
        let (redis, tls) = (!store.is_on_this_host(), store.is_over_tls());
        let given = |option, value: &Option<String>| match value {
            Some(_) if !redis => {
                let problem = "is for Redis, but the store is a file: leave it out, or give a Redis URL as --store";
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
        // For Redis without TLS, the library refuses it with a reason.
        let file = given("--ca-certificate", &arguments.ca_certificate)?
            .or(variable("LEASEHOLD_CA_CERTIFICATE", tls)?);
        store.ca_certificate = file.map(|file| read(&file)).transpose()?;
        Ok(store)
    }

    /// Returns the URL without secrets.
    pub(crate) fn place(&self) -> String {
        self.parsed.to_string()
    }

    /// The failure if the store has not answered for this long.
    pub(crate) fn silent_for(&self, silence: Duration) -> Failure {
        let silence = humantime::format_duration(silence);
        let says = format!("{} did not answer within {silence}", self.place());
        // Without a descriptor there is no connection over which it could answer.
        match File::open("/dev/null") {
            Ok(_) => Failure::new(UNAVAILABLE, says),
            Err(error) => Failure::system(UNAVAILABLE, &says, error),
        }
    }

    /// Returns the URL without secrets, and whether it is the default.
    pub(crate) fn description(&self) -> String {
        let default = if self.given_url { "" } else { " (the default, one for each user)" };
        format!("{}{default}", self.place())
    }

    /// Prints the store in use if the command is verbose.
    pub(crate) fn announce(&self, verbose: bool) {
        if verbose {
            log_line(&format!("the store is {}", self.description()));
        }
    }

    /// Whether the store is a file, so that the kernel reports dead processes and permits need no renewal.
    pub(crate) fn is_on_this_host(&self) -> bool {
        matches!(self.parsed, StoreUrl::File(_))
    }

    fn is_over_tls(&self) -> bool {
        self.deployment().is_some_and(Deployment::has_tls)
    }

    /// Returns the deployment, or `None` if the store is not on Redis.
    pub(crate) fn deployment(&self) -> Option<&Deployment> {
        match &self.parsed {
            StoreUrl::Redis(deployment) => Some(deployment),
            _ => None,
        }
    }

    pub(crate) async fn open(&self) -> Result<Client, Error> {
        match (self.builder(), &self.parsed) {
            (Some(builder), _) => builder.open().await,
            // Only the directories of the default store are created.
            #[cfg(target_os = "linux")]
            (None, StoreUrl::File(path)) if !self.given_url => {
                Client::local_builder(path).create_directories().open().await
            }
            _ => Client::open(&self.url).await,
        }
    }

    /// Returns a builder, or `None` if the store is not on Redis.
    fn builder(&self) -> Option<RedisBuilder> {
        self.deployment()?;
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
        Some(builder)
    }

    /// Opens a client for commands that only read. On Redis a user without write permission is enough.
    pub(crate) async fn open_read_only(&self) -> Result<Client, Failure> {
        self.check_exists()?;
        match self.builder() {
            Some(builder) => Ok(builder.read_only().open().await?),
            None => match self.open().await {
                // A full or read-only disk can still be read.
                Err(error @ (Error::Denied { .. } | Error::NoRoom { .. })) => {
                    self.open_file_read_only(error).await
                }
                opened => Ok(opened?),
            },
        }
    }

    /// Opens the file of the store without writing to it, after `error` has shown that it cannot be written.
    #[cfg(target_os = "linux")]
    async fn open_file_read_only(&self, error: Error) -> Result<Client, Failure> {
        let StoreUrl::File(path) = &self.parsed else { return Err(error.into()) };
        match Client::local_builder(path).read_only().open().await {
            Ok(client) => {
                log_line(&format!("reading only, because the store cannot be written: {error}"));
                Ok(client)
            }
            Err(_) => Err(error.into()),
        }
    }

    #[cfg(not(target_os = "linux"))]
    async fn open_file_read_only(&self, error: Error) -> Result<Client, Failure> {
        Err(error.into())
    }

    /// Opens a client for commands that change an existing store.
    pub(crate) async fn find(&self) -> Result<Client, Failure> {
        self.check_exists()?;
        Ok(self.open().await?)
    }

    fn check_exists(&self) -> Result<(), Failure> {
        if let Some(path) = self.missing() {
            let path = path.display();
            let message = format!("there is no store at {path}: `leasehold run` creates it");
            return Err(Failure::new(UNAVAILABLE, message));
        }
        Ok(())
    }

    /// Returns the path of a file that does not exist. Only `run` and `lock` create it, unless it is the default store.
    pub(crate) fn missing(&self) -> Option<&Path> {
        match &self.parsed {
            StoreUrl::File(path) if self.given_url && !path.exists() => Some(path),
            _ => None,
        }
    }

    /// Returns a client of the `redis` crate on one server of the store, for queries that the library does not make.
    pub(crate) fn redis_client(
        &self,
        server: &ServerSettings,
    ) -> redis::RedisResult<redis::Client> {
        let address = match server.endpoint.clone() {
            Endpoint::Tcp { host, port, tls: true } => {
                ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None }
            }
            Endpoint::Tcp { host, port, tls: false } => ConnectionAddr::Tcp(host, port),
            Endpoint::Unix(path) => ConnectionAddr::Unix(path),
        };
        let info = address.into_connection_info()?;
        let mut redis = info.redis_settings().clone().set_db(server.database.cast_signed());
        if let Some(user) = &server.user {
            redis = redis.set_username(user);
        }
        if let Some(password) = &server.password {
            redis = redis.set_password(password);
        }
        let info = info.set_redis_settings(redis);
        match &self.ca_certificate {
            Some(pem) if server.uses_tls() => {
                let root_cert = Some(pem.clone());
                let certificates = TlsCertificates { client_tls: None, root_cert };
                redis::Client::build_with_tls(info, certificates)
            }
            _ => redis::Client::open(info),
        }
    }

    /// Returns the name of a channel of wake-ups that no client reads.
    pub(crate) fn trial_channel(&self) -> String {
        format!("{}:wake:leasehold-doctor", self.namespace.as_deref().unwrap_or("adv-sem"))
    }

    /// Returns the keys and channels that a user of the server needs, as in an ACL.
    pub(crate) fn keys_and_channels(&self) -> String {
        let namespace = self.namespace.as_deref().unwrap_or("adv-sem");
        let prefix = self.lock_prefix.as_deref().unwrap_or("syncguard");
        let prefix = prefix.strip_suffix(':').unwrap_or(prefix);
        format!(
            "the keys {namespace}:*, {prefix}:* and semaphores:* and the channels {namespace}:wake:*"
        )
    }
}

/// Returns the value of a variable that replaces an option. It is ignored if it does not apply to this store.
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

/// Returns the URL that the user gave: `--store`, else `LEASEHOLD_STORE`.
fn given_url(arguments: &StoreArgs) -> Result<Option<String>, Failure> {
    // A user who gives an empty URL means some store, and not the default one, which only this host shares.
    match arguments.store.as_deref().map(str::trim) {
        Some("")
            if env::var_os("LEASEHOLD_STORE")
                .is_some_and(|url| url.to_str().is_some_and(|url| url.trim().is_empty())) =>
        {
            let problem = "--store or LEASEHOLD_STORE is empty";
            Err(Failure::usage(format!("{problem}: give a URL, or leave out both")))
        }
        Some("") => Err(Failure::usage("--store is empty: give a URL, or leave it out")),
        Some(url) if url.starts_with("memory:") => {
            let problem = "exists in one process only, so it would limit nothing: give sqlite:PATH or a Redis URL";
            Err(Failure::usage(format!("--store memory: {problem}")))
        }
        url => Ok(url.map(str::to_owned)),
    }
}

/// Returns the URL of the default store, a file in the user's state directory.
fn default() -> Result<String, Failure> {
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

/// Returns the URL without secrets. Only the scheme of an invalid URL is kept, because its password cannot be located.
pub(crate) fn without_secrets(url: &str) -> String {
    match (StoreUrl::parse(url), url.split_once(':')) {
        (Ok(store), _) => store.to_string(),
        (Err(_), Some((scheme, _))) if !scheme.contains('@') => format!("{scheme}:…"),
        (Err(_), _) => "…".to_owned(),
    }
}

/// Runs a future to its end on this thread. The library renews leases on its own thread.
pub(crate) fn block_on<T>(future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let failed =
        |error| Failure::system(UNAVAILABLE, "the async runtime could not be started", error);
    runtime.map_err(failed)?.block_on(future)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn displayed_urls_have_no_secrets() {
        for (url, seen) in [
            ("redis://joe:hunter2@host:1/3", "redis://host:1/3"),
            // The end of the password is unknown.
            ("redis://joe:hun?ter2@host", "redis:…"),
            ("redis://joe:hun/ter2@host:port", "redis:…"),
            ("zookeeper://joe:hunter2@host", "zookeeper:…"),
            ("redis-cluster://joe:x/hunter2@a", "redis-cluster:…"),
            ("rediss-sentinel://joe:hunter2@a", "rediss-sentinel:…"),
            ("hunter2@host", "…"),
            ("hunter2@host:6379", "…"),
            ("sqlite:/srv/a@b/c?d.db", "sqlite:/srv/a@b/c?d.db"),
        ] {
            assert_eq!(without_secrets(url), seen, "{url}");
        }
    }
}
