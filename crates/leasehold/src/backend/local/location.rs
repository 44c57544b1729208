//! The location of a store: its file, and the directory of its clients beside it. Only their owner may access either.
//!
//! | | |
//! |---|---|
//! | `PATH` | the database, with SQLite's own `PATH-wal` and `PATH-shm` (and `PATH-journal` while it is made) |
//! | `PATH.clients/turn` | the write lock: `flock` queues writers, where SQLite would sleep and retry. Its content says which files the clients use |
//! | `PATH.clients/{client id}` | the client's lifeline, locked by it for as long as it lives |
//! | `PATH.clients/{client id}.wake` | the socket that wakes it |
//!
//! This module never opens a database that this process already has open: closing any descriptor of the file would
//! release the locks that SQLite holds on it in this process.
//!
//! # Other users
//!
//! All of these files must belong to us and be closed to others, or the store is refused. Others may be able to create
//! files in the directory, as in `/tmp`. So SQLite never creates a file there: we create the missing ones before SQLite
//! looks for them, and only if nothing is in their place. If the directory is sticky, no other user can replace our
//! files.
//!
//! # Files that are replaced
//!
//! The log and the shared memory belong to one database file. If the database or one of these is replaced while a
//! client has it open, a new client would mix two stores. `turn` records which files the clients have open, so that the
//! new client is refused instead.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use lone_fork::CloseOnFork;
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, fstat, openat};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::errors::{self, During};
use super::inspect::{self, check_file, check_owner};
use super::{LocalSettings, lifeline, log, schema};
use crate::Error;

/// The files that SQLite keeps beside the database while it is in use.
const BESIDE: [&str; 2] = ["-wal", "-shm"];

pub(super) struct Location {
    /// Without symbolic links, so that every client finds the same directory beside it.
    pub(super) file: PathBuf,
    pub(super) directory: OwnedFd,
    turn: Arc<CloseOnFork<File>>,
    /// The files that we have open, the database and those beside it, each with its inode.
    identity: Vec<(PathBuf, u64)>,
    /// The length of the log when we last looked at it. While the store is in use, it shrinks only if somebody empties
    /// it with SQLite, or cuts it off.
    log_length: AtomicU64,
    log_is_cut_off: AtomicBool,
}

/// The write lock. No other client writes until it is dropped.
pub(super) struct WriteLock(Arc<CloseOnFork<File>>);

/// What `prepare` has found out about the store before it calls `then`.
pub(super) struct Found {
    /// The header of the log is damaged, as a power cut may leave it.
    pub(super) bad_log: bool,
}

impl Location {
    /// Creates what is missing, and then calls `then` while it holds the store's lock: other clients that open the
    /// store wait until `then` returns. Fails if it gets the lock only after `until`.
    pub(super) fn prepare<T>(
        settings: &LocalSettings,
        until: Instant,
        then: impl FnOnce(&Self, Found) -> Result<T, Error>,
    ) -> Result<(Self, T), Error> {
        let file = resolve(&settings.path, settings.create_directories)?;
        let _opening = Opening::begin(&file, until)?;
        // Before anything is created: nothing may appear beside a file that is refused.
        inspect::check_existing(&file)?;
        make_directory(&with_suffix(&file, ".clients"), false)?;
        let (directory, beside) = open_clients(&file)?;

        let (turn_path, flags) = (beside.join("turn"), OFlags::RDWR | OFlags::CREATE);
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let turn = open_turn(&directory, flags, mode).during("opening", &turn_path)?;
        check_file(&turn_path, &turn.metadata().during("reading the metadata of", &turn_path)?)?;
        let mut place = Self::new(file, directory, turn);
        // Keep the lock until everything is done. Two clients of one process must not both create the file, because the
        // first would close it under the second.
        let lock = place.write_lock()?;
        if Instant::now() >= until {
            return Err(errors::opening_took_too_long(&place.file));
        }
        lifeline::check_files(&place)?;
        place.check_replaced()?;
        place.make_files()?;
        let bad_log = log::has_bad_header(&place.log());
        let done = then(&place, Found { bad_log });
        place.remove_journal();
        let done = done?;
        place.identity = place
            .files()
            .map(|file| metadata_of(&file).map(|metadata| (file, metadata.ino())))
            .collect::<Result<_, _>>()?;
        place.record()?;
        drop(lock);
        Ok((place, done))
    }

