//! Whole numbers that must not be negative: capacities, weights, limits.

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

use crate::failure::Failure;

/// A number as the caller gave it: see [`whole`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Number<T>(pub(crate) T);

pub(crate) trait Whole {
    const LARGEST: u64;
}

impl Whole for u32 {
    const LARGEST: u64 = Self::MAX as u64;
}

impl Whole for u64 {
    const LARGEST: u64 = Self::MAX;
}

impl Whole for usize {
    const LARGEST: u64 = Self::MAX as u64;
}

impl<'a, 'py, T: Whole + FromPyObject<'a, 'py, Error = PyErr>> FromPyObject<'a, 'py> for Number<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        object.extract().map(Self).map_err(|error| in_range::<T>(error, &object))
    }
}

/// Reads a number. One that is out of range raises `InvalidArgument`, not `OverflowError`.
///
/// For arguments with a default, which Python then shows in the signature.
pub(crate) fn whole<'py, T>(object: &Bound<'py, PyAny>) -> PyResult<T>
where
    T: Whole + for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    object.extract().map_err(|error| in_range::<T>(error, object))
}

#[cold]
fn in_range<T: Whole>(error: PyErr, object: &Bound<'_, PyAny>) -> PyErr {
    if !error.is_instance_of::<PyOverflowError>(object.py()) {
        return error;
    }
    let problem = if object.lt(0).unwrap_or(false) {
        "is negative".to_owned()
    } else {
        format!("is too large; the largest is {}", T::LARGEST)
    };
    Failure::Invalid(format!("invalid number: {object} {problem}")).into()
}
