//! The path in a `sqlite:` URL.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// What is wrong with a URL.
type Problem = String;

/// Returns the path after `sqlite:`.
///
/// `~/` at its start stands for the home directory, because a shell expands it in `LEASEHOLD_STORE=sqlite:~/leases` but
/// not in `--store sqlite:~/leases`.
pub(super) fn parse(rest: &str) -> Result<PathBuf, Problem> {
    expand(path_of(rest)?, std::env::var_os("HOME"))
}

fn path_of(rest: &str) -> Result<&str, Problem> {
    let expected = "expected sqlite:/path/to/a/file, or sqlite:file for one in this directory";
    let path = match rest.strip_prefix("//") {
        Some(path) if path.starts_with('/') => path,
        Some(_) => {
            let problem = "sqlite:// is followed by a host name, but the file must be on this host";
            return Err(format!("{problem}: {expected}"));
        }
        None => rest,
    };
    if path.contains("://") {
        let problem = "the URL of another store follows sqlite:";
        return Err(format!("{problem}; remove sqlite:, or {expected}"));
    }
    if path == ":memory:" {
        return Err("for a store in memory, use memory:".to_owned());
    }
    if path.is_empty() {
        return Err(format!("it has no path: {expected}"));
    }
    Ok(path)
}

fn expand(path: &str, home: Option<OsString>) -> Result<PathBuf, Problem> {
    let Some(rest) = path.strip_prefix('~') else { return Ok(PathBuf::from(path)) };
    let literal = format!("write the whole path, or sqlite:./{path} for a file of that name");
    let Some(rest) = rest.strip_prefix('/') else {
        let problem = format!("only ~/ is expanded, not {path:?}");
        return Err(format!("{problem}: {literal}"));
    };
    match home.filter(|home| Path::new(home).is_absolute()) {
        Some(home) => Ok(PathBuf::from(home).join(rest)),
        None => Err(format!("HOME is not set: {literal}")),
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
            let message = expand(path, home).unwrap_err();
            assert!(message.contains(&format!("or sqlite:./{path} for")), "{message}");
        }
    }

    #[test]
    fn the_path_follows_the_scheme() {
        for (url, path) in [("sqlite:x", "x"), ("sqlite:/a/b", "/a/b"), ("sqlite:///a/b", "/a/b")] {
            assert_eq!(parse(url.strip_prefix("sqlite:").unwrap()).unwrap(), Path::new(path));
        }
        for url in ["sqlite:", "sqlite://host/a", "sqlite::memory:", "sqlite:redis://host"] {
            assert!(parse(url.strip_prefix("sqlite:").unwrap()).is_err(), "{url}");
        }
    }
}
