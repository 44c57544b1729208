//! Fences and statistics in JSON.

#![cfg(feature = "serde")]

use std::time::Duration;

use leasehold::{Client, Fence, WaitsFor};
use serde_json::{Value, json};
use testkit::by_hand::ByHand;

#[test]
fn a_fence_is_a_text_of_19_digits() {
    for (number, text) in [
        (7, "\"0000000000000000007\""),
        ((1 << 53) + 1, "\"0009007199254740993\""),
        (i64::MAX.unsigned_abs(), "\"9223372036854775807\""),
    ] {
        let json = serde_json::to_string(&Fence::new(number)).unwrap();
        assert_eq!(json, text);
        assert_eq!(serde_json::from_str::<Fence>(&json).unwrap(), Fence::new(number));
    }
}

/// A JSON number may have been rounded on its way, so it is not accepted as a fence.
#[test]
fn what_is_not_such_a_text_is_refused() {
    for json in ["7", "\"\"", "\"-1\"", "\"1e3\"", "\" 7\"", "\"99999999999999999999\"", "null"] {
        assert!(serde_json::from_str::<Fence>(json).is_err(), "{json}");
    }
    let error = serde_json::from_str::<Fence>("\"seven\"").unwrap_err().to_string();
    assert!(error.starts_with("invalid fence: \"seven\" is not a fence"), "{error}");
}

/// Fails unless the fields of the object are these.
#[track_caller]
fn assert_fields(object: &Value, expected: &[&str]) {
    let fields: Vec<_> = object.as_object().unwrap().keys().map(String::as_str).collect();
    let mut expected = expected.to_vec();
    expected.sort_unstable();
    assert_eq!(fields, expected);
}

#[tokio::test]
async fn statistics_have_the_fields_of_their_types() {
    let client = Client::memory();
    let api = client.semaphore("api", 2).label("mails").numbered();
    let api = api.rate(100, Duration::from_secs(60)).build().unwrap();
    let permit = api.acquire().await.unwrap();
    let mut waiting = ByHand::new(api.acquire().weight(2));
    assert!(waiting.poll().is_none());
    api.pause().by("an operator").await.unwrap();
    let stats = client.stats().waiters().await.unwrap().remove(0);
    assert_eq!(stats.waits_for, Some(WaitsFor::Resume));
    let limits = serde_json::to_value(api.limits().await.unwrap()).unwrap();
    assert_fields(&limits, &["capacity", "pinned", "paused", "rate"]);
    assert_eq!((&limits["capacity"], &limits["paused"]["by"]), (&json!(2), &json!("an operator")));
    let json = serde_json::to_value(&stats).unwrap();
    let numbers = ["capacity", "declared", "held", "held_units", "waiting"];
    let times = ["next_token_seconds", "oldest_hold_seconds", "oldest_wait_seconds"];
    let others = ["name", "pinned", "paused", "rate", "waits_for", "holders", "waiters"];
    assert_fields(&json, &[&numbers[..], &times, &others].concat());
    assert_eq!(numbers.map(|number| json[number].as_u64()), [2, 2, 1, 1, 1].map(Some));
    assert_eq!((&json["name"], &json["waits_for"]), (&json!("api"), &json!("resume")));
    assert!(json["pinned"].is_null() && json["next_token_seconds"].is_number(), "{json}");
    assert_fields(&json["paused"], &["lasts_seconds", "by", "reason"]);
    let rate = json!({
        "starts": 100, "period_seconds": 60.0, "burst": 1, "interval_seconds": 0.6
    });
    assert_eq!(json["rate"], rate);
    let (holder, waiter) = (&json["holders"][0], &json["waiters"][0]);
    let place = ["id", "slot_number", "weight", "host", "pid", "label", "fence"];
    let times = ["age_seconds", "silent_for_seconds", "ttl_ends_in_seconds", "expires_in_seconds"];
    assert_fields(holder, &[&place[..], &times].concat());
    assert_fields(waiter, &[&place[..], &times].concat());
    assert_eq!(holder["fence"], permit.fence().to_string());
    assert_eq!((&holder["slot_number"], &waiter["fence"]), (&json!(1), &Value::Null));
    assert_eq!((&holder["label"], &waiter["weight"]), (&json!("mails"), &json!(2)));
}

#[tokio::test]
async fn a_lock_id_is_never_written() {
    let client = Client::memory();
    let guard = client.lock("invoice:42").label("cron").build().unwrap().acquire().await.unwrap();
    let info = client.locks().lookup("invoice:42").await.unwrap().unwrap();
    let json = serde_json::to_value(&info).unwrap();
    assert!(!json.to_string().contains(&guard.id().to_string()), "{json}");
    let fields = ["id_hash", "host", "pid", "label", "fence", "key_hash"];
    let times = ["acquired_at", "age_seconds", "expires_at", "expires_in_seconds"];
    assert_fields(&json, &[&fields[..], &times, &["key"]].concat());
    assert!(json["acquired_at"].as_str().is_some_and(|time| time.ends_with('Z')), "{json}");
    assert!(json["expires_in_seconds"].as_f64().is_some_and(|left| left > 29.0), "{json}");
}

#[tokio::test]
async fn pools_and_clients_have_the_fields_of_their_types() {
    let client = Client::memory();
    let _lease = client.pool("encoders", 2).build().unwrap().acquire("one").await.unwrap();
    let pool = client.pools().lookup("encoders").await.unwrap();
    let pool = serde_json::to_value(&pool).unwrap();
    assert_fields(&pool, &["name", "held", "members"]);
    assert_eq!(pool["held"], 1);
    let times = ["silent_for_seconds", "expires_in_seconds"];
    assert_fields(&pool["members"][0], &[&["id"][..], &times].concat());
    let clients = serde_json::to_value(client.clients(10).await.unwrap()).unwrap();
    assert_fields(&clients[0], &["id", "host", "pid", "program", "since"]);
    assert_eq!(clients[0]["id"], client.id().to_string());
}
