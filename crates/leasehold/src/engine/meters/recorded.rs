//! Records through the facade of the crate `metrics`.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use ::metrics::{Counter, Gauge, Histogram, Label};

use super::{ACQUIRE_OUTCOMES, Measurement, Primitive, RENEWAL_OUTCOMES};
use crate::LossReason;
use crate::callbacks::guarded;
use crate::clock::{Moment, Span};
use crate::engine::Core;
use crate::engine::timers::Timed;
use crate::metrics as names;
use crate::name::Name;

/// How often the age of the oldest waiter is updated while there are waiters.
const TICK: Span = Span::from_millis(1000);

/// The meters of one client.
pub(crate) struct ClientMeters {
    store: &'static str,
    core: Weak<Core>,
    kinds: [OnceLock<Meters>; 3],
    traffic: OnceLock<Traffic>,
}

/// The metrics of the requests that the client sends for all of its objects.
struct Traffic {
    requests: Counter,
    batch: Histogram,
    reconnects: Counter,
}

impl Traffic {
    fn register(store: &'static str) -> Self {
        guarded(names::describe);
        let labels = &[Label::new("store", store)];
        Self {
            requests: counter(names::REQUESTS, labels),
            batch: histogram(names::BATCH_SIZE, labels),
            reconnects: counter(names::RECONNECTS, labels),
        }
    }
}

/// Registers a handle. If the recorder panics, the result is `noop`, which records nothing.
fn registered<H>(noop: H, register: impl FnOnce() -> H) -> H {
    let mut handle = noop;
    guarded(|| handle = register());
    handle
}

fn counter(name: &'static str, labels: &[Label]) -> Counter {
    registered(Counter::noop(), || ::metrics::counter!(name, labels.to_vec()))
}

fn gauge(name: &'static str, labels: &[Label]) -> Gauge {
    registered(Gauge::noop(), || ::metrics::gauge!(name, labels.to_vec()))
}

fn histogram(name: &'static str, labels: &[Label]) -> Histogram {
    registered(Histogram::noop(), || ::metrics::histogram!(name, labels.to_vec()))
}

/// A counter for each value of a label. The values are few, and the most frequent one comes first.
struct Counters<T>(Vec<(T, Counter)>);

impl<T: Copy + PartialEq> Counters<T> {
    fn register(
        name: &'static str,
        labels: &[Label],
        label: &'static str,
        values: impl IntoIterator<Item = (T, &'static str)>,
    ) -> Self {
        let register = |(value, text)| {
            let labels = [labels, &[Label::new(label, text)]].concat();
            (value, counter(name, &labels))
        };
        Self(values.into_iter().map(register).collect())
    }

    fn increment(&self, value: T) {
        if let Some((_, counter)) = self.0.iter().find(|(other, _)| *other == value) {
            counter.increment(1);
        }
    }
}

impl ClientMeters {
    pub(crate) fn new(store: &'static str, core: Weak<Core>) -> Self {
        Self { store, core, kinds: [const { OnceLock::new() }; 3], traffic: OnceLock::new() }
    }

    /// Returns the meters of one name, or those that all objects of this kind share.
    pub(crate) fn of(&self, kind: Primitive, name: Option<&Name>) -> Meters {
        if self.store != "memory" {
            // Registered before anything is sent, on the thread that declares the object.
            self.traffic();
        }
        if name.is_some() {
            return Meters::register(self, kind, name.map(Name::as_str));
        }
        let meters = &self.kinds[kind as usize];
        meters.get_or_init(|| Meters::register(self, kind, None)).clone()
    }

    fn traffic(&self) -> &Traffic {
        self.traffic.get_or_init(|| Traffic::register(self.store))
    }

    /// A request with this many ids was sent.
    pub(crate) fn sent(&self, ids: usize) {
        let Traffic { requests, batch, .. } = self.traffic();
        guarded(|| {
            requests.increment(1);
            #[allow(clippy::cast_precision_loss)] // at most 256
            batch.record(ids as f64);
        });
    }

