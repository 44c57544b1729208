//! The line protocol of `peers/PROTOCOL.md` for the contenders in Rust.

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;

use super::gate::{Contact, Gate, Grant};
use crate::contender::{EXPORTED, NO_RECORDER};
use crate::host;

/// Longer than anything is held, so that no lease ends.
const LEASE: Duration = Duration::from_secs(10);

/// Answers each line with one line, until the input ends.
pub(crate) fn serve(contender: &str, url: &str) {
    let contender = match contender.strip_suffix(EXPORTED) {
        Some(contender) => {
            install_recorder();
            contender
        }
        None => contender.strip_suffix(NO_RECORDER).unwrap_or(contender),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let contact = match Contact::connect(contender, url).await {
            Ok(contact) => contact,
            Err(why) => return say(&format!("error {why}")),
        };
        say("ok");
        let mut driver = Server {
            contact,
            contender: contender.to_owned(),
            url: url.to_owned(),
            held: Vec::new(),
            first: watch::Sender::new(0),
            may: Arc::new((Semaphore::new(0), Semaphore::new(0))),
        };
        // Nothing else has to run on this thread while it waits for a line: the tasks have other threads.
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            match driver.answer(&line).await {
                Ok(None) => {}
                Ok(Some(answer)) => say(&answer),
                Err(why) => say(&format!("error {}", why.replace('\n', " "))),
            }
        }
    });
}

/// Installs an exporter that nobody scrapes, because recording is what is measured. Its upkeep runs once a second;
/// until then it keeps every value of a histogram.
#[cfg(feature = "metrics")]
fn install_recorder() {
    let buckets = [0.001, 0.01, 0.1, 1.0, 10.0];
    let builder = metrics_exporter_prometheus::PrometheusBuilder::new().set_buckets(&buckets);
    let recorder = builder.expect("some buckets").install_recorder().expect("the first one");
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_secs(1));
            recorder.run_upkeep();
        }
    });
}

