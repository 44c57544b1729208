//! `leasehold top`: shows semaphores, locks and pools on a terminal as they change; and `show --watch`, the same for
//! one name.
//!
//! One loop receives keys, signals and answers of the store, and draws after each. The store is read and changed in
//! tasks, so a slow store never delays a key. Keys are read by a thread, because crossterm blocks to read them.

mod detail;
mod dialog;
mod draw;
mod grid;
mod list;
mod terminal;
mod text;
mod view;

use std::io::{self, IsTerminal};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use leasehold::{Client, Error};
use nix::sys::signal::Signal;
use ratatui::crossterm::event::{self, Event, KeyEvent, KeyEventKind};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};

use self::detail::Detail;
use self::draw::Appearance;
use self::terminal::Screen;
use self::text::Charset;
use self::view::{Effect, View};
use super::limit::who;
use crate::action::Action;
use crate::args::{StoreArgs, TopArgs};
use crate::failure::{Failure, by_signal};
use crate::monitor::{Kind, Monitor, ReadFailure, Snapshot};
use crate::output;
use crate::signals::{Blocked, Signals};
use crate::store::{self, Store};

/// How often the clock on the screen is redrawn.
const TICK: Duration = Duration::from_secs(1);

pub(crate) fn run(arguments: &TopArgs) -> Result<u8, Failure> {
    require_terminal("top", "leasehold ls --json")?;
    session(&arguments.store, async |client| {
        let (read, rest) = Monitor::read(client).await;
        let mut monitor = Monitor::default();
        monitor.record(Ok(read?));
        Ok((View::new(monitor), Instant::now() + rest))
    })
}

/// `show --watch`.
pub(super) fn watch(store: &StoreArgs, name: &str) -> Result<u8, Failure> {
    require_terminal("show --watch", "leasehold show --json")?;
    session(store, async |client| {
        let (mut kinds, mut refused) = (Vec::new(), None);
        for kind in [Kind::Semaphore, Kind::Lock, Kind::Pool] {
            match Detail::fetch(client, kind, name).await.0 {
                Ok(found) => kinds.extend(found.map(|_| kind)),
                Err(
                    error @ (Error::InvalidArgument { .. }
                    | Error::ForeignData { .. }
                    | Error::Denied { .. }),
                ) => {
                    refused.get_or_insert(error);
                }
                Err(error) => return Err(error.into()),
            }
        }
        if kinds.is_empty() {
            return Err(match refused {
                Some(error) => error.into(),
                None => super::show::nothing(name),
            });
        }
        Ok((View::only(name, kinds), Instant::now()))
    })
}

/// Fails with advice if stdout is not a suitable terminal.
fn require_terminal(what: &str, for_scripts: &str) -> Result<(), Failure> {
    let missing = [("stdin", io::stdin().is_terminal()), ("stdout", io::stdout().is_terminal())];
    if let Some((stream, _)) = missing.into_iter().rev().find(|(_, is_terminal)| !is_terminal) {
        let problem = format!("{what} needs a terminal; {stream} is not one");
        return Err(Failure::usage(format!("{problem}. For scripts: {for_scripts}")));
    }
    let term = std::env::var("TERM").unwrap_or_default();
    if term == "dumb" || term.is_empty() {
        let problem = format!("{what} needs a terminal that can move its cursor");
        let advice = format!("TERM is {term:?}: set it, or use {for_scripts}");
        return Err(Failure::usage(format!("{problem}; {advice}")));
    }
    Ok(())
}

/// Opens the store, and then the screen: an error at the start is printed as in any other command.
fn session(
    store: &StoreArgs,
    begin: impl AsyncFnOnce(&Client) -> Result<(View, Instant), Failure>,
) -> Result<u8, Failure> {
    let no_signals = |error| Failure::internal("signal handlers could not be installed", error);
    let blocked = Blocked::new().map_err(no_signals)?;
    store::block_on(async {
        let mut signals = blocked.listen().map_err(no_signals)?;
        let store = Store::new(store)?;
        let opened = async {
            let client = store.open_read_only().await?;
            let started = begin(&client).await?;
            Ok::<_, Failure>((client, started))
        };
        let (client, (view, next_poll)) = tokio::select! {
            signal = signals.next_to_end() => return Ok(by_signal(signal as i32)),
            opened = opened => opened?,
        };
        let charset = Charset::of_locale();
        let appearance = Appearance { charset, colour: output::in_colour(), place: store.place() };
        let next_detail = Some(Instant::now()).filter(|_| view.open.is_some());
        let next_poll = Some(next_poll).filter(|_| view.only.is_none());
        let tasks = JoinSet::new();
        let store = Arc::new(store);
        Session { client, store, view, appearance, tasks, next_poll, next_detail }
            .run(signals)
            .await
    })
}

/// The result of a task.
enum Answer {
    Read { read: Result<Snapshot, ReadFailure>, rest: Duration },
    Detail { kind: Kind, name: String, read: Result<Option<Detail>, Error>, rest: Duration },
    Acted { name: String, action: Action, done: Result<(), Failure> },
}

