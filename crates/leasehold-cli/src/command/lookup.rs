//! `leasehold lookup`: shows the holder of a lock.

use std::fmt::Write;

use leasehold::LockInfo;
use serde_json::Value;

use super::show::find;
use crate::args::LookupArgs;
use crate::failure::{Failure, NOTHING_THERE};
use crate::output::{self, ago, or_dash, timestamp};
use crate::store::{self, Store};

pub(crate) fn run(arguments: &LookupArgs) -> Result<u8, Failure> {
    store::block_on(async {
        let client = Store::new(&arguments.store)?.open_read_only().await?;
        let Some(found) = client.locks().lookup(&arguments.key).await? else {
            let key = &arguments.key;
            let rest = match find(&client, key).await {
                Ok(Some(_)) => format!("; for the semaphore see `leasehold show {key}`"),
                _ => String::new(),
            };
            let message = format!("the lock {key:?} is not held{rest}");
            return Err(Failure::new(NOTHING_THERE, message));
        };
        if arguments.json {
            output::print_json(&as_json(&found, arguments.raw))?;
        } else {
            output::print(&as_text(&found, arguments.raw))?;
        }
        Ok(0)
    })
}

fn as_text(found: &LockInfo, raw: bool) -> String {
    let info = found;
    let names = if raw {
        [("key", output::one_line(&found.key)), ("lock id", found.id.to_string())]
    } else {
        [("key hash", info.key_hash.clone()), ("lock id hash", info.id_hash.clone())]
    };
    let rest = [
        ("host", or_dash(info.host.as_deref().map(output::one_line))),
        ("pid", or_dash(info.pid.map(|pid| pid.to_string()))),
        ("label", or_dash(info.label.as_deref().map(output::one_line))),
        ("fence", info.fence.to_string()),
        ("acquired", format!("{} ({} ago)", timestamp(info.acquired_at), ago(info.age()))),
        ("ends", format!("{} (in {})", timestamp(info.expires_at), ago(info.expires_in()))),
    ];
    names.into_iter().chain(rest).fold(String::new(), |mut text, (title, value)| {
        let _ = writeln!(text, "{title:<13} {value}");
        text
    })
}

/// Returns a lock as JSON. Its key and its lock id may be secrets, so they are there only with `raw`.
fn as_json(found: &LockInfo, raw: bool) -> Value {
    let mut value = output::json(found);
    if raw {
        value["id"] = found.id.to_string().into();
    } else if let Some(fields) = value.as_object_mut() {
        fields.remove("key");
    }
    value
}
