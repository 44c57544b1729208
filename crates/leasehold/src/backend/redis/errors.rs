//! What Redis says, as what the caller does next.

use std::sync::Arc;

use redis::{ErrorKind, RedisError};

use super::tls::distrust;
use crate::Error;

/// `what` was tried; it never contains a secret, and neither does what is made of the error here: the text
/// of a Redis error is kept only where Redis cannot have quoted our credentials in it.
pub(super) fn translate(what: &str, error: &RedisError) -> Error {
    let unavailable = |timed_out| Error::Unavailable {
        what: what.to_owned(),
        timed_out,
        source: Some(Arc::new(error.clone())),
    };
    if error.is_timeout() {
        return unavailable(true);
    }
    let code = error.code().unwrap_or_default();
    let detail = error.detail().unwrap_or_default();
    let refused = |why: &str| Error::Refused { what: format!("{what}: {why}") };
    if let Some(why) = distrust(error) {
        return refused(&why);
    }
    match code {
        "NOAUTH" => refused("it wants a password: put user and password into the URL"),
        "WRONGPASS" => refused("wrong user or password"),
        "NOPERM" => refused(&format!("missing permission: {detail}")),
        "WRONGTYPE" => Error::invalid(
            "name",
            format!(
                "{what}: a key of another type is in our place: choose another name or namespace"
            ),
        ),
        // What our own scripts say of what they find.
        "NOTOURS" => Error::invalid(
            "key",
            format!("{what}: {detail:?} holds something that is not a lock of ours"),
        ),
        "BADFENCE" => Error::invalid(
            "key",
            format!("{what}: the fence counter {detail:?} is not a number that can grow"),
        ),
        // A server that is starting, failing over or stuck: it may be fine in a moment.
        "LOADING" | "MASTERDOWN" | "BUSY" | "TRYAGAIN" | "CLUSTERDOWN" => unavailable(false),
        "READONLY" => refused("it is a read-only replica: connect to the primary"),
        "OOM" => refused("it is out of memory: raise maxmemory, or free some"),
        "MISCONF" => refused("it cannot persist, and refuses writes: see its log"),
        _ => match error.kind() {
            ErrorKind::AuthenticationFailed => refused("wrong user or password"),
            ErrorKind::Io => unavailable(false),
            ErrorKind::Parse => refused("it does not answer as Redis does: is it the right port?"),
            ErrorKind::InvalidClientConfig => Error::invalid("url", format!("{what}: {error}")),
            // Its text may quote the HELLO that we sent, and so the password.
            ErrorKind::Server(_) if detail.contains("HELLO") => refused("it does not know HELLO"),
            ErrorKind::Server(_) | ErrorKind::Extension => refused(&format!("{code} {detail}")),
            _ if error.is_connection_dropped() => unavailable(false),
            _ => Error::internal(format!("{what}: {error}")),
        },
    }
}
