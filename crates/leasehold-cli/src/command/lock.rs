//! `leasehold lock`: runs a command under a fenced lock.

use std::time::{Duration, Instant, SystemTime};

use leasehold::{Client, Error, Lock, LockGuard, Retry};

use crate::args::{LockArgs, WaitLimit};
use crate::child::guard::cleanup::{Cleanup, Kind};
use crate::child::guard::spare::Spare;
use crate::child::job::{HeldLock, Job, grace, lease_to_request, margin};
use crate::child::waiting::{Waiting, locked_by};
use crate::child::{
    CommandOrGuard, HEAD_START, JobEnd, Limit, begin, check_nesting, close_client, is_nested,
    signalled, taken, under,
};
use crate::failure::Failure;
use crate::output::ago;
use crate::signals::Signals;
use crate::store::{self, Store};

/// The shortest lease in graces: see [`grace`].
const GRACES: u32 = 2;
/// How often the store is queried for releases that did not wake this client.
const ASK_AGAIN: Duration = Duration::from_secs(1);

pub(crate) fn run(arguments: LockArgs) -> Result<u8, Failure> {
    let grace = grace(arguments.grace, arguments.lease, GRACES)?;
    let limit = Limit::new(wait_limit(&arguments));
    let store = Store::new(&arguments.store)?;
    let cleanup = Cleanup {
        store: &store,
        kind: Kind::Lock,
        at_least: None,
        outlives_child: arguments.once_per.is_some(),
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
    arguments: LockArgs,
    grace: Duration,
    limit: Limit,
    spare: Spare,
    signals: &mut Signals,
) -> Result<JobEnd, Failure> {
    let lock = declare(client, &arguments, grace, limit)?;
    if is_nested() {
        let holder = async { Ok(client.locks().lookup(lock.name()).await?) };
        let holder = limit.bound(store, signals, holder).await?;
        let what = format!("the lock {:?}", lock.name());
        check_nesting(&what, holder.map(|holder| holder.id.to_string()))?;
    }
    let begun = Instant::now();
    let guard = acquire(client, store, &lock, &arguments, limit, signals).await?;
    let (waited, kept_until) =
        (begun.elapsed(), arguments.once_per.and_then(|period| Instant::now().checked_add(period)));
    // On one host there is one clock, so the library keeps no margin. But the guard needs time to kill the child.
    let margin =
        if store.is_on_this_host() { margin(arguments.lease, grace) } else { Duration::ZERO };
    let job = Job {
        command: arguments.command,
        grace,
        margin,
        ttl: arguments.ttl,
        what: format!("lock {:?}", lock.name()),
        name: lock.name().to_owned(),
        verbose: arguments.verbose,
        at_least: None,
    };
    let held = HeldLock { guard, kept_until };
    under(client, &job, held, waited, spare, signals).await
}

/// `--once-per` does not wait: the holder of the lock runs the job in this period, or has run it.
fn wait_limit(arguments: &LockArgs) -> WaitLimit {
    match arguments.once_per {
        Some(_) => WaitLimit::None,
        None => arguments.wait.wait_limit(),
    }
}

/// Returns why the lock was not acquired at once.
async fn why_not(client: &Client, lock: &Lock, once_per: Option<Duration>) -> String {
    let key = lock.name();
    let info = client.locks().lookup(key).await.ok().flatten();
    let Some(period) = once_per else {
        let held = info.as_ref().map_or_else(|| "held by another process".to_owned(), locked_by);
        return format!("the lock {key:?} is {held}");
    };
    let period = humantime::format_duration(period);
    let left = info.and_then(|info| info.expires_at.duration_since(SystemTime::now()).ok());
    let left = left.map(|left| format!("; the lock expires in {}", ago(left))).unwrap_or_default();
    format!(
        "the job of lock {key:?} is running, or ran within the last {period} (--once-per){left}"
    )
}

fn declare(
    client: &Client,
    arguments: &LockArgs,
    grace: Duration,
    limit: Limit,
) -> Result<Lock, Failure> {
    // The lease and the TTL are longer than those of the child.
    let lease = lease_to_request(arguments.lease, grace);
    let mut lock = client.lock(&arguments.key).lease(lease);
    if let Some(ttl) = arguments.ttl {
        lock = lock.ttl(lease_to_request(ttl + HEAD_START, grace));
    }
    if let WaitLimit::Within(limit) = limit.wait_limit() {
        lock = lock.within(limit);
    }
    if let Some(label) = &arguments.label {
        lock = lock.label(label);
    }
    Ok(lock.retry(Retry::default().max_delay(ASK_AGAIN)).build()?)
}

async fn acquire(
    client: &Client,
    store: &Store,
    lock: &Lock,
    arguments: &LockArgs,
    limit: Limit,
    signals: &mut Signals,
) -> Result<LockGuard, Failure> {
    let (code, verbose) = (arguments.wait.conflict_code, arguments.verbose);
    if limit.wait_limit() == WaitLimit::None {
        let attempt = async { Ok(lock.try_acquire().await?) };
        return match limit.bound(store, signals, attempt).await? {
            Some(guard) => Ok(guard),
            None => Err(taken(code, verbose, &why_not(client, lock, arguments.once_per).await)),
        };
    }
    let what = format!("the lock {:?}", lock.name());
    let mut waiting = Waiting::new(&what, client, &store.place(), arguments.verbose);
    let locks = client.locks();
    let granted = tokio::select! {
        granted = lock.acquire() => granted,
        () = waiting.show_lock(&locks, lock.name()) => unreachable!("show_lock never returns"),
        signal = signals.next_to_end() => return Err(signalled(signal)),
    };
    match granted {
        Ok(granted) => {
            waiting.granted();
            Ok(granted)
        }
        Err(error @ Error::TimedOut { .. }) => Err(taken(code, verbose, &limit.named_in(error))),
        Err(error) => Err(error.into()),
    }
}
