//! Where a store is: its file, and the directory of its clients beside it. Nobody but its owner may get at either.
//!
//! | | |
//! |---|---|
//! | `PATH` | the database, with SQLite's own `PATH-wal` and `PATH-shm` (and `PATH-journal` while it is made) |
//! | `PATH.clients/turn` | who writes has this locked: `flock` queues, where SQLite would sleep and try again. It says which files the clients use |
//! | `PATH.clients/{client id}` | locked by that client for as long as it lives |
//! | `PATH.clients/{client id}.wake` | the socket that wakes it |
//!
//! The database itself is never opened here, only looked at: closing any descriptor of it would take away the locks that
//! SQLite has on it in this process.
//!
//! # Other users
//!
//! All of these files belong to us and are open to nobody else, or the store is refused. The directory may be one where
//! others can make files, such as `/tmp`. So SQLite never makes a file there: we make those that are missing, before it
//! looks for them, and only if there is nothing in their place. Where the directory is sticky, nobody else can replace what
//! is ours.
//!
//! # Files that are replaced
//!
//! The log and the shared memory belong to one database file. If the file, or one of these, is replaced while a client has it
//! open, a new client would mix two stores. `turn` says which files the clients have open, so that it is refused instead.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use rustix::fs::{CWD, FlockOperation, FsWord, Mode, OFlags, flock, fstat, openat, statfs};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::errors::{self, another_programs, not_a_store, of_system};
use super::{lifeline, log, schema};
use crate::Error;

/// What SQLite keeps beside the database for as long as it is used.
const BESIDE: [&str; 2] = ["-wal", "-shm"];

pub(super) struct Location {
    /// Without symbolic links, so that everybody finds the same directory beside it.
    pub(super) file: PathBuf,
    pub(super) directory: OwnedFd,
    turn: Arc<File>,
    /// The database and what is beside it, each with its inode: which files we have open.
    identity: Vec<(PathBuf, u64)>,
}

/// Nobody else writes until this is dropped.
pub(super) struct WriteLock(Arc<File>);

/// What `then` may want to know of the store that is being opened.
pub(super) struct Found {
    /// The header of the log is damaged, as a power cut may leave it.
    pub(super) bad_log: bool,
}

