//! Observers and spans: they report everything once, and disturb nothing.

#![cfg(all(feature = "redis", feature = "local", target_os = "linux"))]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use leasehold::{
    Client, Error, Event, Lock, LockGuard, Locks, LossReason, Observer, Operation, Outcome, Permit,
    Pool, PoolLease, Primitive, Semaphore,
};
use testkit::by_hand::{ByHand, poll_once};
use testkit::local_store::LocalStore;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};
use tracing::field::{Field, Visit};
use tracing::{Subscriber, span};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// A TTL or a lease that a test waits for.
const SHORT: Duration = Duration::from_millis(400);

/// The stores, each with a client.
async fn clients() -> (Vec<Client>, (LocalStore, RedisServer)) {
    let (local, redis) = (LocalStore::new(), RedisServer::start());
    let clients = vec![
        Client::memory(),
        deadline(Client::local(local.path())).await.unwrap(),
        deadline(Client::redis(&redis.url())).await.unwrap(),
    ];
    (clients, (local, redis))
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}

/// A semaphore, a lock or a pool that grants one permit, lock or pool lease at a time, and the events of its observer.
struct Observed {
    resource: Resource,
    client: Client,
    events: Arc<Mutex<Vec<Event>>>,
}

enum Resource {
    Semaphore(Semaphore),
    Lock(Lock, Locks),
    Pool(Pool),
}

enum Guard {
    Permit(Permit),
    Lock(LockGuard),
    Lease(PoolLease),
}

/// How long an acquire waits if nothing becomes free.
const PATIENCE: Duration = Duration::from_millis(300);

impl Observed {
    fn new(client: &Client, primitive: Primitive) -> Self {
        let events = Arc::new(Mutex::new(Vec::new()));
        let list = events.clone();
        let observer = Observer::new(move |event| locked(&list).push(event.clone())).include_raw();
        let lease = Duration::from_secs(1);
        let resource = match primitive {
            Primitive::Semaphore => {
                let semaphore = client.semaphore("observed", 1).observer(observer).lease(lease);
                Resource::Semaphore(semaphore.within(PATIENCE).build().unwrap())
            }
            Primitive::Lock => {
                let locks = client.locks().observer(observer.clone());
                let lock = client.lock("observed").observer(observer).lease(lease);
                Resource::Lock(lock.within(PATIENCE).build().unwrap(), locks)
            }
            Primitive::Pool => {
                let pool = client.pool("observed", 1).observer(observer).lease(lease);
                Resource::Pool(pool.within(PATIENCE).build().unwrap())
            }
            other => panic!("{other}"),
        };
        Self { resource, client: client.clone(), events }
    }

    async fn acquire(&self) -> Result<Guard, Error> {
        match &self.resource {
            Resource::Semaphore(semaphore) => semaphore.acquire().await.map(Guard::Permit),
            Resource::Lock(lock, _) => lock.acquire().await.map(Guard::Lock),
            Resource::Pool(pool) => pool.acquire("one").await.map(Guard::Lease),
        }
    }

    async fn try_acquire(&self) -> Option<Guard> {
        match &self.resource {
            Resource::Semaphore(semaphore) => {
                semaphore.try_acquire().await.unwrap().map(Guard::Permit)
            }
            Resource::Lock(lock, _) => lock.try_acquire().await.unwrap().map(Guard::Lock),
            Resource::Pool(pool) => pool.try_acquire("another").await.unwrap().map(Guard::Lease),
        }
    }

    async fn release_by_id(&self, id: &str) {
        match &self.resource {
            Resource::Semaphore(semaphore) => {
                semaphore.release(&id.parse().unwrap()).await.unwrap();
            }
            Resource::Lock(_, locks) => {
                locks.release(&id.parse().unwrap()).await.unwrap();
            }
            Resource::Pool(pool) => {
                pool.release(id).await.unwrap();
            }
        }
    }

    /// Returns what was reported since the last call, without renewals.
    fn reported(&self) -> Vec<(Operation, &'static str)> {
        let events: Vec<_> = locked(&self.events).drain(..).collect();
        for event in &events {
            assert_eq!(event.waited.is_some(), event.operation == Operation::Acquire, "{event:?}");
            assert!(event.id.is_some(), "{event:?}");
        }
        let other = events.iter().filter(|event| event.operation != Operation::Renew);
        other.map(|event| (event.operation, word(&event.outcome))).collect()
    }
}

