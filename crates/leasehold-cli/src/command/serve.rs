//! `leasehold serve`: shows the store in a browser.
//!
//! One task polls the store into a [`Monitor`](crate::monitor::Monitor). Every page, metric and API answer is made from
//! it, so the load on the store does not depend on the number of browsers. A browser holds one stream of server-sent
//! events, which announces new data. Its script then fetches the page again and replaces the changed parts. Pages also
//! work without the script.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use tokio::net::TcpListener;

use crate::args::ServeArgs;
use crate::failure::{Failure, by_signal};
use crate::output;
use crate::signals::Blocked;
use crate::store::{self, Store};

mod access;
mod actions;
mod api;
mod assets;
mod chart;
mod clients;
mod connections;
mod console;
mod details;
mod live;
mod metrics;
mod pages;
mod poll;
mod reply;
mod request;
mod why;

use access::Access;
use connections::Connections;
use console::Console;

/// How long requests in progress may take after a signal.
const FINISH_WITHIN: Duration = Duration::from_secs(1);

pub(crate) fn run(arguments: &ServeArgs) -> Result<u8, Failure> {
    let token = arguments.token_file.as_deref().map(access::read_token).transpose()?;
    let open = !arguments.listen.ip().to_canonical().is_loopback();
    if open && token.is_none() {
        let problem = "is not loopback, so anyone who can connect to it could read the store";
        let advice = "give --token-file FILE, or listen on 127.0.0.1";
        return Err(Failure::usage(format!("{} {problem}: {advice}", arguments.listen)));
    }
    let bad = |name: &&String| name.is_empty() || name.contains(['/', ' ', '@']);
    if let Some(name) = arguments.hosts.iter().find(bad) {
        let advice = "give the name alone, as in leases.example.com";
        return Err(Failure::usage(format!("--host {name:?} is not a host name: {advice}")));
    }
    let store = Store::new(&arguments.store)?;
    let no_signals = |error| Failure::internal("signal handlers could not be installed", error);
    let blocked = Blocked::new().map_err(no_signals)?;
    let mut signals = blocked.listen().map_err(no_signals)?;
    store::block_on(async {
        let client = tokio::select! {
            client = store.open_read_only() => client?,
            signal = signals.next_to_end() => return Ok(by_signal(signal as i32)),
        };
        let listener = TcpListener::bind(arguments.listen).await;
        let listener = listener.map_err(|error| cannot_listen(arguments.listen, &error))?;
        let address = listener.local_addr();
        let address =
            address.map_err(|error| Failure::internal("the address is unknown", error))?;
        let access = Access::new(token, open, address, &arguments.hosts);
        let console = Arc::new(Console::new(client, store, access));
        tokio::spawn(poll::run(console.clone()));
        let connections = Arc::new(Connections::default());
        output::print(&format!("listening on http://{address}/\n"))?;
        let accept = connections::accept(listener, router(&console), connections.clone());
        let signal = tokio::select! {
            never = accept => match never {},
            signal = signals.next_to_end() => signal,
        };
        console.close();
        let _ = tokio::time::timeout(FINISH_WITHIN, connections.idle()).await;
        let _ = tokio::time::timeout(FINISH_WITHIN, console.client.close()).await;
        Ok(by_signal(signal as i32))
    })
}

fn cannot_listen(address: SocketAddr, error: &io::Error) -> Failure {
    let any = SocketAddr::new(address.ip(), 0);
    let advice = match error.kind() {
        io::ErrorKind::AddrInUse => {
            format!(": end the program that uses it, or give --listen {any} for a free port")
        }
        io::ErrorKind::AddrNotAvailable => ": give an address of this host".to_owned(),
        io::ErrorKind::PermissionDenied => ": give a port from 1024 on".to_owned(),
        _ => String::new(),
    };
    Failure::usage(format!("cannot listen on {address}: {error}{advice}"))
}

fn router(console: &Arc<Console>) -> Router {
    Router::new()
        .route("/", get(pages::semaphores))
        .route("/semaphore", get(pages::semaphore))
        .route("/locks", get(pages::locks))
        .route("/pools", get(pages::pools))
        .route("/clients", get(pages::clients))
        .route("/events", get(pages::events))
        .route("/act", get(actions::confirm).post(actions::act))
        .route("/login", get(actions::login_page).post(actions::login))
        .route("/logout", post(actions::logout))
        .route("/live", get(live::stream))
        .route("/style.css", get(assets::style))
        .route("/script.js", get(assets::script))
        .route("/icon.svg", get(assets::icon))
        .route("/metrics", get(metrics::metrics))
        .route("/healthz", get(metrics::health))
        .route("/api/overview", get(api::overview))
        .route("/api/semaphores", get(api::semaphores))
        .route("/api/semaphores/{name}", get(api::semaphore))
        .route("/api/locks", get(api::locks))
        .route("/api/pools", get(api::pools))
        .route("/api/clients", get(api::clients))
        .route("/api/events", get(api::events))
        .route("/api/history", get(api::history))
        .route("/api/act", post(api::act))
        .fallback(pages::not_found)
        .method_not_allowed_fallback(reply::method_not_allowed)
        .layer(from_fn_with_state(console.clone(), access::guard))
        .with_state(console.clone())
}
