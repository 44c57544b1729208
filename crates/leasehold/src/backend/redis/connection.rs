//! The connection to one server. Its socket is replaced when it is lost or suspect.
//!
//! Waiting for the connection happens here. A query waits until the connection is up, or fails at its own deadline. The
//! engine's sender sends nothing while the connection is down. A new connection resumes both at once.

use std::collections::HashSet;
use std::io;
use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::RedisSettings;
use super::command::RedisCommand;
use super::connect::{Identity, OpenSocket, client_record, received};
use super::deployment::ServerSettings;
use super::errors::{RedisError, ServerError, translate, translate_server};
use super::scripts::Scripts;
use super::sentinel::{Sentinels, moved_from};
use super::server_clock::ServerClock;
use super::slots::slot_of;
use super::socket::Socket;
use super::value::{Push, PushKind, Value};
use crate::backend::{Destination, Event, Report};
use crate::callbacks::event;
use crate::clock::{Moment, Span, Time};
use crate::machine::Held;
use crate::name::Name;
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
    state: watch::Sender<State>,
    /// The clock of the server that the connection leads to.
    clock: Mutex<Arc<ServerClock>>,
    /// The number of the last socket that is suspect.
    suspected: watch::Sender<u64>,
    /// Whether an ASK-redirected command to this node is overdue.
    is_late: AtomicBool,
}

#[derive(Clone)]
enum State {
    Connecting,
    Up(CurrentSocket),
    Down(Error),
}

/// The socket that is in use.
#[derive(Clone)]
struct CurrentSocket {
    socket: Arc<Socket>,
    /// Sockets are numbered, so that a suspicion against one does not affect its successor.
    number: u64,
    /// In a cluster, the channels that the connection has subscribed to.
    channels: Arc<Mutex<HashSet<String>>>,
}

impl CurrentSocket {
    /// Whether the server violated a limit of this client, and this is the error of the request that it answered.
    fn was_violated_by(&self, error: &Error) -> bool {
        let Error::Unavailable { what, .. } = error else { return false };
        self.socket.violation().is_some_and(|why| what.ends_with(&why))
    }

