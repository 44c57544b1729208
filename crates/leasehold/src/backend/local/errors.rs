//! What SQLite and the file system say, as what the caller does next. Every error names the file.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rusqlite::ErrorCode;

use crate::Error;

pub(super) fn not_a_store(path: &Path) -> Error {
    let path = path.display();
    let problem =
        format!("{path} is not a store of ours, nor an SQLite database: choose another path");
    Error::invalid("store", problem)
}

pub(super) fn another_programs(path: &Path) -> Error {
    let path = path.display();
    let problem = format!("{path} is the database of another program: choose another path");
    Error::invalid("store", problem)
}

/// Another process was stopped in the middle of a transaction, or the disk hangs.
pub(super) fn opening_took_too_long(path: &Path) -> Error {
    Error::unavailable(format!("opening {}", path.display()), true, None)
}

pub(super) fn damaged_log(log: &Path) -> Error {
    let what = format!(
        "{}: the write-ahead log is damaged: end all clients, and bring back a copy of all files of the store, or remove \
         its -wal and -shm files (what was written last is lost, but fences still grow)",
        log.display()
    );
    Error::Refused { what }
}

/// `what` was tried, as in "asking".
pub(super) fn of_sqlite(what: &str, file: &Path, error: rusqlite::Error) -> Error {
    let path = file.display();
    let what = format!("{what} {path}");
    let refused = |why: &str| Error::Refused { what: format!("{what}: {why}") };
    let rusqlite::Error::SqliteFailure(failure, _) = &error else {
        return Error::internal(format!("{what}: {error}"));
    };
    match failure.code {
        ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked => {
            Error::unavailable(what, true, Some(Arc::new(error)))
        }
        ErrorCode::SystemIoFailure | ErrorCode::OperationInterrupted => {
            Error::unavailable(what, false, Some(Arc::new(error)))
        }
        ErrorCode::NotADatabase => not_a_store(file),
        ErrorCode::DatabaseCorrupt => refused(
            "the file is damaged: bring back a copy, or move it and its -wal and -shm files away \
             while nobody uses it (then fences begin anew)",
        ),
        ErrorCode::ReadOnly | ErrorCode::PermissionDenied => refused(
            "it cannot be written: look at its permissions, those of its directory, and whether the \
             file system is read-only",
        ),
        ErrorCode::CannotOpen => {
            refused("it cannot be opened: is it a file, in a directory that can be written?")
        }
        ErrorCode::DiskFull => {
            refused("the disk is full: free some space (nothing was changed, nothing is lost)")
        }
        _ => Error::internal(format!("{what}: {error}")),
    }
}

pub(super) fn of_system(what: &str, path: &Path, error: impl Into<io::Error>) -> Error {
    use io::ErrorKind as Kind;

    let error = error.into();
    let what = format!("{what} {}", path.display());
    match error.kind() {
        Kind::PermissionDenied | Kind::ReadOnlyFilesystem => {
            Error::Refused { what: format!("{what}: {error}: choose a path where you may write") }
        }
        Kind::StorageFull | Kind::QuotaExceeded => {
            Error::Refused { what: format!("{what}: {error}: free some space") }
        }
        Kind::NotADirectory | Kind::IsADirectory | Kind::InvalidInput | Kind::InvalidFilename => {
            Error::invalid("store", format!("{what}: {error}: choose another path"))
        }
        _ => Error::unavailable(what, false, Some(Arc::new(error))),
    }
}
