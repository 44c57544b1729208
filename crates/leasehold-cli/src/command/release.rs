//! `leasehold release`: ends somebody's permit or lock by hand.

use leasehold::{AcquisitionId, Client, LockId};
use serde_json::json;

use super::show::find;
use crate::args::ReleaseArgs;
use crate::failure::{Failure, NOTHING_THERE, complain};
use crate::output;
use crate::store;

const WARNING: &str = "warning: whoever held it may still be at work, and the next may begin before he notices; \
                       only a resource that checks fences is safe";

pub(crate) fn run(arguments: &ReleaseArgs) -> Result<u8, Failure> {
    let id = Id::parse(&arguments.id)?;
    store::block_on(async {
        let client = store::open(&arguments.store).await?;
        let released = match id {
            Id::Permit(id) => release_permit(&client, &arguments.name, id).await?,
            Id::Lock(id) => release_lock(&client, &arguments.name, id).await?,
        };
        let Some(released) = released else {
            let message = format!(
                "{:?} neither holds nor waits for {:?}: see `leasehold show`",
                arguments.id, arguments.name
            );
            return Err(Failure::new(NOTHING_THERE, message));
        };
        if released != "waiter" {
            complain(WARNING);
        }
        if arguments.json {
            let (name, id) = (&arguments.name, &arguments.id);
            output::print_json(&json!({ "name": name, "id": id, "released": released }))?;
        }
        let _ = client.close().await;
        Ok(0)
    })
}

/// Ours tell a permit from a lock.
#[derive(Clone, Copy)]
enum Id {
    Permit(AcquisitionId),
    Lock(LockId),
}

impl Id {
    fn parse(text: &str) -> Result<Self, Failure> {
        let permit = text.parse().map(Self::Permit);
        let lock = || text.parse().map(Self::Lock);
        permit.or_else(|_| lock()).map_err(|_| {
            Failure::usage(format!("{text:?} is not an id: take one that `leasehold show` prints"))
        })
    }
}

/// What it was; nothing if it was neither.
async fn release_permit(
    client: &Client,
    name: &str,
    id: AcquisitionId,
) -> Result<Option<&'static str>, Failure> {
    let Some(stats) = find(client, name).await? else { return Ok(None) };
    let is_it = |member: &leasehold::Member| member.id() == id.to_string();
    let waits = stats.waiters().iter().any(is_it);
    let semaphore = client.semaphore(name, stats.capacity().max(1)).build()?;
    let held = semaphore.release(&id).await?;
    Ok(if held { Some("holder") } else { waits.then_some("waiter") })
}

/// Only if it is the lock of this key: an id that was copied from somewhere else is a mistake.
async fn release_lock(
    client: &Client,
    key: &str,
    id: LockId,
) -> Result<Option<&'static str>, Failure> {
    let locks = client.locks();
    let is_it = locks.lookup_raw(key).await?.is_some_and(|found| found.lock_id == id);
    Ok((is_it && locks.release(&id).await?).then_some("lock"))
}
