//! One socket to Redis. Any thread writes to it without blocking; one task reads from it.
//!
//! Redis answers requests in the order in which it receives them. So all requests wait in one queue, each with its
//! number of replies. A writer holds the lock of the queue while it writes, so the order of the queue is the order on
//! the wire. If the socket cannot take all bytes at once, the reading task writes the rest as soon as it can.
//!
//! The server is not trusted. What it sends is bounded (see [`resp`]), and so is what is buffered of it: the replies to
//! one request, and the wake-ups that wait to be handled. The reading task lets others run after [`READ_AT_ONCE`]
//! bytes, so a server that sends without end stops neither timers nor renewals.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, Read, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use lone_fork::CloseOnFork;
use rustls::ClientConnection;
use tokio::net::TcpStream;
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::Instant;

use super::command::{RedisCommand, pack};
use super::errors::RedisError;
use super::resp::{self, Decoder};
use super::value::{Push, PushKind, Value};
use crate::clock::Moment;

/// The initial size of the read buffer.
const BUFFER: usize = 16 * 1024;

/// How much is read before other tasks of the thread run.
const READ_AT_ONCE: usize = 256 * 1024;

/// The largest replies to one request, all together. They are counted as the decoder counts.
const LARGEST_REPLIES: usize = 2 * resp::LARGEST_REPLY;

/// How many wake-ups may wait to be handled. If there are more, reading stops until some are handled.
pub(super) const MOST_WAKE_UPS: usize = 4096;

/// A push of the server, and a moment before which the server did not send it. The server sent it after it had replied
/// to a request that was sent at that moment.
pub(super) struct WakeUp {
    pub(super) push: Push,
    pub(super) not_before: Moment,
}

/// The replies to one request, or the error. A closed channel means that the connection was lost.
pub(super) type Replies = oneshot::Receiver<Result<Vec<Value>, RedisError>>;

/// A forked copy of this process does not keep the socket. Otherwise the server would count the client as connected, and
/// as subscribed to its wake-ups, until the copy has ended, too.
pub(super) enum Stream {
    Tcp(CloseOnFork<TcpStream>),
    #[cfg(unix)]
    Unix(CloseOnFork<UnixStream>),
}

pub(super) struct Socket {
    stream: Stream,
    state: Mutex<SocketState>,
    /// Notified when a caller suspects that the server does not answer over this socket.
    suspected: Notify,
}

struct SocketState {
    /// The TLS session, if there is one.
    session: Option<Box<ClientConnection>>,
    /// Bytes that the socket has not taken yet. Over TLS the session buffers them instead.
    unsent: Vec<u8>,
    unanswered: VecDeque<Unanswered>,
    /// When the last request was sent that was answered, and whose sender waited for the answer. Before the first one,
    /// when the socket was opened.
    answered: Moment,
    /// The waker of the reading task.
    reader: Option<Waker>,
    /// Why writing failed.
    failed: Option<io::Error>,
    /// Why the socket was closed.
    ended: Option<RedisError>,
}

struct Unanswered {
    sent: Instant,
    /// The same, by a clock that also runs in suspend.
    sent_at: Moment,
    /// The number of replies to this request.
    expects: usize,
    replies: Vec<Value>,
    /// The size of these replies.
    size: usize,
    answer: oneshot::Sender<Result<Vec<Value>, RedisError>>,
}

impl Socket {
    pub(super) fn new(stream: Stream, session: Option<ClientConnection>) -> Self {
        let session = session.map(|mut session| {
            // The sender already limits how much is in flight.
            session.set_buffer_limit(None);
            Box::new(session)
        });
        let state = SocketState {
            session,
            unsent: Vec::new(),
            unanswered: VecDeque::new(),
            answered: Moment::now(),
            reader: None,
            failed: None,
            ended: None,
        };
        Self { stream, state: Mutex::new(state), suspected: Notify::new() }
    }

