//! Actions of operators: the confirmation, which states the effect, and the action itself. Also the login, which they need.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use leasehold::{Error, Semaphore};
use maud::{Markup, html};

use super::access::{self, Caller};
use super::connections::Peer;
use super::console::Console;
use super::pages::layout::{self, still};
use super::pages::{caller, missing, semaphore_path};
use super::reply::{self, Refusal};
use super::request::{self, Fields};
use crate::action::Action;
use crate::command::show::find_with;
use crate::failure::{Failure, NOT_ACQUIRED, NOTHING_THERE, REFUSED, UNAVAILABLE, USAGE};
use crate::monitor::Kind;
use crate::output::one_line;

/// The longest reason of a pause, in bytes.
const LONGEST_REASON: usize = 800;

/// A requested action.
pub(super) struct ActionRequest {
    pub(super) name: String,
    pub(super) action: Action,
    /// The fields of the request, for the form that confirms it.
    fields: Vec<(&'static str, String)>,
}

impl ActionRequest {
    pub(super) fn parse(fields: &Fields) -> Result<Self, Refusal> {
        let bad = |sentence: String| Refusal::new(StatusCode::BAD_REQUEST, sentence);
        let needs = |key: &str| {
            fields
                .get(key)
                .map(str::to_owned)
                .ok_or_else(|| bad(format!("The field {key} is missing.")))
        };
        let capacity = || {
            let text = needs("capacity")?;
            let capacity =
                text.parse().ok().filter(|capacity| (1..Semaphore::UNLIMITED).contains(capacity));
            capacity.ok_or_else(|| {
                bad(format!("The limit is {text:?}; it must be a number from 1 to 4294967294."))
            })
        };
        let reason = || match fields.get("reason").map(str::trim).filter(|text| !text.is_empty()) {
            Some(reason) if reason.len() > LONGEST_REASON => {
                let length = reason.len();
                Err(bad(format!(
                    "The reason is {length} bytes long; the limit is {LONGEST_REASON}."
                )))
            }
            reason => Ok(reason.map(str::to_owned)),
        };
        let kind = fields.get("kind").unwrap_or("semaphore");
        let action = match (kind, needs("action")?.as_str()) {
            ("semaphore", "limit") => Action::Limit { capacity: capacity()? },
            ("semaphore", "pin") => Action::Pin { capacity: capacity()? },
            ("semaphore", "unpin") => Action::Unpin,
            ("semaphore", "pause") => Action::Pause { reason: reason()? },
            ("semaphore", "resume") => Action::Resume,
            ("semaphore", "drain") => Action::Drain { reason: reason()? },
            ("semaphore", "forget") => Action::Forget,
            ("semaphore", "release") => Action::Release { id: needs("id")? },
            ("semaphore", "cancel") => Action::Cancel { id: needs("id")? },
            ("lock", "release") => Action::ReleaseLock { fence: needs("id")? },
            ("pool", "release") => Action::ReleaseLease { instance: needs("id")? },
            (kind, action) => {
                return Err(bad(format!("There is no action {action:?} for the kind {kind:?}.")));
            }
        };
        let accepted = ["kind", "action", "name", "capacity", "reason", "id"];
        let accepted =
            accepted.into_iter().filter_map(|key| Some((key, fields.get(key)?.to_owned())));
        Ok(Self { name: needs("name")?, action, fields: accepted.collect() })
    }

    /// Returns whether the name was in use before. Fails if nobody has used it and the action only ends something.
    /// For a missing lock or pool lease there is nothing to release.
    pub(super) async fn check(&self, console: &Console) -> Result<bool, Refusal> {
        let (kind, name) = (self.action.kind(), &self.name);
        let is_tracked = {
            let state = console.state();
            state.monitor.latest().is_some_and(|latest| latest.semaphore(name).is_some())
        };
        // The name may be newer than the last poll.
        if kind != Kind::Semaphore
            || is_tracked
            || find_with(&console.client, name, 0..0).await?.is_some()
        {
            return Ok(true);
        }
        if self.action.sets() { Ok(false) } else { Err(missing(kind.as_str(), name)) }
    }

