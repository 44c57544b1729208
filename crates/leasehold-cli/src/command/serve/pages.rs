//! The HTML pages. Each is made from the monitor once per version, and sent whole or, for the script, without the
//! layout.
//!
//! All names and labels are text of other programs. maud escapes them; [`text`] shows invisible characters, and
//! isolates text that is read from right to left from the text after it.

use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use leasehold::SemaphoreStats;
use maud::{Markup, html};

use super::access::Caller;
use super::console::{Console, Rendering};
use super::details::Details;
use super::reply::{self, Refusal};
use super::request::Fields;
use crate::output::{counted, one_line};

mod clients;
mod events;
pub(super) mod layout;
mod locks;
mod pools;
mod semaphore;
mod semaphores;

/// Rows of one page of a list.
const ROWS: usize = 200;

/// The page that the layout marks as current.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Section {
    Semaphores,
    Locks,
    Pools,
    Clients,
    Events,
    Other,
}

/// A page without the layout.
pub(super) struct Content {
    pub(super) title: String,
    pub(super) body: Markup,
}

/// The inputs of a page besides the monitor.
pub(super) struct View {
    pub(super) fields: Fields,
    pub(super) may_act: bool,
    pub(super) has_token: bool,
}

impl View {
    fn new(console: &Console, request: &Parts) -> Self {
        Self {
            fields: Fields::of_query(&request.uri),
            may_act: caller(request).may_act(),
            has_token: console.access.has_token(),
        }
    }
}

pub(super) fn caller(request: &Parts) -> Caller {
    request.extensions.get().copied().unwrap_or(Caller::Anonymous)
}

pub(super) async fn semaphores(State(console): State<Arc<Console>>, request: Parts) -> Response {
    let view = View::new(&console, &request);
    let make = async { Ok(semaphores::content(&console.state(), &view)) };
    show(&console, &request, Section::Semaphores, make).await
}

pub(super) async fn semaphore(State(console): State<Arc<Console>>, request: Parts) -> Response {
    let view = View::new(&console, &request);
    let make = async {
        let name = view.fields.get("name").unwrap_or_default();
        let Some(detail) = Details::of(&console, name).await else {
            return Err(missing("semaphore", name));
        };
        let state = console.state();
        let latest = state.monitor.latest().and_then(|snapshot| snapshot.semaphore(name));
        let (one, problem) = match (&*detail, latest) {
            (Ok(one), _) => (one, None),
            (Err(problem), Some(latest)) => (latest, Some(problem.as_str())),
            (Err(_), None) => return Err(missing("semaphore", name)),
        };
        Ok(semaphore::content(&state, &view, one, problem))
    };
    show(&console, &request, Section::Semaphores, make).await
}

pub(super) async fn locks(State(console): State<Arc<Console>>, request: Parts) -> Response {
    let view = View::new(&console, &request);
    let make = async { Ok(locks::content(&console.state(), &view)) };
    show(&console, &request, Section::Locks, make).await
}

pub(super) async fn pools(State(console): State<Arc<Console>>, request: Parts) -> Response {
    let view = View::new(&console, &request);
    let make = async { Ok(pools::content(&console.state(), &view)) };
    show(&console, &request, Section::Pools, make).await
}

pub(super) async fn clients(State(console): State<Arc<Console>>, request: Parts) -> Response {
    let view = View::new(&console, &request);
    let make = async {
        let queues = Details::queues(&console).await;
        Ok(clients::content(&console.state(), &queues, &view))
    };
    show(&console, &request, Section::Clients, make).await
}

pub(super) async fn events(State(console): State<Arc<Console>>, request: Parts) -> Response {
    let view = View::new(&console, &request);
    let make = async { Ok(events::content(&console.state(), &view)) };
    show(&console, &request, Section::Events, make).await
}

pub(super) async fn not_found(State(console): State<Arc<Console>>, request: Parts) -> Response {
    let refusal = Refusal::new(StatusCode::NOT_FOUND, "There is no such page.");
    if request.uri.path().starts_with("/api/") {
        return refusal.json();
    }
    layout::refusal(&console, &request, &refusal)
}

/// The page for a name that does not exist. It may have been forgotten while it was shown.
pub(super) fn missing(kind: &str, name: &str) -> Refusal {
    let sentence = format!("There is no {kind} {} in the store.", quoted(name));
    Refusal::new(StatusCode::NOT_FOUND, sentence)
}

async fn show(
    console: &Console,
    request: &Parts,
    section: Section,
    make: impl Future<Output = Result<Content, Refusal>>,
) -> Response {
    console.is_asked().await;
    let caller = caller(request);
    let fields = Fields::of_query(&request.uri).key(&["name", "find", "page", "kind"]);
    let key = format!("{} {}{fields}", caller.may_act(), request.uri.path());
    let rendering = console.rendered(&key, async {
        let Content { title, body } = make.await?;
        let fragment = layout::fragment(console, &body);
        Ok(Rendering { title, body: fragment.into_string().into() })
    });
    match rendering.await {
        Err(refusal) => layout::refusal(console, request, &refusal),
        Ok(rendering) if request.headers.contains_key("leasehold-fragment") => {
            reply::of(StatusCode::OK, reply::HTML, rendering.body.clone())
        }
        Ok(rendering) => {
            let notice = console.access.take_notice(caller);
            let fragment = String::from_utf8_lossy(&rendering.body);
            let page = layout::document(
                console,
                caller,
                section,
                &rendering.title,
                notice.as_deref(),
                &fragment,
            );
            reply::of(StatusCode::OK, reply::HTML, page.into_string())
        }
    }
}