impl Location {
    /// Creates what is missing, and then calls `then` while it holds the store's lock: other clients that open the store wait
    /// until `then` returns. Fails if it gets the lock only after `until`.
    pub(super) fn prepare<T>(
        path: &Path,
        until: Instant,
        then: impl FnOnce(&Self, Found) -> Result<T, Error>,
    ) -> Result<(Self, T), Error> {
        let file = resolve(path)?;
        let _opening = Opening::begin(&file, until)?;
        check_kind(&file)?;
        let beside = with_suffix(&file, ".clients");
        make_directory(&beside, false)?;
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat(CWD, &beside, directory, Mode::empty())
            .map_err(|error| of_system("opening", &beside, error))?;
        let stat = fstat(&directory).map_err(|error| of_system("looking at", &beside, error))?;
        check_owner(&beside, stat.st_uid, stat.st_mode, "700")?;

        let (turn_path, flags) = (beside.join("turn"), OFlags::RDWR | OFlags::CREATE);
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let turn = openat(&directory, "turn", flags, Mode::RUSR | Mode::WUSR)
            .map_err(|error| of_system("opening", &turn_path, error))?;
        let turn = Arc::new(File::from(turn));
        let metadata =
            turn.metadata().map_err(|error| of_system("looking at", &turn_path, error))?;
        check_file(&turn_path, &metadata)?;
        let mut place = Self { file, directory, turn, identity: Vec::new() };
        // Kept until all is done: two clients of one process must not both make the file, because the first would
        // close it under the second.
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
            .map(|file| inode(&file).map(|inode| (file, inode)))
            .collect::<Result<_, _>>()?;
        place.record()?;
        drop(lock);
        Ok((place, done))
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

    /// Fails if clients use other files than those that we would use. If nobody does, what belongs to a database that is not
    /// there is removed.
    fn check_replaced(&self) -> Result<(), Error> {
        let is_new = fs::symlink_metadata(&self.file).map_or(true, |metadata| metadata.len() == 0);
        let mut recorded = String::new();
        // A file that is not there yet, or not ours, says nothing.
        let _ = (&*self.turn).take(100).read_to_string(&mut recorded);
        let recorded = recorded.split_whitespace().map_while(|inode| inode.parse::<u64>().ok());
        let other = self.files().zip(recorded).find(|(file, recorded)| {
            fs::symlink_metadata(file).map_or(true, |metadata| metadata.ino() != *recorded)
        });
        let other = other.map(|(file, _)| file).or(is_new.then(|| self.file.clone()));
        let Some(other) = other else { return Ok(()) };
        let alive = lifeline::count_alive(self);
        if alive > 0 {
            let other = other.display();
            let clients =
                if alive == 1 { "1 client uses".into() } else { format!("{alive} clients use") };
            let what = format!("{other} was removed or replaced while {clients} it");
            return Err(Error::Refused { what: what + ": bring it back, or end them first" });
        }
        if is_new {
            for file in BESIDE.iter().chain(&["-journal"]).map(|end| with_suffix(&self.file, end)) {
                let Ok(metadata) = fs::symlink_metadata(&file) else { continue };
                check_file(&file, &metadata)?;
                fs::remove_file(&file).map_err(|error| of_system("removing", &file, error))?;
            }
        }
        Ok(())
    }

    /// Says which files we have open, for those who come after us.
    fn record(&self) -> Result<(), Error> {
        let inodes: Vec<_> = self.identity.iter().map(|(_, inode)| inode.to_string()).collect();
        let text = format!("{:<99}\n", inodes.join(" "));
        let mut recorded = [0; 100];
        if self.turn.read_exact_at(&mut recorded, 0).is_ok() && recorded == text.as_bytes() {
            return Ok(());
        }
        let written = self.turn.write_all_at(text.as_bytes(), 0);
        written.map_err(|error| of_system("writing beside", &self.file, error))
    }

    /// Waits until nobody else writes. If somebody was stopped while he wrote, for as long as that lasts.
    pub(super) fn write_lock(&self) -> Result<WriteLock, Error> {
        loop {
            match flock(&self.turn, FlockOperation::LockExclusive) {
                Err(Errno::INTR) => {}
                Err(error) => return Err(of_system("waiting for a turn at", &self.file, error)),
                Ok(()) => return Ok(WriteLock(self.turn.clone())),
            }
        }
    }

    /// Fails if a file that we have open is no longer the one that others would open.
    pub(super) fn check(&self) -> Result<(), Error> {
        for (file, known) in &self.identity {
            if inode(file)? != *known {
                return Err(gone(file));
            }
        }
        Ok(())
    }

    /// What SQLite says, as what the caller does next. It may be that the reason is not the one that SQLite knows.
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
            if log::is_damaged(&log) {
                return errors::damaged_log(&log);
            }
        }
        errors::of_sqlite(what, &self.file, error)
    }

    /// Makes what is missing, and checks what is there. Never with more rights than it is to have, not even for a moment.
    ///
    /// SQLite has no use for a journal once there is a log. It is made only where others could put one in its place.
    fn make_files(&self) -> Result<(), Error> {
        let journal = with_suffix(&self.file, "-journal");
        let is_new = fs::symlink_metadata(&self.file).map_or(true, |metadata| metadata.len() == 0);
        let needs_journal =
            is_new || fs::symlink_metadata(&journal).is_ok() || !self.is_in_a_directory_of_ours();
        for file in self.files().chain(needs_journal.then_some(journal)) {
            let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&file);
            match made {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(of_system("making", &file, error));
                }
                _ => {}
            }
            let metadata = fs::symlink_metadata(&file);
            check_file(&file, &metadata.map_err(|error| of_system("looking at", &file, error))?)?;
        }
        Ok(())
    }

    /// Whether nobody else can make files beside the database. What root can do cannot be prevented.
    fn is_in_a_directory_of_ours(&self) -> bool {
        let directory = self.file.parent().unwrap_or(Path::new("/"));
        fs::symlink_metadata(directory).is_ok_and(|metadata| {
            let owners = [geteuid().as_raw(), 0];
            owners.contains(&metadata.uid()) && metadata.mode() & 0o022 == 0
        })
    }

    /// It was only there to keep others from putting one in its place. If SQLite has use for it, it is not empty.
    fn remove_journal(&self) {
        let journal = with_suffix(&self.file, "-journal");
        if fs::symlink_metadata(&journal).is_ok_and(|metadata| metadata.len() == 0) {
            let _ = fs::remove_file(journal);
        }
    }
}

/// A store that this process is opening. There is one at a time: to look at the file is to open and close it, which ends the
/// locks that this process has on it.
struct Opening(PathBuf);

