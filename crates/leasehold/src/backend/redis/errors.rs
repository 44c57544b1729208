//! The errors of requests to Redis, and how they become [`Error`].

use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use super::tls::distrust;
use crate::Error;

/// Why a request failed.
#[derive(Clone, Debug)]
pub(super) enum RedisError {
    /// The server answered with an error.
    Server(ServerError),
    /// The connection was not made, or was lost.
    Io(Arc<io::Error>),
    /// The server violated the protocol, or a limit of this client.
    Violation(String),
    /// The server does not speak the protocol.
    NotResp,
    /// The URL cannot be used.
    Url(&'static str),
}

impl RedisError {
    /// The error for a connection that was lost before the answer came.
    pub(super) fn lost() -> Self {
        io::ErrorKind::ConnectionReset.into()
    }

    /// Returns what the server did wrong, if it violated the protocol or a limit.
    pub(super) fn violation(&self) -> Option<&str> {
        match self {
            Self::Violation(what) => Some(what),
            _ => None,
        }
    }

    fn is_timeout(&self) -> bool {
        matches!(self, Self::Io(error) if error.kind() == io::ErrorKind::TimedOut)
    }
}

impl fmt::Display for RedisError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server(error) => error.fmt(f),
            Self::Io(error) => error.fmt(f),
            Self::Violation(what) => f.write_str(what),
            Self::NotResp => f.write_str("the answer is not RESP"),
            Self::Url(problem) => f.write_str(problem),
        }
    }
}

impl std::error::Error for RedisError {}

impl From<io::Error> for RedisError {
    fn from(error: io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}

impl From<io::ErrorKind> for RedisError {
    fn from(kind: io::ErrorKind) -> Self {
        io::Error::from(kind).into()
    }
}

impl From<ServerError> for RedisError {
    fn from(error: ServerError) -> Self {
        Self::Server(error)
    }
}

/// The answer of a server that did not execute a command: a code and a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServerError(Box<str>);

impl ServerError {
    pub(super) fn new(line: &[u8]) -> Self {
        Self(String::from_utf8_lossy(line).into())
    }

    pub(super) fn code(&self) -> &str {
        self.code_and_detail().0
    }

