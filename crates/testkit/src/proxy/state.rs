//! The state that the controls and the connections of a proxy share, and the accept loop.

use std::collections::BTreeSet;
use std::future::pending;
use std::sync::atomic::AtomicU16;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::spawn_local;

use super::{Cut, Traffic};

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) upstream: AtomicU16,
    pub(super) control: watch::Sender<Control>,
    pub(super) traffic: watch::Sender<Traffic>,
    pub(super) losses: Mutex<Vec<(Vec<u8>, LossTarget)>>,
    pub(super) live: Mutex<Live>,
    pub(super) left: Condvar,
}

/// The open connections. They are numbered, so that a fault applies to those before it and none after.
#[derive(Debug, Default)]
pub(super) struct Live {
    pub(super) next: u64,
    pub(super) ids: BTreeSet<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Control {
    pub(super) stop: bool,
    pub(super) stalled: bool,
    pub(super) refusing: bool,
    pub(super) delay: Duration,
    pub(super) cut: Cut,
    pub(super) cut_before: u64,
    pub(super) void_before: u64,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum LossTarget {
    Request,
    Reply,
}

impl Shared {
    pub(super) fn void(&self, stalled: bool) {
        let live = lock(&self.live);
        self.control.send_modify(|control| {
            control.void_before = live.next;
            control.stalled |= stalled;
        });
    }

    pub(super) fn delay(&self) -> Duration {
        self.control.borrow().delay
    }

    /// Returns when messages of this connection may pass; never if the connection is dead.
    pub(super) async fn open(&self, id: u64) {
        let passes = |control: &Control| !control.stalled && id >= control.void_before;
        if self.control.subscribe().wait_for(passes).await.is_err() {
            pending::<()>().await;
        }
    }

    /// Returns when this connection has to be cut.
    pub(super) async fn cut_of(&self, id: u64) -> Cut {
        let mut control = self.control.subscribe();
        match control.wait_for(|control| id < control.cut_before).await {
            Ok(control) => control.cut,
            Err(_) => pending().await,
        }
    }

    /// Removes and returns the first pending loss that this request matches.
    pub(super) fn loss_of(&self, request: &[u8]) -> Option<LossTarget> {
        let mut losses = lock(&self.losses);
        let holds = |needle: &[u8]| {
            needle.is_empty() || request.windows(needle.len()).any(|window| window == needle)
        };
        let found = losses.iter().position(|(needle, _)| holds(needle))?;
        Some(losses.remove(found).1)
    }

    pub(super) fn enter(&self) -> u64 {
        let mut live = lock(&self.live);
        let id = live.next;
        live.next += 1;
        live.ids.insert(id);
        self.traffic.send_modify(|traffic| {
            traffic.accepted += 1;
            traffic.connections += 1;
        });
        id
    }

    pub(super) fn leave(&self, id: u64) {
        let mut live = lock(&self.live);
        live.ids.remove(&id);
        // Under the lock, so that the count is right for every thread that sees the connection removed.
        self.traffic.send_modify(|traffic| traffic.connections -= 1);
        self.left.notify_all();
    }
}

pub(super) async fn accept(shared: Arc<Shared>, listener: std::net::TcpListener) {
    let listener = TcpListener::from_std(listener).expect("a listener that does not block");
    let mut control = shared.control.subscribe();
    loop {
        let (stop, stalled, refusing) = {
            let control = control.borrow_and_update();
            (control.stop, control.stalled, control.refusing)
        };
        if stop {
            return;
        }
        tokio::select! {
            // Controls first: they hold for every connection made after them.
            biased;
            _ = control.changed() => {}
            accepted = listener.accept(), if !stalled => {
                // An error means that the client has already closed.
                let Ok((client, _)) = accepted else { continue };
                if refusing {
                    let _ = client.set_zero_linger();
                    shared.traffic.send_modify(|traffic| traffic.refused += 1);
                    continue;
                }
                let (shared, id) = (Arc::clone(&shared), shared.enter());
                spawn_local(async move {
                    super::relay::serve(&shared, id, client).await;
                    shared.leave(id);
                });
            }
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
