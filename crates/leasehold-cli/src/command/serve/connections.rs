//! Limits the number of connections and their time-outs.
//!
//! When the limit is reached, a new connection displaces the one that has had no request for the longest time. So idle
//! connections, and connections that send a request very slowly, never keep other clients out. Connections whose request is
//! being answered are not displaced, nor are streams of events, which have their own limit.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::Method;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio_io_timeout::TimeoutStream;

const MOST: usize = 512;
/// How long the head of a request may take, and how long a connection may be without a request.
const HEAD: Duration = Duration::from_secs(15);
/// How long a client may go without reading what it is sent.
const WRITE: Duration = Duration::from_secs(20);
/// The size of the head of a request, and of the buffer for a response, in bytes.
const BUFFER: usize = 32 * 1024;
/// The pause after an error of `accept`, such as too many open files.
const PAUSE: Duration = Duration::from_millis(100);

const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nConnection: close\r\n\
    Content-Type: text/plain; charset=utf-8\r\nContent-Length: 45\r\n\r\n\
    Too many connections. Try again in a moment.\n";

/// The open connections.
#[derive(Debug, Default)]
pub(super) struct Connections {
    open: Mutex<HashMap<u64, OpenConnection>>,
    /// Requests that are being answered.
    answering: AtomicUsize,
    answered: Notify,
}

#[derive(Debug)]
struct OpenConnection {
    task: AbortHandle,
    /// When it was opened, or last made a request.
    active: Instant,
    /// A request is being answered, or it is a stream of events.
    busy: bool,
}

/// The client of a request, and its connection.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) address: SocketAddr,
    number: u64,
    connections: Arc<Connections>,
}

impl Connections {
    /// Waits until no request is being answered.
    pub(super) async fn idle(&self) {
        while self.answering.load(Ordering::Acquire) > 0 {
            self.answered.notified().await;
        }
    }

    fn open(&self) -> std::sync::MutexGuard<'_, HashMap<u64, OpenConnection>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for one more connection, by displacing one if necessary. Returns false if that is impossible.
    fn make_room(&self) -> bool {
        let mut open = self.open();
        if open.len() < MOST {
            return true;
        }
        let idle = open.iter().filter(|(_, place)| !place.busy);
        let Some(number) = idle.min_by_key(|(_, place)| place.active).map(|(number, _)| *number)
        else {
            return false;
        };
        if let Some(place) = open.remove(&number) {
            place.task.abort();
        }
        true
    }

    fn set_busy(&self, number: u64, busy: bool) {
        if let Some(place) = self.open().get_mut(&number) {
            place.busy = busy;
            place.active = Instant::now();
        }
    }
}

impl Peer {
    /// Waits for data of the client. The connection can be displaced meanwhile.
    pub(super) async fn sends<T>(&self, something: impl Future<Output = T>) -> T {
        self.connections.set_busy(self.number, false);
        let sent = something.await;
        self.connections.set_busy(self.number, true);
        sent
    }
}

/// Counts a request while it is being answered.
struct RequestCount(Arc<Connections>);

impl RequestCount {
    fn new(connections: Arc<Connections>) -> Self {
        connections.answering.fetch_add(1, Ordering::AcqRel);
        Self(connections)
    }
}

impl Drop for RequestCount {
    fn drop(&mut self) {
        self.0.answering.fetch_sub(1, Ordering::AcqRel);
        self.0.answered.notify_waiters();
    }
}

/// Accepts connections forever.
pub(super) async fn accept(
    listener: TcpListener,
    router: Router,
    connections: Arc<Connections>,
) -> Infallible {
    let mut number = 0;
    loop {
        let Ok((stream, address)) = listener.accept().await else {
            // The error concerns this one connection, or all of them; in that case some may end during the pause.
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        if !connections.make_room() {
            // The answer fits into the buffer of a new connection. Otherwise the client sees only the end.
            let _ = stream.try_write(FULL);
            continue;
        }
        number += 1;
        let peer = Peer { address, number, connections: connections.clone() };
        // The task cannot end before it is in the map: both run on this thread, and there is no await in between.
        let task = tokio::spawn(serve(stream, router.clone(), peer));
        let place =
            OpenConnection { task: task.abort_handle(), active: Instant::now(), busy: false };
        connections.open().insert(number, place);
    }
}

/// Removes a connection when its task ends or is aborted.
struct RemoveOnDrop(Peer);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        self.0.connections.open().remove(&self.0.number);
    }
}

async fn serve(stream: TcpStream, router: Router, peer: Peer) {
    let _leave = RemoveOnDrop(peer.clone());
    let _ = stream.set_nodelay(true);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(WRITE));
    let io: TokioIo<Pin<Box<TimeoutStream<TcpStream>>>> = TokioIo::new(Box::pin(stream));
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |request: Request<Incoming>| {
        let (peer, router) = (peer.clone(), router.clone());
        async move {
            peer.connections.set_busy(peer.number, true);
            // The answer to HEAD has no body, and ends at once.
            let has_body = request.method() != Method::HEAD;
            let _answering = RequestCount::new(peer.connections.clone());
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(peer.clone());
            let response = router.call(request).await;
            let streams = has_body && response.as_ref().is_ok_and(super::live::is_a_stream);
            peer.connections.set_busy(peer.number, streams);
            response
        }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(BUFFER);
    let _ = http.serve_connection(io, service).await;
}
