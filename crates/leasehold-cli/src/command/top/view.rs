//! The state that `top` shows, and how keys change it. It uses neither the terminal nor the store: the main loop performs each
//! [`Effect`].

use std::time::SystemTime;

use leasehold::Error;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::detail::Detail;
use super::dialog::{self, Dialog, Next};
use super::draw::utc;
use super::list::{self, Sort};
use crate::action::Action;
use crate::failure;
use crate::monitor::{Kind, Monitor, ReadFailure, Snapshot};

/// The action of the main loop after a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Effect {
    None,
    Quit,
    /// Ctrl-C, which has the effect of SIGINT.
    Interrupt,
    /// Ctrl-Z.
    Suspend,
    /// Read the name that was opened.
    Fetch,
    Act {
        name: String,
        action: Action,
    },
}

/// A name that was opened.
#[derive(Debug)]
pub(super) struct OpenName {
    pub(super) kind: Kind,
    pub(super) name: String,
    /// `None` before the first answer.
    pub(super) detail: Option<Detail>,
    /// Whether it was read at least once.
    pub(super) read: bool,
    /// Since when it cannot be read, and the message about it.
    pub(super) problem: Option<(SystemTime, String)>,
    /// The position of the selected entry.
    pub(super) at: usize,
    /// The id of the selected entry, so that the selection stays with it when entries are added or removed.
    selected: Option<String>,
}

impl OpenName {
    fn new(kind: Kind, name: String) -> Self {
        Self { kind, name, detail: None, read: false, problem: None, at: 0, selected: None }
    }
}

/// The result of an action, or a hint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Status {
    /// Not escaped.
    pub(super) text: String,
    pub(super) failed: bool,
}

/// The state: see the module.
#[derive(Debug)]
pub(super) struct View {
    pub(super) monitor: Monitor,
    pub(super) kind: Kind,
    sorts: [Sort; 3],
    pub(super) filter: String,
    pub(super) enters_filter: bool,
    /// Positions in the snapshot.
    pub(super) rows: Vec<usize>,
    pub(super) at: usize,
    selected: Option<String>,
    pub(super) open: Option<OpenName>,
    pub(super) dialog: Option<Dialog>,
    pub(super) status: Option<Status>,
    /// The semaphores that are being drained from here.
    draining: Option<String>,
    /// For `show --watch`: the kinds of the one name. It is read-only.
    pub(super) only: Option<Vec<Kind>>,
    /// How many rows fit on the screen, as drawn last.
    pub(super) page: usize,
}

const KINDS: [Kind; 3] = [Kind::Semaphore, Kind::Lock, Kind::Pool];

impl View {
    pub(super) fn new(monitor: Monitor) -> Self {
        let mut view = Self {
            monitor,
            kind: Kind::Semaphore,
            sorts: KINDS.map(|kind| Sort::all(kind)[0]),
            filter: String::new(),
            enters_filter: false,
            rows: Vec::new(),
            at: 0,
            selected: None,
            open: None,
            dialog: None,
            status: None,
            draining: None,
            only: None,
            page: 1,
        };
        view.arrange();
        view
    }

    /// Creates the view of one name.
    pub(super) fn only(name: &str, kinds: Vec<Kind>) -> Self {
        let mut view = Self::new(Monitor::default());
        view.open = kinds.first().map(|kind| OpenName::new(*kind, name.to_owned()));
        view.only = Some(kinds);
        view
    }

    pub(super) fn sort(&self) -> Sort {
        self.sorts[place(self.kind)]
    }

    pub(super) fn record(&mut self, read: Result<Snapshot, ReadFailure>) {
        self.monitor.record(read);
        self.arrange();
        let drained = self.draining.as_ref().filter(|name| {
            let snapshot = self.monitor.latest();
            snapshot.is_some_and(|all| all.semaphore(name).is_none_or(|one| one.held == 0))
        });
        if let Some(name) = drained {
            let text = format!("{name} is drained: nothing is held, and it stays paused");
            self.status = Some(Status { text, failed: false });
            self.draining = None;
        }
    }