    fn channels(&self) -> MutexGuard<'_, HashSet<String>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
            Target::Node(info) => info.address(),
        };
        let (state, suspected) = (watch::Sender::new(State::Connecting), watch::Sender::new(0));
        let (clock, is_late) = (Mutex::default(), AtomicBool::new(false));
        Arc::new(Self { settings, scripts, target, to, address, state, clock, suspected, is_late })
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
        matches!(&*self.state.borrow(), State::Up(_))
    }

    /// Returns why the server refuses us, if retrying does not help.
    pub(super) fn refusal(&self) -> Option<Error> {
        match &*self.state.borrow() {
            State::Down(error) if !error.is_transient() => Some(error.clone()),
            _ => None,
        }
    }

    fn current(&self) -> Option<CurrentSocket> {
        match &*self.state.borrow() {
            State::Up(current) => Some(current.clone()),
            _ => None,
        }
    }

    /// Returns the clock of the server that requests go to now. `None` if there is no connection.
    pub(super) fn clock(&self) -> Option<Arc<ServerClock>> {
        self.is_up().then(|| self.clock.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Starts a new clock, because after reconnecting the server may be another one.
    fn forget_clock(&self) -> Arc<ServerClock> {
        let clock = Arc::default();
        *self.clock.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&clock);
        clock
    }

    /// Waits for the first attempt to connect, and returns its result.
    pub(super) async fn connected(&self) -> Result<(), Error> {
        let mut state = self.state.subscribe();
        let decided = state.wait_for(|state| !matches!(state, State::Connecting)).await;
        match &*decided.map_err(|_| Error::Closed)? {
            State::Down(error) => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Waits until the connection is up. Fails only if the server refuses us in a way that no retry can fix.
    async fn wait_until_up(&self) -> Result<CurrentSocket, Error> {
        let mut state = self.state.subscribe();
        loop {
            match &*state.borrow_and_update() {
                State::Up(current) => return Ok(current.clone()),
                State::Down(error) if !error.is_transient() => return Err(error.clone()),
                State::Down(_) | State::Connecting => {}
            }
            if state.changed().await.is_err() {
                return Err(Error::Closed);
            }
        }
    }

    /// Closes the connection, because the server is no longer used.
    pub(super) fn leave(&self) {
        let what = format!("request to {}: the server is no longer a primary", self.address);
        let left = State::Down(Error::unavailable(what, false, None));
        if let State::Up(current) = self.state.send_replace(left) {
            current.socket.end(&RedisError::lost());
        }
    }

    /// Marks the current connection as suspect.
    pub(super) fn suspect_current(&self) {
        if let Some(current) = self.current() {
            self.suspect(current.number);
        }
    }

    /// Marks a connection as suspect. If it was already replaced, its successor is not affected.
    fn suspect(&self, number: u64) {
        self.suspected.send_if_modified(|last| {
            let news = number > *last;
            *last = number.max(*last);
            news
        });
    }

    /// Sends commands in one pipeline over the current connection, and returns the answer to each. Fails if there is no
    /// connection.
    pub(super) async fn request(
        &self,
        commands: &[RedisCommand],
    ) -> Result<Vec<CommandReply>, Error> {
        match self.current() {
            Some(current) => self.send_over(&current, commands).await,
            None => Err(self.silence(false)),
        }
    }

    /// Like [`request`](Self::request), but first subscribes the connection to these channels. The server handles the
    /// subscriptions before the commands, so a waiter that the commands enqueue can be woken from the start. Returns
    /// the answers to the commands, and the channels that were refused.
    pub(super) async fn request_listening(
        &self,
        channels: impl Iterator<Item = &String>,
        commands: &[RedisCommand],
    ) -> Result<(Vec<CommandReply>, Vec<(String, ServerError)>), Error> {
        let Some(current) = self.current() else { return Err(self.silence(false)) };
        let new: Vec<_> = {
            let mut known = current.channels();
            channels.filter(|channel| known.insert((*channel).clone())).cloned().collect()
        };
        if new.is_empty() {
            return Ok((self.send_over(&current, commands).await?, Vec::new()));
        }
        // One command per channel: channels of two slots in one command are an error.
        let subscribe = |channel| RedisCommand::new("SSUBSCRIBE").arg(channel);
        let all: Vec<_> = new.iter().map(subscribe).chain(commands.iter().cloned()).collect();
        let mut subscribed = self.send_over(&current, &all).await?;
        let answers = subscribed.split_off(new.len());
        let refused = new.into_iter().zip(subscribed);
        let refused: Vec<_> =
            refused.filter_map(|(channel, reply)| Some((channel, reply.err()?))).collect();
        for (channel, _) in &refused {
            current.channels().remove(channel);
        }
        Ok((answers, refused))
    }

    /// Sends commands in one pipeline as soon as the connection is up. Returns the answer to each, or the first error.
    pub(super) async fn send(&self, commands: Vec<RedisCommand>) -> Result<Vec<Value>, Error> {
        self.send_each(commands).await?.into_iter().collect()
    }

    /// Sends read-only commands in one pipeline as soon as the connection is up, and returns the answer to each. If the
    /// connection is lost meanwhile, they are sent again. Fails when the answer time-out has passed.
    pub(super) async fn send_each(
        &self,
        commands: Vec<RedisCommand>,
    ) -> Result<Vec<Result<Value, Error>>, Error> {
        let ask = async {
            loop {
                let current = self.wait_until_up().await?;
                match self.send_over(&current, &commands).await {
                    // The server would answer the same commands in the same way.
                    Err(error) if current.was_violated_by(&error) => return Err(error),
                    Err(error) if error.is_transient() => {
                        let mut state = self.state.subscribe();
                        let replaced = |state: &State| !matches!(state, State::Up(other) if other.number == current.number);
                        let _ = state.wait_for(replaced).await;
                    }
                    answers => return Ok(self.translated(answers?)),
                }
            }
        };
        let answers = tokio::time::timeout(self.settings.answer_timeout, ask).await;
        answers.unwrap_or_else(|_| Err(self.silence_with_cause()))
    }

    /// Sends commands and returns the answers. Scripts that the server does not have are sent again in full, which also
    /// loads them.
    async fn send_over(
        &self,
        current: &CurrentSocket,
        commands: &[RedisCommand],
    ) -> Result<Vec<CommandReply>, Error> {
        let mut answers = self.answers(current, commands).await?;
        let forgotten =
            |value: &Value| matches!(value, Value::Error(error) if error.code() == "NOSCRIPT");
        if answers.iter().any(forgotten) {
            let again = commands.iter().zip(&answers).filter(|(_, answer)| forgotten(answer));
            let again: Vec<_> = again.map(|(call, _)| self.scripts.in_full(call)).collect();
            let mut anew = self.answers(current, &again).await?.into_iter();
            for answer in answers.iter_mut().filter(|answer| forgotten(answer)) {
                *answer = anew.next().unwrap_or(Value::Nil);
            }
        }
        // An error inside an answer concerns only its own part of the request.
        Ok(answers.into_iter().map(Value::checked).collect())
    }

    fn translated(&self, answers: Vec<CommandReply>) -> Vec<Result<Value, Error>> {
        answers.into_iter().map(|reply| reply.map_err(|error| self.translate(&error))).collect()
    }

    /// Maps an error that the server returned to a request.
    pub(super) fn translate(&self, error: &ServerError) -> Error {
        if error.code() == "READONLY" {
            // It was the primary when we connected. The address may lead to another server by now.
            self.suspect_current();
        }
        translate_server(&format!("request to {}", self.address), error)
    }

    /// Sends the commands at the first poll, and returns their answers.
    async fn answers(
        &self,
        current: &CurrentSocket,
        commands: &[RedisCommand],
    ) -> Result<Vec<Value>, Error> {
        // This error did not come from the server. So the outcome is unknown, and the connection may be half open.
        received(current.socket.send(commands)).await.map_err(|error| {
            self.suspect(current.number);
            match translate(&format!("request to {}", self.address), &error) {
                error if error.is_transient() => error,
                error => Error::unavailable(error.to_string(), false, None),
            }
        })
    }

    fn silence(&self, timed_out: bool) -> Error {
        Error::unavailable(format!("request to {}", self.address), timed_out, None)
    }

    /// The error of a query that was not answered in time. Its source says why there is no connection.
    fn silence_with_cause(&self) -> Error {
        let what = format!("request to {}", self.address);
        let cause = match &*self.state.borrow() {
            State::Down(Error::Unavailable { source, .. }) => source.clone(),
            _ => None,
        };
        Error::unavailable(what, true, cause)
    }

    /// Keeps the connection up for as long as the engine's thread runs.
    pub(super) async fn keep_up(self: Arc<Self>, client: ClientId, report: Report) {
        let to = self.to;
        let mut before: Option<Identity> = None;
        let mut number = 0;
        let mut delay = SHORTEST_DELAY;
        loop {
            let connecting = self.connect(client, before.as_ref());
            let connected = tokio::time::timeout(self.settings.connect_timeout, connecting).await;
            let connected = connected.unwrap_or_else(|_| {
                let what = format!("connecting to {}", self.address);
                Err(Error::unavailable(what, true, None))
            });
            match connected {
                Ok(open) => {
                    let since = Instant::now();
                    number += 1;
                    let clock = self.forget_clock();
                    let (socket, channels) = (open.socket.clone(), Arc::default());
                    let current = CurrentSocket { socket, number, channels };
                    self.state.send_replace(State::Up(current.clone()));
                    let before = before.replace(open.identity.clone());
                    let other =
                        before.as_ref().is_some_and(|before| before.differs(&open.identity));
                    let (again, stragglers) = (before.is_some(), open.stragglers);
                    report(Event::Connected { to, again, other, stragglers });
                    self.serve(client, open, (&current, &clock), &report).await;
                    self.state.send_replace(State::Connecting);
                    let violation = current.socket.violation();
                    let why = violation.as_deref().unwrap_or("connection lost");
                    let lost = format!("request to {}: {why}", self.address);
                    report(Event::Disconnected(to, Error::unavailable(lost, false, None)));
                    // A connection that is lost soon after it was made must not be replaced in a tight loop, nor one
                    // to a server that violates a limit.
                    if since.elapsed() > LONGEST_DELAY && violation.is_none() {
                        delay = SHORTEST_DELAY;
                    } else {
                        self.pause(delay).await;
                        delay = (delay * 2).min(LONGEST_DELAY);
                    }
                }
                Err(error) => {
                    event!(debug, %error, "the connection failed");
                    self.state.send_replace(State::Down(error.clone()));
                    report(Event::Disconnected(to, error));
                    self.pause(delay).await;
                    delay = (delay * 2).min(LONGEST_DELAY);
                }
            }
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

    /// Handles wake-ups until the connection is lost or suspect.
    async fn serve(
        &self,
        client: ClientId,
        mut open: OpenSocket,
        (current, clock): (&CurrentSocket, &ServerClock),
        report: &Report,
    ) {
        let mut suspected = self.suspected.subscribe();
        let info = open.info.clone();
        let mut moved = pin!(moved_from(&info, open.announced.take()));
        let mut interval = tokio::time::interval(RECORD_CLIENT_EVERY);
        // In a cluster, another node may serve the slot of the record: see `Cluster::record_client`.
        let writes_record = !matches!(self.target, Target::Node(_)) && !self.settings.only_reads();
        loop {
            tokio::select! {
                push = open.wake_ups.recv() => match push {
                    Some(Push { kind: PushKind::Message, data }) => {
                        if let Some(event) = read_wake_up(&data, clock) {
                            report(event);
                        }
                    }
                    // The connection was lost.
                    None => return,
                    // The slot of the channel has moved to another node.
                    Some(Push { kind: PushKind::Unsubscribed, data }) => {
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
                // The server does not answer over this connection, so every request in flight fails now.
                _ = suspected.wait_for(|suspect| *suspect >= current.number) => {
                    open.socket.end(&io::ErrorKind::TimedOut.into());
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
fn read_wake_up(data: &[Value], clock: &ServerClock) -> Option<Event> {
    let [_, Value::Text(payload)] = data else { return None };
    let (id, name) = std::str::from_utf8(payload).ok()?.split_once(' ')?;
    if id == "lock" {
        return Some(Event::Unlocked(Name::normalised("key", name).ok()?));
    }
    let mut fields = name.splitn(5, ' ');
    let mut number = || fields.next()?.parse::<u64>().ok();
    let (granted_at, fence, slot_number, claim) = (number()?, number()?, number()?, number()?);
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
    let granted_at = clock.not_before(Time::from_micros(granted_at), Moment::now());
    let granted_at = granted_at.filter(|_| claim > 0);
    let name = Name::new("name", fields.next()?).ok()?;
    Some(Event::Granted(name, id.parse().ok()?, granted_at.map(|at| (held, at))))
}
