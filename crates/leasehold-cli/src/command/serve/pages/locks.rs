//! The page of held locks.

use std::time::SystemTime;

use leasehold::LockInfo;
use maud::{Markup, html};

use super::{
    Content, View, about_actions, about_hidden, cell, dash, find_form, number, optional, pages,
    table, text,
};
use crate::command::serve::console::ConsoleState;
use crate::output::ago;

const TITLES: [&str; 7] = ["Key", "Host", "Process", "Label", "Held for", "Lease left", "Fence"];

pub(super) fn content(state: &ConsoleState, view: &View) -> Content {
    let all = state.monitor.latest().map_or(&[][..], |latest| &latest.locks);
    let find = view.fields.get("find").unwrap_or_default().to_lowercase();
    let found: Vec<_> = all.iter().filter(|one| one.key.to_lowercase().contains(&find)).collect();
    let pages = pages(&found, view, "/locks");
    let body = html! {
        h1 { "Locks" }
        p.summary { strong { (all.len()) } " held." }
        (about_hidden(state, "locks"))
        (about_actions(view))
        (find_form(view, "/locks", "Key contains"))
        @if found.is_empty() {
            p.empty { @if all.is_empty() { "No lock is held." } @else { "No key contains that." } }
        } @else {
            (table("Locks that are held, by key", &TITLES, &rows(pages.rows, view)))
            (pages.links)
        }
    };
    Content { title: "Locks".to_owned(), body }
}

fn rows(rows: &[&LockInfo], view: &View) -> Markup {
    let now = SystemTime::now();
    html! {
        @for lock in rows {
            @let info = &lock;
            tr role="row" data-key=(lock.key) {
                th role="rowheader" scope="row" { (text(&lock.key)) }
                (cell("Host", &optional(info.host.as_deref())))
                (number("Process", dash(info.pid)))
                (cell("Label", &optional(info.label.as_deref())))
                (number("Held for", ago(now.duration_since(info.acquired_at).unwrap_or_default())))
                (number("Lease left", ago(info.expires_at.duration_since(now).unwrap_or_default())))
                (cell("Fence", &html! {
                    (info.fence.to_string())
                    @if view.may_act { " " (release(lock)) }
                }))
            }
        }
    }
}

/// Identifies the lock by its fence, because the lock id is secret.
fn release(lock: &LockInfo) -> Markup {
    html! {
        form.inline method="get" action="/act" data-confirm {
            input type="hidden" name="kind" value="lock";
            input type="hidden" name="action" value="release";
            input type="hidden" name="name" value=(lock.key);
            input type="hidden" name="id" value=(lock.fence.to_string());
            button type="submit" { "Release…" }
        }
    }
}
