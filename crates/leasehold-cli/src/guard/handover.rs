//! The first message to a guard: it brings the standard input of the child along.
//!
//! The guard's own standard input is the socket, because that is the one descriptor that a process can be given and
//! find without knowing its number.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::wire::{LENGTH, Message, Order};

pub(crate) fn send(to: impl AsFd, order: Order, stdin: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [stdin];
    if !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("no room for a descriptor"));
    }
    let message = order.encode();
    let sent = sendmsg(to, &[IoSlice::new(&message)], &mut ancillary, SendFlags::empty())?;
    if sent == LENGTH { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

pub(crate) fn receive(from: &UnixStream) -> io::Result<(Order, OwnedFd)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut message = [0; LENGTH];
    let flags = RecvFlags::WAITALL | RecvFlags::CMSG_CLOEXEC;
    let received = retry_on_intr(|| {
        recvmsg(from, &mut [IoSliceMut::new(&mut message)], &mut ancillary, flags)
    })?;
    if received.bytes != LENGTH {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let rights = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let stdin = rights.ok_or_else(|| io::Error::other("no standard input came along"))?;
    Ok((Order::decode(message)?, stdin))
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;
    use crate::clock::Moment;

    #[test]
    fn a_descriptor_comes_along() {
        let (here, there) = UnixStream::pair().unwrap();
        let (mut read, write) = UnixStream::pair().unwrap();
        let order = Order::Until(Moment::from_micros(7));
        send(&here, order, write.as_fd()).unwrap();
        drop(write);
        let (received, write) = receive(&there).unwrap();
        assert_eq!(received, order);
        io::Write::write_all(&mut UnixStream::from(write), b"over here").unwrap();
        let mut text = String::new();
        read.read_to_string(&mut text).unwrap();
        assert_eq!(text, "over here");
    }
}
