//! One socket to Redis. Any thread writes to it without blocking; one task reads from it.
//!
//! Redis answers requests in the order in which it receives them. So all requests wait in one queue, each with its
//! number of replies. A writer holds the lock of the queue while it writes, so the order of the queue is the order on
//! the wire. If the socket cannot take all bytes at once, the reading task writes the rest as soon as it can.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, Read, Write};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use lone_fork::CloseOnFork;
use redis::{PushInfo, PushKind, RedisError, RedisResult, Value};
use rustls::ClientConnection;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::resp;

/// The initial size of the read buffer.
const BUFFER: usize = 16 * 1024;

/// The replies to one request, or the error. A closed channel means that the connection was lost.
pub(super) type Replies = oneshot::Receiver<RedisResult<Vec<Value>>>;

/// A forked copy of this process does not keep the socket. Otherwise the server would count the client as connected, and
/// as subscribed to its wake-ups, until the copy has ended, too.
pub(super) enum Socket {
    Tcp(CloseOnFork<TcpStream>),
    #[cfg(unix)]
    Unix(CloseOnFork<UnixStream>),
}

pub(super) struct Wire {
    socket: Socket,
    state: Mutex<State>,
}

struct State {
    /// The TLS session, if there is one.
    session: Option<Box<ClientConnection>>,
    /// Bytes that the socket has not taken yet. Over TLS the session buffers them instead.
    unsent: Vec<u8>,
    unanswered: VecDeque<Unanswered>,
    /// The waker of the reading task.
    reader: Option<Waker>,
    /// Why writing failed.
    failed: Option<io::Error>,
    ended: bool,
}

struct Unanswered {
    sent: Instant,
    /// The number of replies to this request.
    expects: usize,
    replies: Vec<Value>,
    answer: oneshot::Sender<RedisResult<Vec<Value>>>,
}

impl Wire {
    pub(super) fn new(socket: Socket, session: Option<ClientConnection>) -> Arc<Self> {
        let session = session.map(|mut session| {
            // The sender already limits how much is in flight.
            session.set_buffer_limit(None);
            Box::new(session)
        });
        let state = State {
            session,
            unsent: Vec::new(),
            unanswered: VecDeque::new(),
            reader: None,
            failed: None,
            ended: false,
        };
        Arc::new(Self { socket, state: Mutex::new(state) })
    }

    /// Writes packed commands that get this many replies. Never blocks.
    pub(super) fn send(&self, packed: &[u8], expects: usize) -> Replies {
        let (answer, replies) = oneshot::channel();
        let mut state = self.state();
        if state.ended {
            return replies;
        }
        let unanswered = Unanswered {
            sent: Instant::now(),
            expects,
            replies: Vec::with_capacity(expects),
            answer,
        };
        state.unanswered.push_back(unanswered);
        let written = state.write(&self.socket, packed);
        // The reading task writes the rest, or reports the error.
        let reader = match written {
            Ok(true) => None,
            Ok(false) => state.reader.clone(),
            Err(error) => {
                state.failed = Some(error);
                state.reader.clone()
            }
        };
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
        replies
    }

    /// Reads until the connection is lost, or a request is not answered in time. Wake-ups go to `wake_ups`.
    pub(super) async fn read(
        &self,
        answer_timeout: Duration,
        wake_ups: &mpsc::UnboundedSender<PushInfo>,
    ) {
        let mut received = Received { bytes: vec![0; BUFFER], start: 0, end: 0 };
        let error = tokio::select! {
            biased;
            error = poll_fn(|cx| self.poll_read(&mut received, wake_ups, cx)) => error,
            () = self.silence(answer_timeout) => io::Error::from(io::ErrorKind::TimedOut).into(),
        };
        self.end(&error);
    }

    /// Fails every unanswered request, now and in the future.
    pub(super) fn end(&self, error: &RedisError) {
        let mut state = self.state();
        state.ended = true;
        let unanswered = std::mem::take(&mut state.unanswered);
        drop(state);
        for own in unanswered {
            let _ = own.answer.send(Err(error.clone()));
        }
    }

    /// Resolves when the oldest request has been unanswered for this long.
    async fn silence(&self, limit: Duration) {
        loop {
            let oldest = self.state().unanswered.front().map(|own| own.sent);
            let now = Instant::now();
            let until = oldest.unwrap_or(now) + limit;
            if until <= now {
                return;
            }
            // Later requests have a later deadline.
            tokio::time::sleep_until(until).await;
        }
    }

