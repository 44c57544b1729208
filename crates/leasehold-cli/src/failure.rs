//! How the command ends when it does not end as its child does: a line for people and a code for scripts.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use leasehold::{Error, LossReason};

/// `release`, `lookup`, `show`: nothing there.
pub(crate) const NOTHING_THERE: u8 = 1;
/// `doctor`: leases are not safe on this store.
pub(crate) const NOT_SAFE: u8 = 1;
/// Bad usage or bad input.
pub(crate) const USAGE: u8 = 64;
/// The store cannot be reached.
pub(crate) const UNAVAILABLE: u8 = 69;
/// Our own fault.
pub(crate) const INTERNAL: u8 = 70;
/// Not acquired, unless `-E` says otherwise.
pub(crate) const NOT_ACQUIRED: u8 = 75;
/// The store refuses us.
pub(crate) const REFUSED: u8 = 77;
/// The lease was lost or its TTL ran out, and the child was stopped.
pub(crate) const LOST: u8 = 124;
/// The child could not be run, was not found.
pub(crate) const CANNOT_RUN: u8 = 126;
pub(crate) const NOT_FOUND: u8 = 127;

/// Died, or was asked to, by this signal.
pub(crate) fn by_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// A code, and what to say about it; nothing if there is nothing to be said.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    message: Option<String>,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: Some(message.into()) }
    }

    pub(crate) fn silent(code: u8) -> Self {
        Self { code, message: None }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(USAGE, message)
    }

    pub(crate) fn internal(what: &str, error: impl Display) -> Self {
        Self::new(INTERNAL, format!("{what}: {error}"))
    }

    /// One line on stderr, whatever the message contains.
    pub(crate) fn report(&self) -> ExitCode {
        if let Some(message) = &self.message {
            complain(message);
        }
        ExitCode::from(self.code)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::InvalidArgument { .. } => USAGE,
            Error::TimedOut { .. } => NOT_ACQUIRED,
            Error::Lost { reason: LossReason::Closed, .. } => INTERNAL,
            Error::Lost { .. } => LOST,
            Error::Unavailable { .. } | Error::Stopped { .. } => UNAVAILABLE,
            Error::Refused { .. } => REFUSED,
            _ => INTERNAL,
        };
        let advice = match &error {
            Error::Unavailable { what, .. } if what.contains("max number of clients") => {
                ": raise its maxclients, or end some clients"
            }
            // A server without TLS on that port says nothing that TLS understands, or waits for more.
            Error::Unavailable { what, .. } if what.contains("rediss://") => {
                ": is it running, and is TLS spoken on that port? redis:// is without"
            }
            Error::Unavailable { what, .. } if what.contains("://") => {
                ": is it running, and is --store right?"
            }
            Error::Unavailable { timed_out: true, .. } => {
                ": is a process stopped that was writing to it?"
            }
            Error::Unavailable { .. } => ": is --store right?",
            _ => "",
        };
        Self::new(code, format!("{error}{}{advice}", cause(&error)))
    }
}

/// What the system said, if that adds anything.
fn cause(error: &Error) -> String {
    std::error::Error::source(error).map(|source| format!(" ({source})")).unwrap_or_default()
}

/// One line on stderr. A terminal that has gone is no reason to fail.
pub(crate) fn complain(message: &str) {
    let line = crate::output::one_line(message);
    let _ = writeln!(io::stderr(), "leasehold: {line}");
}

/// Should we panic after all, then in one line and with a code of the table.
pub(crate) fn without_backtraces() {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(|at| format!(" at {at}")).unwrap_or_default();
        let text = panic.payload().downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.payload().downcast_ref::<&str>().copied());
        let what = text.unwrap_or("it did not say why");
        complain(&format!("internal error{place}: {what}: please report it"));
    }));
}
