//! `leasehold run`: runs a command under a permit.

use std::time::Duration;

use leasehold::{Client, Error, Permit, Semaphore, SemaphoreLimits};

use super::limit::{next_start, paused};
use crate::args::{RateChange, RunArgs, WaitLimit};
use crate::child::guard::cleanup::{Cleanup, Kind, LeaseRef};
use crate::child::guard::spare::Spare;
use crate::child::job::{GRACE, Job, grace, lease_to_request};
use crate::child::waiting::{Waiting, held_by};
use crate::child::{
    CommandOrGuard, HEAD_START, JobEnd, Limit, begin, check_nesting, close_client, is_nested,
    signalled, taken, under,
};
use crate::failure::{Failure, log_line};
use crate::signals::Signals;
use crate::store::{self, Store};

/// With a shorter lease, a slightly late renewal would lose the permit.
const SHORTEST: Duration = Duration::from_millis(300);
/// The shortest lease in graces: see [`grace`].
const GRACES: u32 = 6;
/// How long the store may take to say why no permit was granted in time.
const REASON_WITHIN: Duration = Duration::from_millis(500);

pub(crate) fn run(arguments: RunArgs) -> Result<u8, Failure> {
    if arguments.lease < SHORTEST {
        let lease = humantime::format_duration(arguments.lease);
        let problem = "is too short to be renewed in time: give at least 300ms";
        return Err(Failure::usage(format!("--lease {lease} {problem}")));
    }
    if let (Some(least), Some(ttl)) = (arguments.at_least, arguments.ttl)
        && least > ttl
    {
        let [least, ttl] = [least, ttl].map(humantime::format_duration);
        let problem = format!("--at-least {least} is longer than --ttl {ttl}");
        let advice = "give a shorter --at-least or a longer --ttl";
        return Err(Failure::usage(format!("{problem}, which ends the permit: {advice}")));
    }
    let limit = Limit::new(arguments.wait.wait_limit());
    let store = Store::new(&arguments.store)?;
    let grace = if store.is_on_this_host() {
        arguments.grace.unwrap_or(GRACE)
    } else {
        grace(arguments.grace, arguments.lease, GRACES)?
    };
    let cleanup = Cleanup {
        store: &store,
        kind: Kind::Permit,
        at_least: arguments.at_least,
        outlives_child: false,
    };
    let (spare, mut signals) = match begin(&arguments.command, grace, cleanup)? {
        CommandOrGuard::Command(spare, signals) => (spare, signals),
        CommandOrGuard::Guard(code) => return Ok(code),
    };
    store.announce(arguments.verbose);
    store::block_on(async {
        let client = limit.open(&store, &mut signals).await?;
        let ended =
            hold_and_run(&client, &store, arguments, grace, limit, spare, &mut signals).await;
        close_client(&client, &ended, &mut signals).await;
        ended.map(|end| end.code)
    })
}

async fn hold_and_run(
    client: &Client,
    store: &Store,
    arguments: RunArgs,
    grace: Duration,
    limit: Limit,
    spare: Spare,
    signals: &mut Signals,
) -> Result<JobEnd, Failure> {
    let semaphore = declare(client, &arguments, grace);
    let semaphore = limit.bound(store, signals, semaphore).await?;
    let permit = acquire(client, store, &semaphore, &arguments, limit, &spare, signals).await?;
    let job = Job {
        command: arguments.command,
        grace,
        // On one host only a TTL ends a permit, and the child's TTL is shorter than the permit's.
        margin: Duration::ZERO,
        ttl: arguments.ttl,
        what: format!("permit {} of {:?}", permit.id(), semaphore.name()),
        name: semaphore.name().to_owned(),
        verbose: arguments.verbose,
        at_least: arguments.at_least,
    };
    let waited = permit.waited();
    under(client, &job, permit, waited, spare, signals).await
}

/// Declares the semaphore. Its lease and TTL are longer than those of the child.
async fn declare(
    client: &Client,
    arguments: &RunArgs,
    grace: Duration,
) -> Result<Semaphore, Failure> {
    let lease = lease_to_request(arguments.lease, grace);
    let rate = arguments.rate.map(|rate| rate.with_burst(arguments.burst)).transpose()?;
    // A rate without `-n` does not limit how many run at once.
    let otherwise = if matches!(rate, Some(RateChange::To(_))) { Semaphore::UNLIMITED } else { 1 };
    let capacity = arguments.capacity.unwrap_or(otherwise);
    let semaphore = client.semaphore(&arguments.name, capacity).lease(lease).numbered();
    // The child needs the grace and more from its start. The time to claim a permit may be shorter than that.
    let semaphore = semaphore.claim_first();
    let semaphore = match arguments.capacity {
        Some(_) => semaphore,
        None => semaphore.unless_declared(),
    };
    let semaphore = match rate {
        Some(RateChange::To(rate)) => semaphore.rate(rate.starts, rate.period).burst(rate.burst),
        Some(RateChange::Removed) | None => semaphore,
    };
    let semaphore = match arguments.ttl {
        Some(ttl) => semaphore.ttl(lease_to_request(ttl + HEAD_START, grace)),
        None => semaphore,
    };
    let semaphore = match &arguments.label {
        Some(label) => semaphore.label(label),
        None => semaphore,
    };
    let semaphore = semaphore.build()?;
    // Before any change is reported.
    if let Some(capacity) = arguments.capacity.filter(|capacity| arguments.weight > *capacity) {
        let (weight, name) = (arguments.weight, &arguments.name);
        let problem = format!("--weight {weight} is more than -n {capacity} of {name:?}");
        return Err(Failure::usage(problem + ": give a smaller --weight or a larger -n"));
    }
    let is_weighed = arguments.weight > 1;
    if is_nested() || arguments.capacity.is_some() || rate.is_some() || is_weighed {
        let before = semaphore.limits().await?;
        let limit = arguments.capacity.unwrap_or(before.capacity);
        if is_weighed && limit == Semaphore::UNLIMITED {
            let (weight, name) = (arguments.weight, &arguments.name);
            let problem = format!("--weight {weight} needs a limit, and {name:?} has only a rate");
            let why = "which counts starts, whatever they weigh";
            return Err(Failure::usage(format!("{problem}, {why}: give -n, or no --weight")));
        }
        if is_nested() && before.capacity < Semaphore::UNLIMITED {
            let holders = semaphore.stats().await?.holders.into_iter().map(|holder| holder.id);
            check_nesting(&format!("{:?}", arguments.name), holders)?;
        }
        for change in changes(&arguments.name, &before, arguments.capacity, rate) {
            log_line(&change);
        }
        if rate == Some(RateChange::Removed) && before.rate.is_some() {
            semaphore.clear_rate().await?;
        }
    }
    Ok(semaphore)
}

