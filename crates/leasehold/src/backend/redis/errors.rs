//! Maps errors of Redis to [`Error`].

use std::sync::Arc;

use redis::{ErrorKind, RedisError};

use super::resp::violated;
use super::tls::distrust;
use crate::Error;

/// Redis 6.2 and later, and every version of Valkey, support it.
const NO_RESP3: &str = "the server does not support HELLO 3: use Redis 6.2 or later, or Valkey";

/// Returns the code and the text of an error. Redis 6.2 wraps errors of scripts and puts the location before the error
/// itself. An error that the script returned is `@user_script: 5: -READONLY You can't write …`. An error that ended the
/// script has `ERR Error running script (call to f_…): @user_script:5: …` before that.
pub(super) fn code(error: &RedisError) -> (&str, &str) {
    let (code, detail) = (error.code().unwrap_or_default(), error.detail().unwrap_or_default());
    let inner = match code {
        "@user_script:" => Some(detail),
        "ERR" => detail.rsplit_once("@user_script:").map(|(_, inner)| inner),
        _ => None,
    };
    inner.and_then(unwrap).unwrap_or((code, detail))
}

/// Reads the code and the text from ` 5: -READONLY You can't write …`.
fn unwrap(text: &str) -> Option<(&str, &str)> {
    let text = text.trim_start_matches(|c: char| c == ':' || c == ' ' || c.is_ascii_digit());
    let (code, detail) = text.trim_start_matches('-').split_once(' ')?;
    let is_code = code.len() >= 3 && code.bytes().all(|byte| byte.is_ascii_uppercase());
    is_code.then_some((code, detail))
}

/// Maps an error. `what` names the attempt and must not contain a secret. The result contains none either: the text of
/// a Redis error is kept only where Redis cannot have quoted our credentials in it.
pub(super) fn translate(what: &str, error: &RedisError) -> Error {
    let unavailable =
        |timed_out| Error::unavailable(what, timed_out, Some(Arc::new(error.clone())));
    if error.is_timeout() {
        return unavailable(true);
    }
    let (code, detail) = code(error);
    let refused = |why: &str| Error::Refused { what: format!("{what}: {why}") };
    if let Some(why) = distrust(error) {
        return refused(&why);
    }
    if let Some(why) = violated(error) {
        return Error::unavailable(format!("{what}: {why}"), false, None);
    }
    match code {
        "NOAUTH" => refused("a password is required: put the user and the password into the URL"),
        "WRONGPASS" => refused("wrong user or password: correct them in the URL"),
        "NOPERM" => refused(&format!("missing permission: {detail}")),
        "WRONGTYPE" => Error::invalid(
            "name",
            format!(
                "{what}: another program uses a key of this name: choose another name or namespace"
            ),
        ),
        // These codes come from our own scripts.
        "NOTOURS" => Error::invalid(
            "key",
            format!("{what}: {detail:?} is not a leasehold lock: remove it, or choose another key"),
        ),
        "OTHERLAYOUT" => Error::invalid(
            "lock layout",
            format!(
                "{what}: {detail:?} has the layout of another version of SyncGuard: set lock_layout (--lock-layout) to \
                 the version that the other programs use"
            ),
        ),
        "BADFENCE" => Error::invalid(
            "key",
            format!(
                "{what}: the fence counter {detail:?} is not a number that can be incremented: set it to the last fence \
                 that was used, or choose another name"
            ),
        ),
        // The server is starting, failing over or stuck, and may recover in a moment.
        "LOADING" | "MASTERDOWN" | "BUSY" | "TRYAGAIN" | "CLUSTERDOWN" | "NOREPLICAS" | "MOVED"
        | "ASK" => unavailable(false),
        // The server is a demoted primary. The address may soon lead to the new one.
        "READONLY" => Error::unavailable(
            format!("{what}: the server is now a read-only replica"),
            false,
            None,
        ),
        // Another client may disconnect.
        "ERR" if detail.contains("max number of clients") => {
            Error::unavailable(format!("{what}: {detail}"), false, None)
        }
        "NOPROTO" => refused(NO_RESP3),
        // A page of advice follows the first sentence.
        "DENIED" => refused(&format!("{code} {}", detail.split(". ").next().unwrap_or_default())),
        "OOM" => refused("the server is out of memory: raise maxmemory, or free memory"),
        "MISCONF" => refused("the server cannot save its data, and rejects writes: see its log"),
        _ => match error.kind() {
            ErrorKind::Io => unavailable(false),
            ErrorKind::Parse => refused("the server does not answer as Redis does: check the port"),
            ErrorKind::InvalidClientConfig => Error::invalid("url", format!("{what}: {error}")),
            // The text may quote our HELLO, and so the password.
            ErrorKind::Server(_) if detail.contains("HELLO") => refused(NO_RESP3),
            ErrorKind::Server(_) | ErrorKind::Extension => refused(&format!("{code} {detail}")),
            _ if error.is_connection_dropped() => unavailable(false),
            _ => Error::internal(format!("{what}: {error}")),
        },
    }
}

#[cfg(test)]
mod tests {
    use redis::{ServerErrorKind, Value};

    use super::*;

    fn error(line: &str) -> RedisError {
        let value = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap();
        let Value::ServerError(error) = value else { panic!("{value:?}") };
        error.into()
    }

    /// The wording of Redis 6.2, next to that of 7.0.
    #[test]
    fn the_error_of_a_script_is_found_inside_its_wrapping() {
        let wrapped = "ERR Error running script (call to f_6b1bf486c81ceb7edf3c093f4c48582e38c0e791): \
                       @user_script:7: @user_script: 7: -READONLY You can't write against a read only replica.";
        let cases = [
            (wrapped, "READONLY"),
            (
                "@user_script: 70: -READONLY You can't write against a read only replica.",
                "READONLY",
            ),
            (
                "OOM command not allowed when used memory > 'maxmemory'. script: 1, on @user_script:7.",
                "OOM",
            ),
            ("READONLY You can't write against a read only replica.", "READONLY"),
            (
                "ERR Error running script (call to f_1): @user_script:3: WRONGTYPE Operation against a key",
                "WRONGTYPE",
            ),
            (
                "ERR Error running script (call to f_1): @user_script:3: @user_script: 3: -OOM command not allowed when",
                "OOM",
            ),
            (
                "ERR Error running script (call to f_1): @user_script:3: attempt to index a nil value",
                "ERR",
            ),
        ];
        for (line, expected) in cases {
            assert_eq!(code(&error(line)).0, expected, "{line}");
        }
        assert!(translate("request", &error(wrapped)).may_pass());
        assert_eq!(error("NOSCRIPT gone").kind(), ErrorKind::Server(ServerErrorKind::NoScript));
    }
}
