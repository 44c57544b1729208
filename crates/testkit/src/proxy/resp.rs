//! Splits RESP2 and RESP3 streams into messages.
//!
//! A fault applies to one request or one reply, but TCP delivers chunks: a chunk may contain half a
//! message or a whole pipeline. An aggregate only says how many elements follow. So counting the
//! elements still to come finds its end without a stack, and no message is scanned twice.

/// One request or one reply, with its framing.
#[derive(Debug, PartialEq)]
pub(super) struct Message {
    pub(super) bytes: Vec<u8>,
    /// The bytes are not RESP (TLS, or truncated at the end): forwarded, never counted.
    pub(super) opaque: bool,
}

/// Splits one direction of a connection into messages.
#[derive(Debug)]
pub(super) struct Framer {
    pending: Vec<u8>,
    /// How much of `pending` has been scanned: whole elements only.
    scanned: usize,
    /// How many elements are missing from the message at the start of `pending`.
    elements: usize,
    opaque: bool,
}

impl Framer {
    pub(super) fn new() -> Self {
        Self { pending: Vec::new(), scanned: 0, elements: 1, opaque: false }
    }

    /// Adds bytes and returns the messages that they complete.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Vec<Message> {
        self.pending.extend_from_slice(bytes);
        let mut messages = Vec::new();
        while !self.opaque && self.element().is_some() {
            if self.elements == 0 {
                let rest = self.pending.split_off(self.scanned);
                let bytes = std::mem::replace(&mut self.pending, rest);
                messages.push(Message { bytes, opaque: false });
                (self.scanned, self.elements) = (0, 1);
            }
        }
        if self.opaque {
            messages.extend(self.rest());
        }
        messages
    }

    /// Returns what is left when the stream ends in the middle of a message.
    pub(super) fn rest(&mut self) -> Option<Message> {
        let bytes = std::mem::take(&mut self.pending);
        self.scanned = 0;
        (!bytes.is_empty()).then_some(Message { bytes, opaque: true })
    }

    /// Skips one element. Returns `None` if it is incomplete or not an element at all.
    fn element(&mut self) -> Option<()> {
        let unread = &self.pending[self.scanned..];
        if unread.first().is_some_and(|kind| !kind.is_ascii_graphic()) {
            self.opaque = true;
            return None;
        }
        let line = unread.windows(2).position(|end| end == b"\r\n")?;
        let mut length = line + 2;
        let mut follow = 0;
        let kind = unread[0];
        if b"$=!*~>%|".contains(&kind) {
            // -1 is RESP2's null, which has nothing after it.
            let text = std::str::from_utf8(&unread[1..line]).ok();
            let Some(count) = text.and_then(|text| text.parse::<isize>().ok()) else {
                self.opaque = true;
                return None;
            };
            let count = usize::try_from(count).ok();
            match (kind, count) {
                (b'$' | b'=' | b'!', Some(count)) => length += count + 2,
                (b'%', Some(count)) => follow = 2 * count,
                // Attributes come before a value and are not one.
                (b'|', Some(count)) => follow = 2 * count + 1,
                (_, count) => follow = count.filter(|_| b"*~>".contains(&kind)).unwrap_or(0),
            }
        }
        if unread.len() < length {
            return None;
        }
        self.scanned += length;
        self.elements = self.elements - 1 + follow;
        Some(())
    }
}

/// Returns whether a request is answered by publish/subscribe messages instead of one reply.
pub(super) fn is_subscription(request: &[u8]) -> bool {
    first_word(request).is_some_and(|word| word.ends_with(b"subscribe"))
}

/// Returns whether a message of the server is no reply but a publish/subscribe message or another push.
pub(super) fn is_push(sent: &[u8]) -> bool {
    let pubsub = |word: Vec<u8>| word.ends_with(b"subscribe") || word.ends_with(b"message");
    sent.starts_with(b">") || first_word(sent).is_some_and(pubsub)
}

/// Returns whether a message of the server confirms a subscription.
pub(super) fn confirms_subscription(sent: &[u8]) -> bool {
    first_word(sent).is_some_and(|word| word.ends_with(b"subscribe"))
}

/// Returns the first string of an aggregate, in lower case.
fn first_word(message: &[u8]) -> Option<Vec<u8>> {
    let mut lines = message.split(|byte| *byte == b'\n');
    let aggregate = lines.next()?.first().is_some_and(|kind| b"*>".contains(kind));
    let bulk = lines.next()?.starts_with(b"$");
    (aggregate && bulk)
        .then(|| lines.next().map(|word| word.trim_ascii_end().to_ascii_lowercase()))?
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: [&[u8]; 12] = [
        b"+OK\r\n",
        b"-ERR no\r\n",
        b":12\r\n",
        b"$-1\r\n",
        b"$0\r\n\r\n",
        b"$4\r\na\r\nb\r\n",
        b"*-1\r\n",
        b"*0\r\n",
        b"*3\r\n*2\r\n:1\r\n$1\r\nx\r\n_\r\n#t\r\n",
        b"%1\r\n+key\r\n~2\r\n,1.5\r\n(99\r\n",
        b"|1\r\n+ttl\r\n:3\r\n*1\r\n=7\r\ntxt:abc\r\n",
        b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nm\r\n",
    ];

    #[test]
    fn messages_are_found_at_every_split_of_the_stream() {
        let stream = STREAM.concat();
        for size in 1..=stream.len() {
            let mut framer = Framer::new();
            let found: Vec<_> = stream.chunks(size).flat_map(|chunk| framer.push(chunk)).collect();
            let expected = STREAM.map(|bytes| Message { bytes: bytes.to_vec(), opaque: false });
            assert_eq!(found, expected, "in chunks of {size}");
            assert_eq!(framer.rest(), None);
        }
    }

    #[test]
    fn bytes_outside_the_protocol_pass_unchanged() {
        for alien in [&b"\x16\x03\x01\r\n"[..], b"*x\r\n", b"$3.5\r\nabc"] {
            let mut framer = Framer::new();
            assert_eq!(framer.push(alien), [Message { bytes: alien.to_vec(), opaque: true }]);
            assert_eq!(framer.push(b"+A"), [Message { bytes: b"+A".to_vec(), opaque: true }]);
        }
        let mut framer = Framer::new();
        assert_eq!(framer.push(b"$5\r\nab"), []);
        assert_eq!(framer.rest(), Some(Message { bytes: b"$5\r\nab".to_vec(), opaque: true }));
    }

    #[test]
    fn subscriptions_are_distinguished_from_replies() {
        assert!(is_subscription(b"*2\r\n$10\r\nPSUBSCRIBE\r\n$1\r\nc\r\n"));
        assert!(!is_subscription(b"*2\r\n$3\r\nGET\r\n$9\r\nsubscribe\r\n"));
        assert!(is_push(b">2\r\n+invalidate\r\n*0\r\n"));
        assert!(is_push(b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nm\r\n"));
        assert!(!is_push(b"*1\r\n$2\r\nid\r\n"));
        assert!(confirms_subscription(b">3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n"));
        assert!(!confirms_subscription(b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nm\r\n"));
    }
}