impl Guard {
    fn id(&self) -> String {
        match self {
            Self::Permit(permit) => permit.id().to_string(),
            Self::Lock(guard) => guard.id().to_string(),
            Self::Lease(lease) => lease.id().to_owned(),
        }
    }

    async fn release(self) {
        let released = match self {
            Self::Permit(permit) => permit.release().await,
            Self::Lock(guard) => guard.release().await,
            Self::Lease(lease) => lease.release().await,
        };
        assert!(released.unwrap());
    }
}

fn word(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Done => "done",
        Outcome::Full => "full",
        Outcome::NotHeld => "not held",
        Outcome::Cancelled => "cancelled",
        Outcome::Lost(LossReason::Released) => "lost: released",
        Outcome::Lost(LossReason::Closed) => "lost: closed",
        Outcome::Failed(Error::TimedOut { .. }) => "timed out",
        Outcome::Failed(Error::Closed) => "closed",
        other => panic!("{other:?}"),
    }
}

/// What happens to an object that grants one thing at a time.
#[derive(Clone, Copy, Debug)]
enum Step {
    Acquire,
    /// What is held is renewed in the background.
    Renew,
    /// While it is held.
    TryInVain,
    WaitInVain,
    DropTheWait,
    Release,
    /// While nothing is held.
    ReleaseById,
    /// Without its guard.
    ReleaseHeldById,
    Close,
    AcquireAfterClose,
}

/// What an observer is told of each step, in this order. It is the same for all three primitives.
const TABLE: [(Step, &[(Operation, &str)]); 12] = {
    use Operation::{Acquire, Lose, Release};
    [
        (Step::Acquire, &[(Acquire, "done")]),
        (Step::TryInVain, &[(Acquire, "full")]),
        (Step::WaitInVain, &[(Acquire, "timed out")]),
        (Step::DropTheWait, &[(Acquire, "cancelled")]),
        (Step::Renew, &[]),
        (Step::Release, &[(Release, "done")]),
        (Step::ReleaseById, &[(Release, "not held")]),
        (Step::Acquire, &[(Acquire, "done")]),
        (Step::ReleaseHeldById, &[(Release, "done")]),
        (Step::Acquire, &[(Acquire, "done")]),
        (Step::Close, &[(Lose, "lost: closed")]),
        (Step::AcquireAfterClose, &[(Acquire, "closed")]),
    ]
};

async fn follow_the_table(client: &Client, primitive: Primitive, renews: bool) {
    let observed = Observed::new(client, primitive);
    let (mut held, mut last_id) = (None, String::new());
    for (step, expected) in TABLE {
        match step {
            Step::Acquire => {
                let guard = deadline(observed.acquire()).await.unwrap();
                last_id = guard.id();
                held = Some(guard);
            }
            Step::Renew => {
                let is_renewed = |event: &Event| {
                    event.operation == Operation::Renew && matches!(event.outcome, Outcome::Done)
                };
                if renews {
                    eventually(async || locked(&observed.events).iter().any(is_renewed)).await;
                }
            }
            Step::TryInVain => assert!(deadline(observed.try_acquire()).await.is_none()),
            // An instance that holds a pool lease shares it, so another client waits for it.
            Step::WaitInVain | Step::DropTheWait if primitive == Primitive::Pool => {
                let Resource::Pool(pool) = &observed.resource else { panic!() };
                let mut waiting = Box::pin(pool.acquire("another"));
                if matches!(step, Step::WaitInVain) {
                    deadline(waiting).await.unwrap_err();
                } else {
                    assert!(poll_once(waiting.as_mut()).await.is_none());
                }
            }
            Step::WaitInVain | Step::AcquireAfterClose => {
                assert!(deadline(observed.acquire()).await.is_err());
            }
            Step::DropTheWait => {
                let mut waiting = Box::pin(observed.acquire());
                assert!(poll_once(waiting.as_mut()).await.is_none());
            }
            Step::Release => deadline(held.take().unwrap().release()).await,
            Step::ReleaseById => deadline(observed.release_by_id(&last_id)).await,
            Step::ReleaseHeldById => match held.take().unwrap() {
                // Without its guard, because the guard of a permit would report a loss.
                Guard::Permit(permit) => {
                    deadline(observed.release_by_id(&permit.detach().to_string())).await;
                }
                Guard::Lock(guard) => {
                    deadline(observed.release_by_id(&guard.detach().id.to_string())).await;
                }
                Guard::Lease(lease) => deadline(observed.release_by_id(&lease.detach())).await,
            },
            Step::Close => deadline(observed.client.close()).await.unwrap(),
        }
        let mut reported = observed.reported();
        if matches!(step, Step::ReleaseHeldById) {
            // The client tracks a detached permit, so it reports that the permit is lost, too.
            reported.retain(|(operation, _)| *operation != Operation::Lose);
        }
        assert_eq!(reported, expected, "{primitive}: {step:?}");
    }
}

