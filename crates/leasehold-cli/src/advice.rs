//! What to do about a store that cannot be reached or used. The cause decides: a server that is loading its
//! data does not have to be started. And what to do if this process can open no more files, or start no more processes.

use std::borrow::Cow;
use std::io;

use leasehold::Error;
use rustix::io::Errno;
use rustix::process::{Resource, geteuid, getrlimit};

use crate::failure::text;

/// What to do about this error, for one server. `None` if the error itself says it, or if nothing is known.
pub(crate) fn advice(error: &Error) -> Option<Cow<'static, str>> {
    let says = text(error);
    if let Some(advice) = limit_reached(&says) {
        return Some(advice.into());
    }
    match error {
        Error::Unavailable { timed_out, source, .. } => {
            let cause = source.as_ref().and_then(|source| source.downcast_ref::<io::Error>());
            Some(unavailable(&says, *timed_out, cause.map(io::Error::kind)).into())
        }
        Error::Denied { problem, .. } => denied(problem).map(Cow::Borrowed),
        Error::NoRoom { .. } => Some(Cow::Borrowed(NO_ROOM)),
        Error::Unusable { problem, .. } => unusable(problem).map(Cow::Borrowed),
        _ => None,
    }
}

/// Returns which limit was reached and how to raise it, if the message ends with such an error of the system.
pub(crate) fn limit_reached(says: &str) -> Option<String> {
    let has = |errno: Errno| says.contains(&format!("(os error {})", errno.raw_os_error()));
    // A busy server may also answer `EAGAIN`, but only a process or a thread "could not be started".
    let not_started = says.contains("could not be ");
    if has(Errno::MFILE) {
        let limit = getrlimit(Resource::Nofile).current;
        let limit = limit.map_or("is reached".to_owned(), |limit| format!("is {limit}"));
        Some(format!("the limit {limit}; raise it with `ulimit -n`"))
    } else if has(Errno::NFILE) {
        Some("the limit of the whole system is reached; raise it with `sysctl fs.file-max`".into())
    } else if has(Errno::AGAIN) && not_started {
        Some(no_more_processes(getrlimit(Resource::Nproc).current, geteuid().is_root()))
    } else {
        None
    }
}

/// `limit` is that of the user, which does not apply to root.
fn no_more_processes(limit: Option<u64>, is_root: bool) -> String {
    match limit.filter(|_| !is_root) {
        Some(limit) => {
            let what = "the limit of processes and threads of this user is";
            format!("{what} {limit}; raise it with `ulimit -u`, or end some of them")
        }
        None => "the limit of processes and threads is reached; raise TasksMax of the systemd unit or the pids limit of \
                 the container"
            .to_owned(),
    }
}

/// Appends how to raise the limit, if the message says that one was reached.
pub(crate) fn with_limit(says: String) -> String {
    match limit_reached(&says) {
        Some(advice) => format!("{says}: {advice}"),
        None => says,
    }
}

/// `cause` is the kind of the system's error. A server that answers says in a text why it is not ready.
fn unavailable(says: &str, timed_out: bool, cause: Option<io::ErrorKind>) -> &'static str {
    use io::ErrorKind as Kind;

    let has = |words: &[&str]| words.iter().any(|word| says.contains(word));
    let is_url = says.contains("://");
    if has(&["LOADING", "loading the dataset"]) {
        "wait until it has loaded its data"
    } else if has(&["CLUSTERDOWN", "no node serves"]) {
        "start the nodes that are down; see `redis-cli --cluster check`"
    } else if has(&["MASTERDOWN", "replica"]) {
        "wait until the failover has ended, or give the primary as --store"
    } else if has(&["NOREPLICAS", "Not enough good replicas"]) {
        "start the replicas that are missing, or lower min-replicas-to-write"
    } else if has(&["BUSY"]) {
        "end the script that runs on it: SCRIPT KILL"
    } else if has(&["max number of clients"]) {
        "raise its maxclients, or end some clients"
    } else if has(&["lookup address", "no address", "Name or service not known"]) {
        "the host has no address: correct its name in --store"
    } else if has(&["InvalidContentType"]) {
        "the server does not use TLS on this port: write redis instead of rediss in --store, or correct the port"
    } else if says.contains("unix://") {
        "start it, or correct the path of its socket in --store"
    } else if cause == Some(Kind::ConnectionRefused) {
        "nothing listens there: start the server, or correct the host and port in --store"
    } else if matches!(cause, Some(Kind::ConnectionReset | Kind::BrokenPipe | Kind::UnexpectedEof))
    {
        "the server closed the connection: see its log; if it uses TLS, write rediss instead of redis in --store"
    } else if timed_out && says.contains("rediss") {
        "if the server does not use TLS on this port, write redis instead of rediss in --store; else check that the server runs"
    } else if is_url && timed_out {
        "check that the server runs and that no firewall drops the packets, or correct the host and port in --store"
    } else if is_url {
        "start it, or correct the host and port in --store"
    } else if timed_out {
        "a process that writes to the store may be stopped (state T in ps): continue it with `kill -CONT`, or end it"
    } else {
        "correct --store"
    }
}

