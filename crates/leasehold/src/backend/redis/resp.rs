//! Reads RESP, the protocol of Redis, from a buffer that may end anywhere.
//!
//! It decodes the types that scripts return and wake-ups consist of. For errors and rarer types it only finds the end,
//! and the Redis library decodes them.

use redis::{ErrorKind, PushKind, RedisError, Value};

/// The deepest nesting of arrays that is accepted. Our scripts need three levels.
const DEEPEST: usize = 32;

/// Returns the first value in `bytes` and its length, or `None` if the value is not complete yet.
pub(super) fn read(bytes: &[u8]) -> Result<Option<(Value, usize)>, RedisError> {
    let mut reader = Reader { bytes, at: 0 };
    match reader.value(0) {
        Ok(value) => Ok(Some((value, reader.at))),
        Err(Stop::Incomplete) => Ok(None),
        Err(Stop::Malformed) => Err((ErrorKind::Parse, "the answer is not RESP").into()),
    }
}

enum Stop {
    Incomplete,
    Malformed,
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn value(&mut self, depth: usize) -> Result<Value, Stop> {
        if depth > DEEPEST {
            return Err(Stop::Malformed);
        }
        let start = self.at;
        let (kind, line) = self.line()?.split_first().ok_or(Stop::Malformed)?;
        Ok(match kind {
            b':' => Value::Int(number(line)?),
            b'$' => match length(line)? {
                Some(length) => Value::BulkString(self.take(length)?.to_vec()),
                None => Value::Nil,
            },
            b'*' => match length(line)? {
                Some(length) => Value::Array(self.values(length, depth)?),
                None => Value::Nil,
            },
            b'+' if line == b"OK" => Value::Okay,
            b'+' => Value::SimpleString(text(line)?.to_owned()),
            b'_' => Value::Nil,
            b'>' => push(self.values(some_length(line)?, depth)?)?,
            b'~' => Value::Set(self.values(some_length(line)?, depth)?),
            b'%' => Value::Map(self.pairs(line, depth)?),
            b'|' => {
                let attributes = self.pairs(line, depth)?;
                Value::Attribute { data: Box::new(self.value(depth + 1)?), attributes }
            }
            b'=' | b'!' => {
                self.take(some_length(line)?)?;
                self.by_the_library(start)?
            }
            _ => self.by_the_library(start)?,
        })
    }

    fn values(&mut self, count: usize, depth: usize) -> Result<Vec<Value>, Stop> {
        // Every value has at least three bytes. So a false count does not allocate more than the received bytes
        // justify.
        let mut values = Vec::with_capacity(count.min((self.bytes.len() - self.at) / 3));
        for _ in 0..count {
            values.push(self.value(depth + 1)?);
        }
        Ok(values)
    }

    fn pairs(&mut self, line: &[u8], depth: usize) -> Result<Vec<(Value, Value)>, Stop> {
        let count = some_length(line)?;
        let pair = |_| Ok((self.value(depth + 1)?, self.value(depth + 1)?));
        (0..count).map(pair).collect()
    }

    /// Lets the Redis library decode the value between `start` and here.
    fn by_the_library(&self, start: usize) -> Result<Value, Stop> {
        redis::parse_redis_value(&self.bytes[start..self.at]).map_err(|_| Stop::Malformed)
    }

    fn line(&mut self) -> Result<&'a [u8], Stop> {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().position(|byte| *byte == b'\r').ok_or(Stop::Incomplete)?;
        self.at += end;
        self.end_of_line()?;
        Ok(&rest[..end])
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], Stop> {
        let rest = &self.bytes[self.at..];
        let taken = rest.get(..length).ok_or(Stop::Incomplete)?;
        self.at += length;
        self.end_of_line()?;
        Ok(taken)
    }

    fn end_of_line(&mut self) -> Result<(), Stop> {
        match self.bytes[self.at..] {
            [b'\r', b'\n', ..] => self.at += 2,
            [] | [b'\r'] => return Err(Stop::Incomplete),
            _ => return Err(Stop::Malformed),
        }
        Ok(())
    }
}

