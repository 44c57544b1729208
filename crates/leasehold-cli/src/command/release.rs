//! `leasehold release`: releases a permit or a lock by its id, or a lock by its key, and cancels waiters.

use std::time::SystemTime;

use leasehold::{AcquisitionId, Client, LockId, LockInfo};
use serde_json::json;

use super::show::{find, find_with};
use crate::args::ReleaseArgs;
use crate::failure::{Failure, NOTHING_THERE, log_line};
use crate::output::{self, ago};
use crate::store::{self, Store};

const WARNING: &str = "warning: the old holder may still be running when the next one starts; only a resource that \
                       checks fences is protected";

pub(crate) fn run(arguments: &ReleaseArgs) -> Result<u8, Failure> {
    let Some(id) = &arguments.id else { return release_by_key(arguments) };
    let parsed = Id::parse(id);
    store::block_on(async {
        let store = Store::new(&arguments.store)?;
        // On one host all ids are of our form.
        let is_ours = store.is_on_this_host() || id.is_empty();
        let parsed = if is_ours { Some(parsed?) } else { parsed.ok() };
        let client = store.find().await?;
        let name = &arguments.name;
        let released = match parsed {
            Some(Id::Lock(id)) => release_lock(&client, name, id).await?,
            Some(Id::Permit) | None => release_member(&client, name, id).await?,
        };
        let Some(released) = released else {
            if parsed.is_none() && !is_uuid(id) {
                Id::parse(id)?;
            }
            let message = format!(
                "{id:?} does not hold {name:?} and does not wait for it: see `leasehold show {name}`, or for a lock \
                 `leasehold lookup --raw {name}`"
            );
            return Err(Failure::new(NOTHING_THERE, message));
        };
        if released != "waiter" {
            log_line(WARNING);
        }
        if arguments.json {
            output::print_json(&json!({ "name": name, "id": id, "released": released }))?;
        } else {
            let line = match released {
                "lock" => format!("released lock {id} of {name:?}"),
                "waiter" => format!("cancelled the wait of {id} for {name:?}"),
                _ => format!("released permit {id} of {name:?}"),
            };
            output::print(&output::line(&line))?;
        }
        let _ = client.close().await;
        Ok(0)
    })
}

/// Releases a lock by its key. Without `--yes` it only shows the holder, because a key is mistyped more easily than an
/// id, and the holder may have changed since the operator looked.
fn release_by_key(arguments: &ReleaseArgs) -> Result<u8, Failure> {
    store::block_on(async {
        let client = Store::new(&arguments.store)?.find().await?;
        let (locks, key) = (client.locks(), &arguments.name);
        let Some(lock) = locks.lookup(key).await? else {
            return Err(not_a_lock(&client, key).await);
        };
        let holder = holder(&lock);
        if !arguments.yes {
            let effect =
                "another process can acquire the lock at once, while the old holder may still run";
            return Err(Failure::usage(format!(
                "{key:?} is locked by {holder}. If it is released, {effect}. To confirm, add --yes"
            )));
        }
        // By the id of that holder, so that no later holder is released.
        if !locks.release(&lock.id).await? {
            let problem = format!("{key:?} is no longer locked by {holder}");
            return Err(Failure::new(NOTHING_THERE, problem + ": nothing was released"));
        }
        log_line(WARNING);
        if arguments.json {
            let fence = lock.fence.to_string();
            output::print_json(&json!({ "name": key, "fence": fence, "released": "lock" }))?;
        } else {
            let line = format!("released the lock {key:?}, which was held by {holder}");
            output::print(&output::line(&line))?;
        }
        let _ = client.close().await;
        Ok(0)
    })
}

async fn not_a_lock(client: &Client, key: &str) -> Failure {
    let problem = match find_with(client, key, 0..0).await {
        Ok(Some(_)) => {
            format!(
                "{key:?} is a semaphore: give the id of a permit or of a waiter, as `leasehold show {key}` prints it"
            )
        }
        _ => format!("{key:?} is not locked"),
    };
    Failure::new(NOTHING_THERE, problem)
}

/// Describes the holder of a lock, as far as it is known.
fn holder(lock: &LockInfo) -> String {
    let info = &lock;
    let held_for = SystemTime::now().duration_since(info.acquired_at).unwrap_or_default();
    let label = info.label.as_ref().map(|label| format!("{label:?} ")).unwrap_or_default();
    let host = info.host.as_deref().unwrap_or("an unknown host");
    let process = info.pid.map(|pid| format!(" pid {pid}")).unwrap_or_default();
    format!("{label}on {host}{process} for {} (fence {})", ago(held_for), info.fence)
}

/// An id of our own form, which tells a permit from a lock.
#[derive(Clone, Copy)]
enum Id {
    /// Of a permit or of a waiter.
    Permit,
    Lock(LockId),
}

impl Id {
    fn parse(text: &str) -> Result<Self, Failure> {
        let permit = text.parse::<AcquisitionId>().map(|_| Self::Permit);
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

/// Releases a holder or cancels a waiter. It may belong to another program that shares the semaphore. Returns its role,
/// or `None` if it is neither.
async fn release_member(
    client: &Client,
    name: &str,
    id: &str,
) -> Result<Option<&'static str>, Failure> {
    let Some(stats) = find(client, name).await? else { return Ok(None) };
    let waits = stats.waiters.iter().any(|member| member.id == id);
    let role = if waits { "waiter" } else { "holder" };
    let semaphore = client.semaphore(name, stats.capacity.max(1)).unless_declared().build()?;
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
    let is_it = locks.lookup(key).await?.is_some_and(|found| found.id == id);
    Ok((is_it && locks.release(&id).await?).then_some("lock"))
}
