//! Who is alive, and how to wake him.
//!
//! Every client holds an exclusive `flock` on a file of its own, its *lifeline*, from before its first transition. **It is
//! dead when the kernel has let go of that**: at the end of its process, however that came, and of every process that
//! inherited the descriptor. Pids play no part, so that it does not matter who reuses one, or who cannot see it from inside
//! a container. A file that is missing proves nothing: then nobody is buried.
//!
//! A client is woken by a datagram without content, which means *look*. So a queue of them that is full loses nothing: he
//! who has one to read will look, and see everything.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, flock, fstat, openat, statat, unlinkat,
};
use rustix::io::Errno;

use super::errors::of_system;
use super::location::{Location, check_owner};
use crate::engine::foreign::event;
use crate::{ClientId, Error};

/// How a client can be reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reach {
    Reached,
    /// Alive, but nobody knows how to wake it.
    Silent,
    /// Its process is gone, but somebody has inherited its lifeline. What it holds stays, what it waits for does not.
    Bequeathed,
    Dead,
}

/// The clients of a store, through their directory.
pub(super) struct Clients {
    /// To send with.
    socket: UnixDatagram,
}

impl Clients {
    pub(super) fn new() -> Result<Self, Error> {
        let made = UnixDatagram::unbound().and_then(|socket| {
            // Never wait for a client that does not read its socket.
            socket.set_nonblocking(true)?;
            Ok(socket)
        });
        let failed = |error| of_system("making a socket for", Path::new("the store"), error);
        Ok(Self { socket: made.map_err(failed)? })
    }

    pub(super) fn reach(&self, place: &Location, client: ClientId) -> Reach {
        let Err(error) = self.socket.connect(socket_path(place, client)) else {
            return Reach::Reached;
        };
        match error.kind() {
            _ if is_dead(place, client) => Reach::Dead,
            // The socket is there, and nobody has it open.
            ErrorKind::ConnectionRefused => Reach::Bequeathed,
            _ => Reach::Silent,
        }
    }

    /// If it cannot be reached now, its own question finds out within a second.
    pub(super) fn wake(&self, place: &Location, client: ClientId) {
        let _ = self.socket.send_to(&[], socket_path(place, client));
    }
}

/// The lifeline of a new client, and the socket that wakes it. To be called in our turn.
pub(super) fn enter(place: &Location, client: ClientId) -> Result<(OwnedFd, UnixDatagram), Error> {
    let failed = |error| of_system("making a client's file beside", &place.file, error);
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let lifeline = openat(&place.directory, client.to_string(), flags, Mode::RUSR | Mode::WUSR)
        .map_err(|error| failed(error.into()))?;
    flock(&lifeline, FlockOperation::NonBlockingLockExclusive)
        .map_err(|error| failed(error.into()))?;
    let socket = UnixDatagram::bind(socket_path(place, client)).map_err(failed)?;
    socket.set_nonblocking(true).map_err(failed)?;
    Ok((lifeline, socket))
}

/// Whether it is certain that nobody holds its lifeline any more.
pub(super) fn is_dead(place: &Location, client: ClientId) -> bool {
    held(place, client) == Some(false)
}

/// Whether somebody holds its lifeline. None if that cannot be said: there is no such file, or it is not one of ours.
fn held(place: &Location, client: ClientId) -> Option<bool> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let lifeline = openat(&place.directory, client.to_string(), flags, Mode::empty()).ok()?;
    let stat = fstat(&lifeline).ok()?;
    check_owner(&place.file, stat.st_uid, stat.st_mode, "600").ok()?;
    // Shared, so that two clients can look at the same time.
    Some(flock(&lifeline, FlockOperation::NonBlockingLockShared).is_err())
}

/// How many clients are alive, whatever the database says.
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

/// Fails if a file in the directory is not ours. Sockets have the mode that the umask gives them: nobody else can enter
/// the directory.
pub(super) fn check_files(place: &Location) -> Result<(), Error> {
    for name in entries(place) {
        // What has gone meanwhile is not used.
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
            Err(error) => event!(debug, %error, name, "a dead client's file stays behind"),
        }
    }
}

/// Short enough for a socket however long the store's path is: it leads over our own descriptor of the directory.
fn socket_path(place: &Location, client: ClientId) -> PathBuf {
    let directory = place.directory.as_raw_fd();
    PathBuf::from(format!("/proc/self/fd/{directory}/{client}.wake"))
}

/// Removes what clients have left behind that nobody in the store knows. To be called in our turn: then nobody has a
/// file and is not yet known.
pub(super) fn tidy(place: &Location, known: impl Fn(ClientId) -> bool) {
    for client in clients(place) {
        if !known(client) && is_dead(place, client) {
            remove_files(place, client);
        }
    }
}
