//! An axum service that runs at most two requests of each tenant at once. A request that waits for more than a second is
//! answered with 503 and `Retry-After`.
//!
//!     cargo run --example axum --features tower
//!     for i in 1 2 3 4; do curl -si -H 'x-tenant: acme' localhost:3000 & done; wait
//!
//! Instances of the service that use the same store, such as `redis://localhost`, share the limit:
//!
//!     cargo run --example axum --features tower -- redis://localhost

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response, StatusCode, header};
use axum::routing::get;
use leasehold::tower::{Limit, LimitLayer};
use leasehold::{Client, Error};
use tokio::net::TcpListener;

const TENANTS: [&str; 2] = ["acme", "globex"];

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = std::env::args().nth(1);
    let client = Client::open(store.as_deref().unwrap_or("memory:")).await?;

    let limited = client.clone();
    let limit = move |request: &Request<Body>| {
        let header = request.headers().get("x-tenant").and_then(|name| name.to_str().ok());
        let Some(tenant) = header else { return Ok(Limit::none()) };
        // A header can contain anything, and on Redis a name uses memory until it is forgotten.
        let tenant = if TENANTS.contains(&tenant) { tenant } else { "unknown" };
        let semaphore = limited.semaphore(&format!("tenant:{tenant}"), 2).build()?;
        Ok(semaphore.acquire().within(Duration::from_secs(1)).into())
    };
    let app =
        Router::new().route("/", get(work)).layer(LimitLayer::new(limit).refuse_with(refused));

    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    println!("listening on http://{}", listener.local_addr()?);
    // Requests that run may finish. Without `close`, permits would stay held until their leases end.
    axum::serve(listener, app).with_graceful_shutdown(ended()).await?;
    client.close().await?;
    Ok(())
}

async fn ended() {
    let _ = tokio::signal::ctrl_c().await;
}

async fn work() -> &'static str {
    tokio::time::sleep(Duration::from_secs(2)).await;
    "done\n"
}

/// The limit was reached, or the store cannot be reached, or the permit was lost.
fn refused(error: &Error) -> Response<Body> {
    // The error may contain the address of the store, so the client does not see it.
    eprintln!("refused: {error}");
    let mut response = Response::new(Body::from("busy: try again in a second\n"));
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response.headers_mut().insert(header::RETRY_AFTER, 1.into());
    response
}
