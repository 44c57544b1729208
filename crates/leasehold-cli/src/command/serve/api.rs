//! The same data as JSON, in the shapes of `ls --json` and `show --json`. docs/console.md describes each.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use serde_json::{Value, json};

use super::actions::{ActionRequest, check_caller, perform};
use super::clients::clients as clients_of;
use super::console::{Console, ConsoleState, Rendering};
use super::details::Details;
use super::pages::{caller, missing};
use super::reply::{self, Refusal};
use super::request::{self, Fields};
use crate::monitor::{Event, Sample, Snapshot};
use crate::output::{self, seconds, summary, timestamp};

type ConsoleArg = State<Arc<Console>>;

pub(super) async fn overview(State(console): ConsoleArg, request: Parts) -> Response {
    answer(&console, &request, &[], async {
        let (state, version) = (console.state(), console.version());
        let latest = state.monitor.latest();
        let all = latest.map_or(&[][..], |latest| &latest.semaphores);
        let outage = state
            .monitor
            .outage()
            .map(|outage| json!({ "since": timestamp(outage.since), "problem": outage.problem }));
        Ok(json!({
            "store": console.place,
            "version": version,
            "read_at": latest.map(|latest| timestamp(latest.at)),
            "read_took_seconds": seconds(latest.map(|latest| latest.took)),
            "outage": outage,
            "semaphores": all.len(),
            "held_units": all.iter().map(|one| u64::from(one.held_units)).sum::<u64>(),
            "waiting": all.iter().map(|one| one.waiting).sum::<usize>(),
            "locks": latest.map_or(0, |latest| latest.locks.len()),
            "pools": latest.map_or(0, |latest| latest.pools.len()),
            "hidden": latest.map(|latest| latest.hidden.clone()).unwrap_or_default(),
            "actions": console.access.has_token(),
        }))
    })
    .await
}

pub(super) async fn semaphores(State(console): ConsoleArg, request: Parts) -> Response {
    // Some names, such as `..`, cannot be a part of a path.
    if let Some(name) = Fields::of_query(&request.uri).get("name") {
        return one(&console, &request, name).await;
    }
    of_snapshot(
        &console,
        &request,
        |latest| json!({ "semaphores": latest.semaphores.iter().map(summary).collect::<Value>() }),
    )
    .await
}

pub(super) async fn semaphore(State(console): ConsoleArg, request: Parts) -> Response {
    let name = request.uri.path().trim_start_matches("/api/semaphores/");
    match percent_encoding::percent_decode_str(name).decode_utf8() {
        Ok(name) => one(&console, &request, &name).await,
        Err(_) => Refusal::new(StatusCode::BAD_REQUEST, "The name is not UTF-8.").json(),
    }
}

async fn one(console: &Console, request: &Parts, name: &str) -> Response {
    answer(console, request, &["name"], async {
        let Some(detail) = Details::of(console, name).await else {
            return Err(missing("semaphore", name));
        };
        let stats = detail.as_ref().as_ref().map_err(|problem| queue_unreadable(problem))?;
        let mut value = output::json(stats);
        value["kind"] = "semaphore".into();
        value["why"] = super::why::why(stats).into();
        value["waiters_left_off"] = stats.waiting.saturating_sub(stats.waiters.len()).into();
        Ok(value)
    })
    .await
}

fn queue_unreadable(problem: &str) -> Refusal {
    let sentence = format!("The queue cannot be read: {problem}.");
    Refusal::new(StatusCode::SERVICE_UNAVAILABLE, sentence)
}

pub(super) async fn locks(State(console): ConsoleArg, request: Parts) -> Response {
    of_snapshot(&console, &request, |latest| json!({ "locks": latest.locks })).await
}

pub(super) async fn pools(State(console): ConsoleArg, request: Parts) -> Response {
    of_snapshot(&console, &request, |latest| json!({ "pools": latest.pools })).await
}

pub(super) async fn clients(State(console): ConsoleArg, request: Parts) -> Response {
    answer(&console, &request, &[], async {
        let queues = Details::queues(&console).await;
        let queues = queues.as_ref().as_ref().map_err(|problem| queue_unreadable(problem))?;
        let state = console.state();
        let rows = clients_of(snapshot(&state)?, queues);
        Ok(json!({ "clients": rows }))
    })
    .await
}

