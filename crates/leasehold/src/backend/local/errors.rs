//! Maps errors of SQLite and the file system to [`Error`], by what the caller can do next. Every error names the file.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use rusqlite::ErrorCode;
use rustix::io::Errno;

use crate::Error;

pub(super) fn not_a_store(path: &Path) -> Error {
    unusable(path, "is not a leasehold store: choose another path")
}

pub(super) fn another_programs(path: &Path) -> Error {
    unusable(path, "is a database of another program: choose another path")
}

/// The file at this path cannot be used as it is.
pub(super) fn unusable(path: &Path, problem: &str) -> Error {
    Error::Unusable { problem: format!("{} {problem}", path.display()) }
}

/// This process, or this client, must not use the file at this path as it asks to.
pub(super) fn denied(path: &Path, problem: &str) -> Error {
    Error::Denied { problem: format!("{} {problem}", path.display()) }
}

/// Another process was stopped in the middle of a transaction, or the disk hangs.
pub(super) fn opening_took_too_long(path: &Path) -> Error {
    Error::unavailable(format!("opening {}", path.display()), true, None)
}

pub(super) fn damaged_log(log: &Path) -> Error {
    let what = format!(
        "{}: the write-ahead log is damaged: stop all clients, then restore a backup of all files of the store, or remove \
         its -wal and -shm files (the last changes are lost, but fences continue to grow)",
        log.display()
    );
    Error::Unusable { problem: what }
}

/// Whether SQLite has found less than the shared memory says that there is. Then the write-ahead log was cut off: SQLite
/// accepts a database that is too short.
pub(super) fn is_short_read(error: &rusqlite::Error) -> bool {
    let code = error.sqlite_error().map(|failure| failure.extended_code);
    code == Some(rusqlite::ffi::SQLITE_IOERR_SHORT_READ)
}

/// Whether the content of the files is wrong, rather than the access to them.
pub(super) fn is_damage(error: &rusqlite::Error) -> bool {
    let damage = [ErrorCode::NotADatabase, ErrorCode::DatabaseCorrupt];
    is_short_read(error) || error.sqlite_error_code().is_some_and(|code| damage.contains(&code))
}

/// Whether a value in a row is none that leasehold writes.
fn is_unreadable(error: &rusqlite::Error) -> bool {
    matches!(
        error,
        rusqlite::Error::FromSqlConversionFailure(..)
            | rusqlite::Error::IntegralValueOutOfRange(..)
            | rusqlite::Error::InvalidColumnType(..)
            | rusqlite::Error::Utf8Error(..)
    )
}

/// `what` names the attempt, as in "opening".
pub(super) fn of_sqlite(what: &str, file: &Path, error: rusqlite::Error) -> Error {
    let path = file.display();
    let what = format!("{what} {path}");
    let denied = |why: &str| Error::Denied { problem: format!("{what}: {why}") };
    let failure = match &error {
        rusqlite::Error::SqliteFailure(failure, _) => failure,
        _ if is_unreadable(&error) => {
            let problem = format!("{what}: {error}: leasehold did not write this value");
            return Error::foreign(problem + ": remove it, or restore a backup");
        }
        _ => return Error::internal(format!("{what}: {error}")),
    };
    match failure.code {
        ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked => {
            Error::unavailable(what, true, Some(Arc::new(error)))
        }
        ErrorCode::SystemIoFailure | ErrorCode::OperationInterrupted => {
            Error::unavailable(what, false, Some(Arc::new(error)))
        }
        ErrorCode::NotADatabase => not_a_store(file),
        ErrorCode::DatabaseCorrupt => Error::Unusable {
            problem: format!(
                "{what}: the file is damaged: restore a backup, or move it and its -wal and -shm files away while no \
                 client uses it (fences then restart)"
            ),
        },
        ErrorCode::ReadOnly | ErrorCode::PermissionDenied => denied(
            "it cannot be written: check its permissions, those of its directory, and whether the \
             file system is read-only",
        ),
        ErrorCode::CannotOpen => match no_descriptor_left() {
            Some(cause) => Error::unavailable(what, false, Some(Arc::new(cause))),
            None => denied("it cannot be opened: check that it is a file in a writable directory"),
        },
        ErrorCode::DiskFull => {
            let advice = "the disk is full: free some space (nothing was changed or lost)";
            Error::NoRoom { problem: format!("{what}: {advice}") }
        }
        _ => Error::internal(format!("{what}: {error}")),
    }
}

/// Returns the system's error if this process cannot open three files: the database, its log and its shared memory.
/// SQLite does not report why it cannot open a file.
fn no_descriptor_left() -> Option<io::Error> {
    let opened: io::Result<Vec<_>> = (0..3).map(|_| File::open("/dev/null")).collect();
    let none_left = [Errno::MFILE, Errno::NFILE].map(|errno| Some(errno.raw_os_error()));
    opened.err().filter(|error| none_left.contains(&error.raw_os_error()))
}

/// Maps an error of the operating system.
pub(super) trait During<T> {
    /// `what` names the attempt, as in "opening".
    fn during(self, what: &str, path: &Path) -> Result<T, Error>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn during(self, what: &str, path: &Path) -> Result<T, Error> {
        self.map_err(|error| of_system(what, path, error.into()))
    }
}

fn of_system(what: &str, path: &Path, error: io::Error) -> Error {
    use io::ErrorKind as Kind;

    let what = format!("{what} {}", path.display());
    match error.kind() {
        Kind::PermissionDenied | Kind::ReadOnlyFilesystem => Error::Denied {
            problem: format!("{what}: {error}: choose a path that you can write to"),
        },
        Kind::StorageFull | Kind::QuotaExceeded => {
            Error::NoRoom { problem: format!("{what}: {error}: free some space") }
        }
        Kind::NotADirectory | Kind::IsADirectory | Kind::InvalidInput | Kind::InvalidFilename => {
            Error::invalid("store", format!("{what}: {error}: choose another path"))
        }
        _ => Error::unavailable(what, false, Some(Arc::new(error))),
    }
}
