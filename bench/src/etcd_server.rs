//! An etcd server for one scenario.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Another process may take a port that was just free.
const ATTEMPTS: usize = 5;
const START: Duration = Duration::from_secs(15);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Ends the server and removes its folder if the bench is killed, which closes the input.
const WATCHDOG: &str = r#"read -r _; kill -9 "$1"; rm -rf "$2""#;

/// A cluster of one member on loopback, with etcd's defaults: it calls fsync before it answers a write. It is killed
/// when this is dropped.
pub(crate) struct EtcdServer {
    child: Child,
    watchdog: Child,
    port: u16,
    /// Removed after the server has ended.
    _folder: TempDir,
}

impl EtcdServer {
    /// Starts a server, and returns when it answers.
    pub(crate) fn start() -> Result<Self, String> {
        let mut failed = String::new();
        for _ in 0..ATTEMPTS {
            match Self::start_once() {
                Ok(server) => return Ok(server),
                Err(why) => failed = why,
            }
        }
        Err(failed)
    }

    fn start_once() -> Result<Self, String> {
        let text = |why: std::io::Error| format!("etcd does not start: {why}");
        let folder = tempfile::tempdir().map_err(text)?;
        let [port, peer_port] = free_ports().map_err(text)?;
        let url = |port: u16| format!("http://{}:{port}", Ipv4Addr::LOCALHOST);
        let child = Command::new("etcd")
            .arg("--data-dir")
            .arg(folder.path())
            .args(["--listen-client-urls", &url(port), "--advertise-client-urls", &url(port)])
            .args(["--listen-peer-urls", &url(peer_port)])
            .args(["--initial-advertise-peer-urls", &url(peer_port)])
            .args(["--name", "bench", "--initial-cluster", &format!("bench={}", url(peer_port))])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(text)?;
        let pid = child.id().to_string();
        let watchdog = Command::new("sh")
            .args(["-c", WATCHDOG, "watchdog", &pid])
            .arg(folder.path())
            .stdin(Stdio::piped())
            .spawn()
            .map_err(text)?;
        let mut server = Self { child, watchdog, port, _folder: folder };
        let begun = Instant::now();
        while !server.is_healthy() {
            if let Ok(Some(status)) = server.child.try_wait() {
                return Err(format!("etcd does not start: {status}"));
            }
            if begun.elapsed() > START {
                return Err(format!("etcd does not answer after {START:?}"));
            }
            sleep(LOOK_AGAIN);
        }
        Ok(server)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}:{}", Ipv4Addr::LOCALHOST, self.port)
    }

    /// Whether the member has a leader, and so serves requests.
    fn is_healthy(&self) -> bool {
        let ask = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
            stream.set_read_timeout(Some(Duration::from_secs(1)))?;
            stream.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        ask().is_ok_and(|answer| answer.contains("\"health\":\"true\""))
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        // The watchdog first: once the server is reaped, its pid may belong to another process.
        for process in [&mut self.watchdog, &mut self.child] {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Describes the installed etcd in one line.
pub(crate) fn describe() -> Result<String, String> {
    let output = Command::new("etcd").arg("--version").output();
    let output = output.map_err(|why| format!("etcd could not be run: {why}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.lines().find_map(|line| line.strip_prefix("etcd Version: "));
    Ok(format!(
        "etcd {}: one member, fsync before each answer, over TCP; Redis writes nothing to disk",
        version.unwrap_or("?")
    ))
}

/// Returns two ports that are free now.
fn free_ports() -> std::io::Result<[u16; 2]> {
    let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let (first, second) = (bind()?, bind()?);
    Ok([first.local_addr()?.port(), second.local_addr()?.port()])
}