fn text(line: &[u8]) -> Result<&str, Stop> {
    std::str::from_utf8(line).map_err(|_| Stop::Malformed)
}

fn number(line: &[u8]) -> Result<i64, Stop> {
    text(line)?.parse().map_err(|_| Stop::Malformed)
}

/// Returns `None` for the nil of RESP2, which has the length -1.
fn length(line: &[u8]) -> Result<Option<usize>, Stop> {
    Ok(usize::try_from(number(line)?).ok())
}

fn some_length(line: &[u8]) -> Result<usize, Stop> {
    length(line)?.ok_or(Stop::Malformed)
}

fn push(mut values: Vec<Value>) -> Result<Value, Stop> {
    if values.is_empty() {
        return Err(Stop::Malformed);
    }
    let kind = match values.remove(0) {
        Value::BulkString(kind) => match kind.as_slice() {
            b"message" => PushKind::Message,
            b"subscribe" => PushKind::Subscribe,
            b"smessage" => PushKind::SMessage,
            b"ssubscribe" => PushKind::SSubscribe,
            b"sunsubscribe" => PushKind::SUnsubscribe,
            other => PushKind::Other(String::from_utf8_lossy(other).into_owned()),
        },
        _ => return Err(Stop::Malformed),
    };
    Ok(Value::Push { kind, data: values })
}

#[cfg(test)]
mod tests {
    use super::*;

    const EACH: [&str; 23] = [
        ":-12\r\n",
        "$5\r\na\r\nbc\r\n",
        "$0\r\n\r\n",
        "$-1\r\n",
        "*-1\r\n",
        "*0\r\n",
        "+OK\r\n",
        "+queued\r\n",
        "_\r\n",
        "*3\r\n*2\r\n+held\r\n:3\r\n$2\r\nid\r\n-NOTOURS some key\r\n",
        "-NOSCRIPT No matching script\r\n",
        ">3\r\n$7\r\nmessage\r\n$4\r\nwake\r\n$2\r\nid\r\n",
        ">3\r\n$9\r\nsubscribe\r\n$4\r\nwake\r\n:1\r\n",
        ">3\r\n$8\r\nsmessage\r\n$4\r\nwake\r\n$2\r\nid\r\n",
        ">3\r\n$10\r\nssubscribe\r\n$4\r\nwake\r\n:1\r\n",
        ">3\r\n$12\r\nsunsubscribe\r\n$4\r\nwake\r\n:0\r\n",
        "~1\r\n:1\r\n",
        "%1\r\n$1\r\na\r\n:1\r\n",
        "|1\r\n$1\r\na\r\n:1\r\n:5\r\n",
        "=8\r\ntxt:text\r\n",
        "!9\r\nERR wrong\r\n",
        ",1.5\r\n",
        "#t\r\n",
    ];

    #[test]
    fn every_type_is_read_as_the_library_reads_it() {
        for bytes in EACH.map(str::as_bytes) {
            let expected = redis::parse_redis_value(bytes).unwrap();
            let followed = [bytes, b":1"].concat();
            let (value, length) = read(&followed).unwrap().expect("it is complete");
            assert_eq!((value, length), (expected, bytes.len()), "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn a_value_that_is_not_complete_is_waited_for() {
        for bytes in EACH.map(str::as_bytes) {
            for end in 0..bytes.len() {
                let read = read(&bytes[..end]).unwrap();
                assert_eq!(read, None, "{} of {}", end, bytes.escape_ascii());
            }
        }
    }

    #[test]
    fn invalid_resp_is_refused() {
        let deep = "*1\r\n".repeat(DEEPEST + 2);
        for bytes in ["HTTP/1.1 400\r\n", ":x\r\n", "$1\r\nab\r\n", "\r\n", ">0\r\n", &deep] {
            assert!(read(bytes.as_bytes()).is_err(), "{bytes:?}");
        }
        // A false count is not believed.
        assert_eq!(read(b"*9223372036854775807\r\n:1\r\n").unwrap(), None);
    }
}
