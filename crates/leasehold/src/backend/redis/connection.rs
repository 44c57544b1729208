//! The connection to one server. Its socket is replaced when it is lost or suspect.
//!
//! Waiting for the connection happens here. A query waits until the connection is up; [`Topology`](super::topology::Topology)
//! repeats it, and limits its time. The engine's sender sends nothing while the connection is down. A new connection
//! resumes both at once.

use std::collections::HashSet;
use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::RedisSettings;
use super::command::RedisCommand;
use super::connect::{Identity, OpenSocket, client_record, received};
use super::errors::{RedisError, ServerError, translate, translate_server, within};
use super::scripts::Scripts;
use super::sentinel::{Sentinels, moved_from};
use super::slots::slot_of;
use super::socket::{Socket, WakeUp};
use super::value::{Push, PushKind, Value};
use crate::backend::{Destination, Event, Report};
use crate::callbacks::event;
use crate::clock::{Moment, Span};
use crate::machine::Held;
use crate::name::Name;
use crate::url::ServerSettings;
use crate::{ClientId, Error, Fence};

#[cfg(test)]
mod tests;

/// How often this client writes its record, which statistics show.
pub(super) const RECORD_CLIENT_EVERY: Duration = Duration::from_secs(60);

/// The delay between attempts to connect, if the first one fails. It doubles from the shortest to the longest.
const SHORTEST_DELAY: Duration = Duration::from_millis(10);
const LONGEST_DELAY: Duration = Duration::from_secs(1);

/// The server to connect to.
pub(super) enum Target {
    /// The only server of the store.
    Only(ServerSettings),
    /// The primary that the sentinels name.
    Primary(Arc<Sentinels>),
    /// A node of a cluster.
    Node(ServerSettings),
}

/// The connection to one server. Its socket is replaced whenever it is lost.
pub(super) struct Connection {
    pub(super) settings: Arc<RedisSettings>,
    pub(super) scripts: Arc<Scripts>,
    pub(super) target: Target,
    to: Destination,
    /// The server's address, for messages.
    pub(super) address: String,
    state: watch::Sender<ConnectionState>,
    /// Whether an ASK-redirected command to this node is overdue.
    is_late: AtomicBool,
}

enum ConnectionState {
    Connecting,
    Up(Arc<CurrentSocket>),
    Down(Error),
}

/// The socket that is in use.
pub(super) struct CurrentSocket {
    socket: Arc<Socket>,
    /// In a cluster, the channels that the connection has subscribed to.
    channels: Mutex<HashSet<String>>,
}

impl CurrentSocket {
    fn channels(&self) -> MutexGuard<'_, HashSet<String>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why commands have no answers.
pub(super) enum Failure {
    /// There was no connection, so they were not sent.
    Unsent(Error),
    /// The connection was lost before the answers came.
    Unknown(Error),
    /// The server refuses us, or answers the same commands by the same violation of a limit.
    Final(Error),
}

/// The answer to one command, or the server's error.
pub(super) type CommandReply = Result<Value, ServerError>;

impl Connection {
    pub(super) fn new(
        settings: Arc<RedisSettings>,
        scripts: Arc<Scripts>,
        target: Target,
        to: Destination,
    ) -> Arc<Self> {
        let address = match &target {
            Target::Only(_) | Target::Primary(_) => settings.address.clone(),
            Target::Node(info) => info.to_string(),
        };
        let state = watch::Sender::new(ConnectionState::Connecting);
        let is_late = AtomicBool::new(false);
        Arc::new(Self { settings, scripts, target, to, address, state, is_late })
    }

    pub(super) fn to(&self) -> Destination {
        self.to
    }

    pub(super) fn is_late(&self) -> bool {
        self.is_late.load(Ordering::Relaxed)
    }

    pub(super) fn set_late(&self, is_late: bool) {
        self.is_late.store(is_late, Ordering::Relaxed);
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(&*self.state.borrow(), ConnectionState::Up(_))
    }

    /// Returns the socket that requests go to now. Fails if there is none.
    pub(super) fn current(&self) -> Result<Arc<CurrentSocket>, Error> {
        match &*self.state.borrow() {
            ConnectionState::Up(current) => Ok(current.clone()),
            _ => Err(self.silence(false)),
        }
    }

