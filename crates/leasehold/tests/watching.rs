//! Observers of semaphores and pools, and spans: they report everything once, and disturb nothing.

#![cfg(all(feature = "redis", feature = "local", target_os = "linux"))]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use leasehold::compat::lua_pool::LuaPool;
use leasehold::{
    AcquisitionId, Client, ErrorKind, EventResult, LossReason, Observer, PoolEvent, PoolOperation,
    SemaphoreEvent, SemaphoreOperation,
};
use testkit::by_hand::ByHand;
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

/// Returns an observer, and the events that it has received.
fn listener<E: Clone + Send + 'static>() -> (Observer<E>, Arc<Mutex<Vec<E>>>) {
    let events = Arc::new(Mutex::new(Vec::new()));
    let list = events.clone();
    (Observer::new(move |event: &E| list.lock().unwrap().push(event.clone())), events)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}

/// Returns the events of one acquisition.
fn of(
    events: &Mutex<Vec<SemaphoreEvent>>,
    id: AcquisitionId,
) -> Vec<(SemaphoreOperation, EventResult)> {
    let events = locked(events);
    let matching = events.iter().filter(|event| event.id == id);
    matching.map(|event| (event.operation, event.result)).collect()
}

#[tokio::test]
async fn an_observer_of_a_semaphore_is_told_how_everything_ends() {
    use SemaphoreOperation::{Acquire, Lose, Release};
    for client in &clients().await.0 {
        let (observer, events) = listener();
        let semaphore = client.semaphore("observed", 1).observer(observer).build().unwrap();

        let permit = deadline(semaphore.acquire()).await.unwrap();
        let held = permit.id();
        assert_eq!(of(&events, held), [(Acquire, EventResult::Ok)]);

        deadline(semaphore.try_acquire()).await.unwrap().ok_or(()).unwrap_err();
        assert_eq!(locked(&events).last().unwrap().result, EventResult::Full);

        let late = semaphore.acquire().within(Duration::from_millis(20));
        let id = late.id();
        deadline(late).await.unwrap_err();
        let timed_out = EventResult::Error(ErrorKind::AcquisitionTimeout);
        assert_eq!(of(&events, id), [(Acquire, timed_out)]);

        let acquire = semaphore.acquire();
        let id = acquire.id();
        let mut cancelled = ByHand::new(acquire);
        assert!(cancelled.poll().is_none());
        drop(cancelled);
        assert_eq!(of(&events, id), [(Acquire, EventResult::Cancelled)]);

        deadline(permit.release()).await.unwrap();
        assert_eq!(of(&events, held), [(Acquire, EventResult::Ok), (Release, EventResult::Ok)]);

        let permit = deadline(semaphore.acquire()).await.unwrap();
        let id = permit.id();
        deadline(client.close()).await.unwrap();
        drop(permit);
        let lost = EventResult::Lost(LossReason::Closed);
        assert_eq!(of(&events, id), [(Acquire, EventResult::Ok), (Lose, lost)]);
        for event in &*locked(&events) {
            assert_eq!(event.name, "observed");
            assert_eq!(event.waited.is_some(), event.operation == Acquire, "{event:?}");
            assert_eq!(event.held_for.is_some(), event.operation != Acquire, "{event:?}");
        }
    }
}

#[tokio::test]
async fn an_observer_of_a_pool_is_told_how_everything_ends() {
    use PoolOperation::{Acquire, Lose, Release, Renew};
    for client in &clients().await.0 {
        let (observer, events) = listener::<PoolEvent>();
        let pool = client.pool("observed", 1).observer(observer).lease(Duration::from_secs(1));
        let pool = pool.build().unwrap();
        deadline(LuaPool::new(pool.clone()).acquire("raw")).await.unwrap();
        deadline(pool.extend("raw")).await.unwrap();
        deadline(pool.try_acquire("other")).await.unwrap();
        deadline(pool.extend("other")).await.unwrap();
        deadline(pool.release("raw")).await.unwrap();
        let reported: Vec<_> =
            locked(&events).drain(..).map(|e| (e.operation, e.result, e.instance_id)).collect();
        let raw = |operation| (operation, EventResult::Ok, "raw".to_owned());
        let other = |operation, result| (operation, result, "other".to_owned());
        let expected = [
            raw(Acquire),
            raw(Renew),
            other(Acquire, EventResult::Full),
            other(Renew, EventResult::NotHeld),
            raw(Release),
        ];
        assert_eq!(reported, expected);

        let lease = deadline(pool.acquire("guard")).await.unwrap();
        eventually(async || locked(&events).iter().any(|event| event.operation == Renew)).await;
        deadline(lease.release()).await.unwrap();
        let lease = deadline(pool.try_acquire("guard")).await.unwrap().unwrap();
        deadline(client.close()).await.unwrap();
        drop(lease);
        let reported: Vec<_> = locked(&events)
            .drain(..)
            .filter(|event| event.operation != Renew)
            .map(|event| (event.operation, event.result, event.held_for.is_some()))
            .collect();
        let expected = [
            (Acquire, EventResult::Ok, false),
            (Release, EventResult::Ok, true),
            (Acquire, EventResult::Ok, false),
            (Lose, EventResult::Lost(LossReason::Closed), true),
        ];
        assert_eq!(reported, expected);
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
            let old = u64::MAX - all.len() as u64;
            all.insert(old, seen);
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
