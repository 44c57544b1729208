//! The connections of one process, as the servers see them.

use std::collections::HashSet;
use std::time::Duration;

use redis::Connection;

/// How long a server may take to answer the driver. A server that is stopped in the meantime never answers.
pub(super) const PROMPTLY: Duration = Duration::from_millis(250);

/// Closes all connections of a process at the servers with these URLs. The server discards what it has not read or not
/// sent yet.
pub(super) fn cut(pid: u32, servers: &[String]) {
    let ports = local_ports(pid);
    for url in servers {
        // A server that is killed in the meantime has closed them itself.
        let _ = open(url, PROMPTLY).and_then(|mut server| {
            let list: String =
                redis::cmd("CLIENT").arg("LIST").query(&mut server).unwrap_or_default();
            for line in list.lines() {
                let field = |name| line.split(' ').find_map(|word| word.strip_prefix(name));
                let port =
                    field("addr=").and_then(|address| address.rsplit_once(':')?.1.parse().ok());
                if let (Some(id), Some(port)) = (field("id="), port)
                    && ports.contains(&port)
                {
                    redis::cmd("CLIENT").arg("KILL").arg("ID").arg(id).exec(&mut server).ok()?;
                }
            }
            Some(())
        });
    }
}

pub(super) fn open(url: &str, answers_within: Duration) -> Option<Connection> {
    let client = redis::Client::open(url).ok()?;
    let connection = client.get_connection_with_timeout(answers_within.min(Duration::from_secs(1)));
    let connection = connection.ok()?;
    connection.set_read_timeout(Some(answers_within)).ok()?;
    Some(connection)
}

/// The local ports of the TCP sockets that a process has open.
fn local_ports(pid: u32) -> HashSet<u16> {
    let sockets: HashSet<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .filter_map(|file| {
            let link = std::fs::read_link(file.ok()?.path()).ok()?;
            let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
            Some(inode.to_owned())
        })
        .collect();
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let port = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let (_, port) = fields.get(1)?.rsplit_once(':')?;
        sockets.contains(*fields.get(9)?).then(|| u16::from_str_radix(port, 16).ok())?
    };
    table.lines().filter_map(port).collect()
}

#[cfg(test)]
mod tests {
    use testkit::redis_server::RedisServer;

    use super::*;

    #[test]
    fn the_connections_of_this_process_are_closed_and_no_others() {
        let server = RedisServer::start();
        let mut connection = open(&server.url(), Duration::from_secs(5)).unwrap();
        let mut ping = || redis::cmd("PING").query::<String>(&mut connection);
        assert!(ping().is_ok());
        cut(1, &[server.url()]);
        assert!(ping().is_ok());
        cut(std::process::id(), &[server.url()]);
        assert!(ping().is_err());
    }
}
