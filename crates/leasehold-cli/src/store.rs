//! Which store is meant, and a client on it.

use std::env;
use std::future::Future;
use std::path::PathBuf;

use leasehold::Client;

use crate::args::StoreArgs;
use crate::failure::Failure;

/// The URL of the store: `--store`, else `LEASEHOLD_STORE`, else a file in the user's state directory.
pub(crate) fn url(arguments: &StoreArgs) -> Result<String, Failure> {
    // A variable that is set to nothing is not set, as elsewhere in a shell.
    if let Some(url) = arguments.store.as_ref().filter(|url| !url.is_empty()) {
        return Ok(url.clone());
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

pub(crate) async fn open(arguments: &StoreArgs) -> Result<Client, Failure> {
    Ok(Client::open(&url(arguments)?).await?)
}

/// Runs what a subcommand has to wait for. The leases have a thread of their own in the library; this one only waits.
pub(crate) fn block_on<T>(future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| Failure::internal("no runtime", error))?.block_on(future)
}
