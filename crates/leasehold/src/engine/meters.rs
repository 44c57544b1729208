//! The metrics of one client. Without the feature `metrics`, all of this is empty.
//!
//! The handles are registered once: for each client, for each kind of object that it declares, and for each semaphore,
//! lock or pool that asked for its name as a label. So recording needs no lookup. The names of the metrics are in
//! `crate::metrics`.

#[cfg(feature = "metrics")]
pub(crate) use on::{ClientMeters, Meters, Waiting};

#[cfg(not(feature = "metrics"))]
pub(crate) use off::{ClientMeters, Meters, Waiting};

/// The kind of object that is acquired.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Semaphore,
    Lock,
    Pool,
}

impl Kind {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Semaphore => "semaphore",
            Self::Lock => "lock",
            Self::Pool => "pool",
        }
    }
}

/// The outcome of an acquire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    Acquired,
    /// A try found nothing free.
    Full,
    TimedOut,
    Cancelled,
    Closed,
    /// Granted, but lost before the caller saw it.
    Lost,
    Unavailable,
    /// The store does not permit it.
    Denied,
    Error,
}

impl Outcome {
    #[cfg(feature = "metrics")]
    const ALL: [Self; 9] = [
        Self::Acquired,
        Self::Full,
        Self::TimedOut,
        Self::Cancelled,
        Self::Closed,
        Self::Lost,
        Self::Unavailable,
        Self::Denied,
        Self::Error,
    ];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Acquired => "acquired",
            Self::Full => "full",
            Self::TimedOut => "timed_out",
            Self::Cancelled => "cancelled",
            Self::Closed => "closed",
            Self::Lost => "lost",
            Self::Unavailable => "unavailable",
            Self::Denied => "denied",
            Self::Error => "error",
        }
    }
}

impl From<&crate::Error> for Outcome {
    fn from(error: &crate::Error) -> Self {
        use crate::Error;
        match error {
            Error::TimedOut { .. } => Self::TimedOut,
            Error::Closed => Self::Closed,
            Error::Lost { .. } => Self::Lost,
            Error::Unavailable { .. } => Self::Unavailable,
            Error::Refused { .. } => Self::Denied,
            Error::InvalidArgument { .. } | Error::Stopped { .. } | Error::Internal { .. } => {
                Self::Error
            }
        }
    }
}

/// The outcome of a renewal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Renewal {
    Renewed,
    /// The store no longer has the lease.
    Missing,
    /// The store did not answer, or refused the renewal.
    Failed,
}

impl Renewal {
    #[cfg(feature = "metrics")]
    const ALL: [Self; 3] = [Self::Renewed, Self::Missing, Self::Failed];

    #[cfg(feature = "metrics")]
    fn as_str(self) -> &'static str {
        match self {
            Self::Renewed => "renewed",
            Self::Missing => "missing",
            Self::Failed => "failed",
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod off {
    // The same functions as with the feature.
    #![allow(clippy::unused_self)]

    use std::sync::Weak;
    use std::time::Duration;

    use super::{Kind, Outcome, Renewal};
    use crate::LossReason;
    use crate::clock::Moment;
    use crate::engine::Core;
    use crate::name::Name;

    #[derive(Debug)]
    pub(crate) struct ClientMeters;

    impl ClientMeters {
        pub(crate) fn new(_store: &'static str, _core: Weak<Core>) -> Self {
            Self
        }

        #[inline]
        pub(crate) fn of(&self, _kind: Kind, _name: Option<&Name>) -> Meters {
            Meters
        }

        #[inline]
        pub(crate) fn sent(&self, _ids: usize) {}

        #[inline]
        pub(crate) fn reconnected(&self) {}
    }

    #[derive(Clone, Debug)]
    pub(crate) struct Meters;

    impl Meters {
        pub(crate) const ON: bool = false;

        #[inline]
        pub(crate) fn waits(&self, _since: Moment) -> Waiting {
            Waiting
        }

        #[inline]
        pub(crate) fn ended(&self, _outcome: Outcome, _waited: Duration) {}

        #[inline]
        pub(crate) fn holds(&self) {}

        #[inline]
        pub(crate) fn holds_no_more(&self, _held_for: Option<Duration>) {}

        #[inline]
        pub(crate) fn lost(&self, _reason: LossReason) {}

        #[inline]
        pub(crate) fn renewed(&self, _outcome: Renewal, _latency: Duration) {}
    }

    #[derive(Debug)]
    pub(crate) struct Waiting;
}

#[cfg(feature = "metrics")]
mod on {
    use std::collections::{BTreeSet, HashMap};
    use std::fmt;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
    use std::time::Duration;

    use ::metrics::{Counter, Gauge, Histogram, Label};

    use super::{Kind, Outcome, Renewal};
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
        ages: Arc<Ages>,
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
            let mut traffic = Self {
                requests: Counter::noop(),
                batch: Histogram::noop(),
                reconnects: Counter::noop(),
            };
            guarded(|| {
                names::describe();
                traffic = Self {
                    requests: ::metrics::counter!(names::REQUESTS, "store" => store),
                    batch: ::metrics::histogram!(names::BATCH_SIZE, "store" => store),
                    reconnects: ::metrics::counter!(names::RECONNECTS, "store" => store),
                };
            });
            traffic
        }
    }