/// Formats text of other programs. Text without a visible start or end is quoted.
fn text(text: &str) -> Markup {
    html! { bdi { (quoted_if_needed(text)) } }
}

fn quoted_if_needed(text: &str) -> String {
    if text.trim() == text && !text.is_empty() { one_line(text) } else { quoted(text) }
}

fn quoted(text: &str) -> String {
    format!("“{}”", one_line(text))
}

fn optional(value: Option<&str>) -> Markup {
    html! { @if let Some(value) = value { (text(value)) } @else { span.faint { "–" } } }
}

/// Returns the value, or a dash if it is unknown.
fn dash(value: Option<impl std::fmt::Display>) -> String {
    value.map_or_else(|| "–".to_owned(), |value| value.to_string())
}

fn semaphore_link(name: &str) -> Markup {
    html! { a href=(semaphore_path(name)) { (text(name)) } }
}

pub(super) fn semaphore_path(name: &str) -> String {
    format!("/semaphore?name={}", encoded(name))
}

fn encoded(text: &str) -> String {
    form_urlencoded::byte_serialize(text.as_bytes()).collect()
}

/// A cell of a table. On a phone it is a line of a card.
fn cell(label: &str, content: &Markup) -> Markup {
    // One element, which is one column of the card.
    html! { td role="cell" data-label=(label) { div { (content) } } }
}

fn number(label: &str, content: impl std::fmt::Display) -> Markup {
    html! { td.number role="cell" data-label=(label) { (content.to_string()) } }
}

/// A table with a caption for screen readers, whose rows become cards on a phone.
fn table(caption: &str, titles: &[&str], rows: &Markup) -> Markup {
    html! {
        table role="table" {
            caption.hidden { (caption) }
            thead role="rowgroup" {
                tr role="row" { @for title in titles { th role="columnheader" scope="col" { (title) } } }
            }
            tbody role="rowgroup" { (rows) }
        }
    }
}

/// The time of day, with the date for scripts and as a tooltip.
fn clock(at: SystemTime) -> Markup {
    let full = humantime::format_rfc3339_seconds(at).to_string();
    let time = full.get(11..19).unwrap_or(&full).to_owned();
    html! { time datetime=(full) title=(full) { (time) } }
}

/// How many units are held, in words.
fn held_text(one: &SemaphoreStats) -> String {
    let (units, permits) = (one.held_units, one.held);
    let of = one.limited_to().map(|limit| format!(" of {limit}")).unwrap_or_default();
    if units == permits {
        format!("{units}{of}")
    } else {
        format!("{units}{of} units, {}", counted(permits, "permit"))
    }
}

/// The rows of one page of a list, and the links to the others.
struct Pages<'a, T> {
    rows: &'a [T],
    links: Markup,
}

fn pages<'a, T>(all: &'a [T], view: &View, path: &str) -> Pages<'a, T> {
    let last = all.len().saturating_sub(1) / ROWS + 1;
    let requested = view.fields.number("page").and_then(|page| usize::try_from(page).ok());
    let page = requested.unwrap_or(1).clamp(1, last);
    let (from, to) = ((page - 1) * ROWS, (page * ROWS).min(all.len()));
    let find = view.fields.get("find").map(|find| format!("&find={}", encoded(find)));
    let find = find.unwrap_or_default();
    let links = html! {
        @if last > 1 {
            nav.pages aria-label="Pages of this list" {
                @if page > 1 { a href={ (path) "?page=" (page - 1) (find) } rel="prev" { "Previous" } }
                span { (from + 1) "–" (to) " of " (all.len()) }
                @if page < last { a href={ (path) "?page=" (page + 1) (find) } rel="next" { "Next" } }
            }
        }
    };
    Pages { rows: &all[from..to], links }
}

/// A form that filters a list by text.
fn find_form(view: &View, path: &str, label: &str) -> Markup {
    html! {
        form.find method="get" action=(path) role="search" {
            label for="find" { (label) }
            input #find type="search" name="find" maxlength="512" value=(view.fields.get("find").unwrap_or_default());
            button type="submit" { "Find" }
        }
    }
}

/// Explains why there are no buttons, if there are none.
fn about_actions(view: &View) -> Markup {
    html! {
        @if !view.has_token {
            p.hint { "This console is read-only. To change anything here, start it with " code { "--token-file FILE" } "." }
        } @else if !view.may_act {
            p.hint { a href="/login" { "Log in" } " with the token to change anything here." }
        }
    }
}

/// Says that the store denies access to this list, if it does.
fn about_hidden(state: &super::console::ConsoleState, what: &str) -> Markup {
    let hidden = state.monitor.latest().is_some_and(|latest| latest.hidden.contains(&what));
    html! {
        @if hidden {
            p.hint { "The store denies this console access to " (what) "." }
        }
    }
}