    /// Adds the details of a name, which may no longer be the open one.
    pub(super) fn record_detail(
        &mut self,
        kind: Kind,
        name: &str,
        read: Result<Option<Detail>, Error>,
    ) {
        let Some(open) = self.open.as_mut().filter(|open| open.kind == kind && open.name == name)
        else {
            return;
        };
        match read {
            Ok(detail) => {
                (open.detail, open.read, open.problem) = (detail, true, None);
                let entries = open.detail.as_ref().map(Detail::entries).unwrap_or_default();
                let same = |id: &String| entries.iter().position(|entry| entry.id == *id);
                open.at = open.selected.as_ref().and_then(same).unwrap_or(open.at);
                open.at = open.at.min(entries.len().saturating_sub(1));
                open.selected = entries.get(open.at).map(|entry| entry.id.clone());
            }
            Err(error) => {
                let since = open.problem.as_ref().map_or_else(SystemTime::now, |(since, _)| *since);
                let what = match &error {
                    Error::Unavailable { .. } => "store unreachable",
                    // The name belongs to another program and is not valid for this library, or permission is missing.
                    _ => "the name cannot be read",
                };
                open.problem = Some((
                    since,
                    format!("{what} since {}: {}", utc(since), failure::text(&error)),
                ));
                if open.detail.is_none() && kind == Kind::Semaphore {
                    let stats = self.monitor.latest().and_then(|all| all.semaphore(name));
                    open.detail = stats.cloned().map(Box::new).map(Detail::Semaphore);
                }
            }
        }
    }

    pub(super) fn record_action(&mut self, name: &str, action: &Action, problem: Option<&str>) {
        self.status = Some(match problem {
            None => Status { text: format!("{name}: {}", action.done()), failed: false },
            Some(problem) => Status { text: format!("{name}: {problem}"), failed: true },
        });
        if problem.is_none() && matches!(action, Action::Drain { .. }) {
            self.draining = Some(name.to_owned());
        }
    }

    /// Sorts and filters. The selection stays with its name.
    fn arrange(&mut self) {
        self.rows = list::rows(&self.monitor, self.kind, self.sort(), &self.filter);
        let same = self.selected.as_ref().and_then(|name| {
            let snapshot = self.monitor.latest()?;
            self.rows.iter().position(|at| list::name(snapshot, self.kind, *at) == name)
        });
        self.select(same.unwrap_or(self.at));
    }

    fn select(&mut self, at: usize) {
        self.at = at.min(self.rows.len().saturating_sub(1));
        self.selected = self.row_name(self.at);
    }

    fn row_name(&self, at: usize) -> Option<String> {
        let (snapshot, row) = (self.monitor.latest()?, self.rows.get(at)?);
        Some(list::name(snapshot, self.kind, *row).to_owned())
    }

    /// Whether the selected row is a paused semaphore.
    pub(super) fn is_paused(&self) -> bool {
        let row = self.rows.get(self.at).filter(|_| self.kind == Kind::Semaphore);
        let one = row.and_then(|row| self.monitor.latest()?.semaphores.get(*row));
        one.is_some_and(|one| one.paused.is_some())
    }

    /// Returns the name to which actions apply.
    fn subject(&self) -> Option<(Kind, String)> {
        match &self.open {
            Some(open) => Some((open.kind, open.name.clone())),
            None => Some((self.kind, self.row_name(self.at)?)),
        }
    }

    pub(super) fn key(&mut self, key: KeyEvent) -> Effect {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            match key.code {
                KeyCode::Char('c') => return Effect::Interrupt,
                KeyCode::Char('z') => return Effect::Suspend,
                _ => {}
            }
        }
        if let Some(dialog) = &mut self.dialog {
            match dialog.key(key) {
                Next::Stays => {}
                Next::Closes => self.dialog = None,
                Next::Becomes(dialog) => self.dialog = Some(dialog),
                Next::Acts { name, action } => {
                    self.dialog = None;
                    return Effect::Act { name, action };
                }
            }
            return Effect::None;
        }
        if self.enters_filter {
            match key.code {
                KeyCode::Enter => self.enters_filter = false,
                KeyCode::Esc => (self.enters_filter, self.filter) = (false, String::new()),
                _ => dialog::edit(&mut self.filter, key),
            }
            self.arrange();
            return Effect::None;
        }
        self.status = None;
        match key.code {
            KeyCode::Char('q') => return Effect::Quit,
            KeyCode::Char('?') => {
                self.dialog = Some(Dialog::Help { from: 0, only: self.only.is_some() });
            }
            KeyCode::Esc => return self.back(),
            KeyCode::Tab => return self.next_kind(),
            KeyCode::Up | KeyCode::Char('k') => self.go(|at, _| at.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.go(|at, _| at + 1),
            KeyCode::PageUp => self.go(usize::saturating_sub),
            KeyCode::PageDown => self.go(|at, page| at + page),
            KeyCode::Home => self.go(|_, _| 0),
            KeyCode::End => self.go(|_, _| usize::MAX),
            _ if self.only.is_some() => {}
            KeyCode::Enter if self.open.is_none() => return self.enter(),
            KeyCode::Char(digit @ '1'..='3') if self.open.is_none() => {
                self.switch(KINDS[digit as usize - '1' as usize]);
            }
            KeyCode::Char('s') if self.open.is_none() => {
                self.sorts[place(self.kind)] = self.sort().next(self.kind);
                self.arrange();
            }
            KeyCode::Char('/') if self.open.is_none() => self.enters_filter = true,
            KeyCode::Char('x') => self.open_release_dialog(),
            KeyCode::Char(letter @ ('p' | 'r' | 'l' | 'd')) => self.open_dialog(letter),
            _ => {}
        }
        Effect::None
    }

