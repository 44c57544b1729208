//! Foreign code that panics, and threads that cannot be started: everything else continues, and nothing hangs.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Wake, Waker};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use leasehold::compat::sync_guard::ErrorCode;
use leasehold::{Client, Error};
use rustix::process::{Resource, Rlimit, setrlimit};
use testkit::child::{self, Child};
use testkit::local_store::LocalStore;
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};
use tracing::{Event, Level, Metadata, Subscriber, span};

use super::{NAME, acquire, connect, held_and_waiting, one, open, release, within};

/// A call that takes longer than this hangs.
const HUNG: Duration = Duration::from_secs(4);
const MOMENT: Duration = Duration::from_millis(50);
/// An unprivileged user.
const NOBODY: u32 = 65534;

/// In the child: plays the named part.
pub(crate) fn play(part: &str, arguments: &[&str]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        match part {
            "listener" => under_a_panicking_listener(arguments[0]).await,
            "reconnecting" => reconnect_under_a_panicking_listener(arguments[0]).await,
            "no threads" => without_threads(arguments).await,
            _ => unreachable!("unknown part {part:?}"),
        }
        std::future::pending::<()>().await;
    });
}

#[derive(Default)]
struct Panicking {
    woken: AtomicU32,
}

impl Wake for Panicking {
    fn wake(self: Arc<Self>) {
        self.woken.fetch_add(1, Ordering::SeqCst);
        panic!("this waker panics, as the test wants it to");
    }
}

