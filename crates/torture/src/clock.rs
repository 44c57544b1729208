//! The one clock of a run.
//!
//! All processes of a run are on one host, and `CLOCK_BOOTTIME` is the kernel's own: what two of them read can be
//! compared to the microsecond. It neither stops nor steps.
//!
//! Wall clocks do, if `scripts/torture` gave such to this run that can be set (see `crates/stepped-clock`): one to the servers, the
//! other program and the driver itself, and one to all others.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// Microseconds.
pub type Micros = u64;

pub const MILLISECOND: Micros = 1000;
pub const SECOND: Micros = 1_000_000;

/// Since the host was started.
#[must_use]
pub fn now() -> Micros {
    let time = clock_gettime(ClockId::Boottime);
    let part = |number: i64| u64::try_from(number).unwrap_or_default();
    part(time.tv_sec) * SECOND + part(time.tv_nsec) / 1000
}

/// By how much the wall clock is ahead of ours, before anybody set it: Redis counts on that one, and the fence of a semaphore
/// is a reading of it.
#[must_use]
pub fn wall_offset() -> Micros {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let set = Wall::own().and_then(|wall| wall.ahead().ok()).unwrap_or_default();
    micros(wall).saturating_sub(now()).saturating_add_signed(-set)
}

/// What tells a process where its wall clock is.
pub const WALL: &str = "STEPPED_CLOCK";

/// A wall clock that can be set.
#[derive(Debug)]
pub struct Wall {
    pub path: PathBuf,
    file: File,
}

impl Wall {
    /// Our own, which is also that of every process that is not given another. None if it is the host's.
    #[must_use]
    pub fn own() -> Option<Self> {
        Self::open(std::env::var_os(WALL)?.into())
    }

    /// One more, for others, if there can be any.
    #[must_use]
    pub fn another(path: &Path) -> Option<Self> {
        Self::own()?;
        std::fs::write(path, [0; 8]).ok()?;
        Self::open(path.to_owned())
    }

    fn open(path: PathBuf) -> Option<Self> {
        let file = OpenOptions::new().read(true).write(true).open(&path).ok()?;
        Some(Self { path, file })
    }

    /// By how many microseconds it is ahead of the host's.
    fn ahead(&self) -> io::Result<i64> {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, 0)?;
        Ok(i64::from_ne_bytes(bytes))
    }

    /// Sets it forward, or back, for everybody who has it at once.
    ///
    /// # Errors
    /// If the file cannot be read or written.
    pub fn step(&self, by: i64) -> io::Result<()> {
        self.file.write_all_at(&self.ahead()?.saturating_add(by).to_ne_bytes(), 0)
    }
}

#[must_use]
pub fn micros(duration: Duration) -> Micros {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
