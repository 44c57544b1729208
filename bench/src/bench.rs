//! One run: its server, its report, and how long to measure.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use testkit::redis_server::RedisServer;
use tokio::runtime::Runtime;

use crate::contender::{Contender, ETCD};
use crate::etcd_server::{self, EtcdServer};
use crate::host;
use crate::progress::Progress;
use crate::report::{Better, Report};
use crate::sample::Sample;
use crate::scenario::Scenario;

/// The environment in which a scenario runs.
pub(crate) struct Bench {
    pub(crate) quick: bool,
    pub(crate) url: String,
    /// Our own server. `None` if the run measures on a given store.
    pub(crate) server: Option<RedisServer>,
    /// Started when a contender of the scenario needs it.
    etcd: Option<EtcdServer>,
    pub(crate) report: Report,
    pub(crate) runtime: Runtime,
    progress: Progress,
    scenario: &'static Scenario,
    begun: Instant,
    scenario_begun: Instant,
    names: u64,
}

impl Bench {
    pub(crate) fn new(
        quick: bool,
        store: Option<String>,
        scenarios: &[&'static Scenario],
    ) -> Result<Self, String> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.map_err(|why| why.to_string())?;
        let server = store.is_none().then(RedisServer::start);
        let url = store.or_else(|| server.as_ref().map(RedisServer::url)).expect("one of the two");
        let mut report = Report::default();
        report.about.push(host::describe());
        let version = runtime.block_on(version(&url));
        report.about.push(version.map_err(|why| format!("cannot ask the store: {why}"))?);
        let seconds = scenarios.iter().map(|scenario| scenario.seconds(quick)).sum();
        Ok(Self {
            quick,
            url,
            server,
            etcd: None,
            report,
            runtime,
            progress: Progress::new(seconds),
            scenario: scenarios.first().ok_or("no scenario was chosen")?,
            begun: Instant::now(),
            scenario_begun: Instant::now(),
            // So that a second run on one store does not use the names of the first.
            names: host::nanos() / 1000,
        })
    }

    /// Runs a scenario. If it panics, that is reported, and the other scenarios still run.
    pub(crate) fn run(&mut self, scenario: &'static Scenario) {
        self.scenario = scenario;
        self.report.scenarios.push(scenario.name);
        self.progress.scenario(scenario.name, scenario.seconds(self.quick), self.steps());
        self.scenario_begun = Instant::now();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (scenario.run)(self))) {
            let why = panic.downcast_ref::<String>().map(String::as_str);
            let why = why.or(panic.downcast_ref::<&str>().copied()).unwrap_or("it broke");
            self.trouble("the scenario", why.to_owned());
        }
        self.progress.say(&format!(
            "{:<16} {:>5.1} s",
            scenario.name,
            self.scenario_begun.elapsed().as_secs_f64()
        ));
        if let Some(server) = &self.server {
            // Removes what killed clients have left behind.
            let flushed: redis::RedisResult<()> =
                redis::cmd("FLUSHALL").query(&mut server.connection());
            flushed.expect("a server of our own obeys");
        }
        // So that it uses no processor time in the other scenarios.
        self.etcd = None;
    }

    pub(crate) fn finish(mut self) -> Report {
        self.progress.finish();
        let (kind, took) =
            (if self.quick { "quick run" } else { "full run" }, self.begun.elapsed());
        self.report.about.push(format!(
            "{kind} of {:.0} s; everything is the median of up to {} interleaved repetitions",
            took.as_secs_f64(),
            self.repetitions()
        ));
        self.report
    }

    /// Returns how often everything is measured.
    pub(crate) fn repetitions(&self) -> usize {
        if self.quick { 3 } else { 7 }
    }

    /// Whether to run another round. Not if the scenario would then exceed its expected time, as on a busy machine.
    pub(crate) fn again(&self, rounds: usize) -> bool {
        let expected = self.scenario.seconds(self.quick);
        let done = u32::try_from(rounds).expect("few rounds");
        let after_another = self.scenario_begun.elapsed() * (done + 1) / done.max(1);
        rounds == 0 || (rounds < self.repetitions() && after_another.as_secs() < expected)
    }

    /// Whether the scenario has time left.
    pub(crate) fn in_time(&self) -> bool {
        self.scenario_begun.elapsed().as_secs() < self.scenario.seconds(self.quick)
    }

    /// Returns the duration of one measurement of a rate.
    pub(crate) fn window(&self) -> Duration {
        Duration::from_millis(if self.quick { 250 } else { 1000 })
    }

    /// Returns a name that nothing else uses.
    pub(crate) fn name(&mut self) -> String {
        self.names += 1;
        format!("bench-{}", self.names)
    }

    fn steps(&self) -> usize {
        self.scenario.steps * if self.scenario.repeated { self.repetitions() } else { 1 }
    }

    /// Shows what is measured next.
    pub(crate) fn step(&mut self, what: &str) {
        self.progress.step(format!("{}: {what}", self.scenario.name));
    }

    pub(crate) fn add(
        &mut self,
        what: &str,
        contender: &str,
        kind: (&'static str, Better),
        value: f64,
    ) {
        self.report.add(self.scenario.name, what, contender, kind, value);
    }

    /// Adds a note below the table of the scenario, one per subject.
    pub(crate) fn note(&mut self, note: String) {
        self.report.note(self.scenario.name, note);
    }

    pub(crate) fn sample(&self, what: &str, contender: &str) -> Sample {
        self.report.sample(self.scenario.name, what, contender)
    }

    /// Compares a bar with the ratio of the first contender to the second, taken within each round.
    pub(crate) fn judge_ratio(&mut self, bar: &'static str, what: &str, first: &str, second: &str) {
        let ratio = self.sample(what, first).over(&self.sample(what, second));
        self.report.judge(bar, &ratio);
    }

    /// Reports something that could not be measured. The run continues.
    pub(crate) fn trouble(&mut self, contender: &str, why: String) {
        self.progress.say(&format!("{}, {contender}: {why}", self.scenario.name));
        self.report.trouble(self.scenario.name, contender, why);
    }

    /// Returns the URL of the server of this contender.
    pub(crate) fn url_of(&mut self, contender: &Contender) -> Result<String, String> {
        if *contender == ETCD { Ok(self.etcd()?.url()) } else { Ok(self.url.clone()) }
    }

    /// Returns etcd, which is started if it does not run.
    pub(crate) fn etcd(&mut self) -> Result<&EtcdServer, String> {
        if self.server.is_none() {
            return Err("etcd is on this host, unlike the given store".to_owned());
        }
        if self.etcd.is_none() {
            let about = etcd_server::describe()?;
            if !self.report.about.contains(&about) {
                self.report.about.push(about);
            }
            self.etcd = Some(EtcdServer::start()?);
        }
        Ok(self.etcd.as_ref().expect("it was just started"))
    }

    /// Returns a plain connection to the store.
    pub(crate) fn connection(&self) -> redis::aio::MultiplexedConnection {
        let client = redis::Client::open(self.url.as_str()).expect("it was asked before");
        let connection = self.runtime.block_on(client.get_multiplexed_async_connection());
        connection.expect("the store answers")
    }
}

/// Returns the version of the store.
async fn version(url: &str) -> redis::RedisResult<String> {
    let mut connection = redis::Client::open(url)?.get_multiplexed_async_connection().await?;
    let info: String = redis::cmd("INFO").arg("server").query_async(&mut connection).await?;
    let field = |name| info.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("?");
    Ok(format!("Redis {}, over TCP", field("redis_version:").trim()))
}
