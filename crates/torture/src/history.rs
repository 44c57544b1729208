//! The events that a worker writes, one line for each.
//!
//! A line is written with one system call, just after the event or just before it. A process that is killed loses at
//! most the end of its last line. Every line begins with the time when it was written. Where an answer counts, the line
//! also has the time before the request. The answer was true at some instant in between, and the checker never
//! concludes anything more precise from it.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::str::{FromStr, SplitAsciiWhitespace};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock::{self, Micros};

/// One acquisition, numbered by its process.
pub type OpId = u64;

/// An event, as the process that writes it sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The process starts, with these client ids.
    Begin { clients: String },
    /// It is about to ask for a permit, lock or pool lease, which the store will list with this id. `-` means that
    /// the id is not known.
    Ask { op: OpId, thing: String, id: String },
    /// The store answered, to a query sent at `since`, that the acquisition waits.
    Queue { op: OpId, since: Micros, position: u64 },
    /// It was granted. Other programs have no fences for semaphores. A slot of 0 means none.
    Grant { op: OpId, fence: Option<u64>, slot: u32, weight: u32 },
    /// `check()` was called at `since` and succeeded.
    Hold { op: OpId, since: Micros },
    /// It is about to release: from here on it does not believe that it holds.
    Ending { op: OpId },
    /// It drops the guard and keeps only the id.
    Detach { op: OpId },
    /// The acquisition has ended, for this process.
    End { op: OpId, how: How },
    /// An id that is known to have been released was released again, with this answer.
    Stale { thing: String, released: bool },
    /// The protected record was read with this fence.
    Read { op: OpId, fence: u64, version: u64, sum: u64 },
    /// The record is about to be written: `sum` follows `before`.
    Intend { op: OpId, fence: u64, version: u64, before: u64, sum: u64 },
    /// The record was written, at some instant after `since`.
    Wrote { op: OpId, since: Micros, version: u64 },
    /// The record refused this fence because of a newer one, `floor`.
    Refused { op: OpId, fence: u64, floor: u64 },
    /// The record had changed to this version, although the fence was valid.
    Conflict { op: OpId, fence: u64, version: u64 },
    /// The process did not run between `since` and now.
    Gap { since: Micros },
    /// The process is running.
    Tick,
    /// The process ends as it should.
    Done,
}

/// How an acquisition ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// Released, and the store has confirmed it.
    Released,
    /// The guard was dropped, so it is released in the background.
    Dropped,
    /// The worker was notified of the loss.
    Lost,
    /// The future was dropped.
    Cancelled,
    /// The acquire timed out.
    TimedOut,
    /// Nothing was free, and it did not wait.
    Full,
    /// The store was unreachable, or the outcome is unknown.
    Failed,
    /// The library returned an error that should be impossible.
    Internal,
}

const HOWS: [(How, &str); 8] = [
    (How::Released, "released"),
    (How::Dropped, "dropped"),
    (How::Lost, "lost"),
    (How::Cancelled, "cancelled"),
    (How::TimedOut, "timed-out"),
    (How::Full, "full"),
    (How::Failed, "failed"),
    (How::Internal, "internal"),
];

impl How {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        HOWS.iter().find(|(how, _)| *how == self).map_or("", |(_, text)| text)
    }
}

/// One line of a history.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Line {
    pub at: Micros,
    pub event: Event,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.at)?;
        match &self.event {
            Event::Begin { clients } => write!(f, "begin {clients}"),
            Event::Ask { op, thing, id } => write!(f, "ask {op} {thing} {id}"),
            Event::Queue { op, since, position } => write!(f, "queue {op} {since} {position}"),
            Event::Grant { op, fence, slot, weight } => {
                let fence = fence.map_or_else(|| "-".to_owned(), |fence| fence.to_string());
                write!(f, "grant {op} {fence} {slot} {weight}")
            }
            Event::Hold { op, since } => write!(f, "hold {op} {since}"),
            Event::Ending { op } => write!(f, "ending {op}"),
            Event::Detach { op } => write!(f, "detach {op}"),
            Event::End { op, how } => write!(f, "end {op} {}", how.as_str()),
            Event::Stale { thing, released } => write!(f, "stale {thing} {released}"),
            Event::Read { op, fence, version, sum } => {
                write!(f, "read {op} {fence} {version} {sum}")
            }
            Event::Intend { op, fence, version, before, sum } => {
                write!(f, "intend {op} {fence} {version} {before} {sum}")
            }
            Event::Wrote { op, since, version } => write!(f, "wrote {op} {since} {version}"),
            Event::Refused { op, fence, floor } => write!(f, "refused {op} {fence} {floor}"),
            Event::Conflict { op, fence, version } => write!(f, "conflict {op} {fence} {version}"),
            Event::Gap { since } => write!(f, "gap {since}"),
            Event::Tick => write!(f, "tick"),
            Event::Done => write!(f, "done"),
        }
    }
}

