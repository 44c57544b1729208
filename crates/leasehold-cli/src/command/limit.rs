//! `leasehold limit`, `pause`, `resume`, `drain`, `forget`: change the limits of a semaphore while it is in use.

use leasehold::{Client, Semaphore, SemaphoreStats};

use super::show::find_with;
use crate::args::{DrainArgs, ForgetArgs, LimitArgs, PauseArgs, RateChange, ResumeArgs, StoreArgs};
use crate::failure::{Failure, NOT_ACQUIRED, NOTHING_THERE, log_line};
use crate::output::{self, ago, one_line};
use crate::store::{self, Store};

pub(crate) fn limit(arguments: &LimitArgs) -> Result<u8, Failure> {
    // Checked before anything is changed, so that all changes are made or none.
    let rate = arguments.rate.map(|rate| rate.with_burst(arguments.burst)).transpose()?;
    let sets_rate = matches!(rate, Some(RateChange::To(_)));
    let unused = if arguments.capacity.is_some() || sets_rate {
        UnusedName::Changed
    } else {
        UnusedName::Refused
    };
    with_semaphore(&arguments.store, &arguments.name, unused, async |client, semaphore, stats| {
        match arguments.capacity {
            Some(capacity) if arguments.pin => semaphore.pin(capacity).await?,
            Some(capacity) => semaphore.set_capacity(capacity).await?,
            // Without a number, the current limit is pinned.
            None if arguments.pin => match stats.map_or(0, |one| one.capacity) {
                0 => {
                    let problem = format!("{:?} has no limit yet", arguments.name);
                    return Err(Failure::usage(problem + ": give the number to pin"));
                }
                capacity => semaphore.pin(capacity).await?,
            },
            None if arguments.unpin => semaphore.unpin().await?,
            None => {}
        }
        match rate {
            Some(RateChange::To(rate)) => {
                semaphore.set_rate(rate.starts, rate.period, rate.burst).await?;
            }
            Some(RateChange::Removed) => semaphore.clear_rate().await?,
            None => {}
        }
        let stats = find_with(client, &arguments.name, 0..0).await?;
        // Another operator may have forgotten the name in the meantime.
        let stats = stats.ok_or_else(|| unknown(&arguments.name))?;
        if arguments.json {
            return output::print_json(&output::summary(&stats));
        }
        output::print(&format!("{}: {}\n", one_line(&stats.name), describe(&stats)))
    })
}

pub(crate) fn pause(arguments: &PauseArgs) -> Result<u8, Failure> {
    with_semaphore(
        &arguments.store,
        &arguments.name,
        UnusedName::Changed,
        async |_, semaphore, _| {
            let pause = semaphore.pause().by(who());
            let pause = match &arguments.reason {
                Some(reason) => pause.reason(reason),
                None => pause,
            };
            Ok(pause.await?)
        },
    )
}

pub(crate) fn resume(arguments: &ResumeArgs) -> Result<u8, Failure> {
    with_semaphore(
        &arguments.store,
        &arguments.name,
        UnusedName::Refused,
        async |_, semaphore, _| Ok(semaphore.resume().await?),
    )
}

pub(crate) fn drain(arguments: &DrainArgs) -> Result<u8, Failure> {
    with_semaphore(
        &arguments.store,
        &arguments.name,
        UnusedName::Changed,
        async |_, semaphore, _| {
            let drain = semaphore.drain().by(who());
            let drain = match &arguments.reason {
                Some(reason) => drain.reason(reason),
                None => drain,
            };
            let drain = match arguments.wait {
                Some(limit) => drain.within(limit),
                None => drain,
            };
            let Err(error) = drain.await else { return Ok(()) };
            if !matches!(error, leasehold::Error::NotDrained { .. }) {
                return Err(error.into());
            }
            let limit = humantime::format_duration(arguments.wait.unwrap_or_default());
            let (name, held) = (semaphore.name(), semaphore.stats().await?.held);
            let permits = match held {
                1 => format!("1 permit of {name:?} is"),
                held => format!("{held} permits of {name:?} are"),
            };
            let problem = format!("{permits} still held after {limit}; the semaphore stays paused");
            let advice = format!("see `leasehold show {name}`");
            Err(Failure::new(NOT_ACQUIRED, format!("{problem}: {advice}")))
        },
    )
}

pub(crate) fn forget(arguments: &ForgetArgs) -> Result<u8, Failure> {
    with_semaphore(
        &arguments.store,
        &arguments.name,
        UnusedName::Refused,
        async |_, semaphore, stats| {
            let name = semaphore.name();
            let (held, waiting) = stats.map_or((0, 0), |stats| (stats.held, stats.waiting));
            if held > 0 || waiting > 0 {
                let problem = format!("{name:?} is in use: {held} held, {waiting} waiting");
                let advice =
                    format!("`leasehold drain {name}` first, and end the waiting processes");
                return Err(Failure::new(NOT_ACQUIRED, format!("{problem}: {advice}")));
            }
            if !arguments.yes {
                let effect = "this removes its limits, its pause and its last fence. The next fence then comes from the clock: if the \
                          clock was set back, a resource that compares fences rejects it";
                return Err(Failure::usage(format!("{name:?}: {effect}. To confirm, add --yes")));
            }
            Ok(semaphore.forget().await?)
        },
    )
}

