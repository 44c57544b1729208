//! The first messages to a guard: one before the command joins a queue, and one when it holds its lease. If the store has
//! lifelines, the second one carries the lifeline of the command's client, and the guard and the child inherit it.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::cleanup::LeaseRef;
use crate::clock::Moment;

/// The information that a guard needs before it starts the child.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Start {
    /// The deadline of the child.
    pub(crate) until: Moment,
    /// Whether the child gets the terminal at its start.
    pub(crate) foreground: bool,
    /// The values of the child's environment variables.
    pub(crate) name: String,
    pub(crate) id: String,
    pub(crate) fence: String,
    /// Empty if it has no slot number.
    pub(crate) slot: String,
}

/// A message that a guard receives before it has a child.
#[derive(Debug)]
pub(super) enum EarlyMessage {
    /// The command is about to wait for this lease.
    Waits(LeaseRef),
    /// The command holds its lease.
    Start(Start, Option<OwnedFd>),
}

/// The size of the deadline, the flags and the lengths of the texts.
const HEADER: usize = 8 + 1 + 4 * 4;
const FOREGROUND: u8 = 1;
const WAITS: u8 = 2;

/// Reports that the command is about to wait for this lease. If the command is killed, the guard removes it.
pub(super) fn send_waits(lease: &LeaseRef, to: impl AsFd) -> io::Result<()> {
    send(to, (Moment::NEVER, WAITS), [&lease.name, &lease.id, "", ""], None)
}

fn send(
    to: impl AsFd,
    (until, flags): (Moment, u8),
    texts: [&str; 4],
    lifeline: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut message = until.micros().to_le_bytes().to_vec();
    message.push(flags);
    for text in texts {
        let length = u32::try_from(text.len()).map_err(io::Error::other)?;
        message.extend(length.to_le_bytes());
    }
    for text in texts {
        message.extend(text.as_bytes());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = lifeline.as_slice();
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("no room for a descriptor"));
    }
    // These are the first two writes to the socket, so the whole message fits.
    let sent = sendmsg(to, &[IoSlice::new(&message)], &mut ancillary, SendFlags::empty())?;
    if sent == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

impl Start {
    pub(crate) fn send(&self, to: impl AsFd, lifeline: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let flags = if self.foreground { FOREGROUND } else { 0 };
        let texts = [&*self.name, &*self.id, &*self.fence, &*self.slot];
        send(to, (self.until, flags), texts, lifeline)
    }
}

impl EarlyMessage {
    /// Waits for the next message. Returns `None` if the command has ended without sending one.
    pub(super) fn receive(mut from: &UnixStream) -> io::Result<Option<Self>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut header = [0; HEADER];
        // The lifeline stays open in the child.
        let received = retry_on_intr(|| {
            let mut header = [IoSliceMut::new(&mut header)];
            recvmsg(from, &mut header, &mut ancillary, RecvFlags::WAITALL)
        })?;
        if received.bytes == 0 {
            return Ok(None);
        }
        if received.bytes != HEADER {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let lifeline = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        let (until, rest) = header.split_at(8);
        let until = until.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let mut texts = rest[1..].chunks(4).map(|length| {
            let length =
                length.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte));
            let mut text = vec![0; length];
            from.read_exact(&mut text)?;
            String::from_utf8(text).map_err(io::Error::other)
        });
        let mut text = || texts.next().unwrap_or_else(|| Ok(String::new()));
        let (name, id, fence, slot) = (text()?, text()?, text()?, text()?);
        if rest[0] & WAITS != 0 {
            return Ok(Some(Self::Waits(LeaseRef { name, id })));
        }
        let (until, foreground) = (Moment::from_micros(until), rest[0] & FOREGROUND != 0);
        Ok(Some(Self::Start(Start { until, foreground, name, id, fence, slot }, lifeline)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start() -> Start {
        let (until, foreground) = (Moment::from_micros(70_000_007), true);
        let [name, id, fence, slot] = ["a\nname", "an id", "7", ""].map(str::to_owned);
        Start { until, foreground, name, id, fence, slot }
    }

    #[test]
    fn all_fields_and_the_descriptor_arrive() {
        let (here, there) = UnixStream::pair().unwrap();
        let (mut read, write) = UnixStream::pair().unwrap();
        start().send(&here, Some(write.as_fd())).unwrap();
        drop(write);
        let Some(EarlyMessage::Start(received, write)) = EarlyMessage::receive(&there).unwrap()
        else {
            panic!("not the start");
        };
        assert_eq!(received, start());
        io::Write::write_all(&mut UnixStream::from(write.unwrap()), b"over here").unwrap();
        let mut text = String::new();
        read.read_to_string(&mut text).unwrap();
        assert_eq!(text, "over here");

        start().send(&here, None).unwrap();
        assert!(matches!(
            EarlyMessage::receive(&there).unwrap(),
            Some(EarlyMessage::Start(_, None))
        ));
    }

    #[test]
    fn a_wait_is_reported_before_the_start() {
        let (here, there) = UnixStream::pair().unwrap();
        let [name, id] = ["a name", "an id"].map(str::to_owned);
        let lease = LeaseRef { name, id };
        send_waits(&lease, &here).unwrap();
        start().send(&here, None).unwrap();
        let received = EarlyMessage::receive(&there).unwrap();
        assert!(matches!(received, Some(EarlyMessage::Waits(received)) if received == lease));
        assert!(matches!(EarlyMessage::receive(&there).unwrap(), Some(EarlyMessage::Start(..))));
    }

    #[test]
    fn a_command_that_ends_says_nothing() {
        let (here, there) = UnixStream::pair().unwrap();
        drop(here);
        assert!(EarlyMessage::receive(&there).unwrap().is_none());
    }
}
