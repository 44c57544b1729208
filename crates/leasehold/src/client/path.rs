//! The path in a `sqlite:` URL.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::Error;

/// Returns the path in a `sqlite:` URL. `~/` at its start stands for the home directory, because a shell expands it in
/// `LEASEHOLD_STORE=sqlite:~/leases` but not in `--store sqlite:~/leases`.
///
/// It is public only for the command. It is not part of the API.
///
/// # Errors
/// [`Error::InvalidArgument`] if there is no path in the URL, or if the home directory is not known.
pub fn sqlite_path(url: &str) -> Result<PathBuf, Error> {
    expand(path_of(url)?, std::env::var_os("HOME"))
}

fn path_of(url: &str) -> Result<&str, Error> {
    let expected = "expected sqlite:/path/to/a/file, or sqlite:file for one in this directory";
    let rest = url.strip_prefix("sqlite:").unwrap_or(url);
    let path = match rest.strip_prefix("//") {
        Some(path) if path.starts_with('/') => path,
        Some(_) => {
            let problem = "sqlite:// is followed by a host name, but the file must be on this host";
            return Err(Error::invalid("store", format!("{problem}: {expected}")));
        }
        None => rest,
    };
    if path.contains("://") {
        let problem = "the URL of another store follows sqlite:";
        return Err(Error::invalid("store", format!("{problem}; remove sqlite:, or {expected}")));
    }
    if path == ":memory:" {
        return Err(Error::invalid("store", "for a store in memory, use memory:"));
    }
    if path.is_empty() {
        return Err(Error::invalid("store", format!("it has no path: {expected}")));
    }
    Ok(path)
}

fn expand(path: &str, home: Option<OsString>) -> Result<PathBuf, Error> {
    let Some(rest) = path.strip_prefix('~') else { return Ok(PathBuf::from(path)) };
    let literal = format!("write the whole path, or sqlite:./{path} for a file of that name");
    let Some(rest) = rest.strip_prefix('/') else {
        let problem = format!("only ~/ is expanded, not {path:?}");
        return Err(Error::invalid("store", format!("{problem}: {literal}")));
    };
    match home.filter(|home| Path::new(home).is_absolute()) {
        Some(home) => Ok(PathBuf::from(home).join(rest)),
        None => Err(Error::invalid("store", format!("HOME is not set: {literal}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tilde_is_the_home_directory() {
        let expand = |path, home: Option<&str>| expand(path, home.map(OsString::from));
        assert_eq!(expand("~/x.db", Some("/home/u")).unwrap(), Path::new("/home/u/x.db"));
        assert_eq!(expand("/a/~/x.db", None).unwrap(), Path::new("/a/~/x.db"));
        assert_eq!(expand("./~/x.db", None).unwrap(), Path::new("./~/x.db"));
        for (path, home) in [("~/x.db", None), ("~joe/x.db", Some("/home/u")), ("~", Some("/h"))] {
            let message = expand(path, home).unwrap_err().to_string();
            assert!(message.contains(&format!("or sqlite:./{path} for")), "{message}");
        }
    }

    #[test]
    fn the_path_follows_the_scheme() {
        for (url, path) in [("sqlite:x", "x"), ("sqlite:/a/b", "/a/b"), ("sqlite:///a/b", "/a/b")] {
            assert_eq!(sqlite_path(url).unwrap(), Path::new(path));
        }
        for url in ["sqlite:", "sqlite://host/a", "sqlite::memory:", "sqlite:redis://host"] {
            assert!(sqlite_path(url).is_err(), "{url}");
        }
    }
}
