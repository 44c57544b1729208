//! The messages between a command and its guard: nine bytes each, a tag and a number.

use std::io;

use crate::clock::Moment;

pub(crate) const LENGTH: usize = 9;

/// A message from the command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Order {
    /// The child may run until this deadline.
    Until(Moment),
    /// Send the child's group this signal.
    Signal(i32),
    /// The lease is lost: stop the child now.
    Stop,
    /// The command knows the child: start it.
    Go,
}

/// A message from the guard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GuardMessage {
    /// The child leads the group of this number, and waits for [`Order::Go`].
    Started(i32),
    /// The child could not be run; the system's error number.
    NotStarted(i32),
    /// The child was stopped by this signal, and can be continued.
    Stopped(i32),
    /// The deadline has passed: the child is being stopped.
    Overdue,
    /// The child was sent SIGTERM, because of the deadline or of [`Order::Stop`].
    Stopping,
    /// The child exited with this code, and its group has ended.
    Exited(i32),
    /// The child was killed by this signal, and its group has ended.
    Killed(i32),
}

/// A message that fits into nine bytes.
pub(crate) trait Message: Sized {
    fn pack(self) -> (u8, u64);
    fn unpack(tag: u8, number: u64) -> Option<Self>;

    /// Whether this message replaces an earlier one of its kind.
    fn replaces_earlier(self) -> bool;

    fn encode(self) -> [u8; LENGTH] {
        let (tag, number) = self.pack();
        let mut bytes = [tag; LENGTH];
        bytes[1..].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    fn decode(bytes: [u8; LENGTH]) -> io::Result<Self> {
        let [tag, number @ ..] = bytes;
        Self::unpack(tag, u64::from_le_bytes(number))
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not a message of ours"))
    }
}

impl Message for Order {
    fn pack(self) -> (u8, u64) {
        match self {
            Self::Until(deadline) => (b'u', deadline.micros()),
            Self::Signal(signal) => (b's', small(signal)),
            Self::Stop => (b'x', 0),
            Self::Go => (b'g', 0),
        }
    }

    fn replaces_earlier(self) -> bool {
        matches!(self, Self::Until(_))
    }

    fn unpack(tag: u8, number: u64) -> Option<Self> {
        Some(match tag {
            b'u' => Self::Until(Moment::from_micros(number)),
            b's' => Self::Signal(i32::try_from(number).ok()?),
            b'x' => Self::Stop,
            b'g' => Self::Go,
            _ => return None,
        })
    }
}

impl Message for GuardMessage {
    fn pack(self) -> (u8, u64) {
        match self {
            Self::Started(pid) => (b'p', small(pid)),
            Self::NotStarted(errno) => (b'n', small(errno)),
            Self::Stopped(signal) => (b't', small(signal)),
            Self::Overdue => (b'o', 0),
            Self::Stopping => (b's', 0),
            Self::Exited(code) => (b'e', small(code)),
            Self::Killed(signal) => (b'k', small(signal)),
        }
    }

    fn replaces_earlier(self) -> bool {
        matches!(self, Self::Stopped(_))
    }

    fn unpack(tag: u8, number: u64) -> Option<Self> {
        let number = i32::try_from(number).ok()?;
        Some(match tag {
            b'p' => Self::Started(number),
            b'n' => Self::NotStarted(number),
            b't' => Self::Stopped(number),
            b'o' => Self::Overdue,
            b's' => Self::Stopping,
            b'e' => Self::Exited(number),
            b'k' => Self::Killed(number),
            _ => return None,
        })
    }
}

/// Converts a pid, signal, code or error number: all are small and not negative.
fn small(number: i32) -> u64 {
    u64::try_from(number).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_decoded_as_encoded() {
        for order in [Order::Until(Moment::NEVER), Order::Signal(15), Order::Stop, Order::Go] {
            assert_eq!(Order::decode(order.encode()).unwrap(), order);
        }
        let news = [
            GuardMessage::Started(4242),
            GuardMessage::NotStarted(2),
            GuardMessage::Stopped(20),
            GuardMessage::Overdue,
        ];
        for news in news.into_iter().chain([
            GuardMessage::Stopping,
            GuardMessage::Exited(255),
            GuardMessage::Killed(9),
        ]) {
            assert_eq!(GuardMessage::decode(news.encode()).unwrap(), news);
        }
        assert!(Order::decode([b'?'; LENGTH]).is_err());
    }
}
