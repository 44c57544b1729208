//! How clients find out whether another client is alive, and how they wake it.
//!
//! Every client holds an exclusive `flock` on a file of its own, its *lifeline*, from before its first transition. **A
//! client is dead when the kernel has released that lock**: when its process has ended, for whatever reason, and so has
//! every process that inherited the descriptor. Pids play no part, so neither pid reuse nor pid namespaces of
//! containers matter. A missing lifeline proves nothing, so its client is not removed.
//!
//! An empty datagram wakes a client, which then reads the store to find out what has changed. So a full socket buffer
//! loses nothing: a client with one unread datagram reads the store, and finds every change.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use lone_fork::CloseOnFork;
use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, flock, fstat, openat, statat, unlinkat,
};
use rustix::io::Errno;

use super::errors::During;
use super::inspect::check_owner;
use super::location::Location;
use crate::callbacks::event;
use crate::machine::Reach;
use crate::{ClientId, Error};

/// The lifeline of a client. A forked copy of its process does not keep it, or else the client would count as alive for
/// as long as the copy lives.
pub(super) type Lifeline = CloseOnFork<OwnedFd>;

/// The socket that wakes a client. A forked copy does not keep it, or else the client would count as reachable.
pub(super) type WakeUps = CloseOnFork<UnixDatagram>;

/// The sender of wake-ups to the clients of a store.
pub(super) struct Clients {
    /// The unbound socket that sends them.
    socket: UnixDatagram,
}

impl Clients {
    pub(super) fn new() -> Result<Self, Error> {
        let (what, path) = ("creating a socket for", Path::new("the store"));
        let socket = UnixDatagram::unbound().during(what, path)?;
        // Never block on a client that does not read its socket.
        socket.set_nonblocking(true).during(what, path)?;
        Ok(Self { socket })
    }

    pub(super) fn reach(&self, place: &Location, client: ClientId) -> Reach {
        let Err(error) = self.socket.connect(socket_path(place, client)) else {
            return Reach::Reached;
        };
        match error.kind() {
            _ if is_dead(place, client) => Reach::Dead,
            // The socket file exists, but no process has it open.
            ErrorKind::ConnectionRefused => Reach::Inherited,
            _ => Reach::Silent,
        }
    }

    /// Wakes a client. If it cannot be reached now, its own periodic query finds the change within a second.
    pub(super) fn wake(&self, place: &Location, client: ClientId) {
        let _ = self.socket.send_to(&[], socket_path(place, client));
    }
}

/// Creates the lifeline of a new client, and the socket that wakes it. Call it under the write lock.
pub(super) fn enter(place: &Location, client: ClientId) -> Result<(Lifeline, WakeUps), Error> {
    let what = "creating a client's file beside";
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let open = || Ok(openat(&place.directory, client.to_string(), flags, Mode::RUSR | Mode::WUSR)?);
    let lifeline = CloseOnFork::open(open).during(what, &place.file)?;
    flock(&lifeline, FlockOperation::NonBlockingLockExclusive).during(what, &place.file)?;
    let path = socket_path(place, client);
    let socket = CloseOnFork::open(|| UnixDatagram::bind(path)).during(what, &place.file)?;
    socket.set_nonblocking(true).during(what, &place.file)?;
    Ok((lifeline, socket))
}

/// Whether it is certain that no process holds the lifeline of `client`.
pub(super) fn is_dead(place: &Location, client: ClientId) -> bool {
    held(place, client) == Some(false)
}

/// Returns whether a process holds the lifeline. `None` if that cannot be known: the file does not exist, or is not
/// ours.
fn held(place: &Location, client: ClientId) -> Option<bool> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let lifeline = openat(&place.directory, client.to_string(), flags, Mode::empty()).ok()?;
    let stat = fstat(&lifeline).ok()?;
    check_owner(&place.file, stat.st_uid, stat.st_mode, "600").ok()?;
    // Shared, so that two clients can check at the same time.
    Some(flock(&lifeline, FlockOperation::NonBlockingLockShared).is_err())
}

/// Returns the number of clients that are alive, whatever the database says.
pub(super) fn count_alive(place: &Location) -> usize {
    clients(place).filter(|client| held(place, *client) == Some(true)).count()
}

/// The clients that have a lifeline.
fn clients(place: &Location) -> impl Iterator<Item = ClientId> {
    entries(place).filter_map(|name| name.to_str().and_then(ClientId::parse))
}

fn entries(place: &Location) -> impl Iterator<Item = OsString> {
    let directory = std::fs::read_dir(format!("/proc/self/fd/{}", place.directory.as_raw_fd()));
    directory.into_iter().flatten().flatten().map(|entry| entry.file_name())
}

/// Fails if a file in the directory is not ours. The mode of sockets is not checked, because it depends on the umask,
/// and no other user can enter the directory.
pub(super) fn check_files(place: &Location) -> Result<(), Error> {
    for name in entries(place) {
        // A file that was removed meanwhile is not used.
        let Ok(stat) = statat(&place.directory, &*name, AtFlags::SYMLINK_NOFOLLOW) else {
            continue;
        };
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        let mode = if is_file { stat.st_mode } else { 0 };
        check_owner(&place.clients().join(name), stat.st_uid, mode, "600")?;
    }
    Ok(())
}

pub(super) fn remove_files(place: &Location, client: ClientId) {
    for name in [format!("{client}.wake"), client.to_string()] {
        match unlinkat(&place.directory, &name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => event!(debug, %error, name, "a dead client's file could not be removed"),
        }
    }
}

/// Returns a path that is short enough for a socket, however long the store's path is: it goes through our own
/// descriptor of the directory.
fn socket_path(place: &Location, client: ClientId) -> PathBuf {
    let directory = place.directory.as_raw_fd();
    PathBuf::from(format!("/proc/self/fd/{directory}/{client}.wake"))
}

/// Removes the files of dead clients that have no row in the store. Call it under the write lock: then no client has a
/// file but no row yet.
pub(super) fn tidy(place: &Location, has_row: impl Fn(ClientId) -> bool) {
    for client in clients(place) {
        if !has_row(client) && is_dead(place, client) {
            remove_files(place, client);
        }
    }
}
