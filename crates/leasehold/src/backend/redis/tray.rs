//! Group commit across names: what several names have to ask goes in one script, while the one before is on its way.
//!
//! A name sends its batches one or two at a time (see the engine's outbox), but a thousand names would send a
//! thousand scripts, each of which costs more than the little that it does. Here they wait together, no longer than it
//! takes until one of two scripts comes back. Renewals do not wait: they are sent by themselves.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redis::Value;
use tokio::sync::oneshot;

use super::link::Link;
use super::scripts::Keys;
use crate::Error;
use crate::machine::Command;

/// How many scripts of one client are on their way at most.
const IN_FLIGHT: u8 = 2;
/// How many names one script serves at most, and about how many ids: the server serves nobody else meanwhile.
const MAX_NAMES: usize = 64;
const MAX_IDS: usize = 256;

/// What waits to be sent.
#[derive(Default)]
pub(super) struct Tray {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Part>,
    in_flight: u8,
}

/// What one name has to ask.
struct Part {
    keys: Arc<Keys>,
    commands: Vec<Command>,
    answer: oneshot::Sender<Result<Value, Error>>,
}

/// Asks, together with others. Only on the engine's thread.
pub(super) async fn ask(
    link: &Arc<Link>,
    keys: &Arc<Keys>,
    commands: Vec<Command>,
) -> Result<Value, Error> {
    let (answer, answered) = oneshot::channel();
    let deliver = {
        let mut state = link.tray.state();
        state.waiting.push_back(Part { keys: keys.clone(), commands, answer });
        let deliver = state.in_flight < IN_FLIGHT;
        state.in_flight += u8::from(deliver);
        deliver
    };
    if deliver {
        tokio::spawn(self::deliver(link.clone()));
    }
    answered.await.unwrap_or_else(|_| Err(Error::internal("a script was not sent")))
}

/// Sends what waits, until nothing does.
async fn deliver(link: Arc<Link>) {
    loop {
        let Some(parts) = link.tray.take() else { return };
        let asked: Vec<_> = parts.iter().map(|part| (&*part.keys, &part.commands[..])).collect();
        let answers = link.send(vec![link.scripts.apply(&asked)]).await;
        let answers = answers.map(|mut answers| answers.pop().unwrap_or(Value::Nil));
        match answers {
            Ok(Value::Array(answers)) if answers.len() == parts.len() => {
                for (part, answer) in parts.into_iter().zip(answers) {
                    let answer = answer.extract_error().map_err(|error| link.translate(&error));
                    let _ = part.answer.send(answer);
                }
            }
            other => {
                let error =
                    other.err().unwrap_or_else(|| Error::internal("a script answered nonsense"));
                for part in parts {
                    let _ = part.answer.send(Err(error.clone()));
                }
            }
        }
    }
}

impl Tray {
    fn take(&self) -> Option<Vec<Part>> {
        self.state().take()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// As much as one script can take. None if nothing waits: then one script less is on its way.
    fn take(&mut self) -> Option<Vec<Part>> {
        let (mut parts, mut ids) = (Vec::new(), 0);
        while parts.len() < MAX_NAMES
            && let Some(part) = self.waiting.front()
            && (parts.is_empty() || ids + part.commands.len() <= MAX_IDS)
        {
            ids += part.commands.len();
            // What nobody waits for any more is not sent.
            parts.extend(self.waiting.pop_front().filter(|part| !part.answer.is_closed()));
        }
        if parts.is_empty() && self.waiting.is_empty() {
            self.in_flight -= 1;
            return None;
        }
        Some(parts)
    }
}