/// Polls an acquire once, and waits until its waker has panicked: because the acquire was granted
/// the permit that `other` held, or because it timed out.
async fn panic_once(client: &Client, other: &Client, granted: bool) {
    let held = acquire(&one(other)).await;
    let panicking = Arc::new(Panicking::default());
    let waker = Waker::from(panicking.clone());
    let limit = if granted { super::MINUTES } else { MOMENT };
    let mut doomed = pin!(one(client).acquire().within(limit));
    assert!(doomed.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    if granted {
        eventually(async || one(other).position(&doomed.id()).await.unwrap().is_some()).await;
        assert!(release(held).await);
    }
    eventually(async || panicking.woken.load(Ordering::SeqCst) > 0).await;
}

/// Checks that `client`, whose wakers panic, still works. `other` shares its store.
async fn survives_panicking_wakers(client: &Client, other: &Client, granted: bool) {
    const HEARTBEAT: Duration = Duration::from_secs(2);
    let renewed_permit = client.semaphore("renewed", 1).lease(HEARTBEAT);
    let renewed_permit = acquire(&renewed_permit.build().unwrap()).await;
    // More panics than the number of batches that one name has in flight.
    for _ in 0..3 {
        panic_once(client, other, granted).await;
    }
    let panicked = Instant::now();
    for name in [NAME, "another"] {
        let semaphore = client.semaphore(name, 1).build().unwrap();
        let first = within(HUNG, semaphore.acquire()).await.unwrap();
        let error = within(HUNG, semaphore.acquire().within(MOMENT)).await.unwrap_err();
        assert!(matches!(error, Error::TimedOut { .. }), "{error}");
        assert!(within(HUNG, first.release()).await.unwrap());
    }
    // Permits that were held before are still held and renewed.
    let renewed = || renewed_permit.valid_until().is_none_or(|until| until > panicked + HEARTBEAT);
    eventually(async || {
        renewed_permit.check().unwrap();
        renewed()
    })
    .await;
}

#[tokio::test]
async fn wakers_that_panic_at_a_timeout_in_memory_affect_nobody_else() {
    let client = Client::memory();
    survives_panicking_wakers(&client, &client, false).await;
}

#[tokio::test]
async fn wakers_that_panic_at_a_timeout_on_redis_affect_nobody_else() {
    let server = RedisServer::start();
    let (client, other) = (connect(&server.url()).await, connect(&server.url()).await);
    survives_panicking_wakers(&client, &other, false).await;
}

#[tokio::test]
async fn wakers_that_panic_at_a_grant_on_redis_affect_nobody_else() {
    let server = RedisServer::start();
    let (client, other) = (connect(&server.url()).await, connect(&server.url()).await);
    survives_panicking_wakers(&client, &other, true).await;
}

#[tokio::test]
async fn wakers_that_panic_at_a_grant_on_one_host_affect_nobody_else() {
    let store = LocalStore::new();
    let (client, other) = (open(&store).await, open(&store).await);
    survives_panicking_wakers(&client, &other, true).await;
}

/// Another task waits for the same loss.
#[tokio::test]
async fn a_waker_that_panics_at_a_loss_does_not_keep_others_from_being_notified() {
    let client = Client::memory();
    let permit = client.semaphore(NAME, 1).ttl(2 * MOMENT).build().unwrap();
    let permit = acquire(&permit).await;
    let panicking = Arc::new(Panicking::default());
    let waker = Waker::from(panicking.clone());
    let mut doomed = pin!(permit.lost());
    assert!(doomed.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    let lost = tokio::spawn(permit.lost());
    within(HUNG, lost).await.unwrap();
    assert_eq!(panicking.woken.load(Ordering::SeqCst), 1);
    let semaphore = one(&client);
    let held = acquire(&semaphore).await;
    within(HUNG, semaphore.acquire().within(MOMENT)).await.unwrap_err();
    drop(held);
}

/// A subscriber that panics at every event from another thread than the one that created it.
struct PanickingListener {
    spared: ThreadId,
    events: Arc<AtomicU32>,
}

impl Subscriber for PanickingListener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, _: &Event<'_>) {
        if thread::current().id() != self.spared {
            self.events.fetch_add(1, Ordering::SeqCst);
            panic!("this listener panics, as the test wants it to");
        }
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// In the child: installs the subscriber, and returns the number of events at which it panicked.
fn listen() -> Arc<AtomicU32> {
    let events = Arc::new(AtomicU32::new(0));
    let listener = PanickingListener { spared: thread::current().id(), events: events.clone() };
    tracing::subscriber::set_global_default(listener).expect("no other subscriber");
    events
}

/// In the child: describes the outcome of a future in a word or two.
async fn outcome<T>(future: impl Future<Output = Result<T, Error>>) -> String {
    match tokio::time::timeout(HUNG, future).await {
        Ok(Ok(_)) => "done".to_owned(),
        Ok(Err(error)) => format!("{:?}", ErrorCode::from(&error)),
        Err(_) => "hung".to_owned(),
    }
}

async fn under_a_panicking_listener(url: &str) {
    let _told = child::lines_from_test();
    let events = listen();
    let client = Client::open(url).await.unwrap();
    let permit = client.semaphore(NAME, 1).ttl(Duration::from_millis(400)).build().unwrap();
    let permit = permit.acquire().await.unwrap();
    let lost = permit.lost();
    child::say(&format!("lost: {}", outcome(async { Ok(lost.await) }).await));
    let busy = client.semaphore("busy", 1).build().unwrap();
    let _held = busy.acquire().await;
    child::say(&format!("acquire: {}", outcome(busy.acquire().within(MOMENT)).await));
    child::say(&format!("panicked: {}", events.load(Ordering::SeqCst) > 0));
}

async fn reconnect_under_a_panicking_listener(url: &str) {
    let mut from_test = child::lines_from_test();
    let events = listen();
    let client = Client::open(url).await.unwrap();
    child::say("connected");
    from_test.recv().await;
    child::say(&format!("acquire: {}", outcome(one(&client).acquire()).await));
    child::say(&format!("panicked: {}", events.load(Ordering::SeqCst) > 0));
}

#[tokio::test]
async fn a_listener_that_panics_affects_no_acquire() {
    let server = RedisServer::start();
    for url in ["memory:", &server.url()] {
        let mut child = Child::start("listener", &[url]);
        assert_eq!(child.says().await, "lost: done", "{url}");
        assert_eq!(child.says().await, "acquire: AcquisitionTimeout", "{url}");
        assert_eq!(child.says().await, "panicked: true", "{url}");
    }
}

#[tokio::test]
async fn a_listener_that_panics_when_the_connection_is_lost_does_not_keep_it_from_being_made_anew()
{
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let mut child = Child::start("reconnecting", &[&proxy.url()]);
    assert_eq!(child.says().await, "connected");
    proxy.cut();
    child.tell("go on");
    assert_eq!(child.says().await, "acquire: done");
    assert_eq!(child.says().await, "panicked: true");
}

/// In the child: reports the outcome of every call while no thread can be started.
async fn without_threads(arguments: &[&str]) {
    let _told = child::lines_from_test();
    let limit = Rlimit { current: Some(1), maximum: Some(1) };
    setrlimit(Resource::Nproc, limit).unwrap();
    if thread::Builder::new().spawn(|| ()).is_ok() {
        return child::say("skipped: threads can still be started");
    }
    let (url, path) = (arguments[0].to_owned(), arguments[1].to_owned());
    say_outcome("connect", async move { Client::open(&url).await }).await;
    say_outcome("local", async move { Client::local(path).await }).await;
    let client = Client::memory();
    let handle = client.clone();
    say_outcome("acquire", async move { handle.semaphore(NAME, 1).build()?.acquire().await }).await;
    let handle = client.clone();
    let limited = async move {
        let semaphore = handle.semaphore("busy", 1).build()?;
        let _held = semaphore.acquire().await?;
        semaphore.acquire().within(MOMENT).await
    };
    say_outcome("waiting acquire", limited).await;
    let handle = client.clone();
    let ending = async move {
        let permit = handle.semaphore("ends", 1).ttl(MOMENT).build()?.acquire().await?;
        permit.lost().await;
        Ok(())
    };
    say_outcome("ttl", ending).await;
    let handle = client.clone();
    say_outcome("lock", async move { handle.lock(NAME).build()?.acquire().await }).await;
    let handle = client.clone();
    say_outcome("lease", async move { handle.pool(NAME, 1).build()?.acquire("a").await }).await;
    let handle = client.clone();
    say_outcome("statistics", async move { handle.stats().await }).await;
    say_outcome("close", async move { client.close().await }).await;
    child::say("end");
}

/// Runs the call in its own task, so that a panic can be reported.
async fn say_outcome<T: Send + 'static>(
    what: &str,
    call: impl Future<Output = Result<T, Error>> + Send + 'static,
) {
    let outcome = tokio::spawn(outcome(call)).await.unwrap_or_else(|_| "panicked".to_owned());
    child::say(&format!("{what}: {outcome}"));
}

#[tokio::test]
async fn nothing_hangs_or_panics_if_no_thread_can_be_started() {
    let server = RedisServer::start();
    let store = LocalStore::new();
    fs::set_permissions(store.directory(), Permissions::from_mode(0o755)).unwrap();
    let its_directory = store.directory().join("own");
    fs::create_dir(&its_directory).unwrap();
    fs::set_permissions(&its_directory, Permissions::from_mode(0o700)).unwrap();
    let (url, path) = (server.url(), its_directory.join("store"));
    let arguments = [url.as_str(), path.to_str().unwrap()];
    // The limit does not apply to root.
    let child = if rustix::process::geteuid().is_root() {
        chown(&its_directory, Some(NOBODY), Some(NOBODY)).unwrap();
        Child::start_as(NOBODY, "no threads", &arguments)
    } else {
        Some(Child::start("no threads", &arguments))
    };
    let Some(mut child) = child else {
        return eprintln!("skipped: no other user may run this test");
    };
    let mut lines = Vec::new();
    loop {
        let line = deadline(async { child.says().await }).await;
        match line.as_str() {
            "end" => break,
            line if line.starts_with("skipped") => return eprintln!("{line}"),
            line => lines.push(line.to_owned()),
        }
    }
    let outcome = |what: &str| {
        let line = lines.iter().find_map(|line| line.strip_prefix(what)?.strip_prefix(": "));
        line.unwrap_or_else(|| panic!("{what} is missing: {lines:?}"))
    };
    let bad = lines.iter().filter(|line| line.ends_with(": hung") || line.ends_with(": panicked"));
    assert_eq!(bad.collect::<Vec<_>>(), Vec::<&String>::new(), "{lines:?}");
    for needs_the_thread in ["connect", "local", "waiting acquire"] {
        assert_ne!(outcome(needs_the_thread), "done", "{lines:?}");
    }
    assert_eq!(held_and_waiting(&one(&connect(&url).await)).await, (0, 0));
}