    /// The connection to a server is up again.
    pub(crate) fn reconnected(&self) {
        let reconnects = &self.traffic().reconnects;
        guarded(|| reconnects.increment(1));
    }
}

/// The meters of one kind of object, or of one object.
#[derive(Clone)]
pub(crate) struct Meters(Arc<Handles>);

struct Handles {
    acquires: Counters<&'static str>,
    wait: Histogram,
    hold: Histogram,
    losses: Counters<LossReason>,
    held: Gauge,
    waiting: Gauge,
    oldest: Gauge,
    renewals: Counters<&'static str>,
    renewal: Histogram,
    waiters: Arc<Waiters>,
    core: Weak<Core>,
    /// The target of the timer that updates the age of the oldest waiter.
    this: Weak<Self>,
    /// Whether that timer is set. It is set only while there are waiters.
    ticks: AtomicBool,
}

const LOSSES: [(LossReason, &str); 5] = [
    (LossReason::TtlEnded, "ttl_ended"),
    (LossReason::NotRenewed, "not_renewed"),
    (LossReason::Missing, "missing"),
    (LossReason::Released, "released"),
    (LossReason::Closed, "closed"),
];

impl Meters {
    pub(crate) const ON: bool = true;

    fn register(client: &ClientMeters, kind: Primitive, name: Option<&str>) -> Self {
        let mut labels = vec![Label::new("store", client.store), Label::new("kind", kind.as_str())];
        labels.extend(name.map(|name| Label::new("name", name.to_owned())));
        guarded(names::describe);
        let outcomes = |name, outcomes: &[&'static str]| {
            let values = outcomes.iter().map(|outcome| (*outcome, *outcome));
            Counters::register(name, &labels, "outcome", values)
        };
        Self(Arc::new_cyclic(|this| Handles {
            acquires: outcomes(names::ACQUIRES, &ACQUIRE_OUTCOMES),
            wait: histogram(names::WAIT_SECONDS, &labels),
            hold: histogram(names::HOLD_SECONDS, &labels),
            losses: Counters::register(names::LOSSES, &labels, "reason", LOSSES),
            held: gauge(names::HELD, &labels),
            waiting: gauge(names::WAITING, &labels),
            oldest: gauge(names::OLDEST_WAIT_SECONDS, &labels),
            renewals: outcomes(names::RENEWALS, &RENEWAL_OUTCOMES),
            renewal: histogram(names::RENEWAL_SECONDS, &labels),
            waiters: Waiters::shared(client.store, kind, name),
            core: client.core.clone(),
            this: this.clone(),
            ticks: AtomicBool::new(false),
        }))
    }

    /// Counts an acquire as waiting until the returned value is dropped.
    pub(crate) fn waits(&self, since: Moment) -> Waiting {
        let key = self.0.waiters.add(since);
        guarded(|| self.0.waiting.increment(1));
        self.0.tick();
        Waiting { meters: self.clone(), key }
    }

    pub(crate) fn record(&self, measurement: Measurement) {
        let handles = &*self.0;
        guarded(|| match measurement {
            Measurement::Acquired { outcome, waited } => {
                handles.acquires.increment(outcome);
                if outcome == "acquired" {
                    handles.wait.record(waited);
                }
            }
            Measurement::Held => handles.held.increment(1),
            Measurement::NoLongerHeld { held_for } => {
                handles.held.decrement(1);
                if let Some(held_for) = held_for {
                    handles.hold.record(held_for);
                }
            }
            Measurement::Lost(reason) => handles.losses.increment(reason),
            Measurement::Renewed { outcome, latency } => {
                handles.renewals.increment(outcome);
                if outcome != "failed" {
                    handles.renewal.record(latency);
                }
            }
        });
    }
}

impl fmt::Debug for Meters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meters").finish_non_exhaustive()
    }
}