    /// Moves the selection. `to` gets the position and the page size, and returns the new position.
    fn go(&mut self, to: impl FnOnce(usize, usize) -> usize) {
        let page = self.page.max(1);
        match &mut self.open {
            None => self.select(to(self.at, page)),
            Some(open) => {
                let entries = open.detail.as_ref().map(Detail::entries).unwrap_or_default();
                open.at = to(open.at, page).min(entries.len().saturating_sub(1));
                open.selected = entries.get(open.at).map(|entry| entry.id.clone());
            }
        }
    }

    fn back(&mut self) -> Effect {
        if self.only.is_some() {
            return Effect::Quit;
        }
        if self.open.take().is_none() {
            self.filter.clear();
            self.arrange();
        }
        Effect::None
    }

    fn enter(&mut self) -> Effect {
        let Some((kind, name)) = self.subject() else { return Effect::None };
        self.open = Some(OpenName::new(kind, name));
        Effect::Fetch
    }

    fn next_kind(&mut self) -> Effect {
        let following = |kinds: &[Kind], kind| {
            let at = kinds.iter().position(|one| *one == kind).unwrap_or_default();
            kinds[(at + 1) % kinds.len()]
        };
        match (&self.only, &self.open) {
            (Some(kinds), Some(open)) if kinds.len() > 1 => {
                self.open = Some(OpenName::new(following(kinds, open.kind), open.name.clone()));
                return Effect::Fetch;
            }
            (None, None) => self.switch(following(&KINDS, self.kind)),
            _ => {}
        }
        Effect::None
    }

    fn switch(&mut self, kind: Kind) {
        (self.kind, self.at, self.selected) = (kind, 0, None);
        self.arrange();
    }

    /// Opens the dialog of an action: its input, if it needs any, and its confirmation.
    fn open_dialog(&mut self, letter: char) {
        let Some((kind, name)) = self.subject() else { return };
        if kind != Kind::Semaphore {
            let text = format!("a {} cannot be paused and has no limit here", kind.as_str());
            self.status = Some(Status { text, failed: true });
            return;
        }
        let stats = match self.open.as_ref().and_then(|open| open.detail.as_ref()) {
            Some(Detail::Semaphore(stats)) => Some(&**stats),
            _ => self.monitor.latest().and_then(|snapshot| snapshot.semaphore(&name)),
        };
        let pinned = stats.is_some_and(|stats| stats.pinned.is_some());
        self.dialog = Some(match letter {
            'p' => Dialog::Reason { name, text: String::new(), drains: false },
            'd' => Dialog::Reason { name, text: String::new(), drains: true },
            'l' => Dialog::Limit { name, text: String::new(), pins: pinned, pinned, problem: None },
            _ => Dialog::Confirm { name, action: Action::Resume, who: None },
        });
    }

    fn open_release_dialog(&mut self) {
        let Some(open) = &self.open else {
            let text = "open the name with Enter, and select the holder to release".to_owned();
            self.status = Some(Status { text, failed: false });
            return;
        };
        let entries = open.detail.as_ref().map(Detail::entries).unwrap_or_default();
        if let Some((action, who)) = entries.into_iter().nth(open.at).map(|entry| entry.release) {
            let name = open.name.clone();
            self.dialog = Some(Dialog::Confirm { name, action, who: Some(who) });
        }
    }
}

pub(super) fn place(kind: Kind) -> usize {
    KINDS.iter().position(|one| *one == kind).unwrap_or_default()
}

#[cfg(test)]
mod tests;
