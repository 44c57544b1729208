//! Collects the `tracing` events of the library.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Mutex, Once};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

/// One event: its level, its message and its fields as text.
#[derive(Clone, Debug)]
pub struct RecordedEvent {
    pub level: Level,
    pub message: String,
    pub fields: BTreeMap<&'static str, String>,
}

static EVENTS: Mutex<Vec<RecordedEvent>> = Mutex::new(Vec::new());

/// Collects events from now on, of the whole process, because the engine logs on its own thread.
pub fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let subscriber = tracing_subscriber::registry().with(Listener);
        tracing::subscriber::set_global_default(subscriber).expect("no other subscriber");
    });
}

/// Returns the events about this name since [`listen`].
#[must_use]
pub fn about(name: &str) -> Vec<RecordedEvent> {
    let events = EVENTS.lock().unwrap();
    let about =
        |event: &&RecordedEvent| event.fields.get("name").is_some_and(|value| value == name);
    events.iter().filter(about).cloned().collect()
}

/// Returns the events since [`listen`] whose message contains `words`.
#[must_use]
pub fn saying(words: &str) -> Vec<RecordedEvent> {
    let events = EVENTS.lock().unwrap();
    events.iter().filter(|event| event.message.contains(words)).cloned().collect()
}

struct Listener;

impl<S: Subscriber> Layer<S> for Listener {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let level = *event.metadata().level();
        let mut recorded = RecordedEvent { level, message: String::new(), fields: BTreeMap::new() };
        event.record(&mut recorded);
        EVENTS.lock().unwrap().push(recorded);
    }
}

impl Visit for RecordedEvent {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let value = format!("{value:?}");
        match field.name() {
            "message" => self.message = value,
            name => drop(self.fields.insert(name, value)),
        }
    }
}
