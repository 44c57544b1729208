//! How a client was declared: the URL of its store, and its settings.

use std::path::PathBuf;
use std::time::Duration;

use leasehold::Client as Engine;
use leasehold::url::StoreUrl;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::failure::Failure;
use crate::process;

/// The minimum of `claim_within`, as in the library.
const MIN_CLAIM: Duration = Duration::from_secs(1);

/// The settings that a client may have besides its URL.
#[derive(Default)]
pub(super) struct Options {
    pub(super) namespace: Option<String>,
    pub(super) lock_prefix: Option<String>,
    /// As PEM.
    pub(super) ca_certificate: Option<Vec<u8>>,
    pub(super) connect_timeout: Option<Duration>,
    pub(super) answer_timeout: Option<Duration>,
    pub(super) claim_within: Option<Duration>,
    pub(super) read_only: bool,
}

/// The store of a client, and its settings.
pub(crate) struct Settings {
    url: String,
    store: StoreUrl,
    options: Options,
}

impl Settings {
    /// Checks all that can be checked before the store is opened.
    pub(super) fn new(url: String, options: Options) -> Result<Self, Failure> {
        let store = match StoreUrl::parse(&url)? {
            // The store is opened later, and the program may have changed its directory by then.
            StoreUrl::File(path) => StoreUrl::File(std::path::absolute(&path).unwrap_or(path)),
            store => store,
        };
        let settings = Self { url, store, options };
        settings.check()?;
        Ok(settings)
    }

    /// The URL without secrets.
    pub(super) fn address(&self) -> String {
        self.store.to_string()
    }

    pub(super) fn is_memory(&self) -> bool {
        matches!(self.store, StoreUrl::Memory)
    }

    /// Settings that the store does not have are refused, not ignored.
    fn check(&self) -> Result<(), Failure> {
        let (redis, remote) = match self.store {
            StoreUrl::Redis(_) => (true, true),
            StoreUrl::File(_) => (false, true),
            _ => (false, false),
        };
        let options = &self.options;
        let settings = [
            ("namespace", options.namespace.is_some(), redis),
            ("lock_prefix", options.lock_prefix.is_some(), redis),
            ("ca_certificate", options.ca_certificate.is_some(), redis),
            ("connect_timeout", options.connect_timeout.is_some(), redis),
            ("read_only", options.read_only, remote),
            ("answer_timeout", options.answer_timeout.is_some(), remote),
            ("claim_within", options.claim_within.is_some(), remote),
        ];
        for (name, given, is_supported) in settings {
            if given && !is_supported {
                let address = self.address();
                return Err(Failure::Invalid(format!(
                    "invalid {name}: the store {address} has no such setting: leave it out"
                )));
            }
        }
        let durations = [
            ("connect_timeout", options.connect_timeout),
            ("answer_timeout", options.answer_timeout),
            ("claim_within", options.claim_within),
        ];
        for (name, duration) in durations {
            if duration.is_some_and(|duration| duration.is_zero()) {
                return Err(Failure::Invalid(format!(
                    "invalid {name}: it is 0; it must be longer than zero"
                )));
            }
        }
        if let Some(limit) = options.claim_within
            && limit < MIN_CLAIM
        {
            return Err(Failure::Invalid(format!(
                "invalid claim_within: it is {limit:?}; the minimum is {MIN_CLAIM:?}, \
                 because other clients must keep to it"
            )));
        }
        Ok(())
    }

    /// Opens the store.
    pub(super) async fn open(&self) -> Result<Engine, Failure> {
        let options = &self.options;
        match &self.store {
            StoreUrl::File(path) => {
                process::open_file()?;
                let mut builder = Engine::local_builder(path);
                if let Some(timeout) = options.answer_timeout {
                    builder = builder.answer_timeout(timeout);
                }
                if let Some(limit) = options.claim_within {
                    builder = builder.claim_within(limit);
                }
                if options.read_only {
                    builder = builder.read_only();
                }
                Ok(builder.open().await?)
            }
            StoreUrl::Redis(_) => {
                let mut builder = Engine::redis_builder(&self.url);
                if let Some(namespace) = &options.namespace {
                    builder = builder.namespace(namespace);
                }
                if let Some(prefix) = &options.lock_prefix {
                    builder = builder.lock_prefix(prefix);
                }
                if let Some(pem) = &options.ca_certificate {
                    builder = builder.ca_certificate(pem.clone());
                }
                if let Some(timeout) = options.connect_timeout {
                    builder = builder.connect_timeout(timeout);
                }
                if let Some(timeout) = options.answer_timeout {
                    builder = builder.answer_timeout(timeout);
                }
                if let Some(limit) = options.claim_within {
                    builder = builder.claim_within(limit);
                }
                if options.read_only {
                    builder = builder.read_only();
                }
                Ok(builder.open().await?)
            }
            _ => Ok(Engine::open(&self.url).await?),
        }
    }
}

/// The URL in `$LEASEHOLD_STORE`. There is no default: a store in memory would limit nothing between processes, and the default of the
/// command would surprise a program that moves to another host.
pub(super) fn url_from_environment() -> Result<String, Failure> {
    match std::env::var("LEASEHOLD_STORE") {
        // A program whose variable is empty means some store, and not one that no other process shares.
        Ok(url) if url.trim().is_empty() => Err(Failure::Invalid(
            "invalid store: $LEASEHOLD_STORE is empty: set it to a URL, or unset it".to_owned(),
        )),
        Ok(url) => Ok(url),
        Err(std::env::VarError::NotUnicode(_)) => Err(Failure::Invalid(
            "invalid store: $LEASEHOLD_STORE is not UTF-8: set it to a URL, or unset it".to_owned(),
        )),
        Err(std::env::VarError::NotPresent) => Err(Failure::Invalid(
            "invalid store: no URL is given, and $LEASEHOLD_STORE is not set: pass the URL of a store that your processes share, as in \
             Client(\"sqlite:/var/lib/app/leases\") or Client(\"redis://host\"), or use Client.memory() within one process"
                .to_owned(),
        )),
    }
}

/// Reads a certificate that was given as PEM, in bytes or text, or as the path of a file.
pub(super) fn certificate(given: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    if let Ok(bytes) = given.cast::<PyBytes>() {
        return Ok(bytes.as_bytes().to_vec());
    }
    if let Ok(text) = given.cast::<PyString>() {
        let text = text.to_string();
        if text.contains("-----BEGIN") {
            return Ok(text.into_bytes());
        }
    }
    let path: PathBuf = given.extract()?;
    Ok(std::fs::read(path)?)
}