#[tokio::test]
async fn an_observer_receives_the_outcome_of_every_operation() {
    let (local, redis) = (LocalStore::new(), RedisServer::start());
    for primitive in [Primitive::Semaphore, Primitive::Lock, Primitive::Pool] {
        let memory = Client::memory();
        // A permit of these stores lives as long as its process, so it is not renewed.
        let renews = primitive != Primitive::Semaphore;
        follow_the_table(&memory, primitive, renews).await;
        let local = deadline(Client::local(local.path())).await.unwrap();
        follow_the_table(&local, primitive, renews).await;
        let redis = deadline(Client::redis(&redis.url())).await.unwrap();
        follow_the_table(&redis, primitive, true).await;
    }
}

#[tokio::test]
async fn an_observer_that_panics_is_in_nobodys_way() {
    for client in &clients().await.0 {
        let panics = || std::panic::resume_unwind(Box::new("on purpose"));
        let semaphore = client.semaphore("panics", 1).lease(SHORT);
        let semaphore = semaphore.observer(Observer::new(move |_| panics())).build().unwrap();
        let pool = client.pool("panics", 1).lease(Duration::from_secs(1));
        let pool = pool.observer(Observer::new(move |_| panics())).build().unwrap();
        let permit = deadline(semaphore.acquire()).await.unwrap();
        let lease = deadline(pool.acquire("i")).await.unwrap();
        let waiting = tokio::spawn(semaphore.acquire());
        let begun = Instant::now();
        let is_renewed = |until| until > begun + 2 * SHORT;
        eventually(async || permit.valid_until().is_none_or(is_renewed)).await;
        permit.check().unwrap();
        lease.check().unwrap();
        drop(permit);
        let permit = deadline(waiting).await.unwrap().unwrap();
        deadline(lease.release()).await.unwrap();
        deadline(client.close()).await.unwrap();
        permit.check().unwrap_err();
    }
}

/// One span, with its fields as text, and whether it was closed.
#[derive(Clone, Debug, Default)]
struct Seen {
    span: &'static str,
    fields: BTreeMap<&'static str, String>,
    events: Vec<String>,
    event_fields: Vec<BTreeMap<&'static str, String>>,
    closed: bool,
}

impl Visit for Seen {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.fields.insert(field.name(), format!("{value:?}").trim_matches('"').to_owned());
    }
}

/// The spans by their ids.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<BTreeMap<u64, Seen>>>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Spans {
    fn on_new_span(&self, attributes: &span::Attributes<'_>, id: &span::Id, _: Context<'_, S>) {
        let mut seen = Seen { span: attributes.metadata().name(), ..Seen::default() };
        attributes.record(&mut seen);
        locked(&self.0).insert(id.into_u64(), seen);
    }

    fn on_record(&self, id: &span::Id, values: &span::Record<'_>, _: Context<'_, S>) {
        if let Some(seen) = locked(&self.0).get_mut(&id.into_u64()) {
            values.record(seen);
        }
    }

    fn on_event(&self, event: &tracing::Event<'_>, context: Context<'_, S>) {
        let Some(span) = context.event_span(event) else { return };
        let mut recorded = Seen::default();
        event.record(&mut recorded);
        if let Some(seen) = locked(&self.0).get_mut(&span.id().into_u64()) {
            seen.events.extend(recorded.fields.remove("message"));
            seen.event_fields.push(recorded.fields);
        }
    }

    fn on_close(&self, id: span::Id, _: Context<'_, S>) {
        // The registry reuses the id of a closed span.
        let mut all = locked(&self.0);
        if let Some(mut seen) = all.remove(&id.into_u64()) {
            seen.closed = true;
            let closed = all.values().filter(|seen| seen.closed).count() as u64;
            all.insert(u64::MAX - closed, seen);
        }
    }
}

impl Spans {
    /// Returns the spans of that name with these fields.
    fn find(&self, span: &str, fields: &[(&str, &str)]) -> Vec<Seen> {
        let all = locked(&self.0);
        let matches = |seen: &&Seen| {
            seen.span == span
                && fields
                    .iter()
                    .all(|(key, value)| seen.fields.get(key).is_some_and(|field| field == value))
        };
        all.values().filter(matches).cloned().collect()
    }
}

