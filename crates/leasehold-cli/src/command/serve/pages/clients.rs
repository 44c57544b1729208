//! The page of clients, the leases that they hold, and the semaphores that they wait for.

use maud::{Markup, html};

use super::{Content, View, cell, dash, number, optional, pages, semaphore_link, table, text};
use crate::command::serve::clients::{ClientRow, clients};
use crate::command::serve::console::ConsoleState;
use crate::command::serve::details::Queues;
use crate::monitor::Kind;

const TITLES: [&str; 7] = ["Client", "Host", "Process", "Program", "Label", "Holds", "Waits for"];
/// The number of leases, and of semaphores it waits for, that are listed for one client.
const LISTED: usize = 20;

pub(super) fn content(state: &ConsoleState, queues: &Queues, view: &View) -> Content {
    let semaphores = queues.as_deref().unwrap_or_default();
    let latest = state.monitor.latest();
    let all = latest.map(|latest| clients(latest, semaphores)).unwrap_or_default();
    let holding = all.iter().filter(|row| !row.holds.is_empty()).count();
    let waiting = all.iter().filter(|row| !row.waits.is_empty()).count();
    let waiters = latest.map_or(&[][..], |latest| &latest.semaphores);
    let waiters: usize = waiters.iter().map(|one| one.waiting).sum();
    let listed: usize = semaphores.iter().map(|one| one.waiters.len()).sum();
    let pages = pages(&all, view, "/clients");
    let body = html! {
        h1 { "Clients" }
        p.summary {
            strong { (holding) } " of " (all.len()) " hold something, " strong { (waiting) } " wait. A client that has ended may be \
             listed for three minutes more."
        }
        @if let Err(problem) = queues { p.outage role="alert" { "The queues cannot be read: " (problem) "." } }
        @else if listed < waiters { p.hint { "The first " (listed) " of " (waiters) " waiters are listed here." } }
        @if all.is_empty() { p.empty { "There is no client." } }
        @else {
            (table("Clients, by host", &TITLES, &rows(pages.rows)))
            (pages.links)
        }
    };
    Content { title: "Clients".to_owned(), body }
}

fn rows(rows: &[ClientRow]) -> Markup {
    html! {
        @for row in rows {
            tr role="row" {
                th role="rowheader" scope="row" { (optional(row.id.as_deref())) }
                (cell("Host", &optional(row.host.as_deref())))
                (number("Process", dash(row.pid)))
                (cell("Program", &optional(row.program.as_deref())))
                (cell("Label", &labels(row)))
                (cell("Holds", &holds(row)))
                (cell("Waits for", &waits(row)))
            }
        }
    }
}

fn labels(row: &ClientRow) -> Markup {
    html! {
        @if row.labels.is_empty() { span.faint { "–" } }
        @for (at, label) in row.labels.iter().take(LISTED).enumerate() { @if at > 0 { ", " } (text(label)) }
    }
}

fn holds(row: &ClientRow) -> Markup {
    html! {
        @if row.holds.is_empty() { span.faint { "–" } }
        @else { ul.holds {
            @for ((kind, name), units) in row.holds.iter().take(LISTED) {
                li {
                    @if *kind == Kind::Semaphore { (semaphore_link(name)) } @else { (kind.as_str()) " " (text(name)) }
                    @if *units > 1 { " ×" (units) }
                }
            }
            @if row.holds.len() > LISTED { li { "and " (row.holds.len() - LISTED) " more" } }
        } }
    }
}

fn waits(row: &ClientRow) -> Markup {
    html! {
        @if row.waits.is_empty() { span.faint { "–" } }
        @else { ul.holds {
            @for (name, count) in row.waits.iter().take(LISTED) {
                li { (semaphore_link(name)) @if *count > 1 { " ×" (count) } }
            }
            @if row.waits.len() > LISTED { li { "and " (row.waits.len() - LISTED) " more" } }
        } }
    }
}
