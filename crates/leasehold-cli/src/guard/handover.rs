//! The first message to a guard, sent when the command holds its lease. If the store has lifelines, the message carries the
//! lifeline of the command's client, and the guard and the child inherit it.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

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

/// The size of the deadline, the terminal flag and the lengths of the texts.
const HEADER: usize = 8 + 1 + 4 * 4;

impl Start {
    pub(crate) fn send(&self, to: impl AsFd, lifeline: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let texts = [&self.name, &self.id, &self.fence, &self.slot];
        let mut message = self.until.micros().to_le_bytes().to_vec();
        message.push(u8::from(self.foreground));
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
        // This is the first write to the socket, so the whole message fits.
        let sent = sendmsg(to, &[IoSlice::new(&message)], &mut ancillary, SendFlags::empty())?;
        if sent == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Waits for the message. Returns `None` if the command has ended without sending one.
    pub(super) fn receive(mut from: &UnixStream) -> io::Result<Option<(Self, Option<OwnedFd>)>> {
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
        let (until, foreground) = (Moment::from_micros(until), rest[0] != 0);
        Ok(Some((Self { until, foreground, name, id, fence, slot }, lifeline)))
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
    fn everything_arrives_and_a_descriptor_comes_along() {
        let (here, there) = UnixStream::pair().unwrap();
        let (mut read, write) = UnixStream::pair().unwrap();
        start().send(&here, Some(write.as_fd())).unwrap();
        drop(write);
        let (received, write) = Start::receive(&there).unwrap().unwrap();
        assert_eq!(received, start());
        io::Write::write_all(&mut UnixStream::from(write.unwrap()), b"over here").unwrap();
        let mut text = String::new();
        read.read_to_string(&mut text).unwrap();
        assert_eq!(text, "over here");

        start().send(&here, None).unwrap();
        assert!(Start::receive(&there).unwrap().unwrap().1.is_none());
    }

    #[test]
    fn a_command_that_ends_says_nothing() {
        let (here, there) = UnixStream::pair().unwrap();
        drop(here);
        assert_eq!(Start::receive(&there).unwrap().map(|(start, _)| start), None);
    }
}