static OPENING: (Mutex<BTreeSet<PathBuf>>, Condvar) = (Mutex::new(BTreeSet::new()), Condvar::new());

impl Opening {
    /// Waits until nobody else opens this store here. One that waits for its turn, perhaps for as long as another process is
    /// stopped, holds up other attempts at the same store, which so do not become more and more threads.
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
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

/// The file's real path, in a directory that there is, and not at the other end of a network.
fn resolve(path: &Path) -> Result<PathBuf, Error> {
    let whole = std::path::absolute(path).map_err(|error| of_system("finding", path, error))?;
    let (Some(parent), Some(name)) = (whole.parent(), whole.file_name()) else {
        let problem = format!("{} is not the path of a file", path.display());
        return Err(Error::invalid("store", problem));
    };
    make_directory(parent, true)?;
    let real =
        |path: &Path| fs::canonicalize(path).map_err(|error| of_system("finding", path, error));
    let file = match fs::symlink_metadata(&whole) {
        Ok(_) => real(&whole)?,
        Err(_) => real(parent)?.join(name),
    };
    let parent = file.parent().unwrap_or(Path::new("/"));
    let system = statfs(parent).map_err(|error| of_system("looking at", parent, error))?;
    if let Some(system) = network(system.f_type, parent) {
        let problem = format!("{} is on a network file system ({system})", file.display());
        let advice = "locks and shared memory do not work there as they do on one host: choose a path on a \
                      local disk, or use Redis";
        return Err(Error::invalid("store", format!("{problem}: {advice}")));
    }
    Ok(file)
}

/// Whatever else there may be is left alone, and nothing is put beside it.
fn check_kind(path: &Path) -> Result<(), Error> {
    const DATABASE: &[u8] = b"SQLite format 3\0";
    // What is not there, or not a file, is seen to later.
    let Ok(metadata) = fs::metadata(path) else { return Ok(()) };
    if !metadata.is_file() || metadata.len() == 0 || is_recorded(path, &metadata) {
        return Ok(());
    }
    // What this process has open it has looked at before: see above why it must not be opened again.
    if is_open(&metadata) {
        return Ok(());
    }
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(100).read_to_end(&mut start));
    if read.is_err() {
        // Why it cannot be read, its owner and its mode say better.
        return Ok(());
    }
    if !start.starts_with(DATABASE) {
        return Err(not_a_store(path));
    }
    if schema::is_another_programs(&start) {
        return Err(another_programs(path));
    }
    Ok(())
}

/// Whether a client has had this very file open as a store. SQLite looks at what is in it once more.
fn is_recorded(path: &Path, metadata: &Metadata) -> bool {
    let turn = with_suffix(path, ".clients").join("turn");
    let recorded = fs::read_to_string(turn).unwrap_or_default();
    recorded.split_whitespace().next().is_some_and(|inode| inode.parse() == Ok(metadata.ino()))
}

fn is_open(wanted: &Metadata) -> bool {
    let Ok(open) = fs::read_dir("/proc/self/fd") else { return true };
    let same =
        |metadata: Metadata| (metadata.dev(), metadata.ino()) == (wanted.dev(), wanted.ino());
    open.flatten().any(|entry| fs::metadata(entry.path()).is_ok_and(same))
}

/// 0700, and so are the directories that have to be made above it.
fn make_directory(path: &Path, parents: bool) -> Result<(), Error> {
    match DirBuilder::new().recursive(parents).mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(of_system("making the directory", path, error))
        }
        _ => Ok(()),
    }
}

fn with_suffix(file: &Path, suffix: &str) -> PathBuf {
    let mut path = OsString::from(file);
    path.push(suffix);
    PathBuf::from(path)
}

