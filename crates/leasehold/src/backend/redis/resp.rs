//! Decodes RESP, the protocol of Redis, from a stream that may pause anywhere.
//!
//! A [`Decoder`] remembers what it has decoded of the current reply: the arrays that are not complete, and how much of
//! a line was scanned. So no byte is scanned twice, however the stream is cut.
//!
//! A server may send anything, so everything is bounded: the size of a reply, the length of a line, and the depth of
//! arrays. A length is checked as soon as it is read, before any of its bytes arrive.
//!
//! Attributes are skipped: the value that they describe is returned.

use super::errors::RedisError::{self, NotResp, Violation};
use super::errors::ServerError;
use super::value::{Push, PushKind, Value};

/// The largest reply, and the largest push. Each value counts as its bytes plus [`VALUE`], the memory that it takes
/// even if it is empty. Our largest replies are pages of lists (1000 keys or 500 members) and the map of a cluster,
/// which stay below 8 MiB. A wake-up has less than 2 KiB.
pub(super) const LARGEST_REPLY: usize = 32 << 20;
const LARGEST_PUSH: usize = 16 << 10;
const VALUE: usize = 64;

/// The longest line: an error or a simple string.
const LONGEST_LINE: usize = 64 << 10;

/// The deepest nesting of arrays. Our scripts need three levels.
const DEEPEST: usize = 32;

/// Decodes one stream of replies and pushes.
#[derive(Default)]
pub(super) struct Decoder {
    /// The aggregates that are not complete, from the outermost to the innermost.
    open: Vec<Open>,
    /// The size of what was decoded of the current reply.
    size: usize,
    /// How many bytes of the current line were scanned without finding its end.
    scanned: usize,
    /// The current element, if it is a string whose header was read.
    body: Option<Body>,
}

/// An aggregate that is not complete.
struct Open {
    kind: u8,
    /// The number of values that are missing.
    left: usize,
    values: Vec<Value>,
}

/// The length of a string's header, with its line end, and of the string.
#[derive(Clone, Copy)]
struct Body {
    header: usize,
    length: usize,
}

enum Element {
    Value(Value),
    Open(Open),
}

impl Decoder {
    /// Decodes `bytes`, which begin where the previous call stopped. Returns how many of them were decoded, and the
    /// next value with its size, if it is complete.
    pub(super) fn read(
        &mut self,
        bytes: &[u8],
    ) -> Result<(usize, Option<(Value, usize)>), RedisError> {
        let mut at = 0;
        while let Some((element, length)) = self.element(&bytes[at..])? {
            at += length;
            (self.scanned, self.body) = (0, None);
            self.fits(length + VALUE)?;
            self.size += length + VALUE;
            if let Some(value) = self.add(element)? {
                return Ok((at, Some((value, std::mem::take(&mut self.size)))));
            }
        }
        Ok((at, None))
    }

    /// Returns the first element and its length, or `None` if it is not complete.
    fn element(&mut self, bytes: &[u8]) -> Result<Option<(Element, usize)>, RedisError> {
        if let Some(body) = self.body {
            return Self::string(bytes, body);
        }
        let Some(line) = self.line(bytes)? else { return Ok(None) };
        let header = line.len() + 2;
        let (kind, rest) = line.split_first().ok_or(NotResp)?;
        let value = match kind {
            b':' => Value::Int(number(rest)?),
            b'$' | b'*' if number(rest)? == -1 => Value::Nil,
            b'$' | b'=' | b'!' => {
                let body = Body { header, length: length(rest)? };
                self.fits(body.length.saturating_add(header))?;
                self.body = Some(body);
                return Self::string(bytes, body);
            }
            b'*' | b'>' | b'~' | b'%' | b'|' => {
                let open = self.aggregate(*kind, length(rest)?)?;
                return Ok(Some((Element::Open(open), header)));
            }
            b'+' | b'(' => Value::Text(rest.to_vec()),
            b'-' => Value::Error(ServerError::new(rest)),
            b'_' => Value::Nil,
            b',' => Value::Double(text(rest)?.parse().map_err(|_| NotResp)?),
            b'#' if matches!(rest, b"t" | b"f") => Value::Int(i64::from(rest == b"t")),
            _ => return Err(NotResp),
        };
        Ok(Some((Element::Value(value), header)))
    }

    fn aggregate(&self, kind: u8, count: usize) -> Result<Open, RedisError> {
        if self.open.len() >= DEEPEST {
            return Err(Violation(format!("a reply has more than {DEEPEST} levels of arrays")));
        }
        let left = match kind {
            b'%' => count.saturating_mul(2),
            // The value that the attributes describe follows them.
            b'|' => count.saturating_mul(2).saturating_add(1),
            _ => count,
        };
        self.fits(left.saturating_mul(VALUE))?;
        // A false count does not allocate much before its values arrive.
        Ok(Open { kind, left, values: Vec::with_capacity(left.min(1024)) })
    }

