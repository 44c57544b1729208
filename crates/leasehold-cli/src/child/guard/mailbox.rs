//! Messages between a command and its guard, sent and received without ever blocking: the other side may be stopped.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};

use super::wire::{LENGTH, Message};

/// Messages that are not yet written to the socket.
///
/// Their number is bounded even if the other side never reads: a message replaces an earlier one with the same content,
/// and a new deadline replaces an older one.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    messages: VecDeque<[u8; LENGTH]>,
    /// How many bytes of the first message are written.
    sent: usize,
}

impl Outgoing {
    pub(crate) fn push(&mut self, message: impl Message + Copy) {
        let (new, by_kind) = (message.encode(), message.replaces_earlier());
        let begun = usize::from(self.sent > 0);
        let mut at = 0;
        self.messages.retain(|old| {
            at += 1;
            at <= begun || !(*old == new || by_kind && old[0] == new[0])
        });
        self.messages.push_back(new);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Writes as much as possible without blocking.
    ///
    /// # Errors
    /// If the other side has closed the socket.
    pub(crate) fn flush(
        &mut self,
        mut write: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<()> {
        while let Some(first) = self.messages.front() {
            match write(&first[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => self.sent += written,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if self.sent == LENGTH {
                self.messages.pop_front();
                self.sent = 0;
            }
        }
        Ok(())
    }
}

/// The part of the next message that has arrived.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    bytes: [u8; LENGTH],
    read: usize,
}

impl Incoming {
    /// Returns the next message, if all of it has arrived.
    ///
    /// # Errors
    /// If the other side has closed the socket, or sends an invalid message.
    pub(crate) fn next<M: Message>(
        &mut self,
        mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<Option<M>> {
        while self.read < LENGTH {
            match read(&mut self.bytes[self.read..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.read += read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.read = 0;
        M::decode(self.bytes).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::{GuardMessage, Order};
    use super::*;
    use crate::clock::Moment;

    /// A socket that reads and writes a limited number of bytes at a time.
    struct Pipe {
        bytes: VecDeque<u8>,
        room: usize,
        step: usize,
    }

    impl Pipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = bytes.len().min(self.step).min(self.room - self.bytes.len());
            if count == 0 {
                return Err(ErrorKind::WouldBlock.into());
            }
            self.bytes.extend(&bytes[..count]);
            Ok(count)
        }

        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let count = into.len().min(self.step).min(self.bytes.len());
            if count == 0 {
                return Err(ErrorKind::WouldBlock.into());
            }
            for (to, from) in into.iter_mut().zip(self.bytes.drain(..count)) {
                *to = from;
            }
            Ok(count)
        }
    }

    #[test]
    fn messages_arrive_in_order_after_partial_writes() {
        for step in [1, 2, 5, 9, 100] {
            let mut pipe = Pipe { bytes: VecDeque::new(), room: 13, step };
            let (mut outgoing, mut incoming) = (Outgoing::default(), Incoming::default());
            let all = [Order::Signal(1), Order::Stop, Order::Signal(2), Order::Go];
            for order in all {
                outgoing.push(order);
            }
            let mut arrived = Vec::new();
            while arrived.len() < all.len() {
                outgoing.flush(|bytes| pipe.write(bytes)).unwrap();
                while let Some(order) = incoming.next::<Order>(|into| pipe.read(into)).unwrap() {
                    arrived.push(order);
                }
            }
            assert_eq!(arrived, all, "{step}");
            assert!(outgoing.is_empty());
        }
    }

    #[test]
    fn an_unread_mailbox_stays_small_and_keeps_the_latest_message() {
        let mut pipe = Pipe { bytes: VecDeque::new(), room: 4, step: 9 };
        let mut outgoing = Outgoing::default();
        for micros in 0..1000 {
            outgoing.push(Order::Until(Moment::from_micros(micros)));
            outgoing.push(Order::Signal(20));
            outgoing.push(Order::Signal(18));
            outgoing.flush(|bytes| pipe.write(bytes)).unwrap();
        }
        assert!(outgoing.messages.len() <= 4, "{}", outgoing.messages.len());
        pipe.room = 1000;
        outgoing.flush(|bytes| pipe.write(bytes)).unwrap();
        let mut incoming = Incoming::default();
        let mut arrived = Vec::new();
        while let Some(order) = incoming.next::<Order>(|into| pipe.read(into)).unwrap() {
            arrived.push(order);
        }
        let last = Order::Until(Moment::from_micros(999));
        assert_eq!(arrived[1..], [last, Order::Signal(20), Order::Signal(18)]);
    }

    #[test]
    fn the_end_of_the_other_side_is_an_error() {
        let mut incoming = Incoming::default();
        assert!(incoming.next::<GuardMessage>(|_| Ok(0)).is_err());
        assert!(
            incoming
                .next::<GuardMessage>(|into| {
                    into.fill(b'?');
                    Ok(into.len())
                })
                .is_err()
        );
        let mut outgoing = Outgoing::default();
        outgoing.push(GuardMessage::Overdue);
        assert!(outgoing.flush(|_| Err(ErrorKind::BrokenPipe.into())).is_err());
    }
}
