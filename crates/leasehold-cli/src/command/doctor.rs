//! `leasehold doctor`: checks that the store can be reached and that leases are safe on it.

use std::fmt::Write;
use std::time::{Duration, Instant};

use leasehold::url::Deployment;
use leasehold::{Client, Error, shortest_lease};
use serde_json::{Value, json};

use crate::advice::advice;
use crate::args::DoctorArgs;
use crate::child::job::shortest_option;
use crate::failure::{self, Failure, NOT_SAFE, REFUSED, UNAVAILABLE};
use crate::output::{self, Style, lease_text, styled};
use crate::store::{self, Store};

mod cluster;
mod node;
mod redis;
mod sentinel;

/// The name that is acquired and released as a trial. It is always the same, so that at most one is left behind.
const TRIAL: &str = "leasehold-doctor";
/// More than the number of doctors that run at once.
const CROWD: u32 = 1000;
const SHORT: Duration = Duration::from_secs(5);
const CLOSE_WITHIN: Duration = Duration::from_millis(500);
const QUESTIONS: usize = 20;
/// A round trip of more than this makes every acquire slow.
const SLOW: Duration = Duration::from_millis(50);
/// The default lease.
const LEASE: Duration = Duration::from_secs(30);

pub(crate) fn run(arguments: &DoctorArgs) -> Result<u8, Failure> {
    let store = Store::new(&arguments.store)?;
    let report = store::block_on(async { Ok(examine(&store).await) })?;
    if arguments.json {
        output::print_json(&report.as_json())?;
    } else {
        output::print(&report.as_text())?;
    }
    Ok(report.code())
}

async fn examine(store: &Store) -> Report {
    let mut report = Report::new(store);
    report.ok("store", store.description());
    // Creating it would hide a mistyped path.
    if let Some(path) = store.missing() {
        let advice = "correct --store; if it is right, `leasehold run` creates the file";
        report.bad("reachable", format!("there is no store at {}", path.display()), advice);
        report.end_with(UNAVAILABLE);
        return report;
    }
    let opening = Instant::now();
    let opened = match store.open().await {
        Ok(client) => {
            report.ok("reachable", format!("yes, after {}", output::ago(opening.elapsed())));
            try_everything(&client, &mut report).await;
            // Leases that were not released expire, so a store that does not answer is not waited for.
            let _ = tokio::time::timeout(CLOSE_WITHIN, client.close()).await;
            true
        }
        Err(error) => {
            report.failed("reachable", &error);
            false
        }
    };
    // The state of the other servers may explain why the store cannot be reached, unless the server is of another kind.
    let refused = !opened && report.code == Some(REFUSED);
    match store.deployment() {
        Some(Deployment::Server(server)) if opened => {
            redis::examine(store, server, &mut report).await;
        }
        Some(Deployment::Cluster(seeds)) if !refused => {
            cluster::examine(store, seeds, &mut report).await;
        }
        Some(Deployment::Sentinel(settings)) if !refused => {
            sentinel::examine(store, settings, &mut report).await;
        }
        _ => {}
    }
    report
}

async fn try_everything(client: &Client, report: &mut Report) {
    try_primitives(client, report).await;
    // If the store is unreachable, each query would take the whole answer time-out.
    if !report.is_unreachable {
        round_trip(client, report).await;
        if let Ok(semaphore) = client.semaphore(TRIAL, CROWD).build() {
            // This fails if another doctor uses it.
            let _ = semaphore.forget().await;
        }
    }
}

/// Acquires and releases each primitive once.
async fn try_primitives(client: &Client, report: &mut Report) {
    let begun = Instant::now();
    let semaphore = async {
        let semaphore = client.semaphore(TRIAL, CROWD).ttl(SHORT).build()?;
        match semaphore.try_acquire().await? {
            Some(permit) => permit.release().await.map(drop),
            None => Ok(()),
        }
    };
    report.tried("semaphore", semaphore.await, begun);
    if report.is_unreachable {
        return;
    }
    let begun = Instant::now();
    let lock = async {
        match client.lock(TRIAL).lease(SHORT).build()?.try_acquire().await? {
            Some(guard) => guard.release().await.map(drop),
            None => Ok(()),
        }
    };
    report.tried("lock", lock.await, begun);
    let begun = Instant::now();
    let pool = async {
        let pool = client.pool(TRIAL, CROWD).lease(SHORT).build()?;
        match pool.try_acquire(&client.id().to_string()).await? {
            Some(lease) => lease.release().await.map(drop),
            None => Ok(()),
        }
    };
    report.tried("pool", pool.await, begun);
}

