//! The page of recent events, the newest first.

use maud::{Markup, html};

use super::{Content, View, cell, clock, semaphore_link, table, text};
use crate::command::serve::console::ConsoleState;
use crate::monitor::{Event, Kind, since};
use crate::output::{ago, one_line};

const TITLES: [&str; 4] = ["Time (UTC)", "Event", "Name", "What happened"];
/// The number of events that are shown.
const SHOWN: usize = 200;

/// The kinds of events, as [`Change::as_str`](crate::monitor::Change::as_str) names them.
const KINDS: [&str; 10] = [
    "granted",
    "released",
    "expired",
    "capacity",
    "rate",
    "paused",
    "resumed",
    "action",
    "unreachable",
    "reachable",
];

pub(super) fn content(state: &ConsoleState, view: &View) -> Content {
    let (kind, name) = (view.fields.get("kind"), view.fields.get("name"));
    let name = name.map(str::to_lowercase);
    let is_filtered = kind.is_some() || name.is_some();
    let found: Vec<_> = state
        .monitor
        .events()
        .iter()
        .rev()
        .filter(|event| kind.is_none_or(|kind| kind == event.change.as_str()))
        .filter(|event| {
            let subject = event.subject.as_ref().map(|(_, name)| name.to_lowercase());
            name.as_ref().is_none_or(|name| subject.is_some_and(|subject| subject.contains(name)))
        })
        .take(SHOWN)
        .collect();
    let body = html! {
        h1 { "Events" }
        p.summary {
            "Changes since the console started. A permit that is granted and released between two polls is not listed."
        }
        (filter(view))
        @if found.is_empty() && is_filtered { p.empty { "No event matches." } }
        @else if found.is_empty() { p.empty { "No events yet." } }
        @else { (table("Events, the newest first", &TITLES, &rows(&found))) }
        @if found.len() == SHOWN { p.hint { "Only the newest " (SHOWN) " are shown." } }
    };
    Content { title: "Events".to_owned(), body }
}

fn filter(view: &View) -> Markup {
    let chosen = view.fields.get("kind");
    html! {
        form.find method="get" action="/events" role="search" {
            label for="kind" { "Event" }
            select #kind name="kind" {
                option value="" { "all" }
                @for kind in KINDS { option value=(kind) selected[chosen == Some(kind)] { (kind) } }
            }
            label for="name" { "Name contains" }
            input #name type="search" name="name" maxlength="512" value=(view.fields.get("name").unwrap_or_default());
            button type="submit" { "Show" }
        }
    }
}

fn rows(events: &[&Event]) -> Markup {
    html! {
        @for event in events {
            @let kind = event.change.as_str();
            tr role="row" data-key=(event.number) {
                (cell("Time (UTC)", &html! { (clock(event.at)) " " span.faint { (ago(since(event.at))) " ago" } }))
                (cell("Event", &html! { span class={ "badge " (kind) } { (kind) } }))
                (cell("Name", &subject(event)))
                (cell("What happened", &html! { (one_line(&event.change.describe())) }))
            }
        }
    }
}

fn subject(event: &Event) -> Markup {
    html! {
        @match &event.subject {
            Some((Kind::Semaphore, name)) => { (semaphore_link(name)) }
            Some((kind, name)) => { (kind.as_str()) " " (text(name)) }
            None => { span.faint { "the store" } }
        }
    }
}