    /// Returns the page to which the action belongs.
    fn page(&self) -> String {
        match self.action.kind() {
            Kind::Semaphore if self.action == Action::Forget => "/".to_owned(),
            Kind::Semaphore => semaphore_path(&self.name),
            Kind::Lock => "/locks".to_owned(),
            Kind::Pool => "/pools".to_owned(),
        }
    }
}

/// Fails unless the caller may act.
pub(super) fn check_caller(console: &Console, caller: Caller) -> Result<(), Refusal> {
    if !console.access.has_token() {
        return Err(access::no_token());
    }
    if !caller.may_act() {
        let sentence = "Actions need the token: log in, or send `Authorization: Bearer TOKEN`.";
        return Err(Refusal::new(StatusCode::UNAUTHORIZED, sentence));
    }
    Ok(())
}

/// The confirmation. The script shows it in a dialog; without the script it is a page.
pub(super) async fn confirm(State(console): State<Arc<Console>>, request: Parts) -> Response {
    let requested = async {
        check_caller(&console, caller(&request))?;
        let requested = ActionRequest::parse(&Fields::of_query(&request.uri))?;
        let is_known = requested.check(&console).await?;
        Ok::<_, Refusal>((requested, is_known))
    };
    match requested.await {
        Ok((requested, is_known)) => {
            let question = question(&requested, is_known);
            still(&console, &request, StatusCode::OK, "Confirm", &question)
        }
        Err(refusal) => layout::refusal(&console, &request, &refusal),
    }
}

fn question(requested: &ActionRequest, is_known: bool) -> Markup {
    let back = if requested.action == Action::Forget {
        semaphore_path(&requested.name)
    } else {
        requested.page()
    };
    html! {
        h1 #question { (one_line(&requested.action.question(&requested.name))) }
        p { (one_line(&requested.action.effect(&requested.name))) }
        @if !is_known { p.callout { (one_line(&requested.name)) " was not in use before. Is the name right?" } }
        form.confirm method="post" action="/act" {
            @for (key, value) in &requested.fields { input type="hidden" name=(key) value=(value); }
            button.confirm type="submit" { "Confirm" }
            // The dialog has its initial focus here, so that a key that is pressed too early does no harm.
            a.cancel href=(back) autofocus { "Cancel" }
        }
    }
}

pub(super) async fn act(State(console): State<Arc<Console>>, request: Request) -> Response {
    let (request, body) = request.into_parts();
    let caller = caller(&request);
    let done = async {
        check_caller(&console, caller)?;
        let requested =
            ActionRequest::parse(&Fields::parse(&request::body(&request, body).await?))?;
        let what = perform(&console, &requested, &request).await?;
        Ok::<_, Refusal>((requested, what))
    };
    match done.await {
        Ok((requested, what)) => {
            console.access.leave_notice(caller, format!("{}: {what}.", requested.name));
            reply::see_other(&requested.page())
        }
        Err(refusal) => layout::refusal(&console, &request, &refusal),
    }
}

/// Performs the action, and adds it to the events. Returns a description.
pub(super) async fn perform(
    console: &Console,
    requested: &ActionRequest,
    request: &Parts,
) -> Result<String, Refusal> {
    let is_known = requested.check(console).await?;
    let address = request.extensions.get::<Peer>().map(|peer| peer.address.ip().to_string());
    let by = format!("console, from {}", address.as_deref().unwrap_or("unknown"));
    let (name, action) = (&requested.name, &requested.action);
    action.perform_in(&console.store, name, &by).await?;
    let mut what = action.done();
    if !is_known {
        what.push_str("; it was not in use before");
    }
    let polls = console.state().polls;
    if matches!(action, Action::Drain { .. }) {
        console.watch_draining(name, by.clone());
    }
    console.note(action.kind(), name, what.clone(), by);
    // The answer shows the effect of the action.
    console.next_poll(polls).await;
    Ok(what)
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        let status = match (failure.error(), failure.code) {
            (Some(Error::NoRoom { .. }), _) => StatusCode::INSUFFICIENT_STORAGE,
            (Some(Error::Unusable { .. }), _) | (_, UNAVAILABLE) => StatusCode::SERVICE_UNAVAILABLE,
            (_, USAGE | NOT_ACQUIRED) => StatusCode::CONFLICT,
            (_, NOTHING_THERE) => StatusCode::NOT_FOUND,
            (_, REFUSED) => StatusCode::FORBIDDEN,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let mut message = failure.message().chars();
        let first: String = message.next().into_iter().flat_map(char::to_uppercase).collect();
        let end = if failure.message().ends_with('?') { "" } else { "." };
        Self::new(status, format!("{first}{}{end}", message.as_str()))
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Failure::from(error).into()
    }
}

pub(super) async fn login_page(State(console): State<Arc<Console>>, request: Parts) -> Response {
    login_form(&console, &request, None)
}

fn login_form(console: &Console, request: &Parts, refusal: Option<&Refusal>) -> Response {
    let status = refusal.map_or(StatusCode::OK, |refusal| refusal.status);
    let body = html! {
        h1 #question { "Log in" }
        @if let Some(refusal) = refusal { p.outage role="alert" { (refusal.sentence) } }
        @if console.access.has_token() {
            p { "Paste the token from the file that " code { "leasehold serve" } " was started with. The login lasts 12 hours, or until the \
                 console is restarted." }
            form.stacked method="post" action="/login" {
                label for="token" { "Token" }
                input #token type="password" name="token" required autocomplete="current-password" maxlength="4096";
                button type="submit" { "Log in" }
            }
        } @else {
            p { "This console is read-only. To change anything here, start it with " code { "--token-file FILE" } "." }
        }
    };
    still(console, request, status, "Log in", &body)
}

pub(super) async fn login(State(console): State<Arc<Console>>, request: Request) -> Response {
    let (request, body) = request.into_parts();
    let cookie = async {
        let fields = Fields::parse(&request::body(&request, body).await?);
        console.access.log_in(fields.get("token").unwrap_or_default().trim()).await
    };
    match cookie.await {
        Ok(cookie) => with_cookie(reply::see_other("/"), &cookie),
        Err(refusal) => login_form(&console, &request, Some(&refusal)),
    }
}

pub(super) async fn logout(State(console): State<Arc<Console>>, request: Parts) -> Response {
    let cookie = console.access.log_out(caller(&request));
    with_cookie(reply::see_other("/"), &cookie)
}

fn with_cookie(mut response: Response, cookie: &str) -> Response {
    if let Ok(cookie) = HeaderValue::from_str(cookie) {
        response.headers_mut().insert(header::SET_COOKIE, cookie);
    }
    response
}