/// Measures the round trip, and reports which leases are long enough for it.
async fn round_trip(client: &Client, report: &mut Report) {
    let mut trips = Vec::new();
    for _ in 0..QUESTIONS {
        let begun = Instant::now();
        let question = async { client.semaphore(TRIAL, CROWD).build()?.locked().await };
        if let Err(error) = question.await {
            report.failed("round trip", &error);
            return;
        }
        trips.push(begun.elapsed());
    }
    trips.sort_unstable();
    let (median, slowest) = (trips[trips.len() / 2], trips[trips.len() - 1]);
    let says = format!("{median:.1?}; the slowest of {QUESTIONS}: {slowest:.1?}");
    if median < SLOW {
        report.ok("round trip", says);
    } else {
        report.warn("round trip", says, "use a server closer to this host");
    }
    let (lease, option) = (shortest_lease(slowest), shortest_option(slowest));
    let is_file = client.lifeline().is_some();
    let whose = if is_file { "locks and pools: " } else { "" };
    let says = format!(
        "{whose}at least {} in a program, --lease {} for the command",
        lease_text(lease),
        lease_text(option)
    );
    if option <= LEASE {
        let why = if is_file { "" } else { ": that survives the loss of one connection" };
        report.ok("lease", says + why);
    } else {
        let advice = format!(
            "give --lease {} or longer, or use a server closer to this host",
            lease_text(option)
        );
        report.warn("lease", says + ": a shorter one is lost with its connection", &advice);
    }
}

/// The severity of a finding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Ok,
    /// Leases work, but less safely than they could.
    Warning,
    /// Something does not work, or leases are not safe.
    Bad,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Finding {
    check: &'static str,
    verdict: Verdict,
    says: String,
    /// The advice.
    advice: Option<String>,
}

#[derive(Debug)]
struct Report {
    findings: Vec<Finding>,
    /// The exit code of the first failure.
    code: Option<u8>,
    /// Whether the store did not answer.
    is_unreachable: bool,
    keys_and_channels: String,
    /// Whether the store has several servers, each of which is reported.
    has_nodes: bool,
    /// The facts about several servers for `--json`, with the name of their field.
    servers: Option<(&'static str, Value)>,
}

impl Report {
    fn new(store: &Store) -> Self {
        let keys_and_channels = store.keys_and_channels();
        let has_nodes =
            matches!(store.deployment(), Some(Deployment::Cluster(_) | Deployment::Sentinel(_)));
        let findings = Vec::new();
        Self {
            findings,
            code: None,
            is_unreachable: false,
            keys_and_channels,
            has_nodes,
            servers: None,
        }
    }

    fn add(&mut self, check: &'static str, verdict: Verdict, says: String, advice: Option<String>) {
        self.findings.push(Finding { check, verdict, says, advice });
    }

    fn ok(&mut self, check: &'static str, says: impl Into<String>) {
        self.add(check, Verdict::Ok, says.into(), None);
    }

    fn warn(&mut self, check: &'static str, says: impl Into<String>, advice: &str) {
        self.add(check, Verdict::Warning, says.into(), Some(advice.to_owned()));
    }

    fn bad(&mut self, check: &'static str, says: impl Into<String>, advice: &str) {
        self.add(check, Verdict::Bad, says.into(), Some(advice.to_owned()));
    }

    fn tried(&mut self, check: &'static str, result: Result<(), Error>, begun: Instant) {
        match result {
            Ok(()) => self.ok(check, format!("acquired and released in {:.1?}", begun.elapsed())),
            Err(error) => self.failed(check, &error),
        }
    }

    fn failed(&mut self, check: &'static str, error: &Error) {
        let (says, code) = (failure::text(error), failure::code(error));
        self.is_unreachable |= matches!(error, Error::Unavailable { .. } | Error::Stopped { .. });
        let allow = format!("let the server's ACL allow it, for {}", self.keys_and_channels);
        let advice = advice(error);
        let advice = match (error, advice.as_deref()) {
            (Error::Denied { .. }, _) if says.contains("missing permission") => &allow,
            // The findings about the other servers say more.
            (Error::Unavailable { .. }, Some(advice))
                if self.has_nodes && advice.starts_with("start it") =>
            {
                "start the servers below that do not answer, or correct --store"
            }
            (_, Some(advice)) => advice,
            (Error::Denied { .. } | Error::Unusable { .. }, None) => {
                "see the message and the server's log"
            }
            (_, None) => "correct --store",
        };
        self.bad(check, says, advice);
        self.end_with(code);
    }

    fn end_with(&mut self, code: u8) {
        self.code.get_or_insert(code);
    }

    fn code(&self) -> u8 {
        let bad = self.findings.iter().any(|finding| finding.verdict == Verdict::Bad);
        self.code.unwrap_or(if bad { NOT_SAFE } else { 0 })
    }

    fn as_text(&self) -> String {
        let mut text = String::new();
        for Finding { check, verdict, says, advice } in &self.findings {
            let (word, style) = match verdict {
                Verdict::Ok => ("ok  ", Style::Green),
                Verdict::Warning => ("warn", Style::Yellow),
                Verdict::Bad => ("bad ", Style::Red),
            };
            let says = output::one_line(says);
            let _ = writeln!(text, "{}  {check:<12} {says}", styled(word, style));
            if let Some(advice) = advice {
                let _ = writeln!(text, "{:19}-> {advice}", "");
            }
        }
        text
    }

    fn as_json(&self) -> Value {
        let findings = self.findings.iter().map(|finding| {
            json!({
                "check": finding.check,
                "verdict": match finding.verdict {
                    Verdict::Ok => "ok",
                    Verdict::Warning => "warning",
                    Verdict::Bad => "bad",
                },
                "says": finding.says,
                "advice": finding.advice,
            })
        });
        let mut report = json!({ "findings": findings.collect::<Vec<_>>() });
        if let Some((name, servers)) = &self.servers {
            report[*name] = servers.clone();
        }
        report
    }
}
