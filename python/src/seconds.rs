//! Durations: seconds as a number, or a `datetime.timedelta`.

use std::time::Duration;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDelta, PyDeltaAccess};

use crate::failure::Failure;

/// A duration as the caller gave it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seconds(pub(crate) Duration);

impl<'py> FromPyObject<'_, 'py> for Seconds {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let invalid = |problem: String| PyErr::from(Failure::Invalid(problem));
        if let Ok(delta) = object.cast::<PyDelta>() {
            // A negative delta has negative days, and everything else positive.
            let days = u64::try_from(delta.get_days()).map_err(|_| {
                invalid(format!("invalid duration: {} is negative", object.to_owned()))
            })?;
            let seconds = u64::try_from(delta.get_seconds()).unwrap_or_default();
            let micros = u32::try_from(delta.get_microseconds()).unwrap_or_default();
            return Ok(Self(Duration::new(days * 86_400 + seconds, micros * 1000)));
        }
        let seconds: f64 = object.extract().map_err(|_| {
            let kind = object.get_type().name().map(|name| name.to_string()).unwrap_or_default();
            PyTypeError::new_err(format!(
                "a duration is a number of seconds or a timedelta, not {kind}"
            ))
        })?;
        Duration::try_from_secs_f64(seconds).map(whole_micros).map(Self).map_err(|_| {
            invalid(format!(
                "invalid duration: {seconds} seconds: give a finite number that is not negative"
            ))
        })
    }
}

/// Rounds to microseconds: 0.3 is not exact as a binary fraction, and locks take whole milliseconds.
fn whole_micros(duration: Duration) -> Duration {
    let micros = (duration.subsec_nanos() + 500) / 1000;
    Duration::from_secs(duration.as_secs()).saturating_add(Duration::from_micros(micros.into()))
}

/// The duration inside, if one was given.
pub(crate) fn given(seconds: Option<Seconds>) -> Option<Duration> {
    seconds.map(|seconds| seconds.0)
}
