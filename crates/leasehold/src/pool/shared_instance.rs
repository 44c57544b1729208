//! Serialises what this client does with one instance id of one pool.
//!
//! The store knows a lease only by its instance id. Suppose one task of this client releases an id (a dropped guard, an
//! abandoned attempt or a repeated release) while another task has acquired it again meanwhile. The release would then
//! end the other task's lease. So all tasks that share an id share its lease, and it is released with the last of them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::name::Name;

/// A pool and an instance id.
type Key = (Name, Name);

/// All seats in use. A seat is one instance id of one pool.
#[derive(Default)]
pub(crate) struct Seats(Arc<Mutex<HashMap<Key, Weak<Seat>>>>);

pub(super) struct Seat {
    key: Key,
    /// The number of tasks that share the seat. A task holds this lock while it asks the store to change anything.
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
        // Another seat may have been put in its place.
        if seats.get(&self.key).is_some_and(|seat| seat.strong_count() == 0) {
            seats.remove(&self.key);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One user of a seat: an attempt, and the guard that results from it.
pub(super) struct Use {
    seat: Arc<Seat>,
    over: AtomicBool,
}

/// The exclusive right to ask the store about a seat.
pub(super) struct Turn<'a> {
    users: tokio::sync::MutexGuard<'a, usize>,
    over: &'a AtomicBool,
    /// Whether this is an attempt that has not ended yet. It shares the seat only if it succeeds.
    attempt: bool,
}

impl Use {
    /// Makes a user that does not share the seat yet: see [`Turn::begin`].
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

    /// Ends the use of the seat. Repeating it is harmless. Returns whether nobody shares the seat any more.
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
