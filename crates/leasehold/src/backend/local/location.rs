//! Where a store is: its file, and the directory of its clients beside it. Nobody but its owner may get at either.
//!
//! | | |
//! |---|---|
//! | `PATH` | the database, with SQLite's own `PATH-wal` and `PATH-shm` |
//! | `PATH.clients/turn` | who writes has this locked: `flock` queues, where SQLite would sleep and try again |
//! | `PATH.clients/{client id}` | locked by that client for as long as it lives |
//! | `PATH.clients/{client id}.wake` | the socket that wakes it |
//!
//! The database itself is never opened here, only looked at: closing any descriptor of it would take away the locks that
//! SQLite has on it in this process.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{CWD, FlockOperation, FsWord, Mode, OFlags, flock, openat, statfs};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::errors::{not_a_store, of_system};
use crate::Error;

pub(super) struct Location {
    /// Without symbolic links, so that everybody finds the same directory beside it.
    pub(super) file: PathBuf,
    pub(super) directory: OwnedFd,
    turn: Arc<File>,
    /// Which file that is, as the kernel sees it.
    identity: (u64, u64),
}

static OPENING: Mutex<()> = Mutex::new(());

/// Nobody else writes until this is dropped.
pub(super) struct WriteLock(Arc<File>);

impl Location {
    /// Makes what is missing. Answers in our turn: whoever else opens the store waits until `then` is done.
    pub(super) fn prepare<T>(
        path: &Path,
        then: impl FnOnce(&Self) -> Result<T, Error>,
    ) -> Result<(Self, T), Error> {
        let file = resolve(path)?;
        // To look at it is to open and close it, which ends the locks that this process has on it: not while it is opened
        // as a store by somebody else here.
        let _opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
        check_kind(&file)?;
        let mut beside = OsString::from(&file);
        beside.push(".clients");
        let beside = PathBuf::from(beside);
        make_directory(&beside, false)?;
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat(CWD, &beside, directory, Mode::empty())
            .map_err(|error| of_system("opening", &beside, error))?;
        let metadata = fs::symlink_metadata(&beside);
        let metadata = metadata.map_err(|error| of_system("looking at", &beside, error))?;
        check_owner(&beside, &metadata, "700")?;

        let turn = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let turn = openat(&directory, "turn", turn, Mode::RUSR | Mode::WUSR)
            .map_err(|error| of_system("opening", &beside.join("turn"), error))?;
        let turn = Arc::new(File::from(turn));
        let mut place = Self { file, directory, turn, identity: (0, 0) };
        // Kept until all is done: two clients of one process must not both make the file, because the first would
        // close it under the second.
        let lock = place.write_lock()?;
        place.make_file()?;
        let metadata = place.metadata()?;
        place.check_file(&metadata)?;
        place.identity = (metadata.dev(), metadata.ino());
        let done = then(&place)?;
        drop(lock);
        Ok((place, done))
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

    /// Fails if the file that we have open is no longer the one that others would open.
    pub(super) fn check(&self) -> Result<(), Error> {
        let metadata = self.metadata()?;
        if (metadata.dev(), metadata.ino()) == self.identity {
            return Ok(());
        }
        Err(self.gone())
    }

    fn gone(&self) -> Error {
        let what = "was removed or replaced while it was in use: make a new client";
        Error::Refused { what: format!("{} {what}", self.file.display()) }
    }

    fn metadata(&self) -> Result<Metadata, Error> {
        fs::symlink_metadata(&self.file).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => self.gone(),
            _ => of_system("looking at", &self.file, error),
        })
    }

    /// Never with more rights than it is to have, not even for a moment.
    fn make_file(&self) -> Result<(), Error> {
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.file);
        match made {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(of_system("making", &self.file, error))
            }
            _ => Ok(()),
        }
    }

    fn check_file(&self, metadata: &Metadata) -> Result<(), Error> {
        let path = self.file.display();
        if !metadata.is_file() {
            return Err(Error::invalid("store", format!("{path} is not a file")));
        }
        if metadata.nlink() != 1 {
            // SQLite would keep a log for each of them, and see half of everything.
            let problem = format!("{path} has {} names: leave it only one", metadata.nlink());
            return Err(Error::invalid("store", problem));
        }
        check_owner(&self.file, metadata, "600")
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
    // What this process has open it has looked at before: see above why it must not be opened again.
    if !metadata.is_file() || metadata.len() == 0 || is_open(&metadata) {
        return Ok(());
    }
    let mut start = [0; DATABASE.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    match read {
        Ok(()) if start == DATABASE => Ok(()),
        // Why it cannot be read, its owner and its mode say better.
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => Ok(()),
        _ => Err(not_a_store(path)),
    }
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

fn check_owner(path: &Path, metadata: &Metadata, mode: &str) -> Result<(), Error> {
    let (ours, owner) = (geteuid().as_raw(), metadata.uid());
    let path = path.display();
    if owner != ours {
        let what = format!("{path} belongs to user {owner}, and we are {ours}");
        return Err(Error::Refused { what: what + ": a store is for one user" });
    }
    if metadata.mode() & 0o077 != 0 {
        let others = metadata.mode() & 0o777;
        let what = format!("{path} is open to others (mode {others:o})");
        return Err(Error::Refused { what: format!("{what}: chmod {mode} {path}") });
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
    use super::*;

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