#[cfg(not(feature = "metrics"))]
fn install_recorder() {
    panic!("this program was built without the feature `metrics`");
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // If nobody reads our output any more, our input ends as well.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

struct Server {
    contact: Contact,
    contender: String,
    url: String,
    held: Vec<Grant>,
    /// When the first waiter acquired it.
    first: watch::Sender<u64>,
    /// Permission to release, and permission to ask again.
    may: Arc<(Semaphore, Semaphore)>,
}

impl Server {
    async fn answer(&mut self, line: &str) -> Result<Option<String>, String> {
        let mut words = line.split(' ');
        let command = words.next().unwrap_or_default();
        let name = words.next().unwrap_or_default();
        let numbers: Vec<u64> = words.map_while(|word| word.parse().ok()).collect();
        match (command, &numbers[..]) {
            ("pairs", &[tasks, names, capacity, window]) => {
                let window = Duration::from_millis(window);
                self.pairs(name, size(tasks), size(names), capacity, window).await.map(Some)
            }
            ("repeat", &[count]) => {
                let mut gate = self.contact.open(name, 1, LEASE)?;
                for _ in 0..count {
                    gate.take().await?.release().await?;
                }
                Ok(Some("ok".to_owned()))
            }
            ("contend", &[waiters, starts_at, step, hold, ends_at]) => {
                let hold = Duration::from_nanos(hold);
                self.contend(name, waiters, starts_at, step, hold, ends_at).await.map(Some)
            }
            ("ring", &[waiters, starts_at, step]) => {
                self.ring(name, waiters, starts_at, step).map(|()| None)
            }
            ("release", _) => {
                self.may.0.add_permits(1);
                Ok(None)
            }
            ("rejoin", _) => {
                self.may.1.add_permits(1);
                Ok(None)
            }
            ("hold", &[lease]) => {
                let mut gate = self.contact.open(name, 1, Duration::from_millis(lease))?;
                let held = gate.acquire(LEASE).await?.ok_or("a free lock was not acquired")?;
                self.held.push(held);
                Ok(Some("ok".to_owned()))
            }
            ("wait", &[count, lease, time_limit]) => {
                let gate = self.contact.open(name, 1, Duration::from_millis(lease))?;
                for _ in 0..count {
                    self.wait(gate.clone(), time_limit);
                }
                Ok(Some("ok".to_owned()))
            }
            ("crowd", &[clients, lease]) => {
                for _ in 0..clients {
                    let contact = Contact::connect(&self.contender, &self.url).await?;
                    self.wait(contact.open(name, 1, Duration::from_millis(lease))?, 0);
                }
                Ok(Some("ok".to_owned()))
            }
            ("granted", _) => {
                let mut first = self.first.subscribe();
                let at = *first.wait_for(|at| *at > 0).await.expect("the sender is ours");
                Ok(Some(format!("ok {at}")))
            }
            _ => Err(format!("unknown request {line:?}")),
        }
    }

    /// Waits in its own task; without a limit if the time limit is 0.
    fn wait(&self, gate: Gate, time_limit: u64) {
        match gate {
            // As a user would write it, with nothing in the task that only the bench needs.
            Gate::Semaphore(semaphore) if time_limit == 0 => {
                tokio::spawn(async move { drop(semaphore.acquire().await) })
            }
            Gate::Tokio(semaphore) if time_limit == 0 => {
                tokio::spawn(async move { drop(semaphore.acquire().await) })
            }
            Gate::Idle => tokio::spawn(std::future::pending()),
            Gate::Lock(lock) if time_limit == 0 => {
                tokio::spawn(async move { drop(lock.acquire().await) })
            }
            Gate::Rslock { manager, key, lease } if time_limit == 0 => {
                tokio::spawn(async move { drop(manager.acquire(key.as_str(), lease).await) })
            }
            gate => tokio::spawn(wait(gate, time_limit, self.first.clone())),
        };
    }

    async fn pairs(
        &self,
        prefix: &str,
        tasks: usize,
        names: usize,
        capacity: u64,
        window: Duration,
    ) -> Result<String, String> {
        let capacity = u32::try_from(capacity).map_err(|why| why.to_string())?;
        let gates: Result<Vec<_>, _> = (0..names)
            .map(|name| self.contact.open(&format!("{prefix}-{name}"), capacity, LEASE))
            .collect();
        let gates = gates?;
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let running: Vec<_> = (0..tasks)
            .map(|task| {
                let mut task_gates: Vec<_> =
                    gates.iter().skip(task % names).step_by(tasks).cloned().collect();
                let (stop, done) = (stop.clone(), done.clone());
                tokio::spawn(async move {
                    while !stop.load(Ordering::Relaxed) {
                        for gate in &mut task_gates {
                            gate.take().await?.release().await?;
                            done.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        tokio::time::sleep(window / 5).await;
        let (begun, before) = (Instant::now(), done.load(Ordering::Relaxed));
        tokio::time::sleep(window).await;
        let (took, pairs) = (begun.elapsed(), done.load(Ordering::Relaxed) - before);
        stop.store(true, Ordering::Relaxed);
        joined(running).await?;
        Ok(format!("ok {pairs} {} {}", took.as_nanos(), done.load(Ordering::Relaxed)))
    }

    async fn contend(
        &self,
        name: &str,
        waiters: u64,
        starts_at: u64,
        step: u64,
        hold: Duration,
        ends_at: u64,
    ) -> Result<String, String> {
        let gate = self.contact.open(name, 1, LEASE)?;
        let running: Vec<_> = (0..waiters)
            .map(|index| {
                let mut gate = gate.clone();
                tokio::spawn(async move {
                    let mut waits = Vec::new();
                    tokio::time::sleep(host::until(starts_at + index * step)).await;
                    loop {
                        let requested = host::nanos();
                        if requested >= ends_at {
                            return Ok(waits);
                        }
                        let Some(taken) = gate.acquire(host::until(ends_at)).await? else {
                            waits.push(format!("{index} {requested} 0 0"));
                            return Ok(waits);
                        };
                        let granted = host::nanos();
                        if !hold.is_zero() {
                            tokio::time::sleep(hold).await;
                        }
                        waits.push(format!("{index} {requested} {granted} {}", host::nanos()));
                        taken.release().await?;
                    }
                })
            })
            .collect();
        let waits: Vec<_> = joined(running).await?.into_iter().flatten().collect();
        Ok([vec![format!("ok {}", waits.len())], waits].concat().join("\n"))
    }

    fn ring(&self, name: &str, waiters: u64, starts_at: u64, step: u64) -> Result<(), String> {
        let gate = self.contact.open(name, 1, LEASE)?;
        for index in 0..waiters {
            let (mut gate, may) = (gate.clone(), self.may.clone());
            tokio::spawn(async move {
                tokio::time::sleep(host::until(starts_at + index * step)).await;
                loop {
                    let held = match gate.acquire(LEASE).await {
                        Ok(Some(held)) => held,
                        Ok(None) => continue,
                        Err(why) => return say(&format!("error {why}")),
                    };
                    say(&format!("granted {}", host::nanos()));
                    may.0.acquire().await.expect("never closed").forget();
                    let released = host::nanos();
                    if let Err(why) = held.release().await {
                        return say(&format!("error {why}"));
                    }
                    say(&format!("released {released}"));
                    may.1.acquire().await.expect("never closed").forget();
                }
            });
        }
        Ok(())
    }
}

async fn wait(mut gate: Gate, time_limit: u64, first: watch::Sender<u64>) {
    let Ok(Some(held)) = gate.acquire(Duration::from_millis(time_limit)).await else { return };
    let now = host::nanos();
    first.send_if_modified(|at| {
        let is_first = *at == 0;
        if is_first {
            *at = now;
        }
        is_first
    });
    // The driver is about to be killed, so it does not matter if the release fails.
    let _ = held.release().await;
}

/// Returns the answers of all tasks, or the first failure.
async fn joined<T>(tasks: Vec<JoinHandle<Result<T, String>>>) -> Result<Vec<T>, String> {
    let mut answers = Vec::with_capacity(tasks.len());
    for task in tasks {
        answers.push(task.await.map_err(|why| why.to_string())??);
    }
    Ok(answers)
}

fn size(number: u64) -> usize {
    usize::try_from(number).expect("a count of tasks")
}
