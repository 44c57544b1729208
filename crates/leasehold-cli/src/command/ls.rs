//! `leasehold ls`: what is held, and how many wait.
//!
//! Each kind of thing is a [`Section`]: rows for people, and the same as JSON.

use std::io::IsTerminal;
use std::time::Duration;

use leasehold::{Client, SemaphoreStats};
use serde_json::{Value, json};

use crate::args::LsArgs;
use crate::failure::Failure;
use crate::output::{self, Style, ago, or_dash, seconds, styled, table};
use crate::store;

const REDRAW: Duration = Duration::from_secs(1);
/// Clears the terminal and goes to its first line.
const CLEAR: &str = "\x1b[2J\x1b[H";

pub(crate) fn run(arguments: &LsArgs) -> Result<u8, Failure> {
    if arguments.watch && !std::io::stdout().is_terminal() {
        return Err(Failure::usage("--watch redraws a terminal, and stdout is none: leave it out"));
    }
    store::block_on(async {
        let client = store::open(&arguments.store).await?;
        loop {
            let sections = sections(&client, arguments.all).await?;
            if arguments.json {
                output::print_json(&as_json(sections))?;
            } else if arguments.watch {
                output::print(&format!("{CLEAR}{}", as_text(&sections)))?;
                tokio::time::sleep(REDRAW).await;
                continue;
            } else {
                output::print(&as_text(&sections))?;
            }
            return Ok(0);
        }
    })
}

/// One kind of thing.
struct Section {
    title: &'static str,
    /// What is printed if there is none of it.
    none: &'static str,
    rows: Option<String>,
    json: Value,
}

async fn sections(client: &Client, all: bool) -> Result<Vec<Section>, Failure> {
    Ok(vec![semaphores(client, all).await?])
}

fn as_json(sections: Vec<Section>) -> Value {
    sections.into_iter().map(|section| (section.title, section.json)).collect()
}

fn as_text(sections: &[Section]) -> String {
    let [first, others @ ..] = sections else { return String::new() };
    if others.is_empty() {
        return first.rows.clone().unwrap_or_else(|| format!("{}\n", first.none));
    }
    let titled = sections.iter().map(|section| {
        let rows = section.rows.clone().unwrap_or_else(|| format!("{}\n", section.none));
        format!("{}\n{rows}", styled(&section.title.to_uppercase(), Style::Bold))
    });
    titled.collect::<Vec<_>>().join("\n")
}

async fn semaphores(client: &Client, all: bool) -> Result<Section, Failure> {
    let query = client.stats().limit(usize::MAX);
    let stats = if all { query.unused() } else { query }.fetch().await?;
    let titles = ["SEMAPHORE", "HELD", "OF", "USE", "WAITING", "OLDEST HOLD", "OLDEST WAIT"];
    let rows =
        (!stats.is_empty()).then(|| table(titles, &[1, 2, 3, 4, 5, 6], stats.iter().map(row)));
    let json = stats.iter().map(semaphore_json).collect();
    Ok(Section { title: "semaphores", none: "nothing is held, and nobody waits", rows, json })
}

fn row(one: &SemaphoreStats) -> [String; 7] {
    [
        one.name().to_owned(),
        one.held().to_string(),
        or_dash((one.capacity() > 0).then(|| one.capacity().to_string())),
        format!("{:.0}%", one.percent()),
        one.waiting().to_string(),
        or_dash(one.oldest_hold().map(ago)),
        or_dash(one.oldest_wait().map(ago)),
    ]
}

/// The numbers of one semaphore; `show` adds who they are.
pub(super) fn semaphore_json(one: &SemaphoreStats) -> Value {
    json!({
        "name": one.name(),
        "capacity": one.capacity(),
        "held": one.held(),
        "waiting": one.waiting(),
        "oldest_hold_seconds": seconds(one.oldest_hold()),
        "oldest_wait_seconds": seconds(one.oldest_wait()),
    })
}
