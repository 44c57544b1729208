//! A contender's process, seen from the bench. `serve` is the other end for contenders in Rust.

mod gate;
mod serve;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

pub(crate) use serve::serve;

use crate::contender::Contender;
use crate::host;

const START: Duration = Duration::from_secs(15);

/// A process that speaks the line protocol. It is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Driver {
    contender: &'static str,
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

/// The outcome of one wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    /// The number of the waiter within its process.
    pub(crate) waiter: u64,
    pub(crate) requested: u64,
    /// `None` if it still waited at the end.
    pub(crate) granted: Option<u64>,
}

impl Driver {
    /// Starts the process and waits until it is connected.
    pub(crate) fn start(contender: &Contender, url: &str) -> Result<Self, String> {
        let mut command = contender.driver(url)?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(|why| format!("does not start: {why}"))?;
        let input = child.stdin.take().expect("it was asked for");
        let output = BufReader::new(child.stdout.take().expect("it was asked for"));
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let mut driver = Self { contender: contender.name, child, input, lines };
        driver.answer(START)?;
        Ok(driver)
    }

    /// Returns the name of the contender.
    pub(crate) fn contender(&self) -> &'static str {
        self.contender
    }

    /// Sends a request without waiting for its answer.
    pub(crate) fn send(&mut self, request: &str) -> Result<(), String> {
        writeln!(self.input, "{request}").map_err(|why| format!("has ended: {why}"))
    }

    /// Sends a request and waits for the numbers in its answer.
    pub(crate) fn call(&mut self, request: &str, time_limit: Duration) -> Result<Vec<u64>, String> {
        self.send(request)?;
        self.answer(time_limit)
    }

    /// Returns the numbers in the next answer.
    pub(crate) fn answer(&mut self, time_limit: Duration) -> Result<Vec<u64>, String> {
        let line = self.line(time_limit)?;
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("ok", rest) => numbers(rest),
            ("error", why) => Err(why.to_owned()),
            _ => Err(format!("answered {line:?}")),
        }
    }

    /// Returns the waits in the answer to `contend`.
    pub(crate) fn waits(&mut self, time_limit: Duration) -> Result<Vec<Wait>, String> {
        let many = self.answer(time_limit)?.first().copied().unwrap_or(0);
        (0..many)
            .map(|_| match numbers(&self.line(time_limit)?)?[..] {
                [waiter, requested, 0, _] => Ok(Wait { waiter, requested, granted: None }),
                [waiter, requested, granted, _] => {
                    Ok(Wait { waiter, requested, granted: Some(granted) })
                }
                ref other => Err(format!("reported a wait as {other:?}")),
            })
            .collect()
    }

    /// Returns the next line.
    pub(crate) fn line(&mut self, time_limit: Duration) -> Result<String, String> {
        self.lines.recv_timeout(time_limit).map_err(|why| match why {
            RecvTimeoutError::Timeout => format!("did not answer within {time_limit:?}"),
            RecvTimeoutError::Disconnected => "has ended".to_owned(),
        })
    }

    /// Returns the next line, if there already is one.
    pub(crate) fn line_by_now(&mut self) -> Option<String> {
        self.lines.try_recv().ok()
    }

    /// Returns its resident memory, in bytes.
    pub(crate) fn resident(&self) -> Result<u64, String> {
        host::resident(self.child.id()).ok_or_else(|| "has ended".to_owned())
    }

    /// Kills the process with SIGKILL, and returns the time of the kill.
    pub(crate) fn kill(mut self) -> u64 {
        let at = host::nanos();
        // It may already have ended, which is fine.
        let _ = self.child.kill();
        at
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn numbers(text: &str) -> Result<Vec<u64>, String> {
    let parse = |word: &str| word.parse().map_err(|_| format!("answered {text:?}"));
    text.split_whitespace().map(parse).collect()
}
