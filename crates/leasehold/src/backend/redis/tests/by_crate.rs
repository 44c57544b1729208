//! Compares with the `redis` crate in tests, and sends commands over its connections.

use redis::{Connection, ConnectionLike};

use crate::backend::redis::command::{RedisCommand, pack};
use crate::backend::redis::errors::ServerError;
use crate::backend::redis::value::{Push, PushKind, Value};

/// Sends a command and returns its reply.
pub(in crate::backend::redis) fn query(
    command: &RedisCommand,
    connection: &mut Connection,
) -> Value {
    try_query(command, connection).unwrap()
}

/// Like [`query`], for a command that the server may refuse.
pub(in crate::backend::redis) fn try_query(
    command: &RedisCommand,
    connection: &mut Connection,
) -> redis::RedisResult<Value> {
    let packed = pack(std::slice::from_ref(command));
    connection.req_packed_command(&packed).map(value)
}

/// Returns a value of that crate as one of ours.
pub(in crate::backend::redis) fn value(value: redis::Value) -> Value {
    let all = |values: Vec<redis::Value>| values.into_iter().map(self::value).collect();
    match value {
        redis::Value::Nil => Value::Nil,
        redis::Value::Int(number) => Value::Int(number),
        redis::Value::Boolean(is_true) => Value::Int(i64::from(is_true)),
        redis::Value::Double(number) => Value::Double(number),
        redis::Value::BulkString(text) | redis::Value::BigNumber(text) => Value::Text(text),
        redis::Value::Okay => Value::Text(b"OK".to_vec()),
        redis::Value::SimpleString(text) | redis::Value::VerbatimString { text, .. } => {
            Value::Text(text.into_bytes())
        }
        redis::Value::Array(values) | redis::Value::Set(values) => Value::Array(all(values)),
        redis::Value::Map(pairs) => {
            let pair = |(key, of_key)| (self::value(key), self::value(of_key));
            Value::Map(pairs.into_iter().map(pair).collect())
        }
        redis::Value::Attribute { data, .. } => self::value(*data),
        redis::Value::Push { kind, data } => {
            let kind = match kind {
                redis::PushKind::Message | redis::PushKind::SMessage => PushKind::Message,
                redis::PushKind::Subscribe | redis::PushKind::SSubscribe => PushKind::Subscribed,
                redis::PushKind::SUnsubscribe => PushKind::Unsubscribed,
                _ => PushKind::Other,
            };
            Value::Push(Push { kind, data: all(data) })
        }
        redis::Value::ServerError(error) => {
            let (code, detail) = (error.code(), error.details().unwrap_or_default());
            Value::Error(ServerError::new(format!("{code} {detail}").as_bytes()))
        }
        other => panic!("{other:?}"),
    }
}