impl Handles {
    /// Records the age of the oldest waiter.
    ///
    /// The recorder is called without a lock. So each thread checks afterwards whether its value is still right,
    /// and records again if it is not. The last value that is recorded is therefore right.
    fn record_age(&self) {
        loop {
            let (version, oldest) = self.waiters.oldest();
            let age = oldest.map_or(Duration::ZERO, |at| Moment::now().saturating_since(at));
            guarded(|| self.oldest.set(age));
            if self.waiters.oldest().0 == version {
                return;
            }
        }
    }

    /// Sets the timer, unless it is set. All meters tick at the same moments, so that the thread wakes up once for them.
    fn tick(&self) {
        if self.ticks.swap(true, Ordering::SeqCst) {
            return;
        }
        let Some(core) = self.core.upgrade() else { return };
        let at = (core.now().micros() + 1).next_multiple_of(TICK.micros());
        let target: Weak<dyn Timed> = self.this.clone();
        // Without the engine's thread, no acquire waits for long.
        let _ = core.set_timer(target, None, Some(Moment::from_micros(at)));
    }
}

impl Timed for Handles {
    fn fire(&self, _now: Moment) {
        // This comes first: a wait that begins from here on sets the timer again.
        self.ticks.store(false, Ordering::SeqCst);
        if self.waiters.oldest().1.is_some() {
            self.record_age();
            self.tick();
        }
    }
}

/// One acquire that waits.
#[derive(Debug)]
pub(crate) struct Waiting {
    meters: Meters,
    key: Key,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let first = self.meters.0.waiters.remove(self.key);
        guarded(|| self.meters.0.waiting.decrement(1));
        if first {
            self.meters.0.record_age();
        }
    }
}

/// The start of a wait, and a number that distinguishes waits that began at the same moment.
type Key = (Moment, u64);

/// All waits under the same labels, in all clients of this process.
#[derive(Default)]
struct Waiters(Mutex<(u64, BTreeSet<Key>)>);

/// The address of the recorder, the store, the kind and the name.
type Labels = (usize, &'static str, &'static str, Option<String>);

static ALL_WAITERS: LazyLock<Mutex<HashMap<Labels, Weak<Waiters>>>> = LazyLock::new(Mutex::default);

impl Waiters {
    fn shared(store: &'static str, kind: Primitive, name: Option<&str>) -> Arc<Self> {
        let recorder =
            ::metrics::with_recorder(|recorder| std::ptr::from_ref(recorder).cast::<()>().addr());
        let labels = (recorder, store, kind.as_str(), name.map(str::to_owned));
        let mut all = ALL_WAITERS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shared) = all.get(&labels).and_then(Weak::upgrade) {
            return shared;
        }
        all.retain(|_, waiters| waiters.strong_count() > 0);
        let new = Arc::new(Self::default());
        all.insert(labels, Arc::downgrade(&new));
        new
    }

    fn add(&self, since: Moment) -> Key {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let key = (since, NEXT.fetch_add(1, Ordering::Relaxed));
        let mut waiters = self.lock();
        waiters.1.insert(key);
        waiters.0 += u64::from(waiters.1.first() == Some(&key));
        key
    }

    /// Removes a wait. Returns whether it was the oldest.
    fn remove(&self, key: Key) -> bool {
        let mut waiters = self.lock();
        let first = waiters.1.first() == Some(&key);
        waiters.1.remove(&key);
        waiters.0 += u64::from(first);
        first
    }

    /// Returns a number that changes whenever the oldest wait changes, and since when the oldest waits.
    fn oldest(&self) -> (u64, Option<Moment>) {
        let waiters = self.lock();
        (waiters.0, waiters.1.first().map(|(since, _)| *since))
    }

    fn lock(&self) -> MutexGuard<'_, (u64, BTreeSet<Key>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