/// Returns the changes of `-n` and `--rate` that affect all users of the name, and changes without effect, a line each.
fn changes(
    name: &str,
    limits: &SemaphoreLimits,
    capacity: Option<u32>,
    rate: Option<RateChange>,
) -> Vec<String> {
    let before = limits.capacity;
    let mut changes = Vec::new();
    match (capacity, limits.pinned) {
        (Some(capacity), _) if before == capacity => {}
        (Some(capacity), Some(pinned)) => {
            changes.push(format!("{name:?} is pinned to {pinned}: -n {capacity} has no effect"));
        }
        (Some(capacity), None) if before == Semaphore::UNLIMITED => {
            changes.push(format!("{name:?} had no limit: the limit is now {capacity}"));
        }
        (Some(capacity), None) => {
            changes.push(format!("the limit of {name:?} was {before} and is now {capacity}"));
        }
        (None, _) => {}
    }
    match (rate, limits.rate) {
        (Some(RateChange::To(rate)), Some(before)) if rate != before => {
            changes.push(format!("the rate of {name:?} was {before} and is now {rate}"));
        }
        (Some(RateChange::Removed), Some(before)) => {
            changes.push(format!("the rate of {name:?} was {before} and is now removed"));
        }
        _ => {}
    }
    changes
}

/// Returns why no permit was granted, as far as that is known a moment later.
async fn why_not(semaphore: &Semaphore, weight: u32) -> String {
    let name = semaphore.name();
    if let Ok(Some(why)) = reason(semaphore).await {
        return why;
    }
    let what = match weight {
        1 => format!("no permit of {name:?} is free"),
        weight => format!("{weight} units of {name:?} are not free"),
    };
    match semaphore.stats().await.ok().as_ref().and_then(held_by) {
        Some(held) => format!("{what}: {held}"),
        None => what,
    }
}

/// Returns the reason if a pause or a rate prevents grants.
async fn reason(semaphore: &Semaphore) -> Result<Option<String>, Failure> {
    let (name, stats) = (semaphore.name(), semaphore.stats().await?);
    if let Some(paused) = paused(&stats) {
        return Ok(Some(format!("{name:?} was {paused}")));
    }
    Ok(next_start(&stats))
}

async fn acquire(
    client: &Client,
    store: &Store,
    semaphore: &Semaphore,
    arguments: &RunArgs,
    limit: Limit,
    spare: &Spare,
    signals: &mut Signals,
) -> Result<Permit, Failure> {
    let (code, verbose) = (arguments.wait.conflict_code, arguments.verbose);
    let acquire = match limit.wait_limit() {
        WaitLimit::None => {
            let attempt = async { Ok(semaphore.try_acquire().weight(arguments.weight).await?) };
            return match limit.bound(store, signals, attempt).await? {
                Some(permit) => Ok(permit),
                None => Err(taken(code, verbose, &why_not(semaphore, arguments.weight).await)),
            };
        }
        WaitLimit::Within(limit) => semaphore.acquire().weight(arguments.weight).within(limit),
        WaitLimit::Endless => semaphore.acquire().weight(arguments.weight),
    };
    let what = format!("{:?}", semaphore.name());
    let mut waiting = Waiting::new(&what, client, &store.place(), arguments.verbose);
    let id = acquire.id();
    // Before the request is sent.
    spare.will_wait(&LeaseRef { name: semaphore.name().to_owned(), id: id.to_string() });
    let granted = tokio::select! {
        granted = acquire => granted,
        () = waiting.show_queue(semaphore, id) => unreachable!("show_queue never returns"),
        signal = signals.next_to_end() => return Err(signalled(signal)),
    };
    match granted {
        Ok(granted) => {
            waiting.granted();
            Ok(granted)
        }
        Err(mut error @ Error::TimedOut { .. }) => {
            // A store that has stopped answering meanwhile never looks like contention.
            let reason = tokio::time::timeout(REASON_WITHIN, reason(semaphore)).await;
            let why = reason.unwrap_or_else(|_| Err(store.silent_for(REASON_WITHIN)))?;
            let why = why.map(|why| format!(": {why}")).unwrap_or_default();
            // The reason names the rate, and what to do at a shell.
            if let Error::TimedOut { next_token, .. } = &mut error {
                *next_token = None;
            }
            Err(taken(code, verbose, &(limit.named_in(error) + &why)))
        }
        Err(error) => Err(error.into()),
    }
}
