//! One run of the server program: start, signals, end.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, ErrorKind, PipeReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

/// Generous, because a loaded machine must not fail a test; a healthy start takes milliseconds.
const DEADLINE: Duration = Duration::from_secs(30);

/// Environment variable naming another server program, for instance `valkey-server`.
const PROGRAM: &str = "LEASEHOLD_TEST_REDIS_SERVER";

/// The shell script that cleans up when this process ends without dropping its server: because it
/// was killed or aborted, or because the server is in a `static`. Only this process holds the write
/// end of the shell's standard input, so `read` returns when this process ends for any reason.
const WATCHDOG: &str = r#"read -r _; kill -9 "$1" 2>/dev/null; rm -rf -- "$2""#;

/// The log line of a server, or of a sentinel, that accepts connections.
const READY: [&str; 2] = ["eady to accept connections", "Sentinel ID is"];

/// Why a server did not start.
pub(super) enum SpawnError {
    /// Another process listens on the port; another port may work.
    PortTaken,
    /// A failure that a retry does not fix, with the server's output.
    Failed(String),
}

/// What the fixture last did to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProcessState {
    Running,
    Stopped,
    Ended,
}

/// A server that has accepted connections. It is killed when dropped.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    watchdog: Child,
    state: ProcessState,
    /// Receives nothing after the start. It is disconnected when the server closes its output,
    /// which signals the end of the server without polling.
    output: Receiver<String>,
}

impl Process {
    /// Runs the server in `dir` and returns when its log says that it accepts connections.
    pub(super) fn spawn(args: &[String], dir: &Path) -> Result<Self, SpawnError> {
        let program = std::env::var_os(PROGRAM).unwrap_or_else(|| OsString::from("redis-server"));
        let (reader, writer) = io::pipe().expect("a pipe for the server's output");
        let spawned = Command::new(&program)
            .args(args)
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(writer.try_clone().expect("a second handle of the pipe"))
            .stderr(writer)
            .spawn();
        let child = spawned.unwrap_or_else(|error| match error.kind() {
            ErrorKind::NotFound => panic!(
                "{} is not installed: run `scripts/test`, which installs it before the tests",
                program.display()
            ),
            _ => panic!("cannot run {}: {error}", program.display()),
        });
        let watchdog = watch(&child.id().to_string(), dir);
        let state = ProcessState::Running;
        let process = Self { child, watchdog, state, output: follow(reader) };
        process.ready()?;
        Ok(process)
    }

    fn ready(&self) -> Result<(), SpawnError> {
        let deadline = Instant::now() + DEADLINE;
        let mut output = String::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(line) if READY.iter().any(|ready| line.contains(ready)) => return Ok(()),
                Ok(line) => output.extend([&line, "\n"]),
                Err(_) if output.contains("Address already in use") => {
                    return Err(SpawnError::PortTaken);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(SpawnError::Failed(format!("redis-server ended:\n{output}")));
                }
                Err(RecvTimeoutError::Timeout) => {
                    let what = format!("redis-server not ready in {DEADLINE:?}:\n{output}");
                    return Err(SpawnError::Failed(what));
                }
            }
        }
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn state(&self) -> ProcessState {
        self.state
    }

    /// Kills the server with SIGKILL, even if it is stopped. Calling it again does nothing.
    pub(super) fn kill(&mut self) {
        self.state = ProcessState::Ended;
        // The watchdog first: once the server is reaped, its pid may belong to another process.
        for child in [&mut self.watchdog, &mut self.child] {
            // An error means that the child has already been reaped.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Kills the server with SIGKILL. Its directory stays, but is still removed if this process ends.
    pub(super) fn kill_for_now(&mut self, dir: &Path) {
        self.kill();
        self.watchdog = watch("", dir);
    }

    /// Waits until the server has ended on its own.
    pub(super) fn wait_ended(&mut self) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    panic!("redis-server {} did not end in {DEADLINE:?}", self.pid())
                }
            }
        }
        self.kill();
    }

    /// Simulates the sudden end of this process: lets the watchdog clean up, and waits for it.
    #[cfg(test)]
    pub(super) fn abandon(&mut self) {
        drop(self.watchdog.stdin.take());
        self.watchdog.wait().expect("the watchdog is our child");
    }

    /// Stops the server and returns when the kernel reports it as stopped.
    pub(super) fn stop(&mut self) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::STOP).expect("the server runs");
        // `EXITED` reports a server that died instead, and `NOWAIT` leaves it for `Child` to reap.
        let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(pid), options).expect("the server is our child");
        assert!(status.is_some_and(|status| status.stopped()), "redis-server ended when paused");
        self.state = ProcessState::Stopped;
    }

    pub(super) fn proceed(&mut self) {
        kill_process(Pid::from_child(&self.child), Signal::CONT).expect("the server runs");
        self.state = ProcessState::Running;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts a watchdog for a server in `dir`, and for its process unless `pid` is empty.
fn watch(pid: &str, dir: &Path) -> Child {
    Command::new("sh")
        .args(["-c", WATCHDOG, "watchdog", pid])
        .arg(dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("a shell to watch over the server")
}

/// Drains the server's output until the server ends, so that a full pipe never blocks it.
fn follow(reader: PipeReader) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
            // The receiver is dropped with its `Process`; draining continues to the end.
            let _ = sender.send(String::from_utf8_lossy(&line).into_owned());
        }
    });
    receiver
}
