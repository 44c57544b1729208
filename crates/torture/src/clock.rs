//! The clock of a run.
//!
//! All processes of a run are on one host, and `CLOCK_BOOTTIME` is the kernel's own clock. So readings of two processes
//! can be compared to the microsecond. This clock neither stops nor steps.
//!
//! Wall clocks can step, if `scripts/torture` started this run with clocks that can be set (see
//! `crates/stepped-clock`). One such clock is used by the servers, the other program and the driver itself, and another
//! one by all other processes.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// A time or a duration in microseconds.
pub type Micros = u64;

pub const MILLISECOND: Micros = 1000;
pub const SECOND: Micros = 1_000_000;

/// Returns the time since the host was started.
#[must_use]
pub fn now() -> Micros {
    let time = clock_gettime(ClockId::Boottime);
    let part = |number: i64| u64::try_from(number).unwrap_or_default();
    part(time.tv_sec) * SECOND + part(time.tv_nsec) / 1000
}

/// Returns by how much the host's wall clock is ahead of [`now`], before any step. Redis counts by the wall clock, and
/// the fence of a semaphore is a reading of it.
#[must_use]
pub fn wall_offset() -> Micros {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let set = Wall::of_this_process().and_then(|wall| wall.ahead().ok()).unwrap_or_default();
    micros(wall).saturating_sub(now()).saturating_add_signed(-set)
}

/// The environment variable that names the file of a process's wall clock.
pub const WALL: &str = "STEPPED_CLOCK";

/// A wall clock that can be set.
#[derive(Debug)]
pub struct Wall {
    pub path: PathBuf,
    file: File,
}

impl Wall {
    /// Returns the clock of this process, which is also the clock of every process that is not given another. `None` if
    /// it is the host's clock.
    #[must_use]
    pub fn of_this_process() -> Option<Self> {
        Self::open(std::env::var_os(WALL)?.into())
    }

    /// Creates another clock, for other processes. `None` if clocks cannot be set in this run.
    #[must_use]
    pub fn another(path: &Path) -> Option<Self> {
        Self::of_this_process()?;
        std::fs::write(path, [0; 8]).ok()?;
        Self::open(path.to_owned())
    }

    fn open(path: PathBuf) -> Option<Self> {
        let file = OpenOptions::new().read(true).write(true).open(&path).ok()?;
        Some(Self { path, file })
    }

    /// Returns by how many microseconds the clock is ahead of the host's.
    fn ahead(&self) -> io::Result<i64> {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, 0)?;
        Ok(i64::from_ne_bytes(bytes))
    }

    /// Sets the clock forward or back, at once for all processes that use it.
    ///
    /// # Errors
    /// An [`io::Error`] if the file cannot be read or written.
    pub fn step(&self, by: i64) -> io::Result<()> {
        self.file.write_all_at(&self.ahead()?.saturating_add(by).to_ne_bytes(), 0)
    }
}

#[must_use]
pub fn micros(duration: Duration) -> Micros {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
