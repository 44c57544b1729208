//! All clients of this process: what a fork and the end of the interpreter do with them.

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use super::shared::Shared;
use crate::wake::{ParkedThread, lock};

/// Only locked with the GIL held, and so never while the process is forked.
static CLIENTS: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

pub(super) fn add(client: &Arc<Shared>) {
    let mut clients = lock(&CLIENTS);
    clients.retain(|client| client.strong_count() > 0);
    clients.push(Arc::downgrade(client));
}

fn all() -> Vec<Arc<Shared>> {
    lock(&CLIENTS).iter().filter_map(Weak::upgrade).collect()
}

/// Closes all clients of this process. Returns when the stores have released everything, or after `limit`.
pub(crate) fn close_all(py: Python<'_>, limit: Duration) {
    let engines: Vec<_> = all().iter().filter_map(|client| client.begin_close()).collect();
    if engines.is_empty() {
        return;
    }
    let until = Instant::now() + limit;
    py.detach(|| {
        let parked = ParkedThread::new();
        let waker = parked.clone().into();
        let mut cx = std::task::Context::from_waker(&waker);
        let mut closing: Vec<_> = engines
            .into_iter()
            .map(|engine| Box::pin(async move { engine.close().await }))
            .collect();
        loop {
            closing.retain_mut(|close| close.as_mut().poll(&mut cx).is_pending());
            let left = until.saturating_duration_since(Instant::now());
            if closing.is_empty() || left.is_zero() {
                return;
            }
            if !parked.take() {
                std::thread::park_timeout(left);
            }
        }
    });
}
