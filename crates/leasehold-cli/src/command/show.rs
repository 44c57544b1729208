//! `leasehold show`: every holder and waiter of a semaphore.

use leasehold::{Client, Fence, Member, SemaphoreStats};
use serde_json::{Value, json};

use super::ls::semaphore_json;
use crate::args::ShowArgs;
use crate::failure::{Failure, NOTHING_THERE};
use crate::output::{self, Style, ago, one_line, or_dash, seconds, styled, table};
use crate::store::{self, Store};

pub(crate) fn run(arguments: &ShowArgs) -> Result<u8, Failure> {
    store::block_on(async {
        let client = Store::new(&arguments.store)?.look().await?;
        let Some(stats) = find(&client, &arguments.name).await? else {
            let name = &arguments.name;
            // What cannot be a lock's key is not one: that is no reason to complain of it here.
            let locked = matches!(client.locks().lookup(name).await, Ok(Some(_)));
            let rest = if locked {
                format!(", but a lock: see `leasehold lookup {name}`")
            } else {
                ": see `leasehold ls --all`".to_owned()
            };
            let message = format!("there is no semaphore {name:?}{rest}");
            return Err(Failure::new(NOTHING_THERE, message));
        };
        if arguments.json {
            output::print_json(&as_json(&stats))?;
        } else {
            output::print(&as_text(&stats))?;
        }
        Ok(0)
    })
}

/// Nothing if nobody has ever declared it, and nobody uses it.
pub(super) async fn find(client: &Client, name: &str) -> Result<Option<SemaphoreStats>, Failure> {
    let stats = client.stats().names([name]).unused().waiters().fetch().await?;
    let known = |one: &SemaphoreStats| one.capacity() > 0 || one.held() > 0 || one.waiting() > 0;
    Ok(stats.into_iter().find(known))
}

fn as_text(stats: &SemaphoreStats) -> String {
    let (held, capacity, waiting) = (stats.held(), stats.capacity(), stats.waiting());
    let name = styled(&one_line(stats.name()), Style::Bold);
    let summary = format!("{name}: {held} of {capacity} held, {waiting} waiting\n");
    let members = stats.holders().iter().map(|holder| row("held", holder)).chain(
        stats.waiters().iter().enumerate().map(|(at, waiter)| row(&format!("{}.", at + 1), waiter)),
    );
    let members: Vec<_> = members.collect();
    if members.is_empty() {
        return summary;
    }
    let titles = ["PLACE", "ID", "HOST", "PID", "LABEL", "FOR", "ENDS IN", "FENCE"];
    format!("{summary}\n{}", table(titles, &[3, 5, 6], members))
}

fn row(place: &str, member: &Member) -> [String; 8] {
    [
        place.to_owned(),
        member.id().to_owned(),
        or_dash(member.host().map(str::to_owned)),
        or_dash(member.pid().map(|pid| pid.to_string())),
        or_dash(member.label().map(str::to_owned)),
        or_dash(member.age().map(ago)),
        or_dash(member.ends_in().map(ago)),
        or_dash(member.fence().map(|fence| fence.to_string())),
    ]
}

fn as_json(stats: &SemaphoreStats) -> Value {
    let mut value = semaphore_json(stats);
    value["holders"] = stats.holders().iter().map(member_json).collect();
    value["waiters"] = stats.waiters().iter().map(member_json).collect();
    value
}

fn member_json(member: &Member) -> Value {
    json!({
        "id": member.id(),
        "host": member.host(),
        "pid": member.pid(),
        "label": member.label(),
        "for_seconds": seconds(member.age()),
        "ends_in_seconds": seconds(member.ends_in()),
        // As text: a number would not survive every JSON library past 2^53.
        "fence": member.fence().as_ref().map(Fence::to_string),
    })
}