    /// Finds a store that exists, and creates nothing.
    pub(super) fn find(path: &Path) -> Result<Self, Error> {
        let file = fs::canonicalize(path).during("finding", path)?;
        inspect::check_file_system(&file, file.parent().unwrap_or(Path::new("/")))?;
        let _opening = Opening::begin(&file, Instant::now() + schema::BUSY)?;
        inspect::check_existing(&file)?;
        let (directory, _) = open_clients(&file)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let turn = open_turn(&directory, flags, Mode::empty()).during("opening", &file)?;
        Ok(Self::new(file, directory, turn))
    }

    fn new(file: PathBuf, directory: OwnedFd, turn: Arc<CloseOnFork<File>>) -> Self {
        let (log_length, log_is_cut_off) = (AtomicU64::new(0), AtomicBool::new(false));
        Self { file, directory, turn, identity: Vec::new(), log_length, log_is_cut_off }
    }

    /// The directory of the clients.
    pub(super) fn clients(&self) -> PathBuf {
        with_suffix(&self.file, ".clients")
    }

    /// The write-ahead log.
    pub(super) fn log(&self) -> PathBuf {
        with_suffix(&self.file, "-wal")
    }

    /// The database, and what SQLite keeps beside it.
    fn files(&self) -> impl Iterator<Item = PathBuf> {
        let beside = BESIDE.map(|suffix| with_suffix(&self.file, suffix));
        std::iter::once(self.file.clone()).chain(beside)
    }

    /// Fails if live clients use other files than we would. If there are none, files that belong to a missing database
    /// are removed.
    fn check_replaced(&self) -> Result<(), Error> {
        let is_new = fs::symlink_metadata(&self.file).map_or(true, |metadata| metadata.len() == 0);
        let mut recorded = String::new();
        // A record that does not exist yet, or that we did not write, is ignored.
        let _ = (&**self.turn).take(100).read_to_string(&mut recorded);
        let recorded = recorded.split_whitespace().map_while(|inode| inode.parse::<u64>().ok());
        let other = self.files().zip(recorded).find(|(file, recorded)| {
            fs::symlink_metadata(file).map_or(true, |metadata| metadata.ino() != *recorded)
        });
        let other = other.map(|(file, _)| file).or(is_new.then(|| self.file.clone()));
        let Some(other) = other else { return Ok(()) };
        let alive = lifeline::count_alive(self);
        if alive > 0 {
            let clients =
                if alive == 1 { "1 client uses".into() } else { format!("{alive} clients use") };
            let problem = format!("was removed or replaced while {clients} it");
            let advice = ": restore it, or stop its clients first";
            return Err(errors::unusable(&other, &(problem + advice)));
        }
        if is_new {
            for file in BESIDE.iter().chain(&["-journal"]).map(|end| with_suffix(&self.file, end)) {
                let Ok(metadata) = fs::symlink_metadata(&file) else { continue };
                check_file(&file, &metadata)?;
                fs::remove_file(&file).during("removing", &file)?;
            }
        }
        Ok(())
    }

    /// Records which files we have open, for clients that open the store later.
    fn record(&self) -> Result<(), Error> {
        let inodes: Vec<_> = self.identity.iter().map(|(_, inode)| inode.to_string()).collect();
        let text = format!("{:<99}\n", inodes.join(" "));
        let mut recorded = [0; 100];
        if self.turn.read_exact_at(&mut recorded, 0).is_ok() && recorded == text.as_bytes() {
            return Ok(());
        }
        self.turn.write_all_at(text.as_bytes(), 0).during("writing a file beside", &self.file)
    }

    /// Waits until no other client writes. If a client was stopped while it wrote, this waits until that client
    /// continues or dies.
    pub(super) fn write_lock(&self) -> Result<WriteLock, Error> {
        loop {
            match flock(self.turn.as_fd(), FlockOperation::LockExclusive) {
                Err(Errno::INTR) => {}
                locked => {
                    locked.during("waiting for the write lock of", &self.file)?;
                    return Ok(WriteLock(self.turn.clone()));
                }
            }
        }
    }

    /// Fails if a file that we have open is no longer the one that others would open, or if the log was cut off.
    pub(super) fn check(&self) -> Result<(), Error> {
        let mut length = None;
        for (file, inode) in &self.identity {
            let metadata = metadata_of(file)?;
            if metadata.ino() != *inode {
                return Err(gone(file));
            }
            if file.as_os_str().as_bytes().ends_with(b"-wal") {
                length = Some(metadata.len());
            }
        }
        length.map_or(Ok(()), |length| self.check_log_length(length))
    }