    /// Returns the code and the text. Redis 6.2 wraps errors of scripts and puts the location before the error itself.
    /// An error that the script returned is `@user_script: 5: -READONLY You can't write …`. An error that ended the
    /// script has `ERR Error running script (call to f_…): @user_script:5: …` before that.
    pub(super) fn code_and_detail(&self) -> (&str, &str) {
        let (code, detail) = self.0.split_once(' ').unwrap_or((&self.0, ""));
        let inner = match code {
            "@user_script:" => Some(detail),
            "ERR" => detail.rsplit_once("@user_script:").map(|(_, inner)| inner),
            _ => None,
        };
        inner.and_then(unwrap).unwrap_or((code, detail))
    }
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Reads the code and the text from ` 5: -READONLY You can't write …`.
fn unwrap(text: &str) -> Option<(&str, &str)> {
    let text = text.trim_start_matches(|c: char| c == ':' || c == ' ' || c.is_ascii_digit());
    let (code, detail) = text.trim_start_matches('-').split_once(' ')?;
    let is_code = code.len() >= 3 && code.bytes().all(|byte| byte.is_ascii_uppercase());
    is_code.then_some((code, detail))
}

/// Returns the result of an attempt. Fails if the attempt takes longer than `limit`.
pub(super) async fn within<T>(
    limit: Duration,
    what: &str,
    attempt: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let in_time = tokio::time::timeout(limit, attempt).await;
    in_time.unwrap_or_else(|_| Err(Error::unavailable(what, true, None)))
}

/// Maps an error. `what` names the attempt and must not contain a secret. The result contains none either: the text of
/// a Redis error is kept only where Redis cannot have quoted our credentials in it.
pub(super) fn translate(what: &str, error: &RedisError) -> Error {
    let unusable = |why: &str| Error::Unusable { problem: format!("{what}: {why}") };
    match error {
        RedisError::Server(error) => translate_server(what, error),
        RedisError::Io(cause) => distrust(cause).map_or_else(
            || Error::unavailable(what, error.is_timeout(), Some(cause.clone())),
            |why| unusable(&why),
        ),
        RedisError::Violation(why) => Error::unavailable(format!("{what}: {why}"), false, None),
        RedisError::NotResp => unusable("the server does not answer as Redis does: check the port"),
        RedisError::Url(problem) => Error::invalid("store", format!("{what}: {problem}")),
    }
}

/// Maps an error that the server returned: see [`translate`].
pub(super) fn translate_server(what: &str, error: &ServerError) -> Error {
    const NO_RESP3: &str = "the server does not support HELLO 3: use Redis 6.2 or later, or Valkey";
    let denied = |why: &str| Error::Denied { problem: format!("{what}: {why}") };
    let no_room = |why: &str| Error::NoRoom { problem: format!("{what}: {why}") };
    let unusable = |why: &str| Error::Unusable { problem: format!("{what}: {why}") };
    let (code, detail) = error.code_and_detail();
    match code {
        "NOAUTH" => denied("a password is required: put the user and the password into the URL"),
        "WRONGPASS" => denied("wrong user or password: correct them in the URL"),
        "NOPERM" => denied(&format!("missing permission: {detail}")),
        "WRONGTYPE" => Error::foreign(format!(
            "{what}: another program uses a key of this name: choose another name or namespace"
        )),
        // These codes come from our own scripts.
        "NOTOURS" => Error::foreign(format!(
            "{what}: {detail:?} is not a leasehold lock: remove it, or choose another key"
        )),
        "OTHERLAYOUT" => Error::invalid(
            "lock layout",
            format!(
                "{what}: {detail:?} has the layout of another version of SyncGuard: set lock_layout (--lock-layout) to \
                 the version that the other programs use"
            ),
        ),
        "BADFENCE" => Error::foreign(format!(
            "{what}: the fence counter {detail:?} is not a number that can be incremented: set it to the last fence that \
             was used, or choose another name"
        )),
        // The server is starting, failing over or stuck, and may recover in a moment.
        "LOADING" | "MASTERDOWN" | "BUSY" | "TRYAGAIN" | "CLUSTERDOWN" | "NOREPLICAS" | "MOVED"
        | "ASK" => {
            let source = Arc::new(RedisError::from(error.clone()));
            Error::unavailable(what, false, Some(source))
        }
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
        "OOM" => no_room("the server is out of memory: raise maxmemory, or free memory"),
        "MISCONF" => no_room("the server cannot save its data, and rejects writes: see its log"),
        // The text may quote our HELLO, and so the password.
        "NOPROTO" => unusable(NO_RESP3),
        _ if detail.contains("HELLO") => unusable(NO_RESP3),
        // A page of advice follows the first sentence.
        "DENIED" => {
            let sentence = detail.split(". ").next().unwrap_or_default();
            let advice = "connect from its own host, or give it a password (requirepass) and put that into the URL";
            denied(&format!("{code} {sentence}: {advice}"))
        }
        _ => unusable(&format!("{code} {detail}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            ("NOSCRIPT", "NOSCRIPT"),
        ];
        let error = |line: &str| ServerError::new(line.as_bytes());
        for (line, expected) in cases {
            assert_eq!(error(line).code(), expected, "{line}");
        }
        assert!(translate_server("request", &error(wrapped)).is_transient());
    }

    #[test]
    fn the_code_decides_what_the_caller_can_do() {
        type Is = fn(&Error) -> bool;
        let denied: Is = |error| matches!(error, Error::Denied { .. });
        let no_room: Is = |error| matches!(error, Error::NoRoom { .. });
        let unusable: Is = |error| matches!(error, Error::Unusable { .. });
        let foreign: Is = |error| matches!(error, Error::ForeignData { .. });
        let invalid: Is = |error| matches!(error, Error::InvalidArgument { .. });
        for (line, is_expected) in [
            ("NOAUTH Authentication required.", denied),
            ("WRONGPASS invalid username-password pair or user is disabled.", denied),
            ("NOPERM this user has no permissions to run the 'evalsha' command", denied),
            ("DENIED Redis is running in protected mode because no password is set. In", denied),
            ("OOM command not allowed when used memory > 'maxmemory'.", no_room),
            ("MISCONF Errors writing to the AOF file: No space left on device", no_room),
            ("NOPROTO unsupported protocol version", unusable),
            ("ERR DB index is out of range", unusable),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", foreign),
            ("NOTOURS syncguard:key", foreign),
            ("BADFENCE adv-sem:semaphore_fence:api", foreign),
            ("OTHERLAYOUT syncguard:key", invalid),
            ("LOADING Redis is loading the dataset in memory", Error::is_transient),
            ("READONLY You can't write against a read only replica.", Error::is_transient),
        ] {
            let error = translate_server("request", &ServerError::new(line.as_bytes()));
            assert!(is_expected(&error), "{line}: {error:?}");
        }
    }

    /// Redis repeats the first arguments of a command that it does not know.
    #[test]
    fn a_password_in_the_text_of_an_error_is_not_repeated() {
        let line = "ERR unknown command `HELLO`, with args beginning with: `3`, `AUTH`, `app`, `hunter2`, ";
        let error = translate_server("connecting", &ServerError::new(line.as_bytes()));
        assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
        assert!(error.to_string().contains("use Redis 6.2 or later"), "{error}");
    }
}