    /// Adds an element to the innermost aggregate. Returns the reply if it is complete.
    fn add(&mut self, element: Element) -> Result<Option<Value>, RedisError> {
        let mut value = match element {
            Element::Value(value) => value,
            Element::Open(open) if open.left == 0 => open.close()?,
            Element::Open(open) => {
                self.open.push(open);
                return Ok(None);
            }
        };
        while let Some(mut open) = self.open.pop() {
            open.values.push(value);
            open.left -= 1;
            if open.left > 0 {
                self.open.push(open);
                return Ok(None);
            }
            value = open.close()?;
        }
        Ok(Some(value))
    }

    /// Returns the first line, without its end, or `None` if it is not complete.
    fn line<'a>(&mut self, bytes: &'a [u8]) -> Result<Option<&'a [u8]>, RedisError> {
        let unscanned = &bytes[self.scanned..];
        let end = unscanned.iter().position(|byte| *byte == b'\r');
        self.scanned += end.unwrap_or(unscanned.len());
        if self.scanned > LONGEST_LINE {
            let limit = LONGEST_LINE >> 10;
            return Err(Violation(format!("a line of a reply is longer than {limit} KiB")));
        }
        match bytes[self.scanned..] {
            [] | [b'\r'] => Ok(None),
            [b'\r', b'\n', ..] => Ok(Some(&bytes[..self.scanned])),
            _ => Err(NotResp),
        }
    }

    /// Returns the string at the start of `bytes`, or `None` if it is not complete.
    fn string(bytes: &[u8], body: Body) -> Result<Option<(Element, usize)>, RedisError> {
        let end = body.header + body.length;
        match bytes.get(end..).unwrap_or_default() {
            [] | [b'\r'] => return Ok(None),
            [b'\r', b'\n', ..] => {}
            _ => return Err(NotResp),
        }
        let text = &bytes[body.header..end];
        let value = match (bytes[0], text) {
            (b'!', line) => Value::Error(ServerError::new(line)),
            // The format of a verbatim string has three characters.
            (b'=', [_, _, _, b':', text @ ..]) => Value::Text(text.to_vec()),
            (b'=', _) => return Err(NotResp),
            (_, text) => Value::Text(text.to_vec()),
        };
        Ok(Some((Element::Value(value), end + 2)))
    }

    /// Fails if the current reply would be too large with this much more.
    fn fits(&self, more: usize) -> Result<(), RedisError> {
        let is_push = self.open.first().is_some_and(|open| open.kind == b'>');
        let largest = if is_push { LARGEST_PUSH } else { LARGEST_REPLY };
        if self.size.saturating_add(more) <= largest {
            return Ok(());
        }
        Err(Violation(match largest {
            LARGEST_PUSH => format!("a message is larger than {} KiB", LARGEST_PUSH >> 10),
            _ => format!("a reply is larger than {} MiB", LARGEST_REPLY >> 20),
        }))
    }
}

impl Open {
    fn close(self) -> Result<Value, RedisError> {
        let mut values = self.values;
        Ok(match self.kind {
            b'>' => Value::Push(push(values).ok_or(NotResp)?),
            b'%' => Value::Map(pairs(values)),
            b'|' => values.pop().ok_or(NotResp)?,
            _ => Value::Array(values),
        })
    }
}

fn pairs(values: Vec<Value>) -> Vec<(Value, Value)> {
    let mut values = values.into_iter();
    std::iter::from_fn(|| values.next().zip(values.next())).collect()
}

fn text(line: &[u8]) -> Result<&str, RedisError> {
    std::str::from_utf8(line).map_err(|_| NotResp)
}

fn number(line: &[u8]) -> Result<i64, RedisError> {
    text(line)?.parse().map_err(|_| NotResp)
}

fn length(line: &[u8]) -> Result<usize, RedisError> {
    usize::try_from(number(line)?).map_err(|_| NotResp)
}

/// Returns the push with these values, the first of which names its kind.
fn push(mut values: Vec<Value>) -> Option<Push> {
    if values.is_empty() {
        return None;
    }
    let Value::Text(kind) = values.remove(0) else { return None };
    let kind = match &kind[..] {
        b"message" | b"smessage" => PushKind::Message,
        b"subscribe" | b"ssubscribe" => PushKind::Subscribed,
        b"sunsubscribe" => PushKind::Unsubscribed,
        _ => PushKind::Other,
    };
    Some(Push { kind, data: values })
}

#[cfg(test)]
mod tests;