    /// A connection does not notice that the log was cut off while it has the pages that it reads in memory. So a
    /// waiter would wait, although nobody can write any more.
    fn check_log_length(&self, length: u64) -> Result<(), Error> {
        let before = self.log_length.swap(length, Ordering::Relaxed);
        if length < before {
            match schema::is_readable(self) {
                Ok(true) => {}
                Err(error) if !errors::is_damage(&error) => {
                    // It is not known, so look again.
                    self.log_length.fetch_max(before, Ordering::Relaxed);
                }
                Ok(false) | Err(_) => self.log_is_cut_off.store(true, Ordering::Relaxed),
            }
        }
        if self.log_is_cut_off.load(Ordering::Relaxed) {
            return Err(errors::damaged_log(&self.log()));
        }
        Ok(())
    }

    /// Maps an SQLite error to [`Error`]. It first looks for causes that SQLite cannot know: a replaced file or a
    /// damaged log.
    pub(super) fn explain(&self, what: &str, error: rusqlite::Error) -> Error {
        use rusqlite::ErrorCode as Code;

        let code = error.sqlite_error_code();
        let odd =
            [Code::NotADatabase, Code::DatabaseCorrupt, Code::SystemIoFailure, Code::CannotOpen];
        if code.is_some_and(|code| odd.contains(&code)) {
            if let Err(gone) = self.check() {
                return gone;
            }
            let log = self.log();
            if log::is_damaged(&log) || errors::is_short_read(&error) {
                return errors::damaged_log(&log);
            }
        }
        errors::of_sqlite(what, &self.file, error)
    }

    /// Creates the missing files and checks the existing ones. A file never has wider permissions than 0600, not even
    /// for a moment.
    ///
    /// SQLite does not need a journal once there is a log. The journal is created only where others could put one in
    /// its place.
    fn make_files(&self) -> Result<(), Error> {
        let journal = with_suffix(&self.file, "-journal");
        let is_new = fs::symlink_metadata(&self.file).map_or(true, |metadata| metadata.len() == 0);
        let needs_journal =
            is_new || fs::symlink_metadata(&journal).is_ok() || !self.is_in_a_directory_of_ours();
        for file in self.files().chain(needs_journal.then_some(journal)) {
            let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&file);
            unless_exists(made.map(drop)).during("creating", &file)?;
            let metadata = fs::symlink_metadata(&file);
            check_file(&file, &metadata.during("reading the metadata of", &file)?)?;
        }
        Ok(())
    }

    /// Whether no other user can create files beside the database. Root is not considered: nothing can be prevented
    /// against root.
    fn is_in_a_directory_of_ours(&self) -> bool {
        let directory = self.file.parent().unwrap_or(Path::new("/"));
        fs::symlink_metadata(directory).is_ok_and(|metadata| {
            let owners = [geteuid().as_raw(), 0];
            owners.contains(&metadata.uid()) && metadata.mode() & 0o022 == 0
        })
    }

    /// Removes the journal that `make_files` created as a placeholder. A journal that SQLite needs is not empty.
    fn remove_journal(&self) {
        let journal = with_suffix(&self.file, "-journal");
        if fs::symlink_metadata(&journal).is_ok_and(|metadata| metadata.len() == 0) {
            let _ = fs::remove_file(journal);
        }
    }
}

/// A store that this process is opening. Only one attempt runs at a time, because examining the file means opening and
/// closing it, which releases the locks that this process holds on it.
struct Opening(PathBuf);

static OPENING: (Mutex<BTreeSet<PathBuf>>, Condvar) = (Mutex::new(BTreeSet::new()), Condvar::new());

impl Opening {
    /// Waits until no other thread of this process is opening this store. An attempt may wait for the write lock for as
    /// long as another process is stopped. Later attempts at the same store then wait here, where they time out, so
    /// blocked threads do not pile up.
    fn begin(file: &Path, until: Instant) -> Result<Self, Error> {
        let (opening, ended) = &OPENING;
        let opening = opening.lock().unwrap_or_else(PoisonError::into_inner);
        let left = until.saturating_duration_since(Instant::now());
        let (mut opening, _) = ended
            .wait_timeout_while(opening, left, |opening| opening.contains(file))
            .unwrap_or_else(PoisonError::into_inner);
        if opening.insert(file.to_owned()) {
            return Ok(Self(file.to_owned()));
        }
        Err(errors::opening_took_too_long(file))
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        let (opening, ended) = &OPENING;
        opening.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
        ended.notify_all();
    }
}

