//! Which store is meant, and a client on it.

use std::env;
use std::future::Future;
use std::path::{Path, PathBuf};

use leasehold::Client;
use redis::{ConnectionAddr, IntoConnectionInfo};

use crate::args::StoreArgs;
use crate::failure::{Failure, UNAVAILABLE};

/// The URL of the store: `--store`, else `LEASEHOLD_STORE`, else a file in the user's state directory.
pub(crate) fn url(arguments: &StoreArgs) -> Result<String, Failure> {
    // A variable that is set to nothing is not set, as elsewhere in a shell. But who says `--store "$URL"` means some store.
    let unset = env::var_os("LEASEHOLD_STORE").is_some_and(|url| url.is_empty());
    match arguments.store.as_deref() {
        Some("") if !unset => {
            return Err(Failure::usage("--store is empty: give a URL, or leave it away"));
        }
        Some(url) if url.starts_with("memory:") => {
            let problem =
                "is of one process, and would exclude nobody: give sqlite:PATH or a Redis URL";
            return Err(Failure::usage(format!("--store memory: {problem}")));
        }
        Some(url) if !url.is_empty() => return Ok(url.to_owned()),
        _ => {}
    }
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

/// For those who only look.
pub(crate) async fn look(arguments: &StoreArgs) -> Result<Client, Failure> {
    if let Some(path) = missing(arguments)? {
        let message = format!("there is no store at {path}: `leasehold run` makes one");
        return Err(Failure::new(UNAVAILABLE, message));
    }
    open(arguments).await
}

/// The path of a file that is not there. Who only looks does not make it, unless it is the one that everybody has.
pub(crate) fn missing(arguments: &StoreArgs) -> Result<Option<String>, Failure> {
    let url = url(arguments)?;
    let asked_for = arguments.store.as_ref().is_some_and(|store| !store.is_empty());
    let path = url.strip_prefix("sqlite:").filter(|path| asked_for && !Path::new(path).exists());
    Ok(path.map(str::to_owned))
}

/// Whether the kernel tells who is dead there, as `Client::lifeline` says of a client: no heartbeat has to be kept then.
pub(crate) fn is_on_this_host(arguments: &StoreArgs) -> Result<bool, Failure> {
    Ok(url(arguments)?.starts_with("sqlite:"))
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

pub(crate) async fn open(arguments: &StoreArgs) -> Result<Client, Failure> {
    Ok(Client::open(&url(arguments)?).await?)
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
