//! The page of all semaphores.

use leasehold::SemaphoreStats;
use maud::{Markup, html};

use super::{
    Content, View, cell, dash, find_form, held_text, number, pages, semaphore_link, table,
};
use crate::command::limit::rate;
use crate::command::serve::chart;
use crate::command::serve::console::ConsoleState;
use crate::command::serve::why::why;
use crate::output::{ago, one_line};

const TITLES: [&str; 6] = ["Name", "Held", "Waiting", "Oldest hold", "Oldest wait", "State"];

pub(super) fn content(state: &ConsoleState, view: &View) -> Content {
    let all = state.monitor.latest().map_or(&[][..], |latest| &latest.semaphores);
    let find = view.fields.get("find").unwrap_or_default().to_lowercase();
    let found: Vec<_> = all.iter().filter(|one| one.name.to_lowercase().contains(&find)).collect();
    let pages = pages(&found, view, "/");
    let (holding, waiting) = all.iter().fold((0_u64, 0_usize), |(held, waiting), one| {
        (held + u64::from(one.held_units), waiting + one.waiting)
    });
    let body = html! {
        h1 { "Semaphores" }
        p.summary {
            strong { (all.len()) } @if all.len() == 1 { " name, " } @else { " names, " }
            strong { (holding) } @if holding == 1 { " unit held, " } @else { " units held, " }
             strong { (waiting) } " waiting."
        }
        (chart::chart(state.monitor.total(), "all semaphores"))
        (find_form(view, "/", "Name contains"))
        @if found.is_empty() {
            p.empty {
                @if all.is_empty() {
                    "No semaphore has been used yet. Try " code { "leasehold run -n 2 demo -- sleep 60" } " on this store."
                } @else { "No name contains that." }
            }
        } @else {
            (table("Semaphores, the most used first", &TITLES, &rows(pages.rows)))
            (pages.links)
        }
        @if view.may_act { (new_limits()) }
    };
    Content { title: "Semaphores".to_owned(), body }
}

/// The forms that limit or pause a semaphore before its first use.
fn new_limits() -> Markup {
    html! {
        section.actions aria-labelledby="new" {
            h2 #new { "Before the first use" }
            div {
                form method="get" action="/act" data-confirm {
                    label for="new-name" { "Name" }
                    input #new-name type="text" name="name" maxlength="512" required autocomplete="off";
                    label for="new-limit" { "Limit" }
                    input #new-limit type="number" name="capacity" min="1" max=(leasehold::Semaphore::UNLIMITED - 1) value="1";
                    button type="submit" name="action" value="limit" { "Set…" }
                    button type="submit" name="action" value="pin" { "Pin…" }
                    button type="submit" name="action" value="pause" { "Pause…" }
                }
            }
        }
    }
}

fn rows(rows: &[&SemaphoreStats]) -> Markup {
    html! {
        @for one in rows {
            tr role="row" data-key=(one.name) {
                th role="rowheader" scope="row" { (semaphore_link(&one.name)) }
                (cell("Held", &html! { (chart::bar(one)) span.amount { (held_text(one)) } }))
                (number("Waiting", one.waiting))
                (number("Oldest hold", dash(one.oldest_hold().map(ago))))
                (number("Oldest wait", dash(one.oldest_wait.map(ago))))
                (cell("State", &state_of(one)))
            }
        }
    }
}

/// Describes pins and pauses, and why the first waiter waits if it is not for room.
fn state_of(one: &SemaphoreStats) -> Markup {
    let waits = one.waits_for;
    let why = why(one).filter(|_| waits != Some(leasehold::WaitsFor::Room));
    html! {
        (badges(one))
        @if let Some(why) = why { span.why { (one_line(&why)) } }
        @else if one.paused.is_none() && one.pinned.is_none() && one.rate.is_none() { span.faint { "–" } }
    }
}

pub(super) fn badges(one: &SemaphoreStats) -> Markup {
    html! {
        @if one.paused.is_some() { span.badge.paused { "paused" } " " }
        @if one.pinned.is_some() { span.badge { "pinned" } " " }
        @if let Some(rate) = rate(one) { span.badge { (rate) } " " }
    }
}