const NO_ROOM: &str = "free space on its disk, or raise its maxmemory or remove keys";

fn denied(says: &str) -> Option<&'static str> {
    let is_login = ["a password is required", "wrong user or password"];
    is_login.iter().any(|words| says.contains(words)).then_some(
        "correct --store: redis://user:password@host, or redis://:password@host without a user",
    )
}

fn unusable(says: &str) -> Option<&'static str> {
    let has = |word: &str| says.contains(word);
    if has(": use redis") {
        Some("give that URL as --store")
    } else if has("authority") {
        Some("give its certificate as --ca-certificate")
    } else if has("DB index is out of range") {
        Some("correct the number of the database in --store: that is what follows the last /")
    } else if has("replica") {
        Some("give the primary as --store")
    } else if has("does not answer as Redis") {
        Some("correct the port in --store")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_decides() {
        let at = "connecting to redis://host:6379: the store cannot be reached";
        for (cause, advised) in [
            ("LOADING: Redis is loading the dataset in memory", "loaded its data"),
            ("CLUSTERDOWN: The cluster is down", "--cluster check"),
            ("failed to lookup address information: Name or service not known", "no address"),
            ("something else", "start it, or correct"),
        ] {
            let says = unavailable(&format!("{at} ({cause})"), false, None);
            assert!(says.contains(advised), "{cause}: {says}");
        }
        for (cause, advised) in [
            (io::ErrorKind::ConnectionRefused, "nothing listens there"),
            (io::ErrorKind::ConnectionReset, "closed the connection"),
            (io::ErrorKind::HostUnreachable, "start it, or correct"),
        ] {
            let says = unavailable(at, false, Some(cause));
            assert!(says.contains(advised), "{cause}: {says}");
        }
    }

    #[test]
    fn a_limit_that_was_reached_is_named() {
        let [files, all, processes] = [Errno::MFILE, Errno::NFILE, Errno::AGAIN]
            .map(|errno| std::io::Error::from_raw_os_error(errno.raw_os_error()));
        let limit = getrlimit(Resource::Nofile).current.unwrap();
        let advised = with_limit(format!("opening /x ({files})"));
        assert!(advised.ends_with(&format!(": the limit is {limit}; raise it with `ulimit -n`")));
        assert!(with_limit(format!("opening /x ({all})")).contains("fs.file-max"));
        let advised = limit_reached(&format!("the thread could not be started: {processes}"));
        assert!(advised.unwrap().contains("the limit of processes and threads"));
        assert_eq!(limit_reached(&format!("connecting to unix:///x ({processes})")), None);
        assert_eq!(limit_reached("it could not be started: Not a directory (os error 20)"), None);

        assert!(no_more_processes(Some(7), false).contains(" is 7; raise it with `ulimit -u`"));
        for (limit, is_root) in [(Some(7), true), (None, false)] {
            assert!(no_more_processes(limit, is_root).contains("TasksMax"));
        }
    }
}
