//! Statistics and other reports of the store, as the dataclasses of `leasehold._types`.

use std::time::{Duration, Instant, SystemTime};

use leasehold::{
    ClientInfo, HeldLock, LockInfo, Outage, PoolStats, SemaphoreMember, SemaphoreStats, WaitsFor,
};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyModule};

use crate::failure::Failure;

static TYPES: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// Makes an instance of a dataclass.
fn make<'py>(py: Python<'py>, class: &str, fields: &Bound<'py, PyDict>) -> PyResult<Py<PyAny>> {
    let types = TYPES
        .get_or_try_init(py, || Ok::<_, PyErr>(py.import("leasehold._types")?.unbind()))?
        .bind(py);
    Ok(types.getattr(class)?.call((), Some(fields))?.unbind())
}

/// The fields of a dataclass, by name.
macro_rules! fields {
    ($py:expr, $($name:ident: $value:expr),* $(,)?) => {{
        let fields = PyDict::new($py);
        $(fields.set_item(stringify!($name), $value)?;)*
        fields
    }};
}

fn list(items: impl Iterator<Item = PyResult<Py<PyAny>>>) -> PyResult<Vec<Py<PyAny>>> {
    items.collect()
}

fn any(py: Python<'_>, items: Vec<Py<PyAny>>) -> PyResult<Py<PyAny>> {
    Ok(items.into_pyobject(py)?.unbind())
}

fn seconds(duration: Option<Duration>) -> Option<f64> {
    duration.map(|duration| duration.as_secs_f64())
}

/// Seconds since 1970.
pub(crate) fn timestamp(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn member(py: Python<'_>, member: &SemaphoreMember) -> PyResult<Py<PyAny>> {
    let fields = fields!(py,
        id: &member.id,
        label: &member.label,
        host: &member.host,
        pid: member.pid,
        age: seconds(member.age),
        expires_in: seconds(member.expires_in),
        ttl_ends_in: seconds(member.ttl_ends_in),
        silent_for: seconds(member.silent_for),
        fence: member.fence.map(leasehold::Fence::get),
        weight: member.weight,
        slot_number: member.slot_number,
    );
    make(py, "SemaphoreMember", &fields)
}

pub(crate) fn stats(py: Python<'_>, stats: &SemaphoreStats) -> PyResult<Py<PyAny>> {
    let paused = stats.paused.as_ref().map(|paused| {
        let fields =
            fields!(py, lasts: paused.lasts.as_secs_f64(), by: &paused.by, reason: &paused.reason);
        make(py, "Paused", &fields)
    });
    let rate = stats.rate.map(|rate| {
        let fields = fields!(py,
            starts: rate.starts,
            period: rate.period.as_secs_f64(),
            burst: rate.burst,
            interval: rate.interval().as_secs_f64(),
        );
        make(py, "RateLimit", &fields)
    });
    let fields = fields!(py,
        name: &stats.name,
        capacity: stats.capacity,
        declared: stats.declared,
        pinned: stats.pinned,
        paused: paused.transpose()?,
        held: stats.held,
        held_units: stats.held_units,
        waiting: stats.waiting,
        waits_for: stats.waits_for.map(WaitsFor::as_str),
        rate: rate.transpose()?,
        next_token: seconds(stats.next_token),
        oldest_hold: seconds(stats.oldest_hold()),
        oldest_wait: seconds(stats.oldest_wait),
        holders: list(stats.holders.iter().map(|holder| member(py, holder)))?,
        waiters: list(stats.waiters.iter().map(|waiter| member(py, waiter)))?,
    );
    make(py, "SemaphoreStats", &fields)
}

pub(crate) fn all_stats(py: Python<'_>, all: &[SemaphoreStats]) -> PyResult<Py<PyAny>> {
    any(py, list(all.iter().map(|one| stats(py, one)))?)
}

pub(crate) fn clients(py: Python<'_>, clients: &[ClientInfo]) -> PyResult<Py<PyAny>> {
    let client = |client: &ClientInfo| {
        let fields = fields!(py,
            id: &client.id,
            host: &client.host,
            pid: client.pid,
            program: &client.program,
            since: client.since.map(timestamp),
        );
        make(py, "ClientInfo", &fields)
    };
    any(py, list(clients.iter().map(client))?)
}

pub(crate) fn outage(py: Python<'_>, outage: &Outage) -> PyResult<Py<PyAny>> {
    let lasts = Instant::now().saturating_duration_since(outage.since);
    let error = PyErr::from(Failure::from(outage.error.clone()));
    let fields = fields!(py, lasts: lasts.as_secs_f64(), error: error);
    make(py, "Outage", &fields)
}

pub(crate) fn held_lock(py: Python<'_>, held: &HeldLock) -> PyResult<Py<PyAny>> {
    let fields = fields!(py,
        id: held.id.to_string(),
        fence: held.fence.get(),
        expires_at: timestamp(held.expires_at),
    );
    make(py, "HeldLock", &fields)
}

pub(crate) fn lock_info(py: Python<'_>, raw: &LockInfo) -> PyResult<Py<PyAny>> {
    let info = &raw;
    let fields = fields!(py,
        key: &raw.key,
        id: raw.id.to_string(),
        key_hash: &info.key_hash,
        id_hash: &info.id_hash,
        acquired_at: timestamp(info.acquired_at),
        expires_at: timestamp(info.expires_at),
        fence: info.fence.get(),
        host: &info.host,
        pid: info.pid,
        label: &info.label,
    );
    make(py, "LockInfo", &fields)
}

pub(crate) fn lock_infos(py: Python<'_>, all: &[LockInfo]) -> PyResult<Py<PyAny>> {
    any(py, list(all.iter().map(|one| lock_info(py, one)))?)
}

pub(crate) fn pool_answer(
    py: Python<'_>,
    status: &str,
    current: u64,
    expired: u64,
) -> PyResult<Py<PyAny>> {
    make(
        py,
        "PoolAnswer",
        &fields!(py, status: status, current_count: current, expired_count: expired),
    )
}

pub(crate) fn pool_count(py: Python<'_>, current: u64, expired: u64) -> PyResult<Py<PyAny>> {
    make(py, "PoolCount", &fields!(py, current_count: current, expired_count: expired))
}

pub(crate) fn pool(py: Python<'_>, pool: &PoolStats) -> PyResult<Py<PyAny>> {
    let member = |member: &leasehold::PoolMember| {
        let fields = fields!(py,
            id: &member.id,
            silent_for: member.silent_for.as_secs_f64(),
            expires_in: seconds(member.expires_in),
        );
        make(py, "PoolMember", &fields)
    };
    let fields = fields!(py, name: &pool.name, members: list(pool.members.iter().map(member))?);
    make(py, "PoolStats", &fields)
}

pub(crate) fn pools(py: Python<'_>, pools: &[PoolStats]) -> PyResult<Py<PyAny>> {
    any(py, list(pools.iter().map(|one| pool(py, one)))?)
}
