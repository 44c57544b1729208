//! The tower layer in a real axum server on loopback, with clients that send HTTP over a socket.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{Request, Response, StatusCode, header};
use axum::routing::get;
use http_body::Frame;
use leasehold::tower::{Limit, LimitLayer};
use leasehold::{Client, Error, ManualClock, Semaphore};
use testkit::wait::{TIME_LIMIT, deadline, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, mpsc};
use tower_layer::Layer;
use tower_service::Service;

/// What the handlers share with the test.
#[derive(Default)]
struct World {
    /// How many requests are in a handler, and the highest number so far.
    running: AtomicU32,
    most: AtomicU32,
    /// A request for `/work` waits for a token from here.
    go: Option<tokio::sync::Semaphore>,
    /// The body of the next request for `/stream`.
    stream: Mutex<Option<mpsc::Receiver<Bytes>>>,
}

/// Counts a request until its handler returns or is dropped.
struct Running(Arc<World>);

impl Running {
    fn begin(world: &Arc<World>) -> Self {
        let now = world.running.fetch_add(1, Ordering::SeqCst) + 1;
        world.most.fetch_max(now, Ordering::SeqCst);
        Self(world.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Chunks(mpsc::Receiver<Bytes>);

impl http_body::Body for Chunks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))))
    }
}

async fn work(State(world): State<Arc<World>>) -> &'static str {
    let _running = Running::begin(&world);
    world.go.as_ref().expect("a world with tokens").acquire().await.unwrap().forget();
    "done"
}

async fn stream(State(world): State<Arc<World>>) -> Body {
    Body::new(Chunks(world.stream.lock().await.take().expect("a body set by the test")))
}

fn world() -> Arc<World> {
    Arc::new(World { go: Some(tokio::sync::Semaphore::new(0)), ..World::default() })
}

fn refused(error: &Error) -> Response<Body> {
    let mut response = Response::new(Body::from(format!("refused: {error}")));
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response.headers_mut().insert(header::RETRY_AFTER, 7.into());
    response
}

struct Server(std::net::SocketAddr);

impl Server {
    async fn start<L: Into<Limit> + 'static>(
        world: &Arc<World>,
        limit: impl Fn(&Request<Body>) -> Result<L, Error> + Send + Sync + 'static,
    ) -> Self {
        let app = Router::new()
            .route("/work", get(work))
            .route("/stream", get(stream))
            .with_state(world.clone())
            .layer(LimitLayer::new(limit).refuse_with(refused));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self(address)
    }

    /// Sends a request over its own connection.
    async fn send(&self, path: &str, tenant: &str) -> Connection {
        let mut stream = deadline(TcpStream::connect(self.0)).await.unwrap();
        let request = format!(
            "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-tenant: {tenant}\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        Connection { stream, read: Vec::new() }
    }
}

struct Connection {
    stream: TcpStream,
    read: Vec<u8>,
}

impl Connection {
    fn text(&self) -> std::borrow::Cow<'_, str> {
        String::from_utf8_lossy(&self.read)
    }

    /// Reads until this text has arrived.
    async fn until(&mut self, text: &str) {
        while !self.text().contains(text) {
            let read = deadline(self.stream.read_buf(&mut self.read)).await.unwrap();
            assert!(read > 0, "the end instead of {text:?}: {}", self.text());
        }
    }

    /// Reads until the server closes the connection.
    async fn all(mut self) -> String {
        // A reset ends the connection as well.
        let _ = deadline(self.stream.read_to_end(&mut self.read)).await;
        self.text().into_owned()
    }
}

/// The limit of a test: by tenant.
fn by_tenant(
    client: &Client,
    capacity: u32,
) -> impl Fn(&Request<Body>) -> Result<leasehold::Acquire, Error> + Send + Sync + 'static {
    let client = client.clone();
    move |request| {
        let tenant = request.headers()["x-tenant"].to_str().expect("the tests send text");
        Ok(client.semaphore(tenant, capacity).build()?.acquire())
    }
}

async fn is(semaphore: &Semaphore, held: u32, waiting: usize) {
    eventually(async || {
        let stats = semaphore.stats().await.unwrap();
        (stats.held, stats.waiting) == (held, waiting)
    })
    .await;
}

