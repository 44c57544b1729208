//! Releases what a killed command held or waited for, so that the next job does not wait until the lease ends.
//!
//! The guard does this when nothing else is left to do: the child's group has ended, or there was no child. It is a copy
//! of the command, so it knows the store, with its password, and opens a client of its own.
//!
//! If the release fails, or the guard is killed before it, the lease ends by itself.

use std::fs::File;
use std::time::Duration;

use leasehold::{Client, Error};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};

use crate::clock::Moment;
use crate::store::{self, Store};

/// How long the release may take, with all its attempts.
const WITHIN: Duration = Duration::from_secs(2);
/// The pause between two attempts.
const TRY_AGAIN: Duration = Duration::from_millis(50);

/// The kind of lease that a command acquires.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Permit,
    Lock,
}

/// The lease that a command holds or waits for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct LeaseRef {
    pub(crate) name: String,
    pub(crate) id: String,
}

/// How to release the lease of a killed command.
#[derive(Clone, Copy)]
pub(crate) struct Cleanup<'a> {
    pub(crate) store: &'a Store,
    pub(crate) kind: Kind,
    /// The lease is not released before this time has passed since it was acquired.
    pub(crate) at_least: Option<Duration>,
    /// Whether the lease outlives the child. Then it is not released if the child may have run.
    pub(crate) outlives_child: bool,
}

impl Cleanup<'_> {
    /// Releases the lease of a command that was killed while its child ran. Call it only after the child's group has
    /// ended. `ran` says whether the child may have run.
    pub(super) fn release_held(self, lease: &LeaseRef, acquired: Moment, ran: bool) {
        let too_early = self.at_least.is_some_and(|least| Moment::now() < acquired.plus(least));
        let lasts_longer = ran && self.outlives_child;
        if !too_early && !lasts_longer {
            self.release(lease);
        }
    }

    /// Releases the lease of a command that was killed before its child started.
    pub(super) fn release(self, lease: &LeaseRef) {
        // The kernel reports that the command is dead, so its permits are free by now.
        if self.kind == Kind::Permit && self.store.is_on_this_host() {
            return;
        }
        // No process should wait for this one: neither a reader of the command's output, nor the guard of an outer
        // command, which knows it by its name.
        let _ = std::fs::write("/proc/self/comm", "leasehold");
        if let Ok(null) = File::options().read(true).write(true).open("/dev/null") {
            let _ = (dup2_stdin(&null), dup2_stdout(&null), dup2_stderr(&null));
        }
        let _ = store::block_on(async {
            let _ = tokio::time::timeout(WITHIN, self.until_released(lease)).await;
            Ok(())
        });
    }

    async fn until_released(self, lease: &LeaseRef) {
        while let Err(Error::Unavailable { .. }) = self.try_to_release(lease).await {
            tokio::time::sleep(TRY_AGAIN).await;
        }
    }

    async fn try_to_release(self, lease: &LeaseRef) -> Result<(), Error> {
        let client = self.store.open().await?;
        match self.kind {
            Kind::Permit => release_permit(&client, lease).await?,
            Kind::Lock => {
                client.locks().release(&lease.id.parse()?).await?;
            }
        }
        client.close().await
    }
}

async fn release_permit(client: &Client, lease: &LeaseRef) -> Result<(), Error> {
    // The capacity is not declared. A waiter is removed in the same way.
    let semaphore = client.semaphore(&lease.name, 1).unless_declared().build()?;
    semaphore.release(&lease.id.parse()?).await?;
    Ok(())
}
