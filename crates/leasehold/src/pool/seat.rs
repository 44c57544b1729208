//! What this client does about one instance id of one pool, one thing after the other.
//!
//! The store knows a lease by its instance id alone. So whoever gives one back that somebody else in this client has
//! acquired anew meanwhile, under the same id, would take it from him: a guard that was dropped, an attempt that was given
//! up, or a release that is repeated. All who share an id share its lease, and it is given back with the last of them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::name::Name;

/// A pool and an instance id.
type Key = (Name, Name);

/// All seats that are in use.
#[derive(Default)]
pub(crate) struct Seats(Arc<Mutex<HashMap<Key, Weak<Seat>>>>);

pub(super) struct Seat {
    key: Key,
    /// How many share it. Whoever asks the store to change anything has this meanwhile.
    users: tokio::sync::Mutex<usize>,
    all: Arc<Mutex<HashMap<Key, Weak<Self>>>>,
}

impl Seats {
    pub(super) fn seat(&self, pool: &Name, instance: &Name) -> Arc<Seat> {
        let key = (pool.clone(), instance.clone());
        let mut seats = lock(&self.0);
        if let Some(seat) = seats.get(&key).and_then(Weak::upgrade) {
            return seat;
        }
        let (users, all) = (tokio::sync::Mutex::new(0), self.0.clone());
        let seat = Arc::new(Seat { key: key.clone(), users, all });
        seats.insert(key, Arc::downgrade(&seat));
        seat
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut seats = lock(&self.all);
        // Somebody may have put another one in its place.
        if seats.get(&self.key).is_some_and(|seat| seat.strong_count() == 0) {
            seats.remove(&self.key);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One who shares a seat: an attempt, and the guard that comes of it.
pub(super) struct Use {
    seat: Arc<Seat>,
    over: AtomicBool,
}

/// It is its turn to ask the store.
pub(super) struct Turn<'a> {
    users: tokio::sync::MutexGuard<'a, usize>,
    over: &'a AtomicBool,
    /// An attempt that is not over yet: it shares the seat only if it succeeds.
    attempt: bool,
}

impl Use {
    /// Not yet one: see [`Turn::begin`].
    pub(super) fn of(seat: Arc<Seat>) -> Self {
        Self { seat, over: AtomicBool::new(true) }
    }

    pub(super) async fn turn(&self) -> Turn<'_> {
        Turn { users: self.seat.users.lock().await, over: &self.over, attempt: false }
    }
}

impl Turn<'_> {
    /// Begins an attempt, which ends with this turn unless it succeeds.
    pub(super) fn begin(&mut self) {
        self.attempt = true;
        *self.users += usize::from(self.over.swap(false, Ordering::AcqRel));
    }

    pub(super) fn succeed(mut self) {
        self.attempt = false;
    }

    /// Once or more often. True if nobody shares the seat any more.
    pub(super) fn end(&mut self) -> bool {
        *self.users -= usize::from(!self.over.swap(true, Ordering::AcqRel));
        *self.users == 0
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.attempt {
            self.end();
        }
    }
}
