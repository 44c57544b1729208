//! `leasehold lock`: a command under a fenced lock.

use std::time::Duration;

use leasehold::{Client, Error, Lock, LockGuard, Retry};

use super::holding::{Begun, Limit, begin, farewell, signalled, taken, under};
use crate::args::{LockArgs, Patience};
use crate::failure::{Failure, complain};
use crate::guard::spare::Spare;
use crate::job::{Job, asked_for, grace, margin};
use crate::signals::Signals;
use crate::store::{self, Store};
use crate::waiting::Waiting;

/// Of a lease: see [`grace`].
const GRACES: u32 = 2;
/// Longer than anybody waits.
const ENDLESS: Duration = Duration::from_secs(100 * 365 * 86_400);
/// A release wakes us. This is for those that nobody tells us of.
const ASK_AGAIN: Duration = Duration::from_secs(1);

pub(crate) fn run(arguments: LockArgs) -> Result<u8, Failure> {
    let grace = grace(arguments.grace, arguments.lease, GRACES)?;
    let limit = Limit::new(arguments.wait.patience());
    let store = Store::new(&arguments.store)?;
    let (spare, mut signals) = match begin(&arguments.command, grace)? {
        Begun::Command(spare, signals) => (spare, signals),
        Begun::Guard(code) => return Ok(code),
    };
    store::block_on(async {
        let open = async { Ok(store.open().await?) };
        let client = limit.bound(&store, &mut signals, open).await?;
        let ended =
            hold_and_run(&client, &store, arguments, grace, limit, spare, &mut signals).await;
        farewell(&client, &ended, &mut signals).await;
        ended
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
) -> Result<u8, Failure> {
    let lock = declare(client, &arguments, grace, limit)?;
    let guard = acquire(client, store, &lock, &arguments, limit, signals).await?;
    // There is one clock on one host, so that the library keeps no margin there. But a guard needs time to kill.
    let margin =
        if store.is_on_this_host() { margin(arguments.lease, grace) } else { Duration::ZERO };
    let job = Job {
        command: arguments.command,
        grace,
        margin,
        ttl: arguments.ttl,
        what: format!("lock {:?}", lock.key()),
        name: lock.key().to_owned(),
        verbose: arguments.verbose,
    };
    if job.verbose {
        complain(&format!("{} acquired, with fence {}", job.what, guard.fence()));
    }
    under(client, &job, guard, spare, signals).await
}

fn declare(
    client: &Client,
    arguments: &LockArgs,
    grace: Duration,
    limit: Limit,
) -> Result<Lock, Failure> {
    let within = match limit.patience() {
        Patience::Within(limit) => limit,
        Patience::None | Patience::Endless => ENDLESS,
    };
    let retry = Retry::default().times(u32::MAX).max_delay(ASK_AGAIN).within(within);
    // The lock is extended until the child has ended. Only the child is limited by --ttl.
    let lock = client.lock(&arguments.key).lease(asked_for(arguments.lease, grace));
    let lock = match &arguments.label {
        Some(label) => lock.label(label),
        None => lock,
    };
    Ok(lock.retry(retry).auto_extend().build()?)
}

async fn acquire(
    client: &Client,
    store: &Store,
    lock: &Lock,
    arguments: &LockArgs,
    limit: Limit,
    signals: &mut Signals,
) -> Result<LockGuard, Failure> {
    let code = arguments.wait.conflict_code;
    if arguments.wait.patience() == Patience::None {
        let attempt = async { Ok(lock.try_acquire().await?) };
        return match limit.bound(store, signals, attempt).await? {
            Some(guard) => Ok(guard),
            None => Err(taken(code, &format!("somebody else has the lock {:?}", lock.key()))),
        };
    }
    let what = format!("the lock {:?}", lock.key());
    let mut waiting = Waiting::new(&what, client, &store.place(), arguments.verbose);
    let locks = client.locks();
    let granted = tokio::select! {
        granted = lock.acquire() => granted,
        () = waiting.show_lock(&locks, lock.key()) => unreachable!("it goes on until we have it"),
        signal = signals.next_to_end() => return Err(signalled(signal)),
    };
    match granted {
        Ok(granted) => {
            waiting.granted();
            Ok(granted)
        }
        Err(error @ Error::TimedOut { .. }) => Err(taken(code, &limit.named_in(error))),
        Err(error) => Err(error.into()),
    }
}
