//! A TCP proxy between a client and a Redis server that injects network faults.
//!
//! It runs on its own thread and runtime, so that it continues while the test's runtime is blocked.
//! Its controls are plain functions that may be called from anywhere, at any time. Once a control
//! has returned, it applies to every byte sent afterwards.
//!
//! What a proxy on loopback cannot do: the client's kernel always sees a living peer, so keepalive
//! and `TCP_USER_TIMEOUT` never fire. A client notices silence only by its own timeouts.

mod relay;
mod resp;
mod state;
#[cfg(test)]
mod tests;

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::LocalSet;

use state::{Live, LossTarget, Shared, lock};

/// How long the proxy may take to apply a control, and how long [`FaultProxy::until`] waits.
const DEADLINE: Duration = Duration::from_secs(20);

/// How a connection is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Cut {
    /// An orderly end of the stream (FIN), as when a server closes an idle client.
    #[default]
    Close,
    /// A reset (RST), as when a host has lost its memory of the connection.
    Reset,
}

/// What has gone through the proxy so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Traffic {
    /// Connections open now.
    pub connections: usize,
    /// Connections accepted since the start.
    pub accepted: u64,
    /// Connections refused since the start.
    pub refused: u64,
    /// Requests forwarded to the server, each command of a pipeline counted.
    pub requests: u64,
    /// Bytes forwarded to the server.
    pub bytes_to_server: u64,
    /// Bytes forwarded to clients.
    pub bytes_to_client: u64,
    /// Requests and replies lost on purpose.
    pub lost: u64,
}

/// A proxy on loopback in front of one server. Dropping it closes its connections.
#[derive(Debug)]
pub struct FaultProxy {
    shared: Arc<Shared>,
    port: u16,
    thread: Option<JoinHandle<()>>,
}

impl FaultProxy {
    /// Starts a proxy in front of a server on this loopback port.
    ///
    /// # Panics
    ///
    /// If no port or thread is available.
    #[must_use]
    pub fn start(upstream_port: u16) -> Self {
        let listener =
            std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port on loopback");
        listener.set_nonblocking(true).expect("a listener that tokio can take");
        let port = listener.local_addr().expect("a bound listener").port();
        let shared = Arc::new(Shared {
            upstream: AtomicU16::new(upstream_port),
            control: watch::Sender::default(),
            traffic: watch::Sender::default(),
            losses: Mutex::default(),
            live: Mutex::default(),
            left: Condvar::new(),
        });
        let for_thread = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("fault-proxy".to_owned())
            .spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                let tasks = LocalSet::new();
                let serving = tasks.run_until(state::accept(for_thread, listener));
                runtime.expect("a runtime").block_on(serving);
            })
            .expect("a thread");
        Self { shared, port, thread: Some(thread) }
    }

    /// The port to connect to.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL to connect to, without credentials.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Closes all current connections, and returns when they are closed. New ones are served.
    ///
    /// It includes a connection once the proxy has accepted it, which a client knows from its first reply.
    ///
    /// # Panics
    ///
    /// If the proxy does not close them in time.
    pub fn cut(&self) {
        self.cut_with(Cut::Close);
    }

    /// As [`cut`](Self::cut), in the way given.
    ///
    /// # Panics
    ///
    /// If the proxy does not close them in time.
    pub fn cut_with(&self, how: Cut) {
        let live = lock(&self.shared.live);
        let before = live.next;
        self.shared
            .control
            .send_modify(|control| (control.cut, control.cut_before) = (how, before));
        let older = |live: &mut Live| live.ids.first().is_some_and(|id| *id < before);
        let waited = self.shared.left.wait_timeout_while(live, DEADLINE, older);
        let (live, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(live);
        assert!(!waited.timed_out(), "the proxy did not cut its connections in {DEADLINE:?}");
    }

    /// Connects new connections to the server on this loopback port, as when a name is pointed at a replica.
    /// Current ones stay where they are until they are [cut](Self::cut).
    pub fn redirect(&self, upstream_port: u16) {
        self.shared.upstream.store(upstream_port, Ordering::SeqCst);
    }

    /// Resets new connections as soon as they are made, or serves them again; current ones stay.
    pub fn refuse(&self, refuse: bool) {
        self.shared.control.send_modify(|control| control.refusing = refuse);
    }

    /// Makes packets vanish in both directions while no socket closes: neither side notices.
    ///
    /// Current connections are dead for good, as behind a router that forgot them; only
    /// [`cut`](Self::cut) closes them towards the server, even if their client has closed. A new
    /// connection is established but gets no answer before [`heal`](Self::heal).
    pub fn half_open(&self) {
        self.shared.void(true);
    }

    /// As [`half_open`](Self::half_open) for the current connections; new ones work.
    pub fn forget_connections(&self) {
        self.shared.void(false);
    }

    /// Holds back everything, both ways, until [`heal`](Self::heal) delivers it: a partition short
    /// enough for TCP to recover from.
    pub fn stall(&self) {
        self.shared.control.send_modify(|control| control.stalled = true);
    }

    /// Adds this latency in each direction to what is sent from now on.
    pub fn delay(&self, delay: Duration) {
        self.shared.control.send_modify(|control| control.delay = delay);
    }

    /// Ends every fault that lasts, and cancels those still to come. Dead connections stay dead.
    pub fn heal(&self) {
        lock(&self.shared.losses).clear();
        self.shared.control.send_modify(|control| {
            (control.stalled, control.refusing, control.delay) = (false, false, Duration::ZERO);
        });
    }

    /// Forwards the next request of any client, drops its reply and cuts the connection: the reply
    /// is lost after its command ran.
    pub fn drop_next_reply(&self) {
        self.lose_reply_to(b"");
    }

    /// As [`drop_next_reply`](Self::drop_next_reply) for the next request that contains these bytes.
    ///
    /// Replies to earlier requests on that connection are delivered; later requests are not
    /// forwarded. Several such orders may be pending; each applies once. Does not work with TLS.
    pub fn lose_reply_to(&self, needle: &[u8]) {
        lock(&self.shared.losses).push((needle.to_vec(), LossTarget::Reply));
    }

    /// Cuts the connection instead of forwarding the next request that contains these bytes. To the
    /// client it looks like a lost reply, but the command never ran.
    pub fn lose_request(&self, needle: &[u8]) {
        lock(&self.shared.losses).push((needle.to_vec(), LossTarget::Request));
    }

    /// Returns the number of open connections.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.traffic().connections
    }

    /// Returns the number of requests forwarded to the server.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.traffic().requests
    }

    /// Returns the number of bytes forwarded in both directions.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.traffic().bytes_to_server + self.traffic().bytes_to_client
    }

    /// Returns all counters, read at one moment.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        *self.shared.traffic.borrow()
    }

    /// Waits until the traffic is as the test expects it.
    ///
    /// # Cancel safety
    ///
    /// Dropping it loses nothing.
    ///
    /// # Panics
    ///
    /// If that takes more than 20 seconds.
    pub async fn until(&self, expected: impl FnMut(&Traffic) -> bool) -> Traffic {
        let mut traffic = self.shared.traffic.subscribe();
        let seen = tokio::time::timeout(DEADLINE, traffic.wait_for(expected)).await;
        let seen = seen.map(|seen| *seen.expect("the proxy lives as long as its handle"));
        seen.unwrap_or_else(|_| panic!("not seen in {DEADLINE:?}; now {:?}", self.traffic()))
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.shared.control.send_modify(|control| control.stop = true);
        // If the thread panicked, its message has already been printed.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
