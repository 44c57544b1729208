//! The layout around the content of each page.

use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::{Section, caller, clock};
use crate::command::serve::access::Caller;
use crate::command::serve::assets;
use crate::command::serve::console::Console;
use crate::command::serve::reply::{self, Refusal};
use crate::output::one_line;

const SECTIONS: [(Section, &str, &str); 5] = [
    (Section::Semaphores, "/", "Semaphores"),
    (Section::Locks, "/locks", "Locks"),
    (Section::Pools, "/pools", "Pools"),
    (Section::Clients, "/clients", "Clients"),
    (Section::Events, "/events", "Events"),
];

/// The part of a page that changes: the banner, the content, and when it was read.
pub(super) fn fragment(console: &Console, content: &Markup) -> Markup {
    let state = console.state();
    let latest = state.monitor.latest();
    let outage = state.monitor.outage();
    html! {
        div #live {
            // It is always in the page, so that a screen reader announces when its text changes.
            div #banner role="status" {
                @if let Some(outage) = outage {
                    p.outage {
                        strong { "Store unreachable" } " since " (clock(outage.since)) " UTC (" (one_line(&outage.problem)) "). "
                        @if let Some(latest) = latest { "Showing what was read at " (clock(latest.at)) " UTC. " }
                        "Retrying."
                    }
                } @else if latest.is_none() {
                    p { "Reading the store for the first time." }
                }
            }
            main #main tabindex="-1" { (content) }
            footer {
                "Store " bdi { (one_line(&console.place)) }
                @if let Some(latest) = latest { ", read at " (clock(latest.at)) " UTC" }
                @if let Some(latest) = latest && latest.semaphores.len() >= crate::monitor::MOST {
                    ". Only the first " (crate::monitor::MOST) " semaphores are read"
                }
                "."
            }
        }
    }
}

/// A whole page around a fragment.
pub(super) fn document(
    console: &Console,
    caller: Caller,
    section: Section,
    title: &str,
    notice: Option<&str>,
    fragment: &str,
) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (one_line(title)) " · leasehold" }
                link rel="icon" href="/icon.svg" type="image/svg+xml";
                link rel="stylesheet" href=(assets::STYLE.path());
                script src=(assets::SCRIPT.path()) defer {}
            }
            body data-live[section != Section::Other] {
                a.skip href="#main" { "Skip to the content" }
                header {
                    a.brand href="/" { "leasehold" }
                    nav aria-label="Main" {
                        @for (one, path, name) in SECTIONS {
                            a href=(path) aria-current=[(one == section).then_some("page")] { (name) }
                        }
                    }
                    (login(console, caller))
                }
                @if let Some(notice) = notice { p.notice role="status" { (one_line(notice)) } }
                p #connection role="status" {}
                noscript { p.hint { "Without scripts this page does not update by itself: reload it." } }
                (PreEscaped(fragment))
                dialog #dialog aria-labelledby="question" {}
            }
        }
    }
}

fn login(console: &Console, caller: Caller) -> Markup {
    html! {
        @match caller {
            Caller::Anonymous if console.access.has_token() => { a.login href="/login" { "Log in" } }
            Caller::Anonymous => { span.login { "read-only" } }
            Caller::Token => {}
            Caller::Session(_) => {
                form.login method="post" action="/logout" { button type="submit" { "Log out" } }
            }
        }
    }
}

/// A static page: a confirmation, a login or an error.
pub(in crate::command::serve) fn still(
    console: &Console,
    request: &Parts,
    status: StatusCode,
    title: &str,
    body: &Markup,
) -> Response {
    if request.headers.contains_key("leasehold-fragment") {
        return reply::of(status, reply::HTML, body.clone().into_string());
    }
    let main = html! { main #main tabindex="-1" { (body) } };
    let main = main.into_string();
    let page = document(console, caller(request), Section::Other, title, None, &main);
    reply::of(status, reply::HTML, page.into_string())
}

pub(in crate::command::serve) fn refusal(
    console: &Console,
    request: &Parts,
    refusal: &Refusal,
) -> Response {
    let title = refusal.status.canonical_reason().unwrap_or("Refused");
    let body = html! {
        h1 #question { (title) }
        p { (one_line(&refusal.sentence)) }
        p { a href="/" { "All semaphores" } }
    };
    still(console, request, refusal.status, title, &body)
}