#[tokio::test]
async fn at_most_so_many_at_once_of_each_tenant() {
    let (client, world) = (Client::memory(), world());
    let server = Server::start(&world, by_tenant(&client, 2)).await;
    let acme = client.semaphore("acme", 2).build().unwrap();
    let mut connections = Vec::new();
    for _ in 0..6 {
        connections.push(server.send("/work", "acme").await);
    }
    is(&acme, 2, 4).await;
    assert_eq!(world.running.load(Ordering::SeqCst), 2);
    let other = server.send("/work", "other").await;
    eventually(async || world.running.load(Ordering::SeqCst) == 3).await;

    world.go.as_ref().unwrap().add_permits(7);
    for connection in connections.into_iter().chain([other]) {
        let answer = connection.all().await;
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("done"), "{answer}");
    }
    is(&acme, 0, 0).await;
    assert!(world.most.load(Ordering::SeqCst) <= 3);
}

#[tokio::test]
async fn an_open_body_keeps_the_permit_and_its_end_releases_it() {
    let (client, world) = (Client::memory(), world());
    let server = Server::start(&world, by_tenant(&client, 1)).await;
    let acme = client.semaphore("acme", 1).build().unwrap();
    let (chunks, body) = mpsc::channel(1);
    *world.stream.lock().await = Some(body);
    let mut first = server.send("/stream", "acme").await;
    first.until("\r\n\r\n").await;
    let second = server.send("/work", "acme").await;
    is(&acme, 1, 1).await;
    chunks.send("one chunk".into()).await.unwrap();
    first.until("one chunk").await;
    is(&acme, 1, 1).await;
    assert_eq!(world.running.load(Ordering::SeqCst), 0);

    drop(chunks);
    assert!(first.all().await.ends_with("0\r\n\r\n"), "the body is complete");
    eventually(async || world.running.load(Ordering::SeqCst) == 1).await;
    world.go.as_ref().unwrap().add_permits(1);
    assert!(second.all().await.ends_with("done"));
    is(&acme, 0, 0).await;
}

#[tokio::test]
async fn a_client_that_disconnects_releases_or_leaves_the_queue() {
    let (client, world) = (Client::memory(), world());
    let server = Server::start(&world, by_tenant(&client, 1)).await;
    let acme = client.semaphore("acme", 1).build().unwrap();

    // While its body is sent.
    let (chunks, body) = mpsc::channel(1);
    *world.stream.lock().await = Some(body);
    let mut streaming = server.send("/stream", "acme").await;
    chunks.send("one chunk".into()).await.unwrap();
    streaming.until("one chunk").await;
    is(&acme, 1, 0).await;
    drop(streaming);
    is(&acme, 0, 0).await;
    assert!(chunks.is_closed(), "the body was dropped");

    // While its handler runs, and while it waits.
    let working = server.send("/work", "acme").await;
    eventually(async || world.running.load(Ordering::SeqCst) == 1).await;
    let waiting = server.send("/work", "acme").await;
    is(&acme, 1, 1).await;
    drop(waiting);
    is(&acme, 1, 0).await;
    drop(working);
    is(&acme, 0, 0).await;
    assert_eq!(world.running.load(Ordering::SeqCst), 0, "the handler was dropped");
}

#[tokio::test]
async fn a_request_that_is_not_granted_in_time_gets_the_response_of_the_user() {
    let (client, world) = (Client::memory(), world());
    let (api, lock) = (client.semaphore("api", 1).build().unwrap(), client.lock("report"));
    let rate = client.rate("mail", 1, Duration::from_secs(3600)).build().unwrap();
    let lock = lock.within(Duration::from_millis(20)).build().unwrap();
    let limited = (api.clone(), lock.clone());
    let server = Server::start(&world, move |request: &Request<Body>| {
        let tenant = request.headers()["x-tenant"].to_str().expect("the tests send text");
        Ok(match tenant {
            "within" => limited.0.acquire().within(Duration::from_millis(20)).into(),
            "try" => limited.0.try_acquire().into(),
            "lock" => limited.1.clone().into(),
            "rate" => rate.try_acquire().into(),
            "none" => Limit::none(),
            other => return Err(client.semaphore(other, 0).build().unwrap_err()),
        })
    })
    .await;
    world.go.as_ref().unwrap().add_permits(100);
    let (permit, guard) = (api.acquire().await.unwrap(), lock.acquire().await.unwrap());
    let assert_refused = async |tenant, why: &str| {
        let answer = server.send("/work", tenant).await.all().await;
        assert!(answer.starts_with("HTTP/1.1 503 "), "{tenant}: {answer}");
        assert!(answer.contains("\r\nretry-after: 7\r\n"), "{tenant}: {answer}");
        assert!(answer.contains(why), "{tenant}: {answer}");
    };
    let assert_served = async |tenant| {
        let answer = server.send("/work", tenant).await.all().await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{tenant}: {answer}");
    };
    assert_refused("within", "refused: no permit of \"api\" was acquired within 20ms").await;
    assert_refused("try", "refused: no permit of \"api\" is free").await;
    assert_refused("lock", "the lock \"report\" was not acquired").await;
    assert_refused("broken", "invalid capacity").await;
    assert_served("none").await;
    assert_served("rate").await;
    assert_refused("rate", "no permit of \"mail\"").await;
    drop((permit, guard));
    for tenant in ["within", "try", "lock"] {
        assert_served(tenant).await;
    }
}

