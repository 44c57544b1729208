//! The connection to Redis: one, multiplexed, and replaced when it is lost or suspect.
//!
//! Waiting for the connection belongs here. Whoever asks is answered when the connection is up, or fails at its own
//! deadline; the engine's sender does not even ask while it is down. A new connection wakes everyone at once.

use std::io;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use redis::{Cmd, PushInfo, PushKind, RedisError, ServerErrorKind, Value};
use tokio::sync::watch;

use super::RedisSettings;
use super::connect::{Connection, Identity, lost, pack};
use super::errors::{code, translate};
use super::scripts::Scripts;
use super::server_clock::ServerClock;
use super::wire::Wire;
use crate::backend::{Destination, Event, Report};
use crate::clock::{Moment, Span, Time};
use crate::engine::foreign::event;
use crate::machine::Held;
use crate::name::Name;
use crate::{ClientId, Error, Fence};

#[cfg(test)]
mod tests;

/// How often this client says who it is.
const INTRODUCE_EVERY: Duration = Duration::from_secs(60);

/// How long to wait before connecting again, when that did not help at once.
const SHORTEST_DELAY: Duration = Duration::from_millis(10);
const LONGEST_DELAY: Duration = Duration::from_secs(1);

/// A connection that is kept up.
pub(super) struct Link {
    pub(super) settings: RedisSettings,
    pub(super) scripts: Scripts,
    state: watch::Sender<State>,
    /// Of the server that the connection leads to.
    clock: Mutex<Arc<ServerClock>>,
    /// The number of the last connection that is suspect.
    suspected: watch::Sender<u64>,
}

#[derive(Clone)]
enum State {
    Connecting,
    /// Connections are numbered, so that a suspicion of one does not fall on the next.
    Up(Arc<Wire>, u64),
    Down(Error),
}

impl Link {
    pub(super) fn new(settings: RedisSettings, scripts: Scripts) -> Arc<Self> {
        let (state, suspected) = (watch::Sender::new(State::Connecting), watch::Sender::new(0));
        Arc::new(Self { settings, scripts, state, clock: Mutex::default(), suspected })
    }