/// What to do with a name that nobody has used yet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum UnusedName {
    /// Change it all the same, and say that it is new, because it may be mistyped.
    Changed,
    /// There is nothing to show, to end or to remove.
    Refused,
}

/// Runs `work` with a handle that declares nothing, and with the statistics if the name was used before.
fn with_semaphore(
    store: &StoreArgs,
    name: &str,
    unused: UnusedName,
    work: impl AsyncFnOnce(&Client, &Semaphore, Option<&SemaphoreStats>) -> Result<(), Failure>,
) -> Result<u8, Failure> {
    store::block_on(async {
        let client = Store::new(store)?.find().await?;
        let semaphore = client.semaphore(name, 1).unless_declared().build()?;
        let found = find_with(&client, name, 0..0).await?;
        if found.is_none() {
            check_unused(&client, name, unused).await?;
        }
        work(&client, &semaphore, found.as_ref()).await?;
        if found.is_none() {
            log_line(&not_in_use_before(name));
        }
        let _ = client.close().await;
        Ok(0)
    })
}

/// Fails if the name is that of a lock, or if an unused name is refused.
async fn check_unused(client: &Client, name: &str, unused: UnusedName) -> Result<(), Failure> {
    let is_a_lock = matches!(client.locks().lookup(name).await, Ok(Some(_)));
    match unused {
        _ if is_a_lock => {
            let why = "is a lock, and this command is for semaphores: to release a lock, use `leasehold release`";
            Err(Failure::new(NOTHING_THERE, format!("{name:?} {why}")))
        }
        UnusedName::Refused => Err(unknown(name)),
        UnusedName::Changed => Ok(()),
    }
}

fn unknown(name: &str) -> Failure {
    let why = "is not the name of a semaphore that was used before: see `leasehold ls --all`";
    Failure::new(NOTHING_THERE, format!("{name:?} {why}"))
}

/// Returns a hint for the case that the name is mistyped.
pub(crate) fn not_in_use_before(name: &str) -> String {
    format!("{name:?} was not in use before: if it is mistyped, see `leasehold ls --all`")
}

/// Returns the acting user and host, as far as they are known.
pub(crate) fn who() -> String {
    let user = std::env::var("USER").or_else(|_| std::env::var("LOGNAME"));
    let user = user.ok().filter(|user| !user.is_empty());
    let user = user.unwrap_or_else(|| format!("uid-{}", rustix::process::getuid().as_raw()));
    let host = rustix::system::uname();
    format!("{user}@{}", host.nodename().to_string_lossy())
}

/// Formats the limits.
pub(super) fn describe(stats: &SemaphoreStats) -> String {
    let capacity = stats.capacity;
    let permits = match capacity {
        0 => "no limit yet".to_owned(),
        1 => "1 permit".to_owned(),
        Semaphore::UNLIMITED => "any number of permits".to_owned(),
        capacity => format!("{capacity} permits"),
    };
    let rate = rate(stats).map(|rate| format!(", {rate}")).unwrap_or_default();
    let pinned = match stats.pinned {
        Some(_) if stats.declared == capacity => ", pinned".to_owned(),
        Some(_) if stats.declared == 0 => ", pinned (no limit was declared yet)".to_owned(),
        Some(_) if stats.declared == Semaphore::UNLIMITED => {
            ", pinned (no limit after --unpin)".to_owned()
        }
        Some(_) => format!(", pinned ({} after --unpin)", stats.declared),
        None => String::new(),
    };
    let paused = paused(stats).map(|paused| format!("; {paused}")).unwrap_or_default();
    format!("{permits}{pinned}{rate}{paused}")
}

/// Formats the rate.
pub(super) fn rate(stats: &SemaphoreStats) -> Option<String> {
    stats.rate.map(|rate| rate.to_string())
}

/// Returns when the rate allows the next start, and how to remove the rate, if there is no token now.
pub(crate) fn next_start(stats: &SemaphoreStats) -> Option<String> {
    let (rate, next) = (stats.rate?, ago(stats.next_token?));
    let (name, advice) = (one_line(&stats.name), "--rate none removes the rate");
    Some(format!(
        "the rate of {rate} allows the next start in {next}; leasehold limit {name:?} {advice}"
    ))
}

/// Formats a pause: since when, by whom and why.
pub(crate) fn paused(stats: &SemaphoreStats) -> Option<String> {
    let paused = stats.paused.as_ref()?;
    let reason = paused.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    Some(one_line(&format!("paused by {} {} ago{reason}", paused.by, ago(paused.lasts))))
}
