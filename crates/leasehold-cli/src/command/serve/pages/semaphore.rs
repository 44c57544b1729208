//! The page of one semaphore: its limits, holders and queue, and why the first waiter waits.

use leasehold::{Semaphore, SemaphoreMember, SemaphoreStats};
use maud::{Markup, html};

use super::semaphores::badges;
use super::{Content, View, about_actions, cell, dash, held_text, number, optional, table, text};
use crate::command::limit::paused;
use crate::command::serve::chart;
use crate::command::serve::console::ConsoleState;
use crate::command::serve::details::SHOWN;
use crate::command::serve::why::why;
use crate::output::{ago, one_line};

const HOLDERS: [&str; 10] = [
    "Holder",
    "Host",
    "Process",
    "Held for",
    "Silent for",
    "TTL left",
    "Units",
    "Slot",
    "Fence",
    "Permit",
];
const WAITERS: [&str; 7] = ["Place", "Waiter", "Host", "Process", "Waited for", "Units", "Id"];

pub(super) fn content(
    state: &ConsoleState,
    view: &View,
    one: &SemaphoreStats,
    problem: Option<&str>,
) -> Content {
    let name = &one.name;
    let body = html! {
        h1 { (text(name)) }
        p.summary {
            strong { (held_text(one)) } " held, " strong { (one.waiting) } " waiting. " (badges(one))
        }
        (chart::segments(one))
        @if let Some(why) = why(one) {
            p.callout { strong { "Why the first waits: " } (one_line(&why)) }
        } @else if let Some(paused) = paused(one) {
            p.callout { (paused) "." }
        }
        (limits(one))
        @if view.may_act { (actions(one)) } @else { (about_actions(view)) }
        @if let Some(history) = state.monitor.history(name) {
            (chart::chart(history, "this semaphore"))
        }
        h2 { "Holders" }
        @if one.holders.is_empty() { p.empty { "Nobody holds a permit." } }
        @else { (holders(one, view)) }
        h2 { "Queue" }
        @if let Some(problem) = problem {
            p.empty { (one.waiting) " waiting. The queue cannot be read: " (one_line(problem)) "." }
        } @else if one.waiting == 0 { p.empty { "Nobody waits." } }
        @else { (queue(one, view)) }
    };
    Content { title: name.to_owned(), body }
}

fn limits(one: &SemaphoreStats) -> Markup {
    let limit = match one.capacity {
        0 => "not declared yet".to_owned(),
        Semaphore::UNLIMITED => "none".to_owned(),
        capacity => capacity.to_string(),
    };
    let declared = (one.declared < Semaphore::UNLIMITED).then(|| one.declared.to_string());
    html! {
        dl.facts {
            div { dt { "Limit" } dd { (limit) @if one.pinned.is_some() { ", pinned" } } }
            @if one.pinned.is_some() { div { dt { "Declared by programs" } dd { (dash(declared)) } } }
            @if let Some(rate) = crate::command::limit::rate(one) { div { dt { "Rate" } dd { (rate) } } }
            div { dt { "Oldest hold" } dd { (dash(one.oldest_hold().map(ago))) } }
            div { dt { "Oldest wait" } dd { (dash(one.oldest_wait.map(ago))) } }
        }
    }
}

fn holders(one: &SemaphoreStats, view: &View) -> Markup {
    let shown = one.holders.iter().take(SHOWN);
    let rows = html! {
        @for holder in shown {
            tr role="row" data-key=(holder.id) {
                (who(holder))
                (place(holder))
                (number("Held for", dash(holder.age.map(ago))))
                (number("Silent for", dash(holder.silent_for.map(ago))))
                (number("TTL left", dash(holder.ttl_ends_in.map(ago))))
                (number("Units", holder.weight))
                (number("Slot", dash(holder.slot_number)))
                (number("Fence", dash(holder.fence)))
                (cell("Permit", &html! {
                    code { (text(&holder.id)) }
                    @if view.may_act { " " (end("release", "Release…", &one.name, holder)) }
                }))
            }
        }
    };
    html! {
        (table("Holders, the longest first", &HOLDERS, &rows))
        (left_off(one.holders.len()))
    }
}

fn queue(one: &SemaphoreStats, view: &View) -> Markup {
    let rows = html! {
        @for (at, waiter) in one.waiters.iter().enumerate().take(SHOWN) {
            tr role="row" data-key=(waiter.id) {
                (number("Place", at + 1))
                (who(waiter))
                (place(waiter))
                (number("Waited for", dash(waiter.age.map(ago))))
                (number("Units", waiter.weight))
                (cell("Id", &html! {
                    code { (text(&waiter.id)) }
                    @if view.may_act { " " (end("cancel", "Cancel…", &one.name, waiter)) }
                }))
            }
        }
    };
    html! {
        (table("The queue, in order", &WAITERS, &rows))
        (left_off(one.waiting))
    }
}

fn left_off(all: usize) -> Markup {
    html! { @if all > SHOWN { p.hint { "and " (all - SHOWN) " more." } } }
}

/// Returns the label, or the id if there is none.
fn who(member: &SemaphoreMember) -> Markup {
    html! {
        th role="rowheader" scope="row" { (text(member.label.as_deref().unwrap_or(&member.id))) }
    }
}

fn place(member: &SemaphoreMember) -> Markup {
    html! {
        (cell("Host", &optional(member.host.as_deref())))
        (number("Process", dash(member.pid)))
    }
}

/// The button that releases a holder or cancels a waiter.
fn end(action: &str, title: &str, name: &str, member: &SemaphoreMember) -> Markup {
    html! {
        form.inline method="get" action="/act" data-confirm {
            input type="hidden" name="action" value=(action);
            input type="hidden" name="name" value=(name);
            input type="hidden" name="id" value=(member.id);
            button type="submit" { (title) }
        }
    }
}

/// The forms for actions. Each leads to a confirmation that states the effect.
fn actions(one: &SemaphoreStats) -> Markup {
    let form = |fields: Markup| {
        html! {
            form method="get" action="/act" data-confirm {
                input type="hidden" name="name" value=(one.name);
                (fields)
            }
        }
    };
    let button = |action: &str, title: &str| {
        html! { button type="submit" name="action" value=(action) { (title) "…" } }
    };
    let limit = one.capacity.clamp(1, Semaphore::UNLIMITED - 1);
    let unused = one.held == 0 && one.waiting == 0;
    html! {
        section.actions aria-labelledby="actions" {
            h2 #actions { "Actions" }
            div {
                (form(html! {
                    label for="limit" { "Limit" }
                    input #limit type="number" name="capacity" min="1" max=(Semaphore::UNLIMITED - 1) required value=(limit);
                    @if one.pinned.is_none() { (button("limit", "Set")) }
                    (button("pin", "Pin"))
                }))
                @if one.pinned.is_some() { (form(button("unpin", "Unpin"))) }
                @if one.paused.is_some() {
                    (form(button("resume", "Resume")))
                } @else {
                    (form(html! {
                        label for="reason" { "Reason" }
                        input #reason type="text" name="reason" maxlength="200" autocomplete="off";
                        (button("pause", "Pause"))
                        (button("drain", "Drain"))
                    }))
                }
                @if unused { (form(button("forget", "Forget"))) }
            }
        }
    }
}