    impl ClientMeters {
        pub(crate) fn new(store: &'static str, core: Weak<Core>) -> Self {
            let ages = Arc::new_cyclic(|this: &Weak<Ages>| Ages {
                this: this.clone(),
                core,
                armed: AtomicBool::new(false),
                all: Mutex::default(),
            });
            Self { store, ages, kinds: [const { OnceLock::new() }; 3], traffic: OnceLock::new() }
        }

        /// Returns the meters of one name, or those that all objects of this kind share.
        pub(crate) fn of(&self, kind: Kind, name: Option<&Name>) -> Meters {
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
        acquires: [Counter; Outcome::ALL.len()],
        wait: Histogram,
        hold: Histogram,
        losses: [Counter; LOSSES.len()],
        held: Gauge,
        waiting: Gauge,
        oldest: Gauge,
        renewals: [Counter; Renewal::ALL.len()],
        renewal: Histogram,
        waiters: Arc<Waiters>,
        /// Weak, because [`Ages`] has a list of meters.
        ages: Weak<Ages>,
        /// Whether these meters are in the list of [`Ages`].
        ticks: AtomicBool,
    }

    const LOSSES: [LossReason; 6] = [
        LossReason::TtlEnded,
        LossReason::LeaseEnded,
        LossReason::NotRenewed,
        LossReason::Missing,
        LossReason::Released,
        LossReason::Closed,
    ];

    fn reason(loss: LossReason) -> &'static str {
        match loss {
            LossReason::TtlEnded => "ttl_ended",
            LossReason::LeaseEnded => "lease_ended",
            LossReason::NotRenewed => "not_renewed",
            LossReason::Missing => "missing",
            LossReason::Released => "released",
            LossReason::Closed => "closed",
        }
    }

    impl Meters {
        pub(crate) const ON: bool = true;

        fn register(client: &ClientMeters, kind: Kind, name: Option<&str>) -> Self {
            let mut labels =
                vec![Label::new("store", client.store), Label::new("kind", kind.as_str())];
            labels.extend(name.map(|name| Label::new("name", name.to_owned())));
            let waiters = Waiters::shared(client.store, kind, name);
            let mut handles = Handles::noop(waiters, Arc::downgrade(&client.ages));
            guarded(|| handles.register(&labels));
            Self(Arc::new(handles))
        }

        /// Counts an acquire as waiting until the returned value is dropped.
        pub(crate) fn waits(&self, since: Moment) -> Waiting {
            let key = self.0.waiters.add(since);
            guarded(|| self.0.waiting.increment(1));
            if let Some(ages) = self.0.ages.upgrade() {
                ages.follow(self);
            }
            Waiting { meters: self.clone(), key }
        }

        /// An acquire has ended.
        pub(crate) fn ended(&self, outcome: Outcome, waited: Duration) {
            guarded(|| {
                self.0.acquires[outcome as usize].increment(1);
                if outcome == Outcome::Acquired {
                    self.0.wait.record(waited);
                }
            });
        }

        pub(crate) fn holds(&self) {
            guarded(|| self.0.held.increment(1));
        }

        /// Something is no longer held. `held_for` is `None` if it stays held but this client no longer tracks it.
        pub(crate) fn holds_no_more(&self, held_for: Option<Duration>) {
            guarded(|| {
                self.0.held.decrement(1);
                if let Some(held_for) = held_for {
                    self.0.hold.record(held_for);
                }
            });
        }

        pub(crate) fn lost(&self, loss: LossReason) {
            let index = LOSSES.iter().position(|own| *own == loss);
            if let Some(index) = index {
                guarded(|| self.0.losses[index].increment(1));
            }
        }

        pub(crate) fn renewed(&self, outcome: Renewal, latency: Duration) {
            guarded(|| {
                self.0.renewals[outcome as usize].increment(1);
                if outcome != Renewal::Failed {
                    self.0.renewal.record(latency);
                }
            });
        }

