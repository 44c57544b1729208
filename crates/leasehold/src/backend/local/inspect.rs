//! The checks of a store's path that create and change nothing. A file that is refused stays as it was, and nothing
//! appears beside it.

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{FsWord, statfs};
use rustix::process::geteuid;

use super::errors::{During, another_programs, denied, not_a_store, unusable};
use super::location::with_suffix;
use super::{log, schema};
use crate::Error;

/// Fails if the file at the path cannot be a store of ours. The kind of file is checked before its permissions: it
/// would be wrong to advise `chmod` for another program's file.
pub(super) fn check_existing(path: &Path) -> Result<(), Error> {
    let metadata = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        metadata => metadata.during("reading the metadata of", path)?,
    };
    check_kind(path, &metadata)?;
    check_file(path, &metadata)
}

/// Fails if the file is not a database, or is a database of another program.
fn check_kind(path: &Path, metadata: &Metadata) -> Result<(), Error> {
    const DATABASE: &[u8] = b"SQLite format 3\0";
    if !metadata.is_file() || metadata.len() == 0 || is_recorded(path, metadata) {
        return Ok(());
    }
    // This process has already checked a file that it has open. The documentation of `location` says why it must not be
    // opened again.
    if is_open(metadata) {
        return Ok(());
    }
    let mut start = Vec::new();
    if File::open(path).and_then(|file| file.take(100).read_to_end(&mut start)).is_err() {
        // The checks of owner and mode explain better why it cannot be read.
        return Ok(());
    }
    if !start.starts_with(DATABASE) {
        return Err(not_a_store(path));
    }
    // While a database is in use, its newest header may be in the log.
    let logged = log::first_page(&with_suffix(path, "-wal"));
    if schema::is_another_programs(logged.as_deref().unwrap_or(&start)) {
        return Err(another_programs(path));
    }
    Ok(())
}

/// Whether a client has had this very file open as a store. SQLite checks its content again.
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

/// Fails if other hosts may share this file system. `directory` is the one of the file, or the closest one that exists.
pub(super) fn check_file_system(file: &Path, directory: &Path) -> Result<(), Error> {
    let system = statfs(directory).during("reading the file system of", directory)?;
    let Some(system) = network(system.f_type, directory) else { return Ok(()) };
    let advice = "file locks and shared memory are not reliable there: choose a path on a local disk, \
                  or use Redis";
    Err(unusable(file, &format!("is on {system}: {advice}")))
}

/// Fails unless this is a regular file that only we can open, with a single name.
pub(super) fn check_file(file: &Path, metadata: &Metadata) -> Result<(), Error> {
    if !metadata.is_file() {
        return Err(unusable(file, "is not a regular file: choose another path"));
    }
    if metadata.nlink() != 1 {
        // With two names of a database, SQLite would keep a log for each, and see only half of the data. Under the name
        // of a log, it would write into another file.
        let names = metadata.nlink();
        let problem = format!("has {names} names (hard links); the limit is 1: remove the others");
        return Err(unusable(file, &problem));
    }
    check_owner(file, metadata.uid(), metadata.mode(), "600")
}

pub(super) fn check_owner(path: &Path, owner: u32, mode: u32, wanted: &str) -> Result<(), Error> {
    let ours = geteuid().as_raw();
    if owner != ours {
        let problem = format!("belongs to user {owner}; this process runs as user {ours}");
        let advice = "a store belongs to one user: choose a path in a directory where only you can create files, or, \
                      to share one between users, run their jobs as one user (sudo -u) or use Redis";
        return Err(denied(path, &format!("{problem}: {advice}")));
    }
    if mode & 0o077 != 0 {
        let problem = format!("is open to other users (mode {:o})", mode & 0o777);
        let advice = format!("run chmod {wanted} {}", path.display());
        return Err(unusable(path, &format!("{problem}: {advice}")));
    }
    Ok(())
}

/// Describes the file system if other hosts may share it.
fn network(kind: FsWord, path: &Path) -> Option<String> {
    const FUSE: FsWord = 0x6573_5546;
    const NETWORK: [(FsWord, &str); 22] = [
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
        (0x4750_4653, "gpfs"),
        (0x1983_0326, "beegfs"),
        (0x2003_0528, "orangefs"),
        (0xaad7_aaea, "panfs"),
        (0xbeef_dead, "snfs"),
        (0x0131_11a8, "ibrix"),
        (0x6163_6673, "acfs"),
        (0x6b41_4653, "kafs"),
        (0xbacb_acbc, "vmhgfs"),
        (0x786f_4256, "vboxsf"),
        (0x7c7c_6673, "prl_fs"),
    ];
    if kind == FUSE {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let device = fs::metadata(path).map_or(0, |metadata| metadata.dev());
        return fuse(&mounts, (rustix::fs::major(device), rustix::fs::minor(device)));
    }
    let (_, name) = NETWORK.iter().find(|(network, _)| *network == kind)?;
    Some(format!("a network file system ({name})"))
}

/// Describes a FUSE file system, unless it is known to be on this host alone. The kernel knows only the name that the
/// file system gives itself. Most of them are remote, and a new one is not recognised, so those are listed that are not.
fn fuse(mounts: &str, (major, minor): (u32, u32)) -> Option<String> {
    const LOCAL: [&str; 7] =
        ["fuseblk", "fuse-overlayfs", "bindfs", "encfs", "gocryptfs", "mergerfs", "unionfs"];
    let device = format!("{major}:{minor}");
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(&device));
    let kind = line.and_then(|line| line.split_once(" - ")?.1.split(' ').next()).unwrap_or("fuse");
    let name = kind.strip_prefix("fuse.").unwrap_or(kind);
    let is_local = LOCAL.contains(&name);
    (!is_local).then(|| format!("a file system that other hosts may share ({kind})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_are_known() {
        let here = Path::new("/");
        for kind in [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42, 0x0102_1997, 0x4750_4653] {
            assert!(network(kind, here).is_some(), "{kind:x}");
        }
        // ext4, xfs, btrfs, tmpfs, overlay, zfs
        for kind in [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0x794c_7630, 0x2fc1_2fc1] {
            assert_eq!(network(kind, here), None, "{kind:x}");
        }
    }

    #[test]
    fn fuse_file_systems_are_recognised_by_name() {
        let mounts = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
                      40 22 0:50 / /mnt/far rw,nosuid - fuse.sshfs me@there:/home rw\n\
                      41 22 0:51 / /mnt/near rw - fuse.fuse-overlayfs fuse-overlayfs rw\n\
                      42 22 0:52 / /mnt/host rw shared:3 - virtiofs host rw\n\
                      43 22 0:53 / /mnt/new rw - fuse.new new rw\n\
                      44 22 8:2 / /mnt/stick rw - fuseblk /dev/sda2 rw\n";
        for (minor, kind) in [(50, "fuse.sshfs"), (52, "virtiofs"), (53, "fuse.new"), (54, "fuse")]
        {
            let expected = format!("a file system that other hosts may share ({kind})");
            assert_eq!(fuse(mounts, (0, minor)), Some(expected));
        }
        assert_eq!(fuse(mounts, (0, 51)), None);
        assert_eq!(fuse(mounts, (8, 2)), None);
        assert_eq!(fuse("", (0, 51)), fuse(mounts, (0, 54)), "it is not known");
    }
}
