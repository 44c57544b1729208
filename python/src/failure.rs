//! Errors, as Python sees them.

use leasehold::{Error, LossReason, Primitive};
use pyo3::exceptions::PySystemExit;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;

use crate::ending::are_we_left_behind;

static EXCEPTIONS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// What an operation of this package can fail with.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The engine's error.
    Engine(Error),
    /// An argument that the engine never sees.
    Invalid(String),
    /// An object of the parent process was used.
    Forked(&'static str),
    /// A call that blocks its thread was made on the thread of an event loop.
    WrongThread(&'static str),
    /// It was lost, and then released or detached, so the engine has no error for it.
    Lost { primitive: Primitive, name: String, id: String, reason: LossReason },
    /// It was released through this object before.
    Released { primitive: Primitive, name: String },
}

/// An object of the parent process was used in a forked child.
pub(crate) const INHERITED: Failure = Failure::Forked(
    "this object belongs to the parent process, and only the parent can use it: acquire another one in this process",
);

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Engine(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        Python::attach(|py| failure.raise(py).unwrap_or_else(|error| error))
    }
}

/// The reason as the attribute `reason` of `leasehold.Lost` has it.
pub(crate) fn reason(reason: LossReason) -> &'static str {
    match reason {
        LossReason::TtlEnded => "ttl-ended",
        LossReason::NotRenewed => "not-renewed",
        LossReason::Missing => "missing",
        LossReason::Released => "released",
        LossReason::Closed => "closed",
        _ => "unknown",
    }
}

/// Imports the exceptions, so that raising one later runs no Python code.
pub(crate) fn prepare(py: Python<'_>) -> PyResult<()> {
    let module = py.import("leasehold._exceptions")?.unbind();
    EXCEPTIONS.get_or_init(py, || module);
    Ok(())
}

fn exception<'py>(py: Python<'py>, name: &str, message: &str) -> PyResult<Bound<'py, PyAny>> {
    let module = EXCEPTIONS
        .get_or_try_init(py, || Ok::<_, PyErr>(py.import("leasehold._exceptions")?.unbind()))?;
    module.bind(py).getattr(name)?.call1((message,))
}

/// The error with its cause, which Python has no other place for.
fn message(error: &Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error} ({source})"),
        None => error.to_string(),
    }
}

/// Names what was lost or released: `permit of "api"`, but `lock "key"`.
fn named(primitive: Primitive, name: &str) -> String {
    match primitive {
        Primitive::Lock => format!("lock {name:?}"),
        other => format!("{} of {name:?}", other.grant()),
    }
}

impl Failure {
    /// Whether a client was closed because the interpreter ends, and this thread is left behind.
    pub(crate) fn is_the_end(&self) -> bool {
        are_we_left_behind() && self.is_closed()
    }

    fn is_closed(&self) -> bool {
        match self {
            Self::Engine(Error::Closed) => true,
            Self::Engine(Error::Lost { reason, .. }) | Self::Lost { reason, .. } => {
                *reason == LossReason::Closed
            }
            _ => false,
        }
    }

    fn raise(&self, py: Python<'_>) -> PyResult<PyErr> {
        if self.is_the_end() {
            return Ok(PySystemExit::new_err(()));
        }
        let exception = match self {
            Self::Forked(what) => exception(py, "Forked", what)?,
            Self::Invalid(what) => exception(py, "InvalidArgument", what)?,
            Self::WrongThread(what) => exception(py, "WrongThread", what)?,
            Self::Lost { primitive, name, id, reason: why } => {
                let message = format!("the {} was lost: {why}", named(*primitive, name));
                lost(py, &message, *primitive, name, id, *why)?
            }
            Self::Released { primitive, name } => {
                let message = format!("the {} was released", named(*primitive, name));
                lost(py, &message, *primitive, name, "", LossReason::Released)?
            }
            Self::Engine(error) => of_engine(py, error)?,
        };
        Ok(PyErr::from_value(exception))
    }
}

/// The exception of each error of the engine.
fn of_engine<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    let message = message(error);
    let new = |name: &str| exception(py, name, &message);
    let raised = match error {
        Error::InvalidArgument { argument, .. } => {
            let raised = new("InvalidArgument")?;
            raised.setattr("argument", argument)?;
            raised
        }
        Error::ForeignData { name, .. } => {
            let raised = new("ForeignData")?;
            raised.setattr("name", name)?;
            raised
        }
        Error::Pinned { name, capacity, .. } => {
            let raised = new("Pinned")?;
            raised.setattr("name", name)?;
            raised.setattr("capacity", capacity)?;
            raised
        }
        Error::InUse { name, held, waiting, .. } => {
            let raised = new("InUse")?;
            raised.setattr("name", name)?;
            raised.setattr("held", held)?;
            raised.setattr("waiting", waiting)?;
            raised
        }
        Error::Unknown { name, .. } => {
            let raised = new("Unknown")?;
            raised.setattr("name", name)?;
            raised
        }
        Error::TooHeavy { name, weight, capacity, .. } => {
            let raised = new("TooHeavy")?;
            raised.setattr("name", name)?;
            raised.setattr("weight", weight)?;
            raised.setattr("capacity", capacity)?;
            raised
        }
        Error::TimedOut { primitive, name, limit, held, capacity, .. } => {
            let raised = new("TimedOut")?;
            raised.setattr("primitive", primitive.as_str())?;
            raised.setattr("name", name)?;
            raised.setattr("limit", limit.as_secs_f64())?;
            raised.setattr("held", held)?;
            raised.setattr("capacity", capacity)?;
            raised
        }
        Error::NotDrained { name, limit, .. } => {
            let raised = new("NotDrained")?;
            raised.setattr("name", name)?;
            raised.setattr("limit", limit.as_secs_f64())?;
            raised
        }
        Error::Cancelled { name, id, .. } => {
            let raised = new("Cancelled")?;
            raised.setattr("name", name)?;
            raised.setattr("id", id)?;
            raised
        }
        Error::Lost { primitive, name, id, reason, .. } => {
            lost(py, &message, *primitive, name, id, *reason)?
        }
        Error::Unavailable { timed_out, silent_for, source, .. } => {
            let raised = new("Unavailable")?;
            raised.setattr("timed_out", timed_out)?;
            raised.setattr("silent_for", silent_for.map(|span| span.as_secs_f64()))?;
            raised.setattr("detail", source.as_ref().map(ToString::to_string))?;
            raised
        }
        Error::WrongThread { .. } => new("WrongThread")?,
        Error::Closed => new("Closed")?,
        Error::Denied { .. } => new("Denied")?,
        Error::NoRoom { .. } => new("NoRoom")?,
        Error::Unusable { .. } => new("Unusable")?,
        Error::Stopped { .. } => new("Stopped")?,
        _ => new("Internal")?,
    };
    Ok(raised)
}

fn lost<'py>(
    py: Python<'py>,
    message: &str,
    primitive: Primitive,
    name: &str,
    id: &str,
    why: LossReason,
) -> PyResult<Bound<'py, PyAny>> {
    let raised = exception(py, "Lost", message)?;
    raised.setattr("primitive", primitive.as_str())?;
    raised.setattr("name", name)?;
    raised.setattr("id", id)?;
    raised.setattr("reason", reason(why))?;
    Ok(raised)
}