impl Drop for WriteLock {
    fn drop(&mut self) {
        let _ = flock(self.0.as_fd(), FlockOperation::Unlock);
    }
}

/// Opens the file of the write lock. A forked copy must not keep it: the lock belongs to the open file, so it would stay
/// locked if this process were killed while it writes.
fn open_turn(directory: &OwnedFd, flags: OFlags, mode: Mode) -> io::Result<Arc<CloseOnFork<File>>> {
    let open = || Ok(File::from(openat(directory, "turn", flags, mode)?));
    CloseOnFork::open(open).map(Arc::new)
}

/// Opens the directory of the clients of this database.
fn open_clients(file: &Path) -> Result<(OwnedFd, PathBuf), Error> {
    let beside = with_suffix(file, ".clients");
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = openat(CWD, &beside, flags, Mode::empty()).during("opening", &beside)?;
    let stat = fstat(&directory).during("reading the metadata of", &beside)?;
    check_owner(&beside, stat.st_uid, stat.st_mode, "700")?;
    Ok((directory, beside))
}

/// Returns the file's real path. Fails on a network file system, and if the file's directory does not exist and is not to
/// be created: a mistyped path would be a store of its own, where nobody else counts.
fn resolve(path: &Path, create_directories: bool) -> Result<PathBuf, Error> {
    let whole = std::path::absolute(path).during("resolving", path)?;
    let (Some(parent), Some(name)) = (whole.parent(), whole.file_name()) else {
        let problem = format!("{} is not the path of a file", path.display());
        return Err(Error::invalid("store", problem + ": choose another path"));
    };
    let real = |path: &Path| fs::canonicalize(path).during("resolving", path);
    if fs::symlink_metadata(&whole).is_ok() {
        let file = real(&whole)?;
        inspect::check_file_system(&file, file.parent().unwrap_or(Path::new("/")))?;
        return Ok(file);
    }
    // A new directory is on the same file system as the closest one that exists.
    let closest = parent.ancestors().find(|parent| parent.exists()).unwrap_or(Path::new("/"));
    inspect::check_file_system(&whole, closest)?;
    if create_directories {
        make_directory(parent, true)?;
    } else if fs::metadata(parent).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        let (path, parent) = (path.display(), parent.display());
        let problem = format!("{path}: there is no directory {parent}");
        return Err(Error::invalid("store", problem + ": create it, or correct the path"));
    }
    Ok(real(parent)?.join(name))
}

/// Creates a directory with mode 0700, and its missing parents likewise.
fn make_directory(path: &Path, parents: bool) -> Result<(), Error> {
    let made = DirBuilder::new().recursive(parents).mode(0o700).create(path);
    unless_exists(made).during("creating the directory", path)
}

fn unless_exists(made: io::Result<()>) -> io::Result<()> {
    made.or_else(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => Ok(()),
        _ => Err(error),
    })
}

pub(super) fn with_suffix(file: &Path, suffix: &str) -> PathBuf {
    let mut path = OsString::from(file);
    path.push(suffix);
    PathBuf::from(path)
}

fn metadata_of(file: &Path) -> Result<Metadata, Error> {
    match fs::symlink_metadata(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(gone(file)),
        metadata => metadata.during("reading the metadata of", file),
    }
}

fn gone(file: &Path) -> Error {
    errors::unusable(file, "was removed or replaced while it was in use: open another client")
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use testkit::local_store::LocalStore;

    use super::*;
    use crate::clock::Span;

    #[test]
    fn a_journal_is_made_where_others_could_make_one() {
        for (mode, made) in [(0o700, false), (0o755, false), (0o775, true), (0o1777, true)] {
            let store = LocalStore::new();
            fs::set_permissions(store.directory(), Permissions::from_mode(mode)).unwrap();
            let open = || {
                let until = Instant::now() + Duration::from_secs(5);
                let settings = LocalSettings {
                    path: store.path(),
                    answer_timeout: Duration::from_secs(5),
                    confirm_within: Span::from_millis(5000),
                    create_directories: false,
                    read_only: false,
                };
                let (_, made) = Location::prepare(&settings, until, |place, _| {
                    let made = with_suffix(&place.file, "-journal").exists();
                    fs::write(&place.file, "what a database begins with").unwrap();
                    Ok(made)
                })
                .unwrap();
                made
            };
            assert!(open(), "SQLite needs one to make the log");
            assert_eq!(open(), made, "{mode:o}");
            assert!(!with_suffix(&store.path(), "-journal").exists());
        }
    }
}