    /// The clock of the server that requests go to now. None if there is no connection.
    pub(super) fn clock(&self) -> Option<Arc<ServerClock>> {
        let up = matches!(&*self.state.borrow(), State::Up(..));
        up.then(|| self.clock.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// The connection is new, and the server may be another one.
    fn forget_clock(&self) -> Arc<ServerClock> {
        let clock = Arc::default();
        *self.clock.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&clock);
        clock
    }

    /// How the first attempt to connect ended.
    pub(super) async fn connected(&self) -> Result<(), Error> {
        let mut state = self.state.subscribe();
        let decided = state.wait_for(|state| !matches!(state, State::Connecting)).await;
        match &*decided.map_err(|_| Error::Closed)? {
            State::Down(error) => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// The connection, as soon as it is up. Fails only if the server refuses us.
    async fn connection(&self) -> Result<(Arc<Wire>, u64), Error> {
        let mut state = self.state.subscribe();
        loop {
            match &*state.borrow_and_update() {
                State::Up(connection, number) => return Ok((connection.clone(), *number)),
                State::Down(error) if !error.may_pass() => return Err(error.clone()),
                State::Down(_) | State::Connecting => {}
            }
            if state.changed().await.is_err() {
                return Err(Error::Closed);
            }
        }
    }

    /// The connection as it is now is suspect.
    pub(super) fn suspect_current(&self) {
        if let State::Up(_, number) = &*self.state.borrow() {
            self.suspect(*number);
        }
    }

    /// A connection is suspect. If it was replaced already, that says nothing about the one after it.
    fn suspect(&self, number: u64) {
        self.suspected.send_if_modified(|last| {
            let news = number > *last;
            *last = number.max(*last);
            news
        });
    }

    /// Sends commands in one go over the connection as it is now, and returns what each of them answered. Fails if there
    /// is none.
    pub(super) async fn request(
        &self,
        commands: Vec<Cmd>,
    ) -> Result<Vec<Result<Value, Error>>, Error> {
        let up = match &*self.state.borrow() {
            State::Up(connection, number) => Some((connection.clone(), *number)),
            _ => None,
        };
        match up {
            Some((connection, number)) => self.send_over(connection, number, commands).await,
            None => Err(self.silence(false)),
        }
    }

    /// Sends commands in one go as soon as the connection is up, and returns what each of them answered, or the first
    /// error.
    pub(super) async fn send(&self, commands: Vec<Cmd>) -> Result<Vec<Value>, Error> {
        self.send_each(commands).await?.into_iter().collect()
    }

    /// Sends commands that only ask, in one go, as soon as the connection is up, and returns what each of them answered. If
    /// the connection is lost meanwhile they are sent again. Fails when the answer time-out has passed.
    pub(super) async fn send_each(
        &self,
        commands: Vec<Cmd>,
    ) -> Result<Vec<Result<Value, Error>>, Error> {
        let ask = async {
            loop {
                let (connection, number) = self.connection().await?;
                match self.send_over(connection, number, commands.clone()).await {
                    Err(error) if error.may_pass() => {
                        let mut state = self.state.subscribe();
                        let replaced =
                            |state: &State| !matches!(state, State::Up(_, up) if *up == number);
                        let _ = state.wait_for(replaced).await;
                    }
                    answers => return answers,
                }
            }
        };
        let answers = tokio::time::timeout(self.settings.answer_timeout, ask).await;
        answers.unwrap_or_else(|_| Err(self.silence(true)))
    }

    /// Scripts that the server has forgotten are sent again in full, which also makes it know them from then on.
    async fn send_over(
        &self,
        wire: Arc<Wire>,
        number: u64,
        commands: Vec<Cmd>,
    ) -> Result<Vec<Result<Value, Error>>, Error> {
        let mut answers = self.answers(&wire, number, &commands).await?;
        let forgotten = |value: &Value| matches!(value, Value::ServerError(error) if error.kind() == Some(ServerErrorKind::NoScript));
        if answers.iter().any(forgotten) {
            let again = commands.iter().zip(&answers).filter(|(_, answer)| forgotten(answer));
            let again: Vec<_> = again.map(|(own, _)| self.scripts.spelled_out(own)).collect();
            let mut anew = self.answers(&wire, number, &again).await?.into_iter();
            for answer in answers.iter_mut().filter(|answer| forgotten(answer)) {
                *answer = anew.next().unwrap_or(Value::Nil);
            }
        }
        // An error inside an answer concerns a part of the request, and whoever asked for that part.
        let failed = |answer| match answer {
            Value::ServerError(error) => Err(self.translate(&error.into())),
            answer => Ok(answer),
        };
        Ok(answers.into_iter().map(failed).collect())
    }

    /// What the server said to a request.
    pub(super) fn translate(&self, error: &RedisError) -> Error {
        if code(error).0 == "READONLY" {
            // It was the primary when we connected: by now the address may lead to another server.
            self.suspect_current();
        }
        translate(&format!("asking {}", self.settings.address), error)
    }

    /// Writes the commands at its first poll.
    async fn answers(
        &self,
        wire: &Wire,
        number: u64,
        commands: &[Cmd],
    ) -> Result<Vec<Value>, Error> {
        let answers = wire.send(&pack(commands), commands.len()).await;
        // Whatever it was, it was not the server that said so: the outcome is unknown, and the connection may be half
        // open.
        answers.unwrap_or_else(|_| Err(lost())).map_err(|error| {
            self.suspect(number);
            match translate(&format!("asking {}", self.settings.address), &error) {
                error if error.may_pass() => error,
                error => Error::unavailable(error.to_string(), false, None),
            }
        })
    }

    fn silence(&self, timed_out: bool) -> Error {
        Error::unavailable(format!("asking {}", self.settings.address), timed_out, None)
    }

    /// Keeps the connection up, for as long as the engine's thread runs.
    pub(super) async fn keep_up(self: Arc<Self>, client: ClientId, report: Report) {
        let to = Destination::ONLY;
        let mut before: Option<Identity> = None;
        let mut number = 0;
        let mut delay = SHORTEST_DELAY;
        loop {
            let connecting = self.connect(client, before.as_ref());
            let connected = tokio::time::timeout(self.settings.connect_timeout, connecting).await;
            let connected = connected.unwrap_or_else(|_| {
                let what = format!("connecting to {}", self.settings.address);
                Err(Error::unavailable(what, true, None))
            });
            match connected {
                Ok(connection) => {
                    let since = Instant::now();
                    number += 1;
                    let clock = self.forget_clock();
                    self.state.send_replace(State::Up(connection.commands.clone(), number));
                    let again = before.replace(connection.identity.clone()).is_some();
                    let stragglers = connection.stragglers;
                    report(Event::Connected { to, again, stragglers });
                    self.serve(client, connection, (number, &clock), &report).await;
                    self.state.send_replace(State::Connecting);
                    let lost = format!("asking {}: connection lost", self.settings.address);
                    report(Event::Disconnected(to, Error::unavailable(lost, false, None)));
                    // One that is lost again and again is not replaced in a circle.
                    if since.elapsed() > LONGEST_DELAY {
                        delay = SHORTEST_DELAY;
                    } else {
                        tokio::time::sleep(delay).await;
                        delay = (delay * 2).min(LONGEST_DELAY);
                    }
                }
                Err(error) => {
                    event!(debug, %error, "no connection");
                    self.state.send_replace(State::Down(error.clone()));
                    report(Event::Disconnected(to, error));
                    tokio::time::sleep(delay).await;
                    delay = (delay * 2).min(LONGEST_DELAY);
                }
            }
        }
    }

    /// Until the connection is lost or suspect.
    async fn serve(
        &self,
        client: ClientId,
        mut live: Connection,
        (number, clock): (u64, &ServerClock),
        report: &Report,
    ) {
        let mut suspected = self.suspected.subscribe();
        let mut introduce = tokio::time::interval(INTRODUCE_EVERY);
        loop {
            tokio::select! {
                push = live.wake_ups.recv() => match push {
                    Some(PushInfo { kind: PushKind::Message, data }) => {
                        if let Some(event) = read_wake_up(&data, clock) {
                            report(event);
                        }
                    }
                    // Not always announced: the channel may just end.
                    None | Some(PushInfo { kind: PushKind::Disconnection, .. }) => return,
                    Some(_) => {}
                },
                // It was found that nothing is answered here: whoever waits for an answer is told.
                _ = suspected.wait_for(|suspect| *suspect >= number) => {
                    live.commands.end(&io::Error::from(io::ErrorKind::TimedOut).into());
                    return;
                }
                _ = introduce.tick() => {
                    // Only statistics need it: whether it got through does not matter.
                    let introduction = self.introduction(client);
                    drop(live.commands.send(&pack(&introduction), introduction.len()));
                }
            }
        }
    }
}

/// A wake-up for a semaphore: id, when it was granted, fence, slot number (0: none), the time to claim it (0: ask first), name.
/// Or, with a fence of 0, what the first in the queue waits for: the last number is the time until its token comes.
fn read_wake_up(data: &[Value], clock: &ServerClock) -> Option<Event> {
    let [_, Value::BulkString(payload)] = data else { return None };
    let (id, name) = std::str::from_utf8(payload).ok()?.split_once(' ')?;
    if id == "lock" {
        return Some(Event::Unlocked(Name::normalised("key", name).ok()?));
    }
    let mut fields = name.splitn(5, ' ');
    let mut number = || fields.next()?.parse::<u64>().ok();
    let (granted_at, fence, slot_number, claim) = (number()?, number()?, number()?, number()?);
    if fence == 0 {
        let name = Name::new("name", fields.next()?).ok()?;
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