    fn poll_read(
        &self,
        received: &mut Received,
        wake_ups: &mpsc::UnboundedSender<PushInfo>,
        cx: &mut Context<'_>,
    ) -> Poll<RedisError> {
        loop {
            match ready!(self.poll_some(received.room(), cx)) {
                Ok(0) => return Poll::Ready(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(count) => received.end += count,
                Err(error) => return Poll::Ready(error.into()),
            }
            loop {
                match received.next() {
                    Ok(Some(value)) => self.deliver(value, wake_ups),
                    Ok(None) => break,
                    Err(error) => return Poll::Ready(error),
                }
            }
        }
    }

    /// Reads the available bytes. Before it waits for more, it writes what is left to write, because over TLS the
    /// server may wait for that.
    fn poll_some(&self, room: &mut [u8], cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        loop {
            match self.try_read(room) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read),
            }
            if let Poll::Ready(Err(error)) = self.poll_flush(cx) {
                return self.poll_after_failed_write(error, room, cx);
            }
            ready!(self.socket.poll_read_ready(cx))?;
        }
    }

    /// Reads once more after a write has failed: if the server has closed the connection, it may have sent the reason
    /// before.
    fn poll_after_failed_write(
        &self,
        error: io::Error,
        room: &mut [u8],
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        let hung_up = [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
        if !hung_up.contains(&error.kind()) {
            return Poll::Ready(Err(error));
        }
        match self.socket.poll_read_ready(cx).map(|ready| ready.and_then(|()| self.try_read(room)))
        {
            Poll::Ready(Ok(count)) if count > 0 => {
                self.state().failed = Some(error);
                Poll::Ready(Ok(count))
            }
            Poll::Ready(_) => Poll::Ready(Err(error)),
            Poll::Pending => {
                self.state().failed = Some(error);
                Poll::Pending
            }
        }
    }

    fn deliver(&self, value: Value, wake_ups: &mpsc::UnboundedSender<PushInfo>) {
        let value = match value {
            // The reply to a subscription is a push, too. An unsubscription is never a reply: nothing here
            // unsubscribes, and the server ends subscriptions by itself when a slot moves.
            Value::Push { kind, data }
                if !matches!(kind, PushKind::Subscribe | PushKind::SSubscribe) =>
            {
                let _ = wake_ups.send(PushInfo { kind, data });
                return;
            }
            value => value,
        };
        let mut state = self.state();
        let Some(first) = state.unanswered.front_mut() else { return };
        first.replies.push(value);
        if first.replies.len() == first.expects
            && let Some(own) = state.unanswered.pop_front()
        {
            drop(state);
            let _ = own.answer.send(Ok(own.replies));
        }
    }

    /// Ready when everything is written. Only the reading task may call it.
    fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.state();
        if !state.reader.as_ref().is_some_and(|known| known.will_wake(cx.waker())) {
            state.reader = Some(cx.waker().clone());
        }
        if let Some(error) = state.failed.take() {
            return Poll::Ready(Err(error));
        }
        while !state.flush(&self.socket)? {
            ready!(self.socket.poll_write_ready(cx))?;
        }
        Poll::Ready(Ok(()))
    }

    fn try_read(&self, room: &mut [u8]) -> io::Result<usize> {
        // The presence of a session never changes.
        let mut state = self.state();
        if let Some(session) = &mut state.session {
            return try_decrypt(session, &self.socket, room);
        }
        drop(state);
        self.socket.try_read(room)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Returns true if everything was written.
    fn write(&mut self, socket: &Socket, mut bytes: &[u8]) -> io::Result<bool> {
        if let Some(session) = &mut self.session {
            session.writer().write_all(bytes)?;
            return self.flush(socket);
        }
        if self.unsent.is_empty() {
            match socket.try_write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        self.unsent.extend_from_slice(bytes);
        Ok(self.unsent.is_empty())
    }

    /// Returns true if nothing is left to write.
    fn flush(&mut self, socket: &Socket) -> io::Result<bool> {
        loop {
            let written = match &mut self.session {
                Some(session) if session.wants_write() => session.write_tls(&mut &*socket),
                None if !self.unsent.is_empty() => socket.try_write(&self.unsent),
                _ => return Ok(true),
            };
            match written {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) if self.session.is_none() => drop(self.unsent.drain(..count)),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }
}

fn try_decrypt(
    session: &mut ClientConnection,
    socket: &Socket,
    room: &mut [u8],
) -> io::Result<usize> {
    loop {
        match session.reader().read(room) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            read => return read,
        }
        if session.read_tls(&mut &*socket)? == 0 {
            return Ok(0);
        }
        if let Err(error) = session.process_new_packets() {
            // Try to send the server the TLS alert that says why we close.
            let _ = session.write_tls(&mut &*socket);
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
    }
}

/// Bytes that were read and not yet decoded.
struct Received {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Received {
    /// Returns the space for the next bytes.
    fn room(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end == self.bytes.len() {
            self.bytes.resize(2 * self.end, 0);
        }
        &mut self.bytes[self.end..]
    }

    fn next(&mut self) -> RedisResult<Option<Value>> {
        let read = resp::read(&self.bytes[self.start..self.end])?;
        Ok(read.map(|(value, length)| {
            self.start += length;
            value
        }))
    }
}

impl Socket {
    fn try_read(&self, room: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(socket) => socket.try_read(room),
            #[cfg(unix)]
            Self::Unix(socket) => socket.try_read(room),
        }
    }

    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(socket) => socket.try_write(bytes),
            #[cfg(unix)]
            Self::Unix(socket) => socket.try_write(bytes),
        }
    }

    fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(socket) => socket.poll_read_ready(cx),
            #[cfg(unix)]
            Self::Unix(socket) => socket.poll_read_ready(cx),
        }
    }

    fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(socket) => socket.poll_write_ready(cx),
            #[cfg(unix)]
            Self::Unix(socket) => socket.poll_write_ready(cx),
        }
    }
}

/// The TLS session requires these traits.
impl Read for &Socket {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        self.try_read(room)
    }
}

impl Write for &Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.try_write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The wire as a stream for the Redis library, which authenticates us over it. Nothing else may use the wire meanwhile.
pub(super) struct Stream(pub(super) Arc<Wire>);

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let count = ready!(self.0.poll_some(buffer.initialize_unfilled(), cx))?;
        buffer.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(self.0.state().write(&self.0.socket, bytes).map(|_| bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
