//! The query and the body of a request, with limits.

use std::collections::HashMap;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri};

use super::connections::Peer;
use super::reply::Refusal;

/// The longest body. Names are at most 512 bytes, and forms have few fields.
const LONGEST_BODY: usize = 16 * 1024;
/// How long a client may take to send it.
const BODY: Duration = Duration::from_secs(10);

/// The fields of a query or a form. If a field occurs twice, the first is used.
#[derive(Clone, Debug, Default)]
pub(super) struct Fields(HashMap<String, String>);

impl Fields {
    pub(super) fn of_query(uri: &Uri) -> Self {
        Self::parse(uri.query().unwrap_or_default().as_bytes())
    }

    pub(super) fn parse(bytes: &[u8]) -> Self {
        let mut fields = HashMap::new();
        for (key, value) in form_urlencoded::parse(bytes) {
            fields.entry(key.into_owned()).or_insert_with(|| value.into_owned());
        }
        Self(fields)
    }

    pub(super) fn of_json(value: &serde_json::Value) -> Option<Self> {
        let text = |value: &serde_json::Value| match value {
            serde_json::Value::String(text) => Some(text.clone()),
            serde_json::Value::Number(number) => Some(number.to_string()),
            _ => None,
        };
        let fields = value.as_object()?.iter();
        Some(Self(fields.filter_map(|(key, value)| Some((key.clone(), text(value)?))).collect()))
    }

    /// Returns the value of a field. An empty field counts as missing.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Returns a text that differs if one of these fields differs.
    pub(super) fn key(&self, of: &[&str]) -> String {
        format!("{:?}", of.iter().map(|key| self.get(key)).collect::<Vec<_>>())
    }

    pub(super) fn number(&self, key: &str) -> Option<u64> {
        self.get(key)?.parse().ok()
    }
}

/// Reads the body of a request. A connection that sends it slowly can be displaced.
pub(super) async fn body(request: &Parts, body: Body) -> Result<Vec<u8>, Refusal> {
    let body = tokio::time::timeout(BODY, to_bytes(body, LONGEST_BODY));
    let body = match request.extensions.get::<Peer>() {
        Some(peer) => peer.sends(body).await,
        None => body.await,
    };
    match body {
        Ok(Ok(bytes)) => Ok(bytes.into()),
        Ok(Err(_)) => {
            let problem = format!("The body is longer than {LONGEST_BODY} bytes, or incomplete.");
            Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, problem))
        }
        Err(_) => {
            let problem = format!("The body did not arrive within {} seconds.", BODY.as_secs());
            Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, problem))
        }
    }
}
