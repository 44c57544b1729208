//! Answers, and their common headers.

use axum::body::{Body, Bytes};
use axum::http::header::{self, HeaderName};
use axum::http::{HeaderValue, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// The content security policy: nothing from other sites, no inline scripts, no frames.
const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; \
                      form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

pub(super) const HTML: &str = "text/html; charset=utf-8";
pub(super) const TEXT: &str = "text/plain; charset=utf-8";
pub(super) const JSON: &str = "application/json";

/// A refused request, with the reason in one sentence.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) sentence: String,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, sentence: impl Into<String>) -> Self {
        Self { status, sentence: sentence.into() }
    }

    /// Returns the answer of the API.
    pub(super) fn json(&self) -> Response {
        json_value(self.status, &json!({ "error": self.sentence }))
    }

    pub(super) fn text(&self) -> Response {
        of(self.status, TEXT, format!("{}\n", self.sentence))
    }

    /// Returns JSON or a page, depending on the path of the request.
    pub(super) fn for_path(&self, uri: &Uri) -> Response {
        if uri.path().starts_with("/api/") { self.json() } else { self.text() }
    }
}

pub(super) fn of(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Response {
    let body: Bytes = body.into();
    (status, [(header::CONTENT_TYPE, kind)], Body::from(body)).into_response()
}

pub(super) fn json_value(status: StatusCode, value: &Value) -> Response {
    of(status, JSON, format!("{value:#}\n"))
}

pub(super) fn see_other(place: &str) -> Response {
    let place = HeaderValue::from_str(place).unwrap_or_else(|_| HeaderValue::from_static("/"));
    (StatusCode::SEE_OTHER, [(header::LOCATION, place)]).into_response()
}

pub(super) async fn method_not_allowed(method: Method, uri: Uri) -> Response {
    let sentence = format!("This address does not accept {method}.");
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, sentence).for_path(&uri)
}

/// Adds the common headers.
pub(super) fn secure(response: &mut Response) {
    let headers = response.headers_mut();
    let fixed: [(HeaderName, &'static str); 5] = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // With `no-referrer`, browsers send `Origin: null` with forms, and the origin could not be checked.
        (header::REFERRER_POLICY, "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    // Assets set their own cache time.
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
}
