//! The errors of the command: a message for people and an exit code for scripts.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use leasehold::{Error, LossReason};
use rustix::io::Errno;

use crate::advice::{advice, with_limit};

/// `release`, `lookup`, `show`: nothing there.
pub(crate) const NOTHING_THERE: u8 = 1;
/// `doctor`: leases are not safe on this store.
pub(crate) const NOT_SAFE: u8 = 1;
/// Bad usage or bad input, or a name that cannot be used like this.
pub(crate) const USAGE: u8 = 64;
/// The store cannot be reached, or has no room.
pub(crate) const UNAVAILABLE: u8 = 69;
/// An internal error.
pub(crate) const INTERNAL: u8 = 70;
/// Not acquired, unless `-E` says otherwise.
pub(crate) const NOT_ACQUIRED: u8 = 75;
/// The store denies access, or cannot be used.
pub(crate) const REFUSED: u8 = 77;
/// The lease was lost or its TTL ran out, and the child was stopped.
pub(crate) const LOST: u8 = 124;
/// The child could not be run.
pub(crate) const CANNOT_RUN: u8 = 126;
/// The child was not found.
pub(crate) const NOT_FOUND: u8 = 127;

/// The exit code after this signal.
pub(crate) fn by_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// An exit code, and a message if there is one.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    message: Option<String>,
    /// The library's error, if it is the cause.
    error: Option<Box<Error>>,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: Some(message.into()), error: None }
    }

    /// Returns the failure with this sentence before its message.
    pub(crate) fn after(self, sentence: &str) -> Self {
        Self { message: Some(format!("{sentence}: {}", self.message())), ..self }
    }

    pub(crate) fn error(&self) -> Option<&Error> {
        self.error.as_deref()
    }

    pub(crate) fn message(&self) -> &str {
        self.message.as_deref().unwrap_or_default()
    }

    pub(crate) fn silent(code: u8) -> Self {
        Self { code, message: None, error: None }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(USAGE, message)
    }

    pub(crate) fn internal(what: &str, error: impl Display) -> Self {
        Self::system(INTERNAL, what, error)
    }

    /// An error of the operating system. If a limit was reached, the message names it.
    pub(crate) fn system(code: u8, what: &str, error: impl Display) -> Self {
        Self::new(code, with_limit(format!("{what}: {error}")))
    }

    /// One line on stderr, whatever the message contains.
    pub(crate) fn report(&self) -> ExitCode {
        if let Some(message) = &self.message {
            log_line(message);
        }
        ExitCode::from(self.code)
    }
}

/// The message of an error, with its cause.
pub(crate) fn text(error: &Error) -> String {
    format!("{error}{}", cause(error))
}

/// The exit code of each error. `help` and the README list them.
pub(crate) fn code(error: &Error) -> u8 {
    match error {
        Error::InvalidArgument { .. }
        | Error::ForeignData { .. }
        | Error::Pinned { .. }
        | Error::Unknown { .. }
        | Error::TooHeavy { .. } => USAGE,
        Error::TimedOut { .. }
        | Error::Cancelled { .. }
        | Error::NotDrained { .. }
        | Error::InUse { .. } => NOT_ACQUIRED,
        Error::Unavailable { .. } | Error::Stopped { .. } | Error::NoRoom { .. } => UNAVAILABLE,
        Error::Denied { .. } | Error::Unusable { .. } => REFUSED,
        Error::Lost { reason: LossReason::Closed, .. } => INTERNAL,
        Error::Lost { .. } => LOST,
        // The command does not block a runtime, and closes its client last.
        _ => INTERNAL,
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        // The other errors say themselves what to do.
        let advice = match &error {
            Error::Unavailable { .. } | Error::Stopped { .. } => advice(&error),
            _ => None,
        };
        let advice = advice.map(|advice| format!(": {advice}")).unwrap_or_default();
        let failure = Self::new(code(&error), text(&error) + &advice);
        Self { error: Some(Box::new(error)), ..failure }
    }
}

/// The cause of an error in parentheses, if there is one.
fn cause(error: &Error) -> String {
    std::error::Error::source(error).map(|source| format!(" ({source})")).unwrap_or_default()
}

/// Prints one line on stderr. A closed terminal is not an error.
pub(crate) fn log_line(message: &str) {
    let line = crate::output::one_line(message);
    let _ = writeln!(io::stderr(), "leasehold: {line}");
}

/// Makes a panic print one line, and exit with [`INTERNAL`].
pub(crate) fn without_backtraces() {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(|at| format!(" at {at}")).unwrap_or_default();
        let text = panic.payload().downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.payload().downcast_ref::<&str>().copied());
        let what = text.unwrap_or("no message");
        // Tokio panics if it cannot create the socket by which it receives signals.
        if what.contains(&format!("code: {},", Errno::MFILE.raw_os_error())) {
            let error = std::io::Error::from(Errno::MFILE);
            return log_line(&with_limit(format!("the runtime could not be started: {error}")));
        }
        log_line(&format!("internal error{place}: {what}: please report it"));
    }));
}
