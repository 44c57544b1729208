//! The ports, the options and the configuration file of a server.

use std::fs;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;

use super::FIXTURE;

/// Below 32768, where Linux's ephemeral ports begin, and above the ports of common services.
pub(super) const PORTS: std::ops::Range<u16> = 20_000..32_000;
pub(super) const ATTEMPTS: usize = 100;

/// The role in which the server program is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A server with all its options on the command line.
    Plain,
    /// A node of a cluster.
    ClusterNode,
    /// A server with its options in a file. A sentinel that changes its role makes it rewrite the
    /// file, so that it keeps the role over a restart.
    Monitored,
    /// A sentinel, which needs a file for what it learns.
    Sentinel,
}

/// A port that no other fixture uses for as long as the socket is held.
pub(super) fn claim_port() -> Option<(u16, UdpSocket)> {
    let random = RandomState::new().build_hasher().finish();
    let span = u64::from(PORTS.end - PORTS.start);
    let port = PORTS.start + u16::try_from(random % span).expect("less than the span of ports");
    Some((port, UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).ok()?))
}

pub(super) fn server_args(extra: &[&str], port: u16, dir: &Path) -> Vec<String> {
    let fixture = format!("--user {FIXTURE} on >{FIXTURE} ~* &* +@all");
    let mut args = vec!["--save".to_owned(), String::new()];
    for option in extra.iter().chain([&fixture.as_str()]) {
        if option.contains(' ') {
            args.extend(option.split_whitespace().map(str::to_owned));
        } else {
            args.push((*option).to_owned());
        }
    }
    // Last, so that they override the options of the test: the fixture depends on these.
    let (port, dir) = (port.to_string(), dir.display().to_string());
    let socket = format!("{dir}/redis.sock");
    let fixture_args =
        ["--bind", "127.0.0.1", "--port", &port, "--dir", &dir, "--unixsocket", &socket];
    let log = ["--daemonize", "no", "--loglevel", "notice", "--logfile", ""];
    args.extend(fixture_args.into_iter().chain(log).map(str::to_owned));
    args
}

/// The options of a cluster node. By default, Redis adds 10000 to the port to get the bus port,
/// which is then often an ephemeral port.
pub(super) fn cluster_args(bus_port: u16) -> [String; 4] {
    let bus_port = bus_port.to_string();
    ["--cluster-enabled", "yes", "--cluster-port", &bus_port].map(str::to_owned)
}

/// The command line for these options: the options themselves, or a file that contains them.
pub(super) fn command_line(kind: Kind, options: Vec<String>, dir: &Path) -> Vec<String> {
    if matches!(kind, Kind::Plain | Kind::ClusterNode) {
        return options;
    }
    let file = dir.join("redis.conf");
    fs::write(&file, config_file(&options)).expect("a writable directory");
    let mut line = vec![file.display().to_string()];
    line.extend((kind == Kind::Sentinel).then(|| "--sentinel".to_owned()));
    line
}

/// One line per option, its values quoted.
fn config_file(options: &[String]) -> String {
    let mut text = String::new();
    for word in options {
        if let Some(name) = word.strip_prefix("--") {
            text.extend(["\n", name]);
        } else {
            let escaped = word.replace('\\', "\\\\").replace('"', "\\\"");
            text.extend([" \"", &escaped, "\""]);
        }
    }
    text + "\n"
}
