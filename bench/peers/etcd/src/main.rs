//! etcd's lock, driven by a line protocol on stdin and stdout (see ../../PROTOCOL.md).
//!
//! Usage: `etcd-driver PEER URL`. There is one peer.

mod session;

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use etcd_client::Client;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use session::{Lock, Session};

/// Longer than anything is held, so that no lease ends. It is also the lease of `etcdctl lock`.
const LEASE: Duration = Duration::from_secs(10);

/// Answers each line with one line, until the input ends.
fn main() {
    let url = std::env::args().nth(2).unwrap_or_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let client = match Client::connect([url], None).await {
            Ok(client) => client,
            Err(why) => return say(&format!("error {why}")),
        };
        say("ok");
        let mut driver = Driver {
            client,
            held: Vec::new(),
            first: watch::Sender::new(0),
            may_release: Arc::new(Semaphore::new(0)),
            may_rejoin: Arc::new(Semaphore::new(0)),
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

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // If nobody reads our output any more, our input ends as well.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

struct Driver {
    client: Client,
    held: Vec<(Session, Lock)>,
    /// When the first waiter acquired it.
    first: watch::Sender<u64>,
    may_release: Arc<Semaphore>,
    may_rejoin: Arc<Semaphore>,
}

impl Driver {
    async fn answer(&mut self, line: &str) -> Result<Option<String>, String> {
        let mut words = line.split(' ');
        let command = words.next().unwrap_or_default();
        let name = words.next().unwrap_or_default();
        let numbers: Vec<u64> = words.map_while(|word| word.parse().ok()).collect();
        match (command, &numbers[..]) {
            ("pairs", &[tasks, names, _capacity, window]) => {
                let window = Duration::from_millis(window);
                self.pairs(name, tasks, names, window).await.map(Some)
            }
            ("repeat", &[count]) => {
                let mut session = self.session(LEASE).await?;
                for _ in 0..count {
                    pair(&mut session, name).await?;
                }
                Ok(Some("ok".to_owned()))
            }
            ("contend", &[waiters, starts_at, step, hold, ends_at]) => {
                let hold = Duration::from_nanos(hold);
                self.contend(name, waiters, (starts_at, step), hold, ends_at).await.map(Some)
            }
            ("ring", &[waiters, starts_at, step]) => {
                self.ring(name, waiters, starts_at, step).await.map(|()| None)
            }
            ("release", _) => {
                self.may_release.add_permits(1);
                Ok(None)
            }
            ("rejoin", _) => {
                self.may_rejoin.add_permits(1);
                Ok(None)
            }
            ("hold", &[lease]) => {
                let mut session = self.session(Duration::from_millis(lease)).await?;
                let lock = session.acquire(name, LEASE).await?;
                self.held.push((session, lock.ok_or("a free lock was not acquired")?));
                Ok(Some("ok".to_owned()))
            }
            ("wait", &[count, lease, time_limit]) => {
                for _ in 0..count {
                    let session = self.session(Duration::from_millis(lease)).await?;
                    tokio::spawn(wait(session, name.to_owned(), time_limit, self.first.clone()));
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

    async fn session(&self, lease: Duration) -> Result<Session, String> {
        Session::open(&self.client, lease).await
    }

    /// Each task has its own names, because a lock has one holder.
    async fn pairs(
        &self,
        prefix: &str,
        tasks: u64,
        names: u64,
        window: Duration,
    ) -> Result<String, String> {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut running = Vec::new();
        for task in 0..tasks {
            let mut session = self.session(LEASE).await?;
            let numbers = (task % names..names).step_by(usize::try_from(tasks).expect("few"));
            let task_names: Vec<_> = numbers.map(|number| format!("{prefix}-{number}")).collect();
            let (stop, done) = (stop.clone(), done.clone());
            running.push(tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    for name in &task_names {
                        pair(&mut session, name).await?;
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                }
                Ok(())
            }));
        }
        sleep(window / 5).await;
        let (begun, before) = (Instant::now(), done.load(Ordering::Relaxed));
        sleep(window).await;
        let (took, pairs) = (begun.elapsed(), done.load(Ordering::Relaxed) - before);
        stop.store(true, Ordering::Relaxed);
        joined(running).await?;
        Ok(format!("ok {pairs} {} {}", took.as_nanos(), done.load(Ordering::Relaxed)))
    }

    async fn contend(
        &self,
        name: &str,
        waiters: u64,
        (starts_at, step): (u64, u64),
        hold: Duration,
        ends_at: u64,
    ) -> Result<String, String> {
        let mut running = Vec::new();
        for index in 0..waiters {
            let (mut session, name) = (self.session(LEASE).await?, name.to_owned());
            running.push(tokio::spawn(async move {
                let mut waits = Vec::new();
                sleep(until(starts_at + index * step)).await;
                loop {
                    let requested = nanos();
                    if requested >= ends_at {
                        return Ok(waits);
                    }
                    let Some(lock) = session.acquire(&name, until(ends_at)).await? else {
                        waits.push(format!("{index} {requested} 0 0"));
                        return Ok(waits);
                    };
                    let granted = nanos();
                    if !hold.is_zero() {
                        sleep(hold).await;
                    }
                    waits.push(format!("{index} {requested} {granted} {}", nanos()));
                    session.release(lock).await?;
                }
            }));
        }
        let waits: Vec<_> = joined(running).await?.into_iter().flatten().collect();
        Ok([vec![format!("ok {}", waits.len())], waits].concat().join("\n"))
    }

    async fn ring(
        &self,
        name: &str,
        waiters: u64,
        starts_at: u64,
        step: u64,
    ) -> Result<(), String> {
        for index in 0..waiters {
            let (mut session, name) = (self.session(LEASE).await?, name.to_owned());
            let (may_release, may_rejoin) = (self.may_release.clone(), self.may_rejoin.clone());
            tokio::spawn(async move {
                sleep(until(starts_at + index * step)).await;
                loop {
                    let lock = match session.acquire(&name, LEASE).await {
                        Ok(Some(lock)) => lock,
                        Ok(None) => continue,
                        Err(why) => return say(&format!("error {why}")),
                    };
                    say(&format!("granted {}", nanos()));
                    may_release.acquire().await.expect("never closed").forget();
                    let released = nanos();
                    if let Err(why) = session.release(lock).await {
                        return say(&format!("error {why}"));
                    }
                    say(&format!("released {released}"));
                    may_rejoin.acquire().await.expect("never closed").forget();
                }
            });
        }
        Ok(())
    }
}

async fn pair(session: &mut Session, name: &str) -> Result<(), String> {
    let lock = session.acquire(name, LEASE).await?;
    session.release(lock.ok_or("was not acquired in 10 s")?).await
}

async fn wait(mut session: Session, name: String, time_limit: u64, first: watch::Sender<u64>) {
    // Without a limit if it is zero.
    let limit = if time_limit == 0 { Duration::MAX } else { Duration::from_millis(time_limit) };
    let Ok(Some(lock)) = session.acquire(&name, limit).await else { return };
    let now = nanos();
    first.send_if_modified(|at| {
        let is_first = *at == 0;
        if is_first {
            *at = now;
        }
        is_first
    });
    // The driver is about to be killed, so it does not matter if the release fails.
    let _ = session.release(lock).await;
}

/// Returns the answers of all tasks, or the first failure.
async fn joined<T>(tasks: Vec<JoinHandle<Result<T, String>>>) -> Result<Vec<T>, String> {
    let mut answers = Vec::with_capacity(tasks.len());
    for task in tasks {
        answers.push(task.await.map_err(|why| why.to_string())??);
    }
    Ok(answers)
}

/// Returns the time in nanoseconds, by a clock that all processes of this host share.
fn nanos() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let (seconds, rest) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.expect("since the start") * 1_000_000_000 + rest.expect("less than a second")
}

/// Returns the time until that moment; zero if it has passed.
fn until(moment: u64) -> Duration {
    Duration::from_nanos(moment.saturating_sub(nanos()))
}
