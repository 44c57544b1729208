//! The console as a process, and a client that sends requests byte for byte.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{Running, TIME_LIMIT};

pub(crate) const TOKEN: &str = "a-token-of-some-length";

/// A `leasehold serve` on a free port. It is killed when dropped.
pub(crate) struct Console {
    pub(crate) running: Running,
    pub(crate) port: u16,
    _directory: TempDir,
}

impl Console {
    /// Starts a read-only console.
    pub(crate) fn start(store: &str) -> Self {
        Self::start_with(store, false, &["--listen", "127.0.0.1:0"])
    }

    /// Starts a console with [`TOKEN`].
    pub(crate) fn with_token(store: &str) -> Self {
        Self::start_with(store, true, &["--listen", "127.0.0.1:0"])
    }

    pub(crate) fn start_with(store: &str, token: bool, options: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("token").display().to_string();
        std::fs::write(&file, format!("{TOKEN}\n")).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        let mut arguments = vec!["serve"];
        arguments.extend(options);
        if token {
            arguments.extend(["--token-file", &file]);
        }
        let mut running = Running::start(store, &arguments);
        let line = running.line();
        let port =
            line.strip_prefix("listening on http://").and_then(|rest| rest.strip_suffix('/'));
        let port = port.and_then(|address| address.rsplit_once(':')).expect(&line).1;
        let console = Self { port: port.parse().unwrap(), running, _directory: directory };
        crate::support::until(|| console.get("/healthz").status == 200);
        console
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(TIME_LIMIT)).unwrap();
        stream.set_write_timeout(Some(TIME_LIMIT)).unwrap();
        stream
    }

    /// Sends these bytes, and returns the reply.
    pub(crate) fn raw(&self, bytes: &[u8]) -> Reply {
        let mut stream = self.connect();
        // A server that has read enough may close before all is written.
        let _ = stream.write_all(bytes);
        Reply::read(&mut stream)
    }

    /// Sends a request with these additional headers.
    pub(crate) fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> Reply {
        let (port, length) = (self.port, body.len());
        self.raw(
            format!(
                "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\nContent-Length: {length}\r\n\
                 {headers}\r\n{body}"
            )
            .as_bytes(),
        )
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        self.request("GET", path, "", "")
    }

    pub(crate) fn json(&self, path: &str) -> Value {
        let reply = self.get(path);
        assert_eq!((reply.status, &*reply.kind()), (200, "application/json"), "{reply:?}");
        serde_json::from_str(&reply.body).unwrap()
    }

    /// Acts through the API, with the token.
    pub(crate) fn act(&self, body: &Value) -> Reply {
        self.request("POST", "/api/act", &bearer(TOKEN), &body.to_string())
    }

    /// The memory that the console uses, in KiB.
    pub(crate) fn memory(&self) -> u64 {
        let pid = self.running.pid().as_raw_pid();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

pub(crate) fn bearer(token: &str) -> String {
    format!("Authorization: Bearer {token}\r\n")
}

#[derive(Debug)]
pub(crate) struct Reply {
    /// Zero if the connection ended without a reply.
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Reply {
    /// Reads to the end of the connection.
    pub(crate) fn read(stream: &mut TcpStream) -> Self {
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Self { status: status.unwrap_or(0), head: head.to_owned(), body: body.to_owned() }
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then_some(value.trim())
        })
    }

    pub(crate) fn kind(&self) -> String {
        self.header("content-type").unwrap_or_default().to_owned()
    }
}

/// Reads what arrives within this time, or to the end.
pub(crate) fn read_for(stream: &mut TcpStream, time: Duration) -> Vec<u8> {
    let (began, mut all, mut bytes) = (Instant::now(), Vec::new(), [0; 4096]);
    while let Some(left) = time.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) {
        stream.set_read_timeout(Some(left)).unwrap();
        match stream.read(&mut bytes) {
            Ok(read @ 1..) => all.extend_from_slice(&bytes[..read]),
            _ => break,
        }
    }
    all
}