pub(super) async fn events(State(console): ConsoleArg, request: Parts) -> Response {
    let after = Fields::of_query(&request.uri).number("after");
    answer(&console, &request, &["after"], async {
        let state = console.state();
        let new = state.monitor.events().iter();
        let new = new.filter(|event| after.is_none_or(|after| event.number > after));
        Ok(json!({ "events": new.map(event_json).collect::<Value>() }))
    })
    .await
}

fn event_json(event: &Event) -> Value {
    json!({
        "number": event.number,
        "at": timestamp(event.at),
        "event": event.change.as_str(),
        "kind": event.subject.as_ref().map(|(kind, _)| kind.as_str()),
        "name": event.subject.as_ref().map(|(_, name)| name),
        "text": event.change.describe(),
    })
}

pub(super) async fn history(State(console): ConsoleArg, request: Parts) -> Response {
    let fields = Fields::of_query(&request.uri);
    answer(&console, &request, &["name"], async {
        let (state, name) = (console.state(), fields.get("name"));
        let history = match name {
            None => Some(state.monitor.total()),
            Some(name) => state.monitor.history(name),
        };
        let history = history.ok_or_else(|| missing("semaphore", name.unwrap_or_default()))?;
        let sample = |sample: &Sample| {
            json!({
                "at": timestamp(sample.at),
                "held": sample.held,
                "waiting": sample.waiting,
                "grants": sample.grants,
            })
        };
        let samples: Value = history.hour().map(sample).collect();
        let rate = history.grants_per_second();
        Ok(json!({ "name": name, "step_seconds": 10, "grants_per_second": rate, "samples": samples }))
    })
    .await
}

pub(super) async fn act(State(console): ConsoleArg, request: Request) -> Response {
    let (request, body) = request.into_parts();
    let done = async {
        check_caller(&console, caller(&request))?;
        let body = request::body(&request, body).await?;
        let fields = serde_json::from_slice(&body).ok().and_then(|value| Fields::of_json(&value));
        let fields = fields.ok_or_else(|| {
            let sentence = "The body is not a JSON object of texts and numbers.";
            Refusal::new(StatusCode::BAD_REQUEST, sentence)
        })?;
        let requested = ActionRequest::parse(&fields)?;
        let what = perform(&console, &requested, &request).await?;
        let effect = requested.action.effect(&requested.name);
        Ok(json!({ "name": requested.name, "done": what, "effect": effect }))
    };
    match done.await {
        Ok(value) => reply::json_value(StatusCode::OK, &value),
        Err(refusal) => Refusal::json(&refusal),
    }
}

async fn of_snapshot(
    console: &Console,
    request: &Parts,
    make: impl FnOnce(&Snapshot) -> Value,
) -> Response {
    answer(console, request, &[], async {
        let state = console.state();
        snapshot(&state).map(make)
    })
    .await
}

fn snapshot(state: &ConsoleState) -> Result<&Snapshot, Refusal> {
    state.monitor.latest().ok_or_else(|| {
        let sentence = "The store has not been read yet.";
        Refusal::new(StatusCode::SERVICE_UNAVAILABLE, sentence)
    })
}

/// Returns an answer that is made once per version, path and fields.
async fn answer(
    console: &Console,
    request: &Parts,
    fields: &[&str],
    make: impl Future<Output = Result<Value, Refusal>>,
) -> Response {
    console.is_asked().await;
    // Unknown fields are ignored, so that they do not cause new answers to be made.
    let key = request.uri.path().to_owned() + &Fields::of_query(&request.uri).key(fields);
    let rendering = console.rendered(&key, async {
        let body = format!("{:#}\n", make.await?).into();
        Ok::<_, Refusal>(Rendering { title: String::new(), body })
    });
    match rendering.await {
        Ok(rendering) => reply::of(StatusCode::OK, reply::JSON, rendering.body.clone()),
        Err(refusal) => refusal.json(),
    }
}