struct Session {
    /// A read-only client.
    client: Client,
    store: Arc<Store>,
    view: View,
    appearance: Appearance,
    tasks: JoinSet<Answer>,
    /// `None` while a task reads, and always in `show --watch`.
    next_poll: Option<Instant>,
    /// `None` while a task reads, and while no name is open.
    next_detail: Option<Instant>,
}

impl Session {
    /// A closed terminal causes an error and SIGHUP, in any order. Both end with the same exit code.
    async fn run(self, signals: Signals) -> Result<u8, Failure> {
        match self.work(signals).await {
            Ok(code) => Ok(code),
            Err(_) if terminal::is_closed() => Ok(by_signal(Signal::SIGHUP as i32)),
            Err(error) => Err(Failure::internal("the terminal cannot be used", error)),
        }
    }

    async fn work(mut self, mut signals: Signals) -> io::Result<u8> {
        let mut screen = Screen::open()?;
        let mut keys = keys()?;
        loop {
            self.start_reads();
            if !screen.is_entered() {
                // The process was continued in the background, and may be in the foreground by now.
                screen.enter()?;
            }
            screen.draw(|frame| draw::draw(frame, &mut self.view, &self.appearance))?;
            let tick = Instant::now() + TICK;
            let due = [self.next_poll, self.next_detail].into_iter().flatten().min();
            let due = due.map_or(tick, |due| due.min(tick));
            tokio::select! {
                key = keys.recv() => match key {
                    Some(Ok(key)) => match self.view.key(key) {
                        Effect::None => {}
                        Effect::Quit => return Ok(0),
                        Effect::Interrupt => return Ok(by_signal(Signal::SIGINT as i32)),
                        Effect::Suspend => suspend(&mut screen),
                        Effect::Fetch => self.next_detail = Some(Instant::now()),
                        Effect::Act { name, action } => self.act(name, action),
                    },
                    Some(Err(error)) => return Err(error),
                    None => return Err(io::ErrorKind::UnexpectedEof.into()),
                },
                signal = signals.next() => match signal {
                    Signal::SIGTSTP => suspend(&mut screen),
                    // Also after SIGSTOP, when a shell has changed the modes.
                    Signal::SIGCONT => screen.enter()?,
                    Signal::SIGWINCH | Signal::SIGCHLD => {}
                    signal => return Ok(by_signal(signal as i32)),
                },
                Some(answer) = self.tasks.join_next(), if !self.tasks.is_empty() => {
                    self.take_in(answer);
                }
                () = sleep_until(due) => {}
            }
        }
    }

    /// Starts the reads that are due.
    fn start_reads(&mut self) {
        let now = Instant::now();
        if self.view.open.is_none() {
            self.next_detail = None;
        }
        if self.next_poll.is_some_and(|due| due <= now) {
            self.next_poll = None;
            let client = self.client.clone();
            self.tasks.spawn(async move {
                let (read, rest) = Monitor::read(&client).await;
                Answer::Read { read, rest }
            });
        }
        if let Some(open) = &self.view.open
            && self.next_detail.is_some_and(|due| due <= now)
        {
            self.next_detail = None;
            let (client, kind, name) = (self.client.clone(), open.kind, open.name.clone());
            self.tasks.spawn(async move {
                let (read, rest) = Detail::fetch(&client, kind, &name).await;
                Answer::Detail { kind, name, read, rest }
            });
        }
    }

    fn act(&mut self, name: String, action: Action) {
        let store = self.store.clone();
        self.tasks.spawn(async move {
            let done = action.perform_in(&store, &name, &who()).await;
            Answer::Acted { name, action, done }
        });
    }

    fn take_in(&mut self, answer: Result<Answer, JoinError>) {
        let now = Instant::now();
        match answer {
            Ok(Answer::Read { read, rest }) => {
                self.view.record(read);
                self.next_poll = Some(now + rest);
            }
            Ok(Answer::Detail { kind, name, read, rest }) => {
                self.view.record_detail(kind, &name, read);
                self.next_detail = Some(now + rest);
            }
            Ok(Answer::Acted { name, action, done }) => {
                let problem = done.err();
                let problem = problem.as_ref().map(Failure::message);
                self.view.record_action(&name, &action, problem);
                // Show its effect at once. A read that is in progress may have started before it.
                self.next_poll = self.next_poll.map(|_| now);
                self.next_detail = self.next_detail.map(|_| now);
            }
            Err(error) => {
                if let Ok(panic) = error.try_into_panic() {
                    resume_unwind(panic);
                }
            }
        }
    }
}

/// Stops the process as Ctrl-Z does, and draws again when it is continued.
fn suspend(screen: &mut Screen) {
    screen.leave();
    Signals::suspend();
}

/// Sends the keys that are pressed. Ends with an error if the terminal cannot be read.
fn keys() -> io::Result<UnboundedReceiver<io::Result<KeyEvent>>> {
    let (sender, receiver) = unbounded_channel();
    std::thread::Builder::new().name("keys".to_owned()).spawn(move || {
        loop {
            let key = match event::read() {
                Ok(Event::Key(key)) if key.kind == KeyEventKind::Press => Ok(key),
                Ok(_) => continue,
                Err(error) => Err(error),
            };
            let failed = key.is_err();
            if sender.send(key).is_err() || failed {
                return;
            }
        }
    })?;
    Ok(receiver)
}
