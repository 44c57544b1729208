//! `leasehold release`: releases a permit or a lock by its id.

use leasehold::{AcquisitionId, Client, LockId};
use serde_json::json;

use super::show::find;
use crate::args::ReleaseArgs;
use crate::failure::{Failure, NOTHING_THERE, log_line};
use crate::output;
use crate::store::{self, Store};

const WARNING: &str = "warning: the old holder may still be running when the next one starts; only a resource that \
                       checks fences is protected";

pub(crate) fn run(arguments: &ReleaseArgs) -> Result<u8, Failure> {
    let id = Id::parse(&arguments.id);
    store::block_on(async {
        let store = Store::new(&arguments.store)?;
        // On one host all ids are of our form.
        let is_ours = store.is_on_this_host() || arguments.id.is_empty();
        let id = if is_ours { Some(id?) } else { id.ok() };
        let client = store.find().await?;
        let released = match id {
            Some(Id::Permit(id)) => release_permit(&client, &arguments.name, id).await?,
            Some(Id::Lock(id)) => release_lock(&client, &arguments.name, id).await?,
            None => release_foreign(&client, &arguments.name, &arguments.id).await?,
        };
        let Some(released) = released else {
            let message = format!(
                "{:?} does not hold {:?}: see `leasehold show {}`, or for a lock `leasehold lookup --raw {}`",
                arguments.id, arguments.name, arguments.name, arguments.name
            );
            return Err(Failure::new(NOTHING_THERE, message));
        };
        log_line(WARNING);
        if arguments.json {
            let (name, id) = (&arguments.name, &arguments.id);
            output::print_json(&json!({ "name": name, "id": id, "released": released }))?;
        } else {
            let what = match released {
                "lock" => "lock",
                "waiter" => "waiter",
                _ => "permit",
            };
            output::print(&output::line(&format!(
                "released {what} {} of {:?}",
                arguments.id, arguments.name
            )))?;
        }
        let _ = client.close().await;
        Ok(0)
    })
}

/// An id of our own form, which tells a permit from a lock.
#[derive(Clone, Copy)]
enum Id {
    Permit(AcquisitionId),
    Lock(LockId),
}

impl Id {
    fn parse(text: &str) -> Result<Self, Failure> {
        let permit = text.parse().map(Self::Permit);
        let lock = || text.parse().map(Self::Lock);
        if text.is_empty() {
            return Err(Failure::usage("the id is empty: see `leasehold show NAME`"));
        }
        permit.or_else(|_| lock()).map_err(|_| {
            let problem = "is not an id: use one that `leasehold show NAME` prints; for a lock, one that \
                           `leasehold lookup --raw KEY` prints";
            Failure::usage(format!("{text:?} {problem}"))
        })
    }
}

/// Releases a permit. Returns its role, or `None` if it does not hold one. A waiter is refused: it would only queue
/// again.
async fn release_permit(
    client: &Client,
    name: &str,
    id: AcquisitionId,
) -> Result<Option<&'static str>, Failure> {
    let Some(stats) = find(client, name).await? else { return Ok(None) };
    let is_it = |member: &leasehold::Member| member.id() == id.to_string();
    if let Some(waiter) = stats.waiters().iter().find(|member| is_it(member)) {
        let process = waiter.pid().map(|pid| format!(" (pid {pid})")).unwrap_or_default();
        let message = format!("\"{id}\" only waits for {name:?}: end its process{process} instead");
        return Err(Failure::new(NOTHING_THERE, message));
    }
    let semaphore = client.semaphore(name, stats.capacity().max(1)).build()?;
    Ok(semaphore.release(&id).await?.then_some("holder"))
}

/// Releases a holder or waiter of another program that shares the semaphore. Returns its role.
async fn release_foreign(
    client: &Client,
    name: &str,
    id: &str,
) -> Result<Option<&'static str>, Failure> {
    let Some(stats) = find(client, name).await? else { return Ok(None) };
    let holds = stats.holders().iter().any(|member| member.id() == id);
    let waits = stats.waiters().iter().any(|member| member.id() == id);
    if !holds && !waits {
        if !is_uuid(id) {
            Id::parse(id)?;
        }
        return Ok(None);
    }
    let semaphore = client.semaphore(name, stats.capacity().max(1)).build()?;
    let role = if holds { "holder" } else { "waiter" };
    Ok(semaphore.release_member(id).await?.then_some(role))
}

/// Whether the text has the form of the ids of asyncio-advanced-semaphores, a UUID with or without dashes. Such a permit
/// may have ended since it was listed.
fn is_uuid(text: &str) -> bool {
    let digits = text.bytes().filter(|byte| *byte != b'-');
    digits.clone().all(|byte| byte.is_ascii_hexdigit()) && digits.count() == 32
}

/// Releases a lock, but only if the id is that of this key: another id is a mistake.
async fn release_lock(
    client: &Client,
    key: &str,
    id: LockId,
) -> Result<Option<&'static str>, Failure> {
    let locks = client.locks();
    let is_it = locks.lookup_raw(key).await?.is_some_and(|found| found.lock_id == id);
    Ok((is_it && locks.release(&id).await?).then_some("lock"))
}