/// On the memory store, where everything except the end of a TTL happens on the calling thread.
#[tokio::test]
async fn an_acquire_and_a_hold_are_a_span_each() {
    let spans = Spans::default();
    let subscriber = tracing_subscriber::registry().with(spans.clone());
    let _listening = tracing::subscriber::set_default(subscriber);
    let client = Client::memory();
    let semaphore = client.semaphore("spans", 2).build().unwrap();

    let permit = deadline(semaphore.acquire().weight(2)).await.unwrap();
    let id = permit.id().to_string();
    let acquired =
        [("name", "spans"), ("kind", "semaphore"), ("weight", "2"), ("outcome", "acquired")];
    let seen = spans.find("leasehold.acquire", &acquired);
    assert_eq!(seen.len(), 1);
    assert!(seen[0].closed && seen[0].events == ["permit acquired"], "{seen:?}");
    let fence = permit.fence().to_string();
    let held = [("name", "spans"), ("id", id.as_str()), ("fence", fence.as_str())];
    let seen = spans.find("leasehold.hold", &held);
    assert_eq!(seen.len(), 1);
    assert!(!seen[0].closed, "{seen:?}");

    let mut waiting = ByHand::new(semaphore.acquire());
    assert!(waiting.poll().is_none());
    drop(waiting);
    let cancelled = spans.find("leasehold.acquire", &[("outcome", "cancelled"), ("weight", "1")]);
    assert!(cancelled.len() == 1 && cancelled[0].closed, "{cancelled:?}");

    drop(permit);
    let seen = spans.find("leasehold.hold", &[("id", &id), ("ended", "released")]);
    assert!(seen.len() == 1 && seen[0].closed, "{seen:?}");
    assert_eq!(seen[0].events, ["permit released"]);

    let permit = deadline(semaphore.acquire()).await.unwrap();
    deadline(semaphore.release(&permit.id())).await.unwrap();
    let id = permit.id().to_string();
    let lost = spans.find("leasehold.hold", &[("id", &id), ("ended", "lost: it was released")]);
    assert!(lost.len() == 1 && lost[0].closed, "{lost:?}");
    assert_eq!(lost[0].events, ["permit lost"]);
    drop(permit);

    // A key and a lock id may be secrets.
    let guard = deadline(client.lock("invoice:42").build().unwrap().acquire()).await.unwrap();
    let lock_id = guard.id().to_string();
    drop(guard);
    let seen = spans.find("leasehold.hold", &[("kind", "lock"), ("ended", "released")]);
    assert!(seen.len() == 1 && seen[0].closed, "{seen:?}");
    assert_eq!(seen[0].events, ["lock released"]);
    let seen = spans.find("leasehold.acquire", &[("kind", "lock"), ("outcome", "acquired")]);
    assert_eq!(seen[0].events, ["lock acquired"]);

    drop(deadline(client.pool("spans", 1).build().unwrap().acquire("one")).await.unwrap());
    let seen = spans.find("leasehold.acquire", &[("kind", "pool"), ("outcome", "acquired")]);
    assert_eq!(seen[0].events, ["pool lease acquired"]);
    let seen = spans.find("leasehold.hold", &[("kind", "pool"), ("id", "one")]);
    assert_eq!(seen[0].events, ["pool lease released"]);

    let guard = deadline(client.lock("invoice:43").build().unwrap().acquire()).await.unwrap();
    let lost_id = guard.id().to_string();
    assert!(deadline(client.locks().release(&guard.id())).await.unwrap());
    let error = deadline(guard.extend(SHORT)).await.unwrap_err();
    let errors = format!("{error} {error:?} {guard:?}");
    assert!(!errors.contains(&lost_id), "{errors}");
    let seen = spans.find("leasehold.hold", &[("kind", "lock")]);
    assert!(seen.iter().any(|seen| seen.events == ["lock lost"]), "{seen:?}");
    drop(guard);

    let all = format!("{:?}", locked(&spans.0));
    assert!(!all.contains("invoice"), "{all}");
    assert!(!all.contains(&lock_id) && !all.contains(&lost_id), "{all}");
    let open: Vec<_> = locked(&spans.0).values().filter(|seen| !seen.closed).cloned().collect();
    assert!(open.is_empty(), "{open:?}");
}
