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

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = std::env::args().nth(1);
    let client = Client::open(store.as_deref().unwrap_or("memory:")).await?;

    let limit = move |request: &Request<Body>| {
        let Some(tenant) = request.headers().get("x-tenant").and_then(|name| name.to_str().ok())
        else {
            return Ok(Limit::none());
        };
        let semaphore = client.semaphore(&format!("tenant:{tenant}"), 2).build()?;
        Ok(semaphore.acquire().within(Duration::from_secs(1)).into())
    };
    let app =
        Router::new().route("/", get(work)).layer(LimitLayer::new(limit).refuse_with(refused));

    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app).await?;
    Ok(())
}

async fn work() -> &'static str {
    tokio::time::sleep(Duration::from_secs(2)).await;
    "done\n"
}

fn refused(error: &Error) -> Response<Body> {
    let status = match error {
        // The header is not a valid name.
        Error::InvalidArgument { .. } => StatusCode::BAD_REQUEST,
        // The limit was reached, or the store cannot be reached, or the permit was lost.
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    let mut response = Response::new(Body::from(format!("{error}\n")));
    *response.status_mut() = status;
    if status == StatusCode::SERVICE_UNAVAILABLE {
        response.headers_mut().insert(header::RETRY_AFTER, 1.into());
    }
    response
}