fn inode(file: &Path) -> Result<u64, Error> {
    match fs::symlink_metadata(file) {
        Ok(metadata) => Ok(metadata.ino()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(gone(file)),
        Err(error) => Err(of_system("looking at", file, error)),
    }
}

fn gone(file: &Path) -> Error {
    let what = "was removed or replaced while it was in use: make a new client";
    Error::Refused { what: format!("{} {what}", file.display()) }
}

/// A file that only we can open, and under no other name.
fn check_file(file: &Path, metadata: &Metadata) -> Result<(), Error> {
    let path = file.display();
    if !metadata.is_file() {
        let problem = format!("{path} is not a file: remove it, or choose another path");
        return Err(Error::invalid("store", problem));
    }
    if metadata.nlink() != 1 {
        // SQLite would keep a log for each name of a database, and see half of everything. Under the name of a log it
        // would write into somebody's file.
        let problem = format!("{path} has {} names: leave it only one", metadata.nlink());
        return Err(Error::invalid("store", problem));
    }
    check_owner(file, metadata.uid(), metadata.mode(), "600")
}

pub(super) fn check_owner(path: &Path, owner: u32, mode: u32, wanted: &str) -> Result<(), Error> {
    let (ours, path) = (geteuid().as_raw(), path.display());
    if owner != ours {
        let what = format!("{path} belongs to user {owner}, and we are {ours}");
        let advice =
            "a store is for one user: choose a path in a directory where only you can make files";
        return Err(Error::Refused { what: format!("{what}: {advice}") });
    }
    if mode & 0o077 != 0 {
        let what = format!("{path} is open to others (mode {:o})", mode & 0o777);
        return Err(Error::Refused { what: format!("{what}: chmod {wanted} {path}") });
    }
    Ok(())
}

/// Its name, if other hosts may share it. Of those behind FUSE the kernel only knows the name that they give themselves.
fn network(kind: FsWord, path: &Path) -> Option<String> {
    const FUSE: FsWord = 0x6573_5546;
    const NETWORK: [(FsWord, &str); 11] = [
        (0x6969, "nfs"),
        (0x517b, "smb"),
        (0xff53_4d42, "cifs"),
        (0xfe53_4d42, "smb2"),
        (0x0102_1997, "9p"),
        (0x00c3_6400, "ceph"),
        (0x5346_414f, "afs"),
        (0x0bd0_0bd0, "lustre"),
        (0x7461_636f, "ocfs2"),
        (0x0116_1970, "gfs2"),
        (0x7375_7245, "coda"),
    ];
    if kind == FUSE {
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let device = fs::metadata(path).ok()?.dev();
        return fuse(&mounts, (rustix::fs::major(device), rustix::fs::minor(device)));
    }
    NETWORK.iter().find(|(known, _)| *known == kind).map(|(_, name)| (*name).to_owned())
}

fn fuse(mounts: &str, (major, minor): (u32, u32)) -> Option<String> {
    const REMOTE: [&str; 8] =
        ["sshfs", "glusterfs", "rclone", "s3fs", "gcsfuse", "cephfs", "juicefs", "davfs"];
    let device = format!("{major}:{minor}");
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(&device))?;
    let kind = line.split_once(" - ")?.1.split(' ').next()?;
    let name = kind.strip_prefix("fuse.").unwrap_or(kind);
    (kind == "virtiofs" || REMOTE.iter().any(|remote| name.contains(remote)))
        .then(|| kind.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use testkit::local_store::LocalStore;

    use super::*;

    #[test]
    fn a_journal_is_made_where_others_could_make_one() {
        for (mode, made) in [(0o700, false), (0o755, false), (0o775, true), (0o1777, true)] {
            let store = LocalStore::new();
            fs::set_permissions(store.directory(), Permissions::from_mode(mode)).unwrap();
            let open = || {
                let until = Instant::now() + Duration::from_secs(5);
                let (_, made) = Location::prepare(&store.path(), until, |place, _| {
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

    #[test]
    fn network_file_systems_are_known() {
        let here = Path::new("/");
        for kind in [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42, 0x0102_1997] {
            assert!(network(kind, here).is_some(), "{kind:x}");
        }
        // ext4, xfs, btrfs, tmpfs, overlay, zfs
        for kind in [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0x794c_7630, 0x2fc1_2fc1] {
            assert_eq!(network(kind, here), None, "{kind:x}");
        }
    }

    #[test]
    fn what_is_behind_fuse_is_known_by_its_name() {
        let mounts = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
                      40 22 0:50 / /mnt/far rw,nosuid - fuse.sshfs me@there:/home rw\n\
                      41 22 0:51 / /mnt/near rw - fuse.fuse-overlayfs fuse-overlayfs rw\n\
                      42 22 0:52 / /mnt/host rw shared:3 - virtiofs host rw\n";
        assert_eq!(fuse(mounts, (0, 50)).as_deref(), Some("fuse.sshfs"));
        assert_eq!(fuse(mounts, (0, 51)), None);
        assert_eq!(fuse(mounts, (0, 52)).as_deref(), Some("virtiofs"));
        assert_eq!(fuse(mounts, (0, 53)), None);
    }
}
