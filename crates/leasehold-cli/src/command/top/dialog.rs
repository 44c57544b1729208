//! Dialogs on top of the view: help, text input and confirmations.

use leasehold::Semaphore;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use crate::action::Action;

/// The longest reason that can be entered.
const LONGEST_TEXT: usize = 200;

/// A dialog about one name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Dialog {
    /// The first line that is shown. `only`: the help of `show --watch`, which has few keys.
    Help {
        from: usize,
        only: bool,
    },
    Reason {
        name: String,
        text: String,
        drains: bool,
    },
    Limit {
        name: String,
        text: String,
        pins: bool,
        pinned: bool,
        problem: Option<&'static str>,
    },
    Confirm {
        name: String,
        action: Action,
        who: Option<String>,
    },
}

/// The result of a key in a dialog.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Next {
    Stays,
    Closes,
    Becomes(Dialog),
    Acts { name: String, action: Action },
}

impl Dialog {
    pub(super) fn key(&mut self, key: KeyEvent) -> Next {
        if key.code == KeyCode::Esc {
            return Next::Closes;
        }
        match self {
            Self::Help { from, .. } => match key.code {
                KeyCode::Down | KeyCode::Char('j') | KeyCode::PageDown => *from += 1,
                KeyCode::Up | KeyCode::Char('k') | KeyCode::PageUp => {
                    *from = from.saturating_sub(1);
                }
                _ => return Next::Closes,
            },
            Self::Reason { name, text, drains } => {
                if key.code == KeyCode::Enter {
                    let reason = Some(text.trim().to_owned()).filter(|text| !text.is_empty());
                    let action =
                        if *drains { Action::Drain { reason } } else { Action::Pause { reason } };
                    return confirm(name, action);
                }
                edit(text, key);
            }
            Self::Limit { name, text, pins, pinned, problem } => {
                *problem = None;
                match key.code {
                    KeyCode::Enter => match text.parse::<u32>() {
                        Ok(capacity) if (1..Semaphore::UNLIMITED).contains(&capacity) => {
                            let action = if *pins {
                                Action::Pin { capacity }
                            } else {
                                Action::Limit { capacity }
                            };
                            return confirm(name, action);
                        }
                        _ => *problem = Some("enter a number from 1 to 4294967294"),
                    },
                    KeyCode::Tab | KeyCode::Char('p') => *pins = !*pins,
                    KeyCode::Char('u') if *pinned => return confirm(name, Action::Unpin),
                    KeyCode::Char('u') => *problem = Some("the limit is not pinned"),
                    KeyCode::Char(c) if !c.is_ascii_digit() => {}
                    _ if text.len() < 10 || key.code == KeyCode::Backspace => edit(text, key),
                    _ => {}
                }
            }
            Self::Confirm { name, action, .. } => match key.code {
                KeyCode::Char('y') => {
                    return Next::Acts { name: name.clone(), action: action.clone() };
                }
                KeyCode::Char('n' | 'q') => return Next::Closes,
                _ => {}
            },
        }
        Next::Stays
    }
}

fn confirm(name: &str, action: Action) -> Next {
    Next::Becomes(Dialog::Confirm { name: name.to_owned(), action, who: None })
}

/// Enters text. Control characters cannot be entered.
pub(super) fn edit(text: &mut String, key: KeyEvent) {
    let plain = !key.modifiers.intersects(KeyModifiers::CONTROL | KeyModifiers::ALT);
    match key.code {
        KeyCode::Backspace => drop(text.pop()),
        KeyCode::Char('u') if key.modifiers.contains(KeyModifiers::CONTROL) => text.clear(),
        KeyCode::Char(c) if plain && !c.is_control() && text.len() < LONGEST_TEXT => text.push(c),
        _ => {}
    }
}
