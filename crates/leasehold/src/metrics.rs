//! The metrics of this library, recorded through the facade of the `metrics` crate. Requires the feature `metrics`.
//!
//! Install a recorder before you build the first semaphore, lock or pool of a client: for example an exporter for
//! Prometheus, StatsD or OpenTelemetry. Objects that were built before record nothing. The example `metrics` shows this
//! with `metrics-exporter-prometheus`.
//!
//! | metric | type | labels | meaning |
//! |---|---|---|---|
//! | [`leasehold_acquires_total`](ACQUIRES) | counter | `store`, `kind`, `outcome` | acquires that have ended |
//! | [`leasehold_wait_seconds`](WAIT_SECONDS) | histogram | `store`, `kind` | how long a successful acquire took |
//! | [`leasehold_hold_seconds`](HOLD_SECONDS) | histogram | `store`, `kind` | how long a permit, lock or pool lease was held until it was released or lost |
//! | [`leasehold_losses_total`](LOSSES) | counter | `store`, `kind`, `reason` | permits, locks and pool leases that were lost before they were released |
//! | [`leasehold_held`](HELD) | gauge | `store`, `kind` | permits, locks and pool leases that this process holds |
//! | [`leasehold_waiting`](WAITING) | gauge | `store`, `kind` | acquires of this process that are waiting |
//! | [`leasehold_oldest_wait_seconds`](OLDEST_WAIT_SECONDS) | gauge | `store`, `kind` | how long the oldest of them has waited; 0 if none is waiting |
//! | [`leasehold_renewals_total`](RENEWALS) | counter | `store`, `kind`, `outcome` | renewals of held permits, locks and pool leases |
//! | [`leasehold_renewal_seconds`](RENEWAL_SECONDS) | histogram | `store`, `kind` | the time from sending a renewal until its answer |
//! | [`leasehold_requests_total`](REQUESTS) | counter | `store` | requests to a store that other processes share |
//! | [`leasehold_batch_size`](BATCH_SIZE) | histogram | `store` | the number of permits, locks and pool leases that one request concerns |
//! | [`leasehold_reconnects_total`](RECONNECTS) | counter | `store` | connections to a server that replaced an earlier connection |
//!
//! | label | values |
//! |---|---|
//! | `store` | `memory`, `local`, `redis` |
//! | `kind` | `semaphore`, `lock`, `pool` |
//! | `outcome` of an acquire | `acquired`; `full` (`try_acquire` found nothing free), `timed_out`, `cancelled` (its future was dropped), `closed` (its client was closed), `lost` (granted, and lost before the caller received it), `unavailable` (the store cannot be reached), `denied` (the store refused the request), `error` |
//! | `outcome` of a renewal | `renewed`, `missing` (the store no longer has it), `failed` (not answered, or refused) |
//! | `reason` | `ttl_ended`, `not_renewed`, `missing`, `released` (by its id), `closed`: see [`LossReason`](crate::LossReason) |
//! | `name` | the name or key, only if the builder asked for it: [`SemaphoreBuilder::name_in_metrics`](crate::SemaphoreBuilder::name_in_metrics), [`LockBuilder::name_in_metrics`](crate::LockBuilder::name_in_metrics), [`PoolBuilder::name_in_metrics`](crate::PoolBuilder::name_in_metrics) |
//!
//! # What is counted
//!
//! - A gauge counts this process only. Clients with the same labels are counted together. For everything that a store
//!   holds, query [`Client::stats`](crate::Client::stats).
//! - An acquire counts as waiting from its first poll until it has an outcome. A try never counts as waiting.
//! - A permit counts as held from the moment when its acquire returned. What was detached does not count as held,
//!   because the client no longer tracks it.
//! - [`Pool::extend`](crate::Pool::extend), [`Pool::release`](crate::Pool::release) and the calls of
//!   [`LuaPool`](crate::compat::lua_pool::LuaPool) have no guard. They count as acquires and renewals, and change neither
//!   `leasehold_held` nor `leasehold_hold_seconds`.
//! - [`Locks::try_acquire_as`](crate::Locks::try_acquire_as), and extensions and releases by a lock id, are not counted.
//!   Observers are notified of them.
//! - The memory store sends no requests. It renews only locks and pool leases.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use leasehold::Client;
//! use metrics_exporter_prometheus::PrometheusBuilder;
//!
//! let exporter = PrometheusBuilder::new().install_recorder()?;
//! let api = Client::memory().semaphore("api", 5).build()?;
//! drop(api.acquire().await?);
//!
//! let acquired = r#"leasehold_acquires_total{store="memory",kind="semaphore",outcome="acquired"} 1"#;
//! assert!(exporter.render().contains(acquired));
//! # Ok(())
//! # }
//! ```

use ::metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

/// Acquires that have ended, by outcome.
pub const ACQUIRES: &str = "leasehold_acquires_total";
/// How long a successful acquire took.
pub const WAIT_SECONDS: &str = "leasehold_wait_seconds";
/// How long a permit, lock or pool lease was held.
pub const HOLD_SECONDS: &str = "leasehold_hold_seconds";
/// Permits, locks and pool leases that were lost before they were released, by reason.
pub const LOSSES: &str = "leasehold_losses_total";
/// Permits, locks and pool leases that this process holds.
pub const HELD: &str = "leasehold_held";
/// Acquires of this process that are waiting.
pub const WAITING: &str = "leasehold_waiting";
/// How long the oldest waiting acquire of this process has waited.
pub const OLDEST_WAIT_SECONDS: &str = "leasehold_oldest_wait_seconds";
/// Renewals of held permits, locks and pool leases, by outcome.
pub const RENEWALS: &str = "leasehold_renewals_total";
/// The time from sending a renewal until its answer.
pub const RENEWAL_SECONDS: &str = "leasehold_renewal_seconds";
/// Requests to a store that other processes share.
pub const REQUESTS: &str = "leasehold_requests_total";
/// The number of permits, locks and pool leases that one request concerns.
pub const BATCH_SIZE: &str = "leasehold_batch_size";
/// Connections to a server that replaced an earlier connection.
pub const RECONNECTS: &str = "leasehold_reconnects_total";

/// Describes all metrics to the recorder.
pub(crate) fn describe() {
    use Unit::{Count, Seconds};
    describe_counter!(ACQUIRES, Count, "Acquires that have ended, by outcome");
    describe_histogram!(WAIT_SECONDS, Seconds, "How long a successful acquire took");
    describe_histogram!(HOLD_SECONDS, Seconds, "How long permits, locks and pool leases were held");
    describe_counter!(LOSSES, Count, "Permits, locks and pool leases that were lost, by reason");
    describe_gauge!(HELD, Count, "Permits, locks and pool leases that this process holds");
    describe_gauge!(WAITING, Count, "Acquires of this process that are waiting");
    let oldest = "How long the longest-waiting acquire of this process has waited";
    describe_gauge!(OLDEST_WAIT_SECONDS, Seconds, oldest);
    describe_counter!(RENEWALS, Count, "Renewals of permits, locks and pool leases, by outcome");
    describe_histogram!(RENEWAL_SECONDS, Seconds, "Time from sending a renewal to its answer");
    describe_counter!(REQUESTS, Count, "Requests to the store");
    describe_histogram!(
        BATCH_SIZE,
        Count,
        "Number of permits, locks and pool leases in one request"
    );
    describe_counter!(RECONNECTS, Count, "Connections that replaced an earlier one");
}
