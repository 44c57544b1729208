//! One run of the server program: spawned, awaited, signalled, ended.

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

/// What runs when this process ends without dropping its server: killed, aborted, or the server
/// sits in a `static`. The shell's standard input is a pipe that only we hold, so our end, however
/// it comes, is its end of file.
const WATCHDOG: &str = r#"read -r _; kill -9 "$1" 2>/dev/null; rm -rf -- "$2""#;

/// The log line of a server, or of a sentinel, that accepts connections.
const READY: [&str; 2] = ["eady to accept connections", "Sentinel ID is"];

/// Why a server did not come up.
pub(super) enum SpawnError {
    /// Somebody else listens on the port; another one may work.
    PortTaken,
    /// Anything that trying again does not help, with what the server said.
    Failed(String),
}

/// What the fixture last did to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Running,
    Stopped,
    Ended,
}

/// A server that accepted connections once; killed when dropped.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    watchdog: Child,
    state: State,
    /// Never yields after the start; its disconnection says that the server closed its output,
    /// which is the event "it ended" without polling.
    output: Receiver<String>,
}

impl Process {
    /// Runs the server in `dir` and returns when it says that it accepts connections.
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
        let state = State::Running;
        let process = Self { child, watchdog, state, output: follow(reader) };
        process.ready()?;
        Ok(process)
    }

    fn ready(&self) -> Result<(), SpawnError> {
        let deadline = Instant::now() + DEADLINE;
        let mut said = String::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(line) if READY.iter().any(|ready| line.contains(ready)) => return Ok(()),
                Ok(line) => said.extend([&line, "\n"]),
                Err(_) if said.contains("Address already in use") => {
                    return Err(SpawnError::PortTaken);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(SpawnError::Failed(format!("redis-server ended:\n{said}")));
                }
                Err(RecvTimeoutError::Timeout) => {
                    let what = format!("redis-server not ready in {DEADLINE:?}:\n{said}");
                    return Err(SpawnError::Failed(what));
                }
            }
        }
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn state(&self) -> State {
        self.state
    }

    /// Ends the server with SIGKILL, also a stopped one. Twice is harmless.
    pub(super) fn kill(&mut self) {
        self.state = State::Ended;
        // The watchdog first: once the server is reaped its pid may be somebody else's.
        for child in [&mut self.watchdog, &mut self.child] {
            // An error means that it has already been reaped.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Ends the server with SIGKILL. Its directory stays, and is still removed if this process ends.
    pub(super) fn kill_for_now(&mut self, dir: &Path) {
        self.kill();
        self.watchdog = watch("", dir);
    }

    /// Waits until the server ended by itself.
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

    /// What happens to the server when this whole process ends without a word.
    #[cfg(test)]
    pub(super) fn abandon(&mut self) {
        drop(self.watchdog.stdin.take());
        self.watchdog.wait().expect("the watchdog is our child");
    }

    /// Stops the server and returns once the kernel says that it is stopped.
    pub(super) fn stop(&mut self) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::STOP).expect("the server runs");
        // NOWAIT and EXITED: should it have died instead, we learn of it, and `Child` still reaps it.
        let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(pid), options).expect("the server is our child");
        assert!(status.is_some_and(|status| status.stopped()), "redis-server ended when paused");
        self.state = State::Stopped;
    }

    pub(super) fn proceed(&mut self) {
        kill_process(Pid::from_child(&self.child), Signal::CONT).expect("the server runs");
        self.state = State::Running;
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

/// Drains the server's output for as long as it lives, so that a full pipe never blocks it.
fn follow(reader: PipeReader) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
            // The receiver goes away with a dropped `Process`; draining goes on to the end.
            let _ = sender.send(String::from_utf8_lossy(&line).into_owned());
        }
    });
    receiver
}
