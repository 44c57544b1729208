//! The page of clients and the leases that they hold.

use maud::{Markup, html};

use super::{Content, View, cell, dash, number, optional, pages, semaphore_link, table, text};
use crate::command::serve::clients::{ClientRow, clients};
use crate::command::serve::console::State;
use crate::monitor::Kind;

const TITLES: [&str; 6] = ["Client", "Host", "Process", "Program", "Label", "Holds"];
/// The number of leases that are listed for one client.
const LISTED: usize = 20;

pub(super) fn content(state: &State, view: &View) -> Content {
    let all = state.monitor.latest().map(clients).unwrap_or_default();
    let holding = all.iter().filter(|row| !row.holds.is_empty()).count();
    let pages = pages(&all, view, "/clients");
    let body = html! {
        h1 { "Clients" }
        p.summary { strong { (holding) } " of " (all.len()) " hold something. A client that has ended may be listed for three minutes more." }
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
