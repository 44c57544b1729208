//! `leasehold doctor`: can the store be reached, and are leases safe on it?

use std::fmt::Write;
use std::time::{Duration, Instant};

use leasehold::{Client, Error, shortest_lease};
use serde_json::{Value, json};

use crate::args::DoctorArgs;
use crate::failure::{Failure, NOT_SAFE, REFUSED, UNAVAILABLE};
use crate::job::shortest_option;
use crate::output::{self, Style, lease_text, styled};
use crate::store::{self, Store};

mod redis;

/// What is acquired and released, to see whether that is possible. Always the same, so that it is left once at most.
const TRIAL: &str = "leasehold-doctor";
/// More than there are doctors at work at once.
const CROWD: u32 = 1000;
const SHORT: Duration = Duration::from_secs(5);
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
    report.ok("store", store.place());
    // To make it would be to say that all is well with a path that was mistyped.
    if let Some(path) = store.missing() {
        let advice = "correct --store; if it is right, `leasehold run` makes the file";
        report.bad("reachable", format!("there is no store at {path}"), advice);
        report.end_with(UNAVAILABLE);
        return report;
    }
    let opening = Instant::now();
    let client = match store.open().await {
        Ok(client) => client,
        Err(error) => {
            report.failed("reachable", &error);
            return report;
        }
    };
    report.ok("reachable", format!("yes, after {}", output::ago(opening.elapsed())));
    try_everything(&client, &mut report).await;
    round_trip(&client, &mut report).await;
    if let Ok(semaphore) = client.semaphore(TRIAL, CROWD).build() {
        // Somebody else may be at it: then it stays.
        let _ = semaphore.forget().await;
    }
    if client.locks().capabilities().backend == "redis" {
        redis::examine(store, &mut report).await;
    }
    let _ = client.close().await;
    report
}

/// Each primitive once, with everything that it asks of the store.
async fn try_everything(client: &Client, report: &mut Report) {
    let begun = Instant::now();
    let semaphore = async {
        let semaphore = client.semaphore(TRIAL, CROWD).ttl(SHORT).build()?;
        match semaphore.try_acquire().await? {
            Some(permit) => permit.release().await.map(drop),
            None => Ok(()),
        }
    };
    report.tried("semaphore", semaphore.await, begun);
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
        let instance = client.id().to_string();
        pool.acquire(&instance).await?;
        pool.release(&instance).await.map(drop)
    };
    report.tried("pool", pool.await, begun);
}

/// Measures the round trip, and says which leases are long enough for it.
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
        report.warn("round trip", says, "use a server that is nearer");
    }
    let (lease, option) = (shortest_lease(slowest), shortest_option(slowest));
    let whose = if client.lifeline().is_some() { "of locks and pools, " } else { "" };
    let says = format!(
        "{whose}at least {} in a program, --lease {} for the command",
        lease_text(lease),
        lease_text(option)
    );
    if option <= LEASE {
        report.ok("lease", says + ": that survives the loss of one connection");
    } else {
        let advice = format!(
            "give --lease {} or longer, or use a server that is nearer",
            lease_text(option)
        );
        report.warn("lease", says + ": a shorter one is lost with its connection", &advice);
    }
}

/// How one finding is to be taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Ok,
    /// Leases work, but less safely than they could.
    Warning,
    /// Something does not work, or leases are not safe.
    Bad,
}

#[derive(Debug)]
struct Finding {
    check: &'static str,
    verdict: Verdict,
    says: String,
    /// What to do about it.
    advice: Option<String>,
}

#[derive(Debug)]
struct Report {
    findings: Vec<Finding>,
    /// What the first that did not work says that the command is to exit with.
    code: Option<u8>,
    keys_and_channels: String,
}

impl Report {
    fn new(store: &Store) -> Self {
        Self { findings: Vec::new(), code: None, keys_and_channels: store.keys_and_channels() }
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
        let (says, code) = (error.to_string(), Failure::from(error.clone()).code);
        let allow = format!("let the server's ACL allow it, for {}", self.keys_and_channels);
        let advice = match code {
            UNAVAILABLE if says.contains("rediss://") => {
                "start it, or correct the host and port of --store: is TLS spoken there? redis:// is without"
            }
            UNAVAILABLE => "start it, or correct the host and port of --store",
            REFUSED if says.contains("permission") => &allow,
            REFUSED if says.contains("authority") => "give its certificate as --ca-certificate",
            REFUSED if says.contains("memory") => "raise its maxmemory, or free some",
            REFUSED if says.contains("replica") => "give the primary as --store",
            REFUSED if says.contains("does not answer as Redis") => "correct the port of --store",
            REFUSED if !says.contains("password") => "see what it says, and its log",
            REFUSED => {
                "correct the user and password of --store, or ask the operator of the server"
            }
            _ => "correct --store",
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
        json!({ "findings": findings.collect::<Vec<_>>() })
    }
}
