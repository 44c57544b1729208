//! The metrics on every store: the tests record with a real exporter and read what it renders.
//!
//! Each test has its own recorder, which counts what is declared under [`Recorded::declare`].

#![cfg(all(feature = "redis", feature = "local", target_os = "linux"))]

use std::time::Duration;

use leasehold::Client;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use testkit::local_store::LocalStore;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};

mod counters;
mod gauges;
mod recorders;
mod traffic;

const NAME: &str = "x";
/// A TTL or a lease that a test waits for.
const SHORT: Duration = Duration::from_millis(400);

/// A recorder, and a handle for reading it.
struct Recorded {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
}

impl Recorded {
    fn new() -> Self {
        let buckets = [0.1, 1.0, 10.0];
        let recorder = PrometheusBuilder::new().set_buckets(&buckets).unwrap().build_recorder();
        let handle = recorder.handle();
        Self { recorder, handle }
    }

    /// Declares semaphores, locks or pools whose metrics are recorded here.
    fn declare<T>(&self, declare: impl FnOnce() -> T) -> T {
        metrics::with_local_recorder(&self.recorder, declare)
    }

    /// Returns the sum of a metric over all series that have all these labels.
    fn sum(&self, metric: &str, labels: &[(&str, &str)]) -> f64 {
        let labels: Vec<_> =
            labels.iter().map(|(key, value)| format!("{key}=\"{value}\"")).collect();
        let rendered = self.handle.render();
        let series = rendered.lines().filter_map(|line| line.strip_prefix(metric)?.split_once(' '));
        series
            .filter(|(series, _)| series.is_empty() || series.starts_with('{'))
            .filter(|(series, _)| labels.iter().all(|label| series.contains(label)))
            .map(|(_, value)| value.parse::<f64>().unwrap())
            .sum()
    }

    /// As [`sum`](Self::sum), for whole numbers.
    fn count(&self, metric: &str, labels: &[(&str, &str)]) -> i64 {
        #[allow(clippy::cast_possible_truncation)] // small numbers
        let sum = self.sum(metric, labels).round() as i64;
        sum
    }

    fn acquires(&self, kind: &str, outcome: &str) -> i64 {
        self.count("leasehold_acquires_total", &[("kind", kind), ("outcome", outcome)])
    }

    fn losses(&self, kind: &str) -> i64 {
        self.count("leasehold_losses_total", &[("kind", kind)])
    }

    fn lost(&self, kind: &str, reason: &str) -> i64 {
        self.count("leasehold_losses_total", &[("kind", kind), ("reason", reason)])
    }

    /// Returns how many of this kind are held, and how many wait.
    fn gauges(&self, kind: &str) -> (i64, i64) {
        let kind = [("kind", kind)];
        (self.count("leasehold_held", &kind), self.count("leasehold_waiting", &kind))
    }

    /// Fails unless the gauges reach these values.
    #[track_caller]
    fn come_to(&self, kind: &str, held: i64, waiting: i64) -> impl Future<Output = ()> {
        eventually(async move || self.gauges(kind) == (held, waiting))
    }
}

/// The stores on which a test runs, one after the other.
enum Store {
    Memory,
    Local(LocalStore),
    Redis(Box<RedisServer>),
}

impl Store {
    fn all() -> [Self; 3] {
        [Self::Memory, Self::Local(LocalStore::new()), Self::redis()]
    }

    fn redis() -> Self {
        Self::Redis(Box::new(RedisServer::start()))
    }

    fn label(&self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Local(_) => "local",
            Self::Redis(_) => "redis",
        }
    }

    async fn client(&self) -> Client {
        match self {
            Self::Memory => Client::memory(),
            Self::Local(store) => deadline(Client::local(store.path())).await.unwrap(),
            Self::Redis(server) => deadline(Client::redis(&server.url())).await.unwrap(),
        }
    }
}
