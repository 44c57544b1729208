//! The stream of server-sent events. It carries only the number of the newest version.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use tokio::sync::watch;

use super::console::{Console, Stream};
use super::reply::Refusal;

/// The shortest time between two events of one browser.
const THROTTLE: Duration = Duration::from_secs(1);
/// The interval of comments without events. They keep proxies from closing the connection, and detect clients that left.
const QUIET: Duration = Duration::from_secs(15);
const KIND: &str = "text/event-stream";

pub(super) fn is_a_stream(response: &Response) -> bool {
    response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == KIND)
}

pub(super) async fn stream(State(console): State<Arc<Console>>) -> Response {
    let Some(stream) = console.stream() else {
        let sentence = "Too many browsers are connected. The page can still be reloaded.";
        let mut response = Refusal::new(StatusCode::SERVICE_UNAVAILABLE, sentence).text();
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("10"));
        return response;
    };
    console.is_asked().await;
    let reader = Reader {
        versions: console.versions(),
        closing: console.closing(),
        first: true,
        _stream: stream,
    };
    let events = unfold(reader, |mut reader| async move {
        let event = reader.next().await?;
        Some((Ok::<_, Infallible>(event), reader))
    });
    let mut response = ([(header::CONTENT_TYPE, KIND)], Body::from_stream(events)).into_response();
    // nginx would buffer events otherwise.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct Reader {
    versions: watch::Receiver<u64>,
    closing: watch::Receiver<bool>,
    first: bool,
    _stream: Stream,
}

impl Reader {
    /// Returns the next event, or `None` when the server ends.
    async fn next(&mut self) -> Option<Bytes> {
        // A browser that reconnects has missed events.
        if std::mem::take(&mut self.first) {
            return Some(self.event());
        }
        tokio::select! {
            _ = self.closing.wait_for(|closing| *closing) => None,
            event = Self::event_or_comment(&mut self.versions) => event,
        }
    }

    async fn event_or_comment(versions: &mut watch::Receiver<u64>) -> Option<Bytes> {
        // A slow browser asks for the next event late, and gets only the newest.
        tokio::time::sleep(THROTTLE).await;
        match tokio::time::timeout(QUIET, versions.changed()).await {
            Ok(changed) => changed.ok().map(|()| event(versions)),
            Err(_) => Some(Bytes::from_static(b":\n\n")),
        }
    }

    fn event(&mut self) -> Bytes {
        event(&mut self.versions)
    }
}

fn event(versions: &mut watch::Receiver<u64>) -> Bytes {
    let version = *versions.borrow_and_update();
    format!("retry: 2000\nevent: version\ndata: {version}\n\n").into()
}
