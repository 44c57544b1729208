//! The values of replies, and how they are read.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

use super::errors::ServerError;

/// A value. Types of RESP that differ only in how a human reads them are one type here: a simple string, a bulk string,
/// a verbatim string and a big number; an array and a set; an integer and a boolean.
#[derive(Clone, PartialEq, Default)]
pub(super) enum Value {
    #[default]
    Nil,
    Int(i64),
    Double(f64),
    Text(Vec<u8>),
    Array(Vec<Value>),
    Map(Vec<(Value, Value)>),
    Push(Push),
    Error(ServerError),
}

/// A message that is not the reply to a command, or the reply to a subscription.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Push {
    pub(super) kind: PushKind,
    pub(super) data: Vec<Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PushKind {
    Message,
    /// The reply to `SUBSCRIBE` or `SSUBSCRIBE`.
    Subscribed,
    /// The server has ended a subscription to a sharded channel.
    Unsubscribed,
    Other,
}

impl Value {
    /// Returns the value, or the error that it is.
    pub(super) fn checked(self) -> Result<Self, ServerError> {
        match self {
            Self::Error(error) => Err(error),
            value => Ok(value),
        }
    }

    /// Reads the value as a `T`, or returns what is wrong with it.
    pub(super) fn read<T: FromValue>(self) -> Result<T, String> {
        T::from_value(self)
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nil => f.write_str("nil"),
            Self::Int(number) => number.fmt(f),
            Self::Double(number) => number.fmt(f),
            Self::Text(text) => write!(f, "\"{}\"", text.escape_ascii()),
            Self::Array(values) => values.fmt(f),
            Self::Map(pairs) => pairs.fmt(f),
            Self::Push(push) => push.fmt(f),
            Self::Error(error) => write!(f, "error({error})"),
        }
    }
}

/// Types that a value can be read as.
pub(super) trait FromValue: Sized {
    /// Returns what is wrong with a value of another type.
    fn from_value(value: Value) -> Result<Self, String>;
}

fn unexpected<T>(value: &Value, expected: &str) -> Result<T, String> {
    Err(format!("{value:?} is not {expected}"))
}

/// Reads an integer, which the server may send as text.
fn integer<T: FromStr + TryFrom<i64>>(value: &Value) -> Result<T, String> {
    let number = match value {
        Value::Int(number) => T::try_from(*number).ok(),
        Value::Text(text) => str::from_utf8(text).ok().and_then(|text| text.parse().ok()),
        _ => None,
    };
    number.map_or_else(|| unexpected(value, "a number in range"), Ok)
}

macro_rules! integers {
    ($($integer:ty),*) => {
        $(impl FromValue for $integer {
            fn from_value(value: Value) -> Result<Self, String> {
                integer(&value)
            }
        })*
    };
}

integers!(i64, u64, usize, u16);

impl FromValue for f64 {
    fn from_value(value: Value) -> Result<Self, String> {
        let number = match &value {
            Value::Double(number) => Some(*number),
            #[allow(clippy::cast_precision_loss)] // scores and times are below 2^53
            Value::Int(number) => Some(*number as Self),
            Value::Text(text) => str::from_utf8(text).ok().and_then(|text| text.parse().ok()),
            _ => None,
        };
        number.map_or_else(|| unexpected(&value, "a number"), Ok)
    }
}

impl FromValue for Vec<u8> {
    fn from_value(value: Value) -> Result<Self, String> {
        match value {
            Value::Text(text) => Ok(text),
            other => unexpected(&other, "a string"),
        }
    }
}

impl FromValue for String {
    fn from_value(value: Value) -> Result<Self, String> {
        Self::from_utf8(value.read()?).map_err(|_| "a string is not UTF-8".to_owned())
    }
}

impl<T: FromValue> FromValue for Option<T> {
    fn from_value(value: Value) -> Result<Self, String> {
        match value {
            Value::Nil => Ok(None),
            value => value.read().map(Some),
        }
    }
}

impl<T: FromValue> FromValue for Vec<T> {
    fn from_value(value: Value) -> Result<Self, String> {
        match value {
            Value::Array(values) => values.into_iter().map(Value::read).collect(),
            other => unexpected(&other, "an array"),
        }
    }
}

impl<A: FromValue, B: FromValue> FromValue for (A, B) {
    fn from_value(value: Value) -> Result<Self, String> {
        match value {
            Value::Array(values) => match <[Value; 2]>::try_from(values) {
                Ok([first, second]) => Ok((first.read()?, second.read()?)),
                Err(values) => unexpected(&Value::Array(values), "a pair"),
            },
            other => unexpected(&other, "a pair"),
        }
    }
}

impl FromValue for HashMap<String, String> {
    fn from_value(value: Value) -> Result<Self, String> {
        match value {
            Value::Map(pairs) => {
                pairs.into_iter().map(|(key, value)| Ok((key.read()?, value.read()?))).collect()
            }
            other => unexpected(&other, "a map"),
        }
    }
}
