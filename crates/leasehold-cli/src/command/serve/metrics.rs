//! The store in the text format of Prometheus, and whether it can be read.
//!
//! These are the numbers of the whole fleet, from the store. The library's metrics count what one program acquires and loses.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use leasehold::SemaphoreStats;

use super::console::{Console, ConsoleState, Rendering};
use super::reply;

const KIND: &str = "text/plain; version=0.0.4; charset=utf-8";
/// The number of semaphores, locks and pools that have series: the most used, or the first by name.
const MOST: usize = 2000;
/// How late a poll may be, in addition to the pause between polls, before it is overdue.
const OVERDUE: Duration = Duration::from_secs(10);

pub(super) async fn metrics(State(console): State<Arc<Console>>) -> Response {
    console.is_asked().await;
    let made = console.rendered("/metrics", async {
        let body = text(&console.state()).into();
        Ok::<_, std::convert::Infallible>(Rendering { title: String::new(), body })
    });
    let Ok(made) = made.await;
    reply::of(StatusCode::OK, KIND, made.body.clone())
}

/// Answers 200 if the store was read recently, else 503 with the reason.
pub(super) async fn health(State(console): State<Arc<Console>>) -> Response {
    let state = console.state();
    let problem = match (state.monitor.outage(), state.read) {
        (Some(outage), _) => {
            let lasts = crate::output::ago(crate::monitor::since(outage.since));
            Some(format!("the store is unreachable for {lasts}"))
        }
        (None, None) => Some("the store has not been read yet".to_owned()),
        (None, Some(read)) => {
            let (age, due) = (read.elapsed(), state.rest.max(OVERDUE) + OVERDUE);
            let ago = crate::output::ago(age);
            (age > due).then(|| format!("the store was last read {ago} ago; a poll is overdue"))
        }
    };
    match problem {
        None => reply::of(StatusCode::OK, reply::TEXT, "ok\n"),
        Some(problem) => {
            reply::of(StatusCode::SERVICE_UNAVAILABLE, reply::TEXT, format!("{problem}\n"))
        }
    }
}

/// The text, one family after the other.
struct Exposition(String);

impl Exposition {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP leasehold_store_{name} {help}");
        let _ = writeln!(self.0, "# TYPE leasehold_store_{name} {kind}");
    }

    fn value(&mut self, name: &str, label: Option<(&str, &str)>, value: impl std::fmt::Display) {
        let _ = match label {
            None => writeln!(self.0, "leasehold_store_{name} {value}"),
            Some((key, label)) => {
                writeln!(self.0, "leasehold_store_{name}{{{key}=\"{}\"}} {value}", escaped(label))
            }
        };
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
        self.family(name, kind, help);
        self.value(name, None, value);
    }

    /// One gauge for each semaphore that has a value.
    fn semaphores<T: std::fmt::Display>(
        &mut self,
        all: &[SemaphoreStats],
        name: &str,
        help: &str,
        value: impl Fn(&SemaphoreStats) -> Option<T>,
    ) {
        self.family(name, "gauge", help);
        for one in all.iter().take(MOST) {
            if let Some(value) = value(one) {
                self.value(name, Some(("name", &one.name)), value);
            }
        }
    }
}

fn text(state: &ConsoleState) -> String {
    let mut text = Exposition(String::new());
    let monitor = &state.monitor;
    let up = u8::from(monitor.outage().is_none() && monitor.latest().is_some());
    text.single("up", "gauge", "Whether the last poll could read the store.", up);
    text.single("polls_total", "counter", "Polls of the store.", state.polls);
    text.single("poll_failures_total", "counter", "Polls that failed.", state.failures);
    text.single("poll_seconds", "gauge", "Duration of the last poll.", state.took.as_secs_f64());
    let Some(latest) = monitor.latest() else { return text.0 };
    text.single(
        "poll_timestamp_seconds",
        "gauge",
        "When the values below were read.",
        latest.at.duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
    );
    let all = &latest.semaphores;
    let help = "Semaphores that have been used. The families below have the 2000 most used.";
    text.single("semaphores", "gauge", help, all.len());
    semaphores(&mut text, all);
    let help = "Permits granted since the console was started. A lower bound: permits that are held for less than the time \
                between two polls are not seen.";
    text.family("semaphore_grants_seen_total", "counter", help);
    for one in all.iter().take(MOST) {
        if let Some(grants) = state.grants.get(&one.name) {
            text.value("semaphore_grants_seen_total", Some(("name", &one.name)), grants);
        }
    }
    text.single("locks", "gauge", "Locks that are held.", latest.locks.len());
    text.family("lock_held", "gauge", "1 for each lock that is held, at most 2000.");
    for lock in latest.locks.iter().take(MOST) {
        text.value("lock_held", Some(("key", &lock.key)), 1);
    }
    text.single("pools", "gauge", "Pools with leases.", latest.pools.len());
    text.family("pool_members", "gauge", "Leases of a pool, for at most 2000 pools.");
    for pool in latest.pools.iter().take(MOST) {
        text.value("pool_members", Some(("name", &pool.name)), pool.members.len());
    }
    text.0
}

fn semaphores(text: &mut Exposition, all: &[SemaphoreStats]) {
    text.semaphores(
        all,
        "semaphore_capacity",
        "Units that may be held at once; none if unlimited.",
        SemaphoreStats::limited_to,
    );
    text.semaphores(all, "semaphore_held_units", "Units that are held.", |one| {
        Some(one.held_units)
    });
    text.semaphores(all, "semaphore_holders", "Permits that are held.", |one| Some(one.held));
    text.semaphores(all, "semaphore_waiting", "Acquires that wait.", |one| Some(one.waiting));
    let oldest = |age: Option<Duration>| Some(age.unwrap_or_default().as_secs_f64());
    let help = "How long the first in the queue has waited; 0 if nobody waits.";
    text.semaphores(all, "semaphore_oldest_wait_seconds", help, |one| oldest(one.oldest_wait));
    let help = "How long the oldest permit has been held; 0 if none is.";
    text.semaphores(all, "semaphore_oldest_hold_seconds", help, |one| oldest(one.oldest_hold()));
    text.semaphores(all, "semaphore_paused", "Whether it is paused.", |one| {
        Some(u8::from(one.paused.is_some()))
    });
    text.semaphores(all, "semaphore_pinned", "Whether its limit is pinned.", |one| {
        Some(u8::from(one.pinned.is_some()))
    });
}

/// Escapes the value of a label for the text format.
fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_cannot_end_early() {
        assert_eq!(escaped("a\\b\"c\nd"), "a\\\\b\\\"c\\nd");
    }
}
