//! `leasehold lock`: a command under a fenced lock.

use std::time::Duration;

use leasehold::{Client, Error, Lock, LockGuard, Retry};

use super::holding::{farewell, listen, signalled, taken, under, unless_signalled};
use crate::args::{LockArgs, Patience};
use crate::failure::{Failure, complain};
use crate::job::{Job, asked_for, grace};
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
    let mut signals = listen()?;
    let grace = grace(arguments.grace, arguments.lease, GRACES)?;
    let store = Store::new(&arguments.store)?;
    store::block_on(async {
        let client = unless_signalled(&mut signals, async { Ok(store.open().await?) }).await?;
        let place = store.place();
        let ended = hold_and_run(&client, &place, arguments, grace, &mut signals).await;
        farewell(&client, &ended).await;
        ended
    })
}

async fn hold_and_run(
    client: &Client,
    place: &str,
    arguments: LockArgs,
    grace: Duration,
    signals: &mut Signals,
) -> Result<u8, Failure> {
    let lock = declare(client, &arguments, grace)?;
    let guard = acquire(client, place, &lock, &arguments, signals).await?;
    let job = Job {
        command: arguments.command,
        grace,
        ttl: arguments.ttl,
        what: format!("lock {:?}", lock.key()),
        name: lock.key().to_owned(),
        verbose: arguments.verbose,
    };
    if job.verbose {
        complain(&format!("{} acquired, with fence {}", job.what, guard.fence()));
    }
    under(client, &job, guard, signals).await
}

fn declare(client: &Client, arguments: &LockArgs, grace: Duration) -> Result<Lock, Failure> {
    let within = match arguments.wait.patience() {
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
    place: &str,
    lock: &Lock,
    arguments: &LockArgs,
    signals: &mut Signals,
) -> Result<LockGuard, Failure> {
    let code = arguments.wait.conflict_code;
    if arguments.wait.patience() == Patience::None {
        let attempt = async { Ok(lock.try_acquire().await?) };
        return match unless_signalled(signals, attempt).await? {
            Some(guard) => Ok(guard),
            None => Err(taken(code, &format!("somebody else has the lock {:?}", lock.key()))),
        };
    }
    let what = format!("the lock {:?}", lock.key());
    let mut waiting = Waiting::new(&what, client, place, arguments.verbose);
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
        Err(error @ Error::TimedOut { .. }) => Err(taken(code, &error.to_string())),
        Err(error) => Err(error.into()),
    }
}