        /// Records the age of the oldest waiter.
        ///
        /// The recorder is called without a lock. So each thread checks afterwards whether its value is still right,
        /// and records again if it is not. The last value that is recorded is therefore right.
        fn record_age(&self) {
            loop {
                let (version, oldest) = self.0.waiters.oldest();
                let age = oldest.map_or(Duration::ZERO, |at| Moment::now().saturating_since(at));
                guarded(|| self.0.oldest.set(age));
                if self.0.waiters.oldest().0 == version {
                    return;
                }
            }
        }
    }

    impl fmt::Debug for Meters {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("Meters").finish_non_exhaustive()
        }
    }

    impl Handles {
        /// Handles that record nothing. They stay in place if the recorder panics while the real ones are registered.
        fn noop(waiters: Arc<Waiters>, ages: Weak<Ages>) -> Self {
            Self {
                acquires: Outcome::ALL.map(|_| Counter::noop()),
                wait: Histogram::noop(),
                hold: Histogram::noop(),
                losses: LOSSES.map(|_| Counter::noop()),
                held: Gauge::noop(),
                waiting: Gauge::noop(),
                oldest: Gauge::noop(),
                renewals: Renewal::ALL.map(|_| Counter::noop()),
                renewal: Histogram::noop(),
                waiters,
                ages,
                ticks: AtomicBool::new(false),
            }
        }

        fn register(&mut self, labels: &[Label]) {
            names::describe();
            let labels = labels.to_vec();
            let with = |key, value| [&labels[..], &[Label::new(key, value)]].concat();
            self.acquires = Outcome::ALL.map(|outcome| {
                ::metrics::counter!(names::ACQUIRES, with("outcome", outcome.as_str()))
            });
            self.losses =
                LOSSES.map(|loss| ::metrics::counter!(names::LOSSES, with("reason", reason(loss))));
            self.renewals = Renewal::ALL.map(|outcome| {
                ::metrics::counter!(names::RENEWALS, with("outcome", outcome.as_str()))
            });
            self.wait = ::metrics::histogram!(names::WAIT_SECONDS, labels.clone());
            self.hold = ::metrics::histogram!(names::HOLD_SECONDS, labels.clone());
            self.renewal = ::metrics::histogram!(names::RENEWAL_SECONDS, labels.clone());
            self.held = ::metrics::gauge!(names::HELD, labels.clone());
            self.waiting = ::metrics::gauge!(names::WAITING, labels.clone());
            self.oldest = ::metrics::gauge!(names::OLDEST_WAIT_SECONDS, labels.clone());
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
                self.meters.record_age();
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

    static ALL_WAITERS: LazyLock<Mutex<HashMap<Labels, Weak<Waiters>>>> =
        LazyLock::new(Mutex::default);

    impl Waiters {
        fn shared(store: &'static str, kind: Kind, name: Option<&str>) -> Arc<Self> {
            let recorder = ::metrics::with_recorder(|recorder| {
                std::ptr::from_ref(recorder).cast::<()>().addr()
            });
            let labels = (recorder, store, kind.as_str(), name.map(str::to_owned));
            let mut all = ALL_WAITERS.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(known) = all.get(&labels).and_then(Weak::upgrade) {
                return known;
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

    /// The timer of a client that updates the age of the oldest waiter. It is set only while there are waiters.
    struct Ages {
        this: Weak<Self>,
        core: Weak<Core>,
        armed: AtomicBool,
        /// The meters under which this client waits, or waited until recently.
        all: Mutex<Vec<Meters>>,
    }

    impl Ages {
        fn all(&self) -> MutexGuard<'_, Vec<Meters>> {
            self.all.lock().unwrap_or_else(PoisonError::into_inner)
        }

        fn follow(&self, meters: &Meters) {
            if meters.0.ticks.swap(true, Ordering::SeqCst) {
                return;
            }
            self.all().push(meters.clone());
            if !self.armed.swap(true, Ordering::SeqCst) {
                self.set_timer();
            }
        }

        fn set_timer(&self) {
            let Some(core) = self.core.upgrade() else { return };
            let target: Weak<dyn Timed> = self.this.clone();
            // Without the engine's thread, no acquire waits for long.
            let _ = core.set_timer(target, None, Some(core.now() + TICK));
        }
    }

    impl Timed for Ages {
        fn fire(&self, _now: Moment) {
            self.armed.store(false, Ordering::SeqCst);
            let all = std::mem::take(&mut *self.all());
            for meters in all {
                // This comes first: a wait that begins from here on adds the meters to the list again.
                meters.0.ticks.store(false, Ordering::SeqCst);
                if meters.0.waiters.oldest().1.is_some() {
                    meters.record_age();
                    self.follow(&meters);
                }
            }
        }
    }
}
