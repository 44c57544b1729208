//! The record that locks protect. It refuses a holder that comes too late.
//!
//! It is a file of one line, `version floor sum`. A holder names its fence whenever it reads or writes the record. The
//! record remembers the newest fence that it has seen, its *floor*, and refuses older ones, even for reads: a holder
//! that was paused after its read must not write once its successor has read. So the version cannot change between the
//! read and the write of a holder whose fence is valid. If it has changed, the write would lose an update, and the
//! result is `Step::Conflict` instead. `sum` is a checksum over all earlier versions.
//!
//! The file is locked only for one step. Between the read and the write, only the lock that is being tested, and the
//! fence, protect the record.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The contents of the record.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Contents {
    pub version: u64,
    pub floor: u64,
    pub sum: u64,
}

/// The result of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    Done(Contents),
    /// A newer fence was used before.
    Refused {
        floor: u64,
    },
    /// Another holder, whose fence is not newer, has written since the read. This write would undo that one.
    Conflict {
        version: u64,
    },
    /// Another process has locked the file. That process may have been stopped.
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
    /// An [`io::Error`] if the file cannot be opened.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file =
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path);
        Ok(Self { file: file? })
    }

    /// # Errors
    /// An [`io::Error`] if the file cannot be read, or is not a record.
    pub fn read(&self, fence: u64) -> io::Result<Step> {
        self.step(|state| {
            if fence < state.floor {
                return Err(Step::Refused { floor: state.floor });
            }
            Ok(Contents { floor: fence, ..state })
        })
    }

    /// Writes the version that follows the one that was read.
    ///
    /// # Errors
    /// An [`io::Error`] if the file cannot be written, or is not a record.
    pub fn write(&self, fence: u64, version: u64, sum: u64) -> io::Result<Step> {
        self.step(|state| {
            if fence < state.floor {
                return Err(Step::Refused { floor: state.floor });
            }
            if state.version + 1 != version {
                return Err(Step::Conflict { version: state.version });
            }
            Ok(Contents { version, floor: fence, sum })
        })
    }

    /// Resets the floor. The operator of a resource does this after the store has lost its data, and with it the
    /// counter of the fences.
    ///
    /// # Errors
    /// An [`io::Error`] if the file cannot be written, or is not a record.
    pub fn forget_fences(&self) -> io::Result<Step> {
        self.step(|state| Ok(Contents { floor: 0, ..state }))
    }

    /// # Errors
    /// An [`io::Error`] if the file cannot be read, or is not a record.
    pub fn contents(&self) -> io::Result<Contents> {
        let mut line = [0; LENGTH];
        match self.file.read_exact_at(&mut line, 0) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(Contents::default()),
            read => read.and_then(|()| {
                parse(&line).ok_or_else(|| io::Error::other("the record cannot be read"))
            }),
        }
    }

    fn step(&self, change: impl FnOnce(Contents) -> Result<Contents, Step>) -> io::Result<Step> {
        if self.file.try_lock().is_err() {
            return Ok(Step::Busy);
        }
        let done = self.contents().and_then(|state| match change(state) {
            Ok(new) => {
                let line = format!("{:020} {:020} {:016x}\n", new.version, new.floor, new.sum);
                // One call with a few bytes: a process that is killed has either made it or not.
                self.file.write_all_at(line.as_bytes(), 0)?;
                Ok(Step::Done(new))
            }
            Err(instead) => Ok(instead),
        });
        self.file.unlock()?;
        done
    }
}

fn parse(line: &[u8]) -> Option<Contents> {
    let text = std::str::from_utf8(line).ok()?;
    let mut words = text.split_ascii_whitespace();
    Some(Contents {
        version: words.next()?.parse().ok()?,
        floor: words.next()?.parse().ok()?,
        sum: u64::from_str_radix(words.next()?, 16).ok()?,
    })
}

/// Returns the checksum of a version, its fence, and all earlier versions.
#[must_use]
pub fn sum(before: u64, version: u64, fence: u64) -> u64 {
    // FNV-1a: not for secrets, and the same in every process.
    let bytes = [before, version, fence].into_iter().flat_map(u64::to_le_bytes);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_with_an_older_fence_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        let (early, late) = (Record::open(&path).unwrap(), Record::open(&path).unwrap());
        assert_eq!(
            early.read(1).unwrap(),
            Step::Done(Contents { floor: 1, ..Contents::default() })
        );
        let Step::Done(read) = late.read(2).unwrap() else { panic!("no newer fence was used") };
        // The second holder has read, so the first may not write any more.
        assert_eq!(early.write(1, 1, sum(0, 1, 1)).unwrap(), Step::Refused { floor: 2 });
        let new = sum(read.sum, 1, 2);
        let written = Contents { version: 1, floor: 2, sum: new };
        assert_eq!(late.write(2, 1, new).unwrap(), Step::Done(written));
        assert_eq!(early.contents().unwrap(), written);
        // The same fence twice: the second write would undo the first.
        assert_eq!(late.write(2, 1, new).unwrap(), Step::Conflict { version: 1 });
        late.forget_fences().unwrap();
        assert_eq!(early.read(1).unwrap(), Step::Done(Contents { floor: 1, ..written }));
    }

    #[test]
    fn a_locked_record_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        let (one, other) = (Record::open(&path).unwrap(), Record::open(&path).unwrap());
        one.file.lock().unwrap();
        assert_eq!(other.read(1).unwrap(), Step::Busy);
    }
}