impl FromStr for Line {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = Words(text.split_ascii_whitespace());
        let at = words.number()?;
        let event = match words.next()? {
            "begin" => Event::Begin { clients: words.text()? },
            "ask" => Event::Ask { op: words.number()?, thing: words.text()?, id: words.text()? },
            "queue" => Event::Queue {
                op: words.number()?,
                since: words.number()?,
                position: words.number()?,
            },
            "grant" => {
                let (op, fence) = (words.number()?, words.next()?);
                let fence = if fence == "-" { None } else { Some(parse(fence)?) };
                let (slot, weight) = (parse(words.next()?)?, parse(words.next()?)?);
                Event::Grant { op, fence, slot, weight }
            }
            "hold" => Event::Hold { op: words.number()?, since: words.number()? },
            "ending" => Event::Ending { op: words.number()? },
            "detach" => Event::Detach { op: words.number()? },
            "end" => {
                let (op, how) = (words.number()?, words.next()?);
                let how = HOWS.iter().find(|(_, text)| *text == how);
                Event::End { op, how: how.ok_or("unknown end")?.0 }
            }
            "stale" => Event::Stale { thing: words.text()?, released: parse(words.next()?)? },
            "read" => Event::Read {
                op: words.number()?,
                fence: words.number()?,
                version: words.number()?,
                sum: words.number()?,
            },
            "intend" => Event::Intend {
                op: words.number()?,
                fence: words.number()?,
                version: words.number()?,
                before: words.number()?,
                sum: words.number()?,
            },
            "wrote" => Event::Wrote {
                op: words.number()?,
                since: words.number()?,
                version: words.number()?,
            },
            "refused" => Event::Refused {
                op: words.number()?,
                fence: words.number()?,
                floor: words.number()?,
            },
            "conflict" => Event::Conflict {
                op: words.number()?,
                fence: words.number()?,
                version: words.number()?,
            },
            "gap" => Event::Gap { since: words.number()? },
            "tick" => Event::Tick,
            "done" => Event::Done,
            other => return Err(format!("{other:?} is not an event")),
        };
        Ok(Self { at, event })
    }
}

struct Words<'a>(SplitAsciiWhitespace<'a>);

impl<'a> Words<'a> {
    fn next(&mut self) -> Result<&'a str, String> {
        self.0.next().ok_or_else(|| "the line ends too soon".to_owned())
    }

    fn text(&mut self) -> Result<String, String> {
        self.next().map(str::to_owned)
    }

    fn number(&mut self) -> Result<u64, String> {
        parse(self.next()?)
    }
}

fn parse<T: FromStr>(word: &str) -> Result<T, String> {
    word.parse().map_err(|_| format!("{word:?} cannot be read"))
}

/// The file to which a process writes its history.
#[derive(Debug)]
pub struct HistoryFile {
    file: File,
    last_op: AtomicU64,
}

impl HistoryFile {
    /// # Errors
    /// An [`io::Error`] if the file cannot be opened.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self { file, last_op: AtomicU64::new(0) })
    }

    pub fn next_op(&self) -> OpId {
        self.last_op.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Writes an event with the current time. Returns that time.
    ///
    /// # Panics
    /// If the line cannot be written: an incomplete history proves nothing.
    pub fn note(&self, event: Event) -> Micros {
        let line = Line { at: clock::now(), event };
        // In one call, appended to the file, so that lines of several threads do not mix.
        (&self.file).write_all(format!("{line}\n").as_bytes()).expect("room for the history");
        line.at
    }
}

/// Reads the history of a process. If the process was killed, its last line may be incomplete, and is skipped.
///
/// # Errors
/// A message if the file cannot be read, or a line is not a history line.
pub fn read(path: &Path) -> Result<Vec<Line>, String> {
    let text =
        std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let lines = whole
        .lines()
        .map(|line| line.parse().map_err(|error| format!("{}: {line:?}: {error}", path.display())));
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_read_back() {
        let (op, since, fence, version) = (7, 12, 1_790_000_000_000_001, 3);
        let (thing, id) = ("solo".to_owned(), "7Vd3kQ0aZx1-42".to_owned());
        let events = [
            Event::Begin { clients: "a,b".into() },
            Event::Ask { op, thing: thing.clone(), id },
            Event::Queue { op, since, position: 0 },
            Event::Grant { op, fence: Some(fence), slot: 1, weight: 1 },
            Event::Grant { op, fence: None, slot: 2, weight: 3 },
            Event::Hold { op, since },
            Event::Ending { op },
            Event::Detach { op },
            Event::Stale { thing, released: false },
            Event::Read { op, fence, version, sum: 1 },
            Event::Intend { op, fence, version, before: 1, sum: u64::MAX },
            Event::Wrote { op, since, version },
            Event::Refused { op, fence, floor: 9 },
            Event::Conflict { op, fence, version },
            Event::Gap { since },
            Event::Tick,
            Event::Done,
        ];
        let ends = HOWS.map(|(how, _)| Event::End { op, how });
        for event in events.into_iter().chain(ends) {
            let line = Line { at: 34, event };
            assert_eq!(line.to_string().parse(), Ok(line));
        }
        assert!("34 grant 7".parse::<Line>().is_err());
        assert!("34 slept 7".parse::<Line>().is_err());
    }
}
