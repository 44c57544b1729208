//! What locks protect: a record that refuses whoever comes too late.
//!
//! It is a file of one line, `version floor sum`. Whoever reads or writes it names its fence. The record remembers the
//! newest fence it has seen, its floor, and refuses older ones, also to readers: a holder that was paused after it
//! read must not write once its successor has read. So between reading and writing the version cannot change under a
//! holder whose fence is good; if it has, an update would be lost, and that is said instead (`Step::Conflict`). `sum` is a
//! checksum over all versions before.
//!
//! The file is locked only for one step. From reading to writing nothing protects the record but the lock that is being
//! tested, and the fence.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// What the record says.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct State {
    pub version: u64,
    pub floor: u64,
    pub sum: u64,
}

/// What came of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    Done(State),
    /// A newer fence was here before.
    Refused {
        floor: u64,
    },
    /// Somebody with a fence that is not newer has written since: this would undo it.
    Conflict {
        version: u64,
    },
    /// Somebody has locked the file; perhaps he was stopped.
    Busy,
}

/// Two numbers of 20 digits, a sum in hexadecimal, two blanks and a line end.
const LENGTH: usize = 20 + 1 + 20 + 1 + 16 + 1;

#[derive(Debug)]
pub struct Record {
    file: File,
}

impl Record {
    /// # Errors
    /// If there is no such directory.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file =
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path);
        Ok(Self { file: file? })
    }

    /// # Errors
    /// If the file cannot be read, or is no record.
    pub fn read(&self, fence: u64) -> io::Result<Step> {
        self.step(|state| {
            if fence < state.floor {
                return Err(Step::Refused { floor: state.floor });
            }
            Ok(State { floor: fence, ..state })
        })
    }

    /// Writes the version that follows the one that was read.
    ///
    /// # Errors
    /// If the file cannot be written, or is no record.
    pub fn write(&self, fence: u64, version: u64, sum: u64) -> io::Result<Step> {
        self.step(|state| {
            if fence < state.floor {
                return Err(Step::Refused { floor: state.floor });
            }
            if state.version + 1 != version {
                return Err(Step::Conflict { version: state.version });
            }
            Ok(State { version, floor: fence, sum })
        })
    }

    /// What whoever runs the resource does after the store has lost its data, and with them the count of the fences.
    ///
    /// # Errors
    /// If the file cannot be written, or is no record.
    pub fn forget_fences(&self) -> io::Result<Step> {
        self.step(|state| Ok(State { floor: 0, ..state }))
    }

    /// # Errors
    /// If the file cannot be read, or is no record.
    pub fn look(&self) -> io::Result<State> {
        let mut line = [0; LENGTH];
        match self.file.read_exact_at(&mut line, 0) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(State::default()),
            read => read.and_then(|()| {
                parse(&line).ok_or_else(|| io::Error::other("the record cannot be read"))
            }),
        }
    }

    fn step(&self, change: impl FnOnce(State) -> Result<State, Step>) -> io::Result<Step> {
        if self.file.try_lock().is_err() {
            return Ok(Step::Busy);
        }
        let done = self.look().and_then(|state| match change(state) {
            Ok(new) => {
                let line = format!("{:020} {:020} {:016x}\n", new.version, new.floor, new.sum);
                // One call of a few bytes: a process that is killed has made it or not.
                self.file.write_all_at(line.as_bytes(), 0)?;
                Ok(Step::Done(new))
            }
            Err(instead) => Ok(instead),
        });
        self.file.unlock()?;
        done
    }
}

fn parse(line: &[u8]) -> Option<State> {
    let text = std::str::from_utf8(line).ok()?;
    let mut words = text.split_ascii_whitespace();
    Some(State {
        version: words.next()?.parse().ok()?,
        floor: words.next()?.parse().ok()?,
        sum: u64::from_str_radix(words.next()?, 16).ok()?,
    })
}

/// The checksum of a version, its fence, and all before it.
#[must_use]
pub fn sum(before: u64, version: u64, fence: u64) -> u64 {
    // FNV-1a: nothing secret, and the same in every process.
    let bytes = [before, version, fence].into_iter().flat_map(u64::to_le_bytes);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_comes_too_late_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        let (early, late) = (Record::open(&path).unwrap(), Record::open(&path).unwrap());
        assert_eq!(early.read(1).unwrap(), Step::Done(State { floor: 1, ..State::default() }));
        let Step::Done(read) = late.read(2).unwrap() else { panic!("nobody was here before") };
        // The second has read; the first may not write under it any more.
        assert_eq!(early.write(1, 1, sum(0, 1, 1)).unwrap(), Step::Refused { floor: 2 });
        let new = sum(read.sum, 1, 2);
        let written = State { version: 1, floor: 2, sum: new };
        assert_eq!(late.write(2, 1, new).unwrap(), Step::Done(written));
        assert_eq!(early.look().unwrap(), written);
        // The same fence twice: the second would undo what the first wrote.
        assert_eq!(late.write(2, 1, new).unwrap(), Step::Conflict { version: 1 });
        late.forget_fences().unwrap();
        assert_eq!(early.read(1).unwrap(), Step::Done(State { floor: 1, ..written }));
    }

    #[test]
    fn a_record_that_somebody_has_locked_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        let (one, other) = (Record::open(&path).unwrap(), Record::open(&path).unwrap());
        one.file.lock().unwrap();
        assert_eq!(other.read(1).unwrap(), Step::Busy);
    }
}