    /// Writes commands. Never blocks.
    pub(super) fn send(&self, commands: &[RedisCommand]) -> Replies {
        let ((answer, replies), expects) = (oneshot::channel(), commands.len());
        let packed = pack(commands);
        let mut state = self.state();
        if state.ended.is_some() {
            return replies;
        }
        let unanswered = Unanswered {
            sent: Instant::now(),
            sent_at: Moment::now(),
            expects,
            replies: Vec::with_capacity(expects),
            size: 0,
            answer,
        };
        state.unanswered.push_back(unanswered);
        let written = state.write(&self.stream, &packed);
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

    /// Reads until the connection is lost or suspect, a request is not answered in time, or the server violates the
    /// protocol or a limit. Wake-ups go to `wake_ups`.
    pub(super) async fn read(&self, answer_timeout: Duration, wake_ups: &mpsc::Sender<WakeUp>) {
        let error = tokio::select! {
            biased;
            error = self.read_all(wake_ups) => error,
            () = self.silence(answer_timeout) => io::ErrorKind::TimedOut.into(),
            () = self.suspected.notified() => io::ErrorKind::TimedOut.into(),
        };
        self.end(&error);
    }

    /// Makes the reading task end the socket as if a request was not answered in time.
    pub(super) fn suspect(&self) {
        self.suspected.notify_one();
    }

    /// Fails every unanswered request, now and in the future.
    pub(super) fn end(&self, error: &RedisError) {
        let mut state = self.state();
        state.ended.get_or_insert_with(|| error.clone());
        let unanswered = std::mem::take(&mut state.unanswered);
        drop(state);
        // If the server has violated a limit, only the request that it was answering is to blame.
        let is_violation = error.violation().is_some();
        for (at, request) in unanswered.into_iter().enumerate() {
            let error = if is_violation && at > 0 { RedisError::lost() } else { error.clone() };
            let _ = request.answer.send(Err(error));
        }
    }

    /// Returns what the server did wrong, if that is why the socket was closed.
    pub(super) fn violation(&self) -> Option<String> {
        self.state().ended.as_ref().and_then(RedisError::violation).map(str::to_owned)
    }

    /// Resolves when the oldest request has been unanswered for this long.
    async fn silence(&self, limit: Duration) {
        loop {
            let oldest = self.state().unanswered.front().map(|request| request.sent);
            let now = Instant::now();
            let until = oldest.unwrap_or(now) + limit;
            if until <= now {
                return;
            }
            // Later requests have a later deadline.
            tokio::time::sleep_until(until).await;
        }
    }

    async fn read_all(&self, wake_ups: &mpsc::Sender<WakeUp>) -> RedisError {
        let decoder = Decoder::default();
        let mut received = Received { bytes: vec![0; BUFFER], start: 0, end: 0, decoder };
        let mut unyielded = 0;
        loop {
            match poll_fn(|cx| self.poll_some(received.room(), cx)).await {
                Ok(0) => return io::ErrorKind::UnexpectedEof.into(),
                Ok(count) => {
                    received.end += count;
                    unyielded += count;
                }
                Err(error) => return error.into(),
            }
            loop {
                match received.next().map(|next| next.map(|next| self.deliver(next))) {
                    Ok(Some(Ok(None))) => {}
                    // If too many wake-ups wait, this waits for the task that handles them.
                    Ok(Some(Ok(Some(wake_up)))) => _ = wake_ups.send(wake_up).await,
                    Ok(None) => break,
                    Ok(Some(Err(error))) | Err(error) => return error,
                }
            }
            if unyielded >= READ_AT_ONCE {
                unyielded = 0;
                tokio::task::yield_now().await;
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
            ready!(self.stream.poll_read_ready(cx))?;
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
        let ready = self.stream.poll_read_ready(cx);
        match ready.map(|ready| ready.and_then(|()| (&self.stream).read(room))) {
            Poll::Ready(Ok(0) | Err(_)) => Poll::Ready(Err(error)),
            read => {
                self.state().failed = Some(error);
                read
            }
        }
    }

    /// Delivers a reply of this size. Returns it if it is a wake-up.
    fn deliver(&self, (value, size): (Value, usize)) -> Result<Option<WakeUp>, RedisError> {
        let value = match value {
            // The reply to a subscription is a push, too. An unsubscription is never a reply: nothing here
            // unsubscribes, and the server ends subscriptions by itself when a slot moves.
            Value::Push(push) if push.kind != PushKind::Subscribed => {
                let not_before = self.state().answered;
                return Ok(Some(WakeUp { push, not_before }));
            }
            value => value,
        };
        let mut state = self.state();
        if state.ended.is_some() {
            return Err(RedisError::lost());
        }
        // From here on, replies would be taken for the answers to other requests.
        let Some(first) = state.unanswered.front_mut() else {
            let what = "the server sent a reply to no request".to_owned();
            return Err(RedisError::Violation(what));
        };
        first.size += size;
        if first.size > LARGEST_REPLIES {
            let limit = LARGEST_REPLIES >> 20;
            let what = format!("the replies to one request are larger than {limit} MiB");
            return Err(RedisError::Violation(what));
        }
        first.replies.push(value);
        if first.replies.len() == first.expects
            && let Some(request) = state.unanswered.pop_front()
        {
            drop(state);
            if request.answer.send(Ok(request.replies)).is_ok() {
                self.state().answered = request.sent_at;
            }
        }
        Ok(None)
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
        while !state.flush(&self.stream)? {
            ready!(self.stream.poll_write_ready(cx))?;
        }
        Poll::Ready(Ok(()))
    }

    fn try_read(&self, room: &mut [u8]) -> io::Result<usize> {
        // The presence of a session never changes.
        let mut state = self.state();
        if let Some(session) = &mut state.session {
            return try_decrypt(session, &self.stream, room);
        }
        drop(state);
        (&self.stream).read(room)
    }

    fn state(&self) -> MutexGuard<'_, SocketState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SocketState {
    /// Returns true if everything was written.
    fn write(&mut self, mut stream: &Stream, mut bytes: &[u8]) -> io::Result<bool> {
        if let Some(session) = &mut self.session {
            session.writer().write_all(bytes)?;
            return self.flush(stream);
        }
        if self.unsent.is_empty() {
            match stream.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        self.unsent.extend_from_slice(bytes);
        Ok(self.unsent.is_empty())
    }

    /// Returns true if nothing is left to write.
    fn flush(&mut self, mut stream: &Stream) -> io::Result<bool> {
        loop {
            let written = match &mut self.session {
                Some(session) if session.wants_write() => session.write_tls(&mut stream),
                None if !self.unsent.is_empty() => stream.write(&self.unsent),
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
    stream: &Stream,
    room: &mut [u8],
) -> io::Result<usize> {
    loop {
        match session.reader().read(room) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            read => return read,
        }
        if session.read_tls(&mut &*stream)? == 0 {
            return Ok(0);
        }
        if let Err(error) = session.process_new_packets() {
            // Try to send the server the TLS alert that says why we close.
            let _ = session.write_tls(&mut &*stream);
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
    }
}

/// Bytes that were read and not yet decoded.
struct Received {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    decoder: Decoder,
}

impl Received {
    /// Returns the space for the next bytes.
    fn room(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            // A large reply was decoded.
            if self.bytes.len() > READ_AT_ONCE && self.end < BUFFER {
                self.bytes.truncate(BUFFER);
                self.bytes.shrink_to_fit();
            }
        }
        if self.end == self.bytes.len() {
            self.bytes.resize(2 * self.end, 0);
        }
        &mut self.bytes[self.end..]
    }

    fn next(&mut self) -> Result<Option<(Value, usize)>, RedisError> {
        let (decoded, value) = self.decoder.read(&self.bytes[self.start..self.end])?;
        self.start += decoded;
        Ok(value)
    }
}

impl Stream {
    fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(stream) => stream.poll_read_ready(cx),
            #[cfg(unix)]
            Self::Unix(stream) => stream.poll_read_ready(cx),
        }
    }

    fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(stream) => stream.poll_write_ready(cx),
            #[cfg(unix)]
            Self::Unix(stream) => stream.poll_write_ready(cx),
        }
    }
}

/// Neither blocks.
impl Read for &Stream {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.try_read(room),
            #[cfg(unix)]
            Stream::Unix(stream) => stream.try_read(room),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.try_write(bytes),
            #[cfg(unix)]
            Stream::Unix(stream) => stream.try_write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_wake_up_is_not_older_than_the_request_that_was_answered_before_it() {
        const WAKE_UP: &[u8] = b">3\r\n+message\r\n+channel\r\n+text\r\n";
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stream = CloseOnFork::open(|| std::net::TcpStream::connect(address)).unwrap();
        stream.set_nonblocking(true).unwrap();
        let stream = stream.try_map(TcpStream::from_std).unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        let opened_after = Moment::now();
        let socket = Arc::new(Socket::new(Stream::Tcp(stream), None));
        let (push, mut wake_ups) = mpsc::channel(1);
        let reading = socket.clone();
        tokio::spawn(async move { reading.read(Duration::from_secs(60), &push).await });

        server.write_all(WAKE_UP).await.unwrap();
        let opened = wake_ups.recv().await.unwrap().not_before;
        assert!(opened_after <= opened);

        let later = || Duration::from_millis(2);
        tokio::time::sleep(later()).await;
        let before_first = Moment::now();
        let first = socket.send(&[RedisCommand::new("PING"), RedisCommand::new("PING")]);
        let after_first = Moment::now();
        server.read_exact(&mut [0; 28]).await.unwrap();
        // Neither a request that is under way nor half of an answer counts.
        server.write_all(&[WAKE_UP, b"+PONG\r\n", WAKE_UP].concat()).await.unwrap();
        assert_eq!(wake_ups.recv().await.unwrap().not_before, opened);
        assert_eq!(wake_ups.recv().await.unwrap().not_before, opened);

        tokio::time::sleep(later()).await;
        let _second = socket.send(&[RedisCommand::new("PING")]);
        server.write_all(&[b"+PONG\r\n", WAKE_UP].concat()).await.unwrap();
        let not_before = wake_ups.recv().await.unwrap().not_before;
        assert!((before_first..=after_first).contains(&not_before));
        assert!(first.await.unwrap().is_ok());
    }
}
