//! Finds the program of the child before the command waits: a typing error should not cost a place in a queue.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::io::Errno;

use crate::failure::{CANNOT_RUN, Failure, NOT_FOUND};

/// The directories that `execvp` searches without `PATH`.
const USUAL: &str = "/bin:/usr/bin";

/// Fails as the start of the child would: if there is no such program, or if it is not executable.
pub(crate) fn check(command: &[OsString]) -> Result<(), Failure> {
    let Some(program) = command.first() else { return Ok(()) };
    let path = std::env::var_os("PATH").unwrap_or_else(|| USUAL.into());
    find(program, &path).map_err(|error| not_run(program, error.raw_os_error()))
}

/// The failure for a program that could not be started, with the system's error number.
pub(crate) fn not_run(program: &OsStr, errno: i32) -> Failure {
    let code = if errno == Errno::NOENT.raw_os_error() { NOT_FOUND } else { CANNOT_RUN };
    let (program, error) = (program.to_string_lossy(), io::Error::from_raw_os_error(errno));
    Failure::system(code, &format!("{program:?} could not be run"), error)
}

/// Searches like `execvp`: a name with a slash is a path, another name is looked up in every directory of `path`.
fn find(program: &OsStr, path: &OsStr) -> Result<(), Errno> {
    if program.is_empty() {
        return Err(Errno::NOENT);
    }
    if program.as_bytes().contains(&b'/') {
        return executable(Path::new(program));
    }
    let mut outcome = Err(Errno::NOENT);
    for directory in std::env::split_paths(path) {
        match executable(&directory.join(program)) {
            Ok(()) => return Ok(()),
            Err(Errno::ACCESS) => outcome = Err(Errno::ACCESS),
            Err(_) => {}
        }
    }
    outcome
}

fn executable(path: &Path) -> Result<(), Errno> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() && metadata.permissions().mode() & 0o111 != 0 => Ok(()),
        Ok(_) => Err(Errno::ACCESS),
        Err(error) => Err(Errno::from_io_error(&error).unwrap_or(Errno::NOENT)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_as_the_system_finds_them() {
        let path = OsStr::new("/nowhere:/bin:/usr/bin");
        assert_eq!(find(OsStr::new("sh"), path), Ok(()));
        assert_eq!(find(OsStr::new("/bin/sh"), OsStr::new("")), Ok(()));
        assert_eq!(find(OsStr::new("no-such-program"), path), Err(Errno::NOENT));
        assert_eq!(find(OsStr::new("/no/such/program"), path), Err(Errno::NOENT));
        assert_eq!(find(OsStr::new(""), path), Err(Errno::NOENT));
        assert_eq!(find(OsStr::new("/etc/passwd"), path), Err(Errno::ACCESS));
        assert_eq!(find(OsStr::new("/etc"), path), Err(Errno::ACCESS));
        assert_eq!(find(OsStr::new("passwd"), OsStr::new("/etc")), Err(Errno::ACCESS));
    }
}