    /// Waits for the first attempt to connect, and returns its result.
    pub(super) async fn connected(&self) -> Result<(), Error> {
        let mut state = self.state.subscribe();
        let decided = state.wait_for(|state| !matches!(state, ConnectionState::Connecting)).await;
        match &*decided.map_err(|_| Error::Closed)? {
            ConnectionState::Down(error) => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Waits until the connection is up, or the server refuses us in a way that no retry can fix.
    async fn current_when_up(&self) -> Result<Arc<CurrentSocket>, Failure> {
        let mut state = self.state.subscribe();
        let decided = state.wait_for(|state| match state {
            ConnectionState::Up(_) => true,
            ConnectionState::Down(error) => !error.is_transient(),
            ConnectionState::Connecting => false,
        });
        match decided.await.as_deref() {
            Ok(ConnectionState::Up(current)) => Ok(current.clone()),
            Ok(ConnectionState::Down(error)) => Err(Failure::Final(error.clone())),
            _ => Err(Failure::Final(Error::Closed)),
        }
    }

    /// Closes the connection, because the server is no longer used.
    pub(super) fn leave(&self) {
        let what = format!("request to {}: the server is no longer a primary", self.address);
        let left = ConnectionState::Down(Error::unavailable(what, false, None));
        if let ConnectionState::Up(current) = self.state.send_replace(left) {
            current.socket.end(&RedisError::lost());
        }
    }

    /// Replaces the current socket, because the server may not answer over it.
    pub(super) fn suspect_current(&self) {
        if let Ok(current) = self.current() {
            current.socket.suspect();
        }
    }

    /// Sends commands in one pipeline over the current connection, and returns the answer to each. Fails if there is no
    /// connection.
    pub(super) async fn request(
        &self,
        commands: &[RedisCommand],
    ) -> Result<Vec<CommandReply>, Error> {
        let current = self.current()?;
        self.send_over(&current, commands).await.map_err(|error| self.failed(&error))
    }

    /// Like [`request`](Self::request), but first waits until the connection is up, for at most `limit`.
    pub(super) async fn request_when_up(
        &self,
        commands: &[RedisCommand],
        limit: Duration,
    ) -> Result<Vec<CommandReply>, Failure> {
        let current = tokio::time::timeout(limit, self.current_when_up()).await;
        let current = current.unwrap_or_else(|_| Err(Failure::Unsent(self.silence(false))))?;
        self.send_over(&current, commands).await.map_err(|error| match error.violation() {
            Some(_) => Failure::Final(self.failed(&error)),
            None => Failure::Unknown(self.failed(&error)),
        })
    }

    /// Like [`request`](Self::request) over this socket, but first subscribes it to these channels. The server handles the
    /// subscriptions before the commands, so a waiter that the commands enqueue can be woken from the start. Returns
    /// the answers to the commands, and the channels that were refused.
    pub(super) async fn request_listening(
        &self,
        current: &CurrentSocket,
        channels: impl ExactSizeIterator<Item = &String>,
        commands: &[RedisCommand],
    ) -> Result<(Vec<CommandReply>, Vec<(String, ServerError)>), Error> {
        let failed = |error: RedisError| self.failed(&error);
        let new: Vec<_> = if channels.len() == 0 {
            Vec::new()
        } else {
            let mut known = current.channels();
            channels.filter(|channel| known.insert((*channel).clone())).cloned().collect()
        };
        if new.is_empty() {
            return Ok((self.send_over(current, commands).await.map_err(failed)?, Vec::new()));
        }
        // One command per channel: channels of two slots in one command are an error.
        let subscribe = |channel| RedisCommand::new("SSUBSCRIBE").arg(channel);
        let all: Vec<_> = new.iter().map(subscribe).chain(commands.iter().cloned()).collect();
        let mut subscribed = self.send_over(current, &all).await.map_err(failed)?;
        let answers = subscribed.split_off(new.len());
        let refused = new.into_iter().zip(subscribed);
        let refused: Vec<_> =
            refused.filter_map(|(channel, reply)| Some((channel, reply.err()?))).collect();
        for (channel, _) in &refused {
            current.channels().remove(channel);
        }
        Ok((answers, refused))
    }

    /// Sends commands and returns the answers. Scripts that the server does not have are sent again in full, which also
    /// loads them.
    async fn send_over(
        &self,
        current: &CurrentSocket,
        commands: &[RedisCommand],
    ) -> Result<Vec<CommandReply>, RedisError> {
        let mut answers = received(current.socket.send(commands)).await?;
        let forgotten =
            |value: &Value| matches!(value, Value::Error(error) if error.code() == "NOSCRIPT");
        if answers.iter().any(forgotten) {
            let again = commands.iter().zip(&answers).filter(|(_, answer)| forgotten(answer));
            let again: Vec<_> = again.map(|(call, _)| self.scripts.in_full(call)).collect();
            let mut anew = received(current.socket.send(&again)).await?.into_iter();
            for answer in answers.iter_mut().filter(|answer| forgotten(answer)) {
                *answer = anew.next().unwrap_or(Value::Nil);
            }
        }
        // An error inside an answer concerns only its own part of the request.
        Ok(answers.into_iter().map(Value::checked).collect())
    }

    /// Maps an error that the server returned to a request.
    pub(super) fn translate(&self, error: &ServerError) -> Error {
        if error.code() == "READONLY" {
            // It was the primary when we connected. The address may lead to another server by now.
            self.suspect_current();
        }
        translate_server(&format!("request to {}", self.address), error)
    }

    /// Maps an error that did not come from the server, so that the outcome of the request is unknown.
    fn failed(&self, error: &RedisError) -> Error {
        match translate(&format!("request to {}", self.address), error) {
            error if error.is_transient() => error,
            error => Error::unavailable(error.to_string(), false, None),
        }
    }

    fn silence(&self, timed_out: bool) -> Error {
        Error::unavailable(format!("request to {}", self.address), timed_out, None)
    }

    /// The error of a query that was not answered in time. Its source says why there is no connection.
    pub(super) fn silence_with_cause(&self) -> Error {
        let what = format!("request to {}", self.address);
        let cause = match &*self.state.borrow() {
            ConnectionState::Down(Error::Unavailable { source, .. }) => source.clone(),
            _ => None,
        };
        Error::unavailable(what, true, cause)
    }

    /// Keeps the connection up for as long as the engine's thread runs.
    pub(super) async fn keep_up(self: Arc<Self>, client: ClientId, report: Report) {
        let mut before: Option<Identity> = None;
        let mut delay = SHORTEST_DELAY;
        loop {
            let what = format!("connecting to {}", self.address);
            let connecting = self.connect(client, before.as_ref());
            let connected = within(self.settings.connect_timeout, &what, connecting).await;
            match connected {
                Ok(open) => {
                    let since = Instant::now();
                    let socket = open.socket.clone();
                    self.serve(client, open, &mut before, &report).await;
                    self.state.send_replace(ConnectionState::Connecting);
                    let violation = socket.violation();
                    let why = violation.as_deref().unwrap_or("connection lost");
                    let lost = format!("request to {}: {why}", self.address);
                    report(Event::Disconnected(self.to, Error::unavailable(lost, false, None)));
                    // A connection that is lost soon after it was made must not be replaced in a tight loop, nor one
                    // to a server that violates a limit.
                    if since.elapsed() > LONGEST_DELAY && violation.is_none() {
                        delay = SHORTEST_DELAY;
                        continue;
                    }
                }
                Err(error) => {
                    event!(debug, %error, "the connection failed");
                    self.state.send_replace(ConnectionState::Down(error.clone()));
                    report(Event::Disconnected(self.to, error));
                }
            }
            self.pause(delay).await;
            delay = (delay * 2).min(LONGEST_DELAY);
        }
    }

    /// Waits for `delay` before the next attempt to connect. It ends early if the sentinels announce a primary.
    async fn pause(&self, delay: Duration) {
        match &self.target {
            Target::Primary(sentinels) => {
                let _ = tokio::time::timeout(delay, sentinels.announcement()).await;
            }
            Target::Only(_) | Target::Node(_) => tokio::time::sleep(delay).await,
        }
    }

    /// Uses a new socket, and handles its wake-ups until it is lost or suspect. `before` identifies the previous one.
    async fn serve(
        &self,
        client: ClientId,
        mut open: OpenSocket,
        before: &mut Option<Identity>,
        report: &Report,
    ) {
        let (socket, since) = (open.socket.clone(), Moment::now());
        let current = Arc::new(CurrentSocket { socket, channels: Mutex::default() });
        self.state.send_replace(ConnectionState::Up(current.clone()));
        let before = before.replace(open.identity.clone());
        let other = before.as_ref().is_some_and(|before| before.differs(&open.identity));
        let (again, stragglers) = (before.is_some(), open.stragglers);
        report(Event::Connected { to: self.to, again, other, stragglers });
        let info = open.info.clone();
        let mut moved = pin!(moved_from(&info, open.announced.take()));
        let mut interval = tokio::time::interval(RECORD_CLIENT_EVERY);
        // In a cluster, another node may serve the slot of the record: see `Cluster::record_client`.
        let writes_record = !matches!(self.target, Target::Node(_)) && !self.settings.only_reads();
        loop {
            tokio::select! {
                wake_up = open.wake_ups.recv() => match wake_up {
                    Some(WakeUp { push: Push { kind: PushKind::Message, data }, not_before }) => {
                        // A connection that has answered no request yet may be lost at once. Until then a waiter
                        // rather waits than holds a permit that it may not be able to release.
                        let not_before = Some(not_before).filter(|at| since <= *at);
                        if let Some(event) = read_wake_up(&data, not_before) {
                            report(event);
                        }
                    }
                    // The connection was lost.
                    None => return,
                    // The slot of the channel has moved to another node.
                    Some(WakeUp { push: Push { kind: PushKind::Unsubscribed, data }, .. }) => {
                        if let Some(Value::Text(channel)) = data.first() {
                            let channel = String::from_utf8_lossy(channel);
                            current.channels().remove(&*channel);
                            report(Event::Missed(slot_of(&channel)));
                        }
                    }
                    Some(_) => {}
                },
                // Another server is the primary now, whatever this one believes.
                () = &mut moved => {
                    open.socket.end(&RedisError::lost());
                    return;
                }
                _ = interval.tick(), if writes_record => {
                    // Only statistics need it, so a failure does not matter.
                    let record = client_record(&self.settings.namespace, client);
                    drop(open.socket.send(&record));
                }
            }
        }
    }
}

/// Reads a wake-up. For a semaphore it has these fields: id, time of the grant, fence, slot number (0: none), time to
/// claim the permit (0: ask first), name. If the fence is 0, there is no permit. Then a slot number of 1 means that another
/// client has released this id. A slot number of 0 means that the first waiter waits for a token, and the last number
/// is the time until the token comes.
fn read_wake_up(data: &[Value], not_before: Option<Moment>) -> Option<Event> {
    let [_, Value::Text(payload)] = data else { return None };
    let (id, name) = std::str::from_utf8(payload).ok()?.split_once(' ')?;
    if id == "lock" {
        return Some(Event::Unlocked(Name::normalised("key", name).ok()?));
    }
    let mut fields = name.splitn(5, ' ');
    let mut number = || fields.next()?.parse::<u64>().ok();
    let (_granted_at, fence, slot_number, claim) = (number()?, number()?, number()?, number()?);
    if fence == 0 {
        let name = Name::new("name", fields.next()?).ok()?;
        if slot_number == 1 {
            return Some(Event::Evicted(name, id.parse().ok()?));
        }
        return Some(Event::Token(name, Span::from_micros(claim)));
    }
    let held = Held {
        slot_number: NonZeroU32::new(u32::try_from(slot_number).unwrap_or(u32::MAX)),
        fence: Fence::new(fence),
        valid_for: Some(Span::from_micros(claim)),
    };
    let name = Name::new("name", fields.next()?).ok()?;
    let granted_at = not_before.filter(|_| claim > 0);
    Some(Event::Granted(name, id.parse().ok()?, granted_at.map(|at| (held, at))))
}
