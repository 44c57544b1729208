//! The style sheet, the script and the icon, which are part of the binary.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;

use super::reply;

pub(super) static STYLE: Asset = Asset {
    name: "/style.css",
    kind: "text/css; charset=utf-8",
    text: include_str!("assets/style.css"),
};
pub(super) static SCRIPT: Asset = Asset {
    name: "/script.js",
    kind: "text/javascript; charset=utf-8",
    text: include_str!("assets/script.js"),
};
static ICON: Asset =
    Asset { name: "/icon.svg", kind: "image/svg+xml", text: include_str!("assets/icon.svg") };

/// A file that never changes while its address stays the same.
pub(super) struct Asset {
    name: &'static str,
    kind: &'static str,
    text: &'static str,
}

impl Asset {
    /// Returns its address, which contains a hash of the content.
    pub(super) fn path(&self) -> String {
        // FNV-1a is enough to distinguish versions of a file.
        let number = self.text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        format!("{}?v={number:016x}", self.name)
    }

    fn response(&self) -> Response {
        let mut response = reply::of(StatusCode::OK, self.kind, self.text);
        let forever = HeaderValue::from_static("public, max-age=31536000, immutable");
        response.headers_mut().insert(header::CACHE_CONTROL, forever);
        response
    }
}

pub(super) async fn style() -> Response {
    STYLE.response()
}

pub(super) async fn script() -> Response {
    SCRIPT.response()
}

pub(super) async fn icon() -> Response {
    ICON.response()
}