#[tokio::test]
async fn a_lost_permit_stops_the_request() {
    let clock = ManualClock::new();
    let client = Client::memory_builder().manual_clock(&clock).build().unwrap();
    let (hour, world) = (Duration::from_secs(3600), world());
    let acme = client.semaphore("acme", 1).ttl(hour).build().unwrap();
    let limited = acme.clone();
    let server = Server::start(&world, move |_: &Request<Body>| Ok(limited.acquire())).await;

    // While the handler runs.
    let working = server.send("/work", "acme").await;
    eventually(async || world.running.load(Ordering::SeqCst) == 1).await;
    clock.advance(hour);
    let answer = working.all().await;
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("its TTL ended"), "{answer}");
    assert_eq!(world.running.load(Ordering::SeqCst), 0, "the handler was dropped");

    // While the body is sent.
    let (chunks, body) = mpsc::channel(1);
    *world.stream.lock().await = Some(body);
    let mut streaming = server.send("/stream", "acme").await;
    chunks.send("one chunk".into()).await.unwrap();
    streaming.until("one chunk").await;
    clock.advance(hour);
    let answer = streaming.all().await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert!(!answer.ends_with("0\r\n\r\n"), "the client must see that it is incomplete: {answer}");
    is(&acme, 0, 0).await;
}

/// A service that is ready once for each call, and whose clones are not ready.
#[derive(Default)]
struct Picky {
    ready: bool,
    unready_calls: Arc<AtomicUsize>,
}

impl Clone for Picky {
    fn clone(&self) -> Self {
        Self { ready: false, unready_calls: self.unready_calls.clone() }
    }
}

impl Service<Request<()>> for Picky {
    type Response = Response<String>;
    type Error = std::io::Error;
    type Future = std::future::Ready<Result<Response<String>, std::io::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), std::io::Error>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        let ready = std::mem::take(&mut self.ready);
        self.unready_calls.fetch_add(usize::from(!ready), Ordering::SeqCst);
        std::future::ready(Err(std::io::Error::other("an error of the service")))
    }
}

#[tokio::test]
async fn the_service_that_was_ready_is_the_one_that_is_called() {
    let api = Client::memory().semaphore("api", 1).build().unwrap();
    let (limited, picky) = (api.clone(), Picky::default());
    let unready_calls = picky.unready_calls.clone();
    let mut service =
        LimitLayer::new(move |_: &Request<()>| Ok(limited.acquire().within(TIME_LIMIT)))
            .layer(picky);
    let held = api.acquire().await.unwrap();
    let mut calls = Vec::new();
    for _ in 0..3 {
        std::future::poll_fn(|cx| service.poll_ready(cx)).await.unwrap();
        calls.push(tokio::spawn(service.call(Request::new(()))));
    }
    is(&api, 1, 3).await;
    drop(held);
    for call in calls {
        let error = deadline(call).await.unwrap().unwrap_err();
        assert_eq!(error.to_string(), "an error of the service");
    }
    assert_eq!(unready_calls.load(Ordering::SeqCst), 0);
    is(&api, 0, 0).await;
}

#[tokio::test]
async fn without_a_response_of_the_user_the_service_fails() {
    let client = Client::memory();
    let api = client.semaphore("api", 1).build().unwrap();
    let limited = api.clone();
    let mut service =
        LimitLayer::new(move |_: &Request<()>| Ok(limited.acquire())).layer(Picky::default());
    let _held = api.acquire().await.unwrap();
    let call = tokio::spawn(service.call(Request::new(())));
    is(&api, 1, 1).await;
    client.close().await.unwrap();
    let error = deadline(call).await.unwrap().unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(Error::Closed)), "{error}");
}
