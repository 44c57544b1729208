//! Child processes of a test: the test binary, started again to play a part.
//!
//! A test file that needs such processes defines a test named `child` as their entry point. Run as
//! a test, it does nothing:
//!
//! ```text
//! #[test]
//! fn child() {
//!     testkit::child::play(|part, arguments| …);
//! }
//! ```
//!
//! The test and the child exchange lines over the child's standard input and output. A child ends when its handle is
//! dropped or its standard input is closed. The kernel closes that input when the test process ends.

use std::env;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child as Process, ChildStdin, Command, Stdio};
use std::thread;

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, test_kill_process, waitid,
};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::wait::deadline;

/// The environment variables that name the part and its arguments.
const PART: &str = "LEASEHOLD_TEST_PART";
const ARGUMENTS: &str = "LEASEHOLD_TEST_ARGUMENTS";
/// The prefix of the lines that the child sends. The test harness writes lines as well.
const MARK: &str = "child says: ";

/// A process that plays a part. It is killed when dropped.
#[derive(Debug)]
pub struct Child {
    process: Process,
    input: Option<ChildStdin>,
    lines: UnboundedReceiver<String>,
}

impl Child {
    /// Starts this test binary again, at its test `child`.
    #[must_use]
    pub fn start(part: &str, arguments: &[&str]) -> Self {
        let process = command(part, arguments).spawn().expect("the test binary can be run");
        Self::of(process)
    }

    /// As [`start`](Self::start), as an unprivileged user. Returns `None` if this process may not
    /// become that user, or that user may not run the test binary.
    #[must_use]
    pub fn start_as(user: u32, part: &str, arguments: &[&str]) -> Option<Self> {
        command(part, arguments).uid(user).gid(user).spawn().ok().map(Self::of)
    }

    fn of(mut process: Process) -> Self {
        let output = BufReader::new(process.stdout.take().expect("a piped output"));
        let (sender, lines) = unbounded_channel();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // Not always at the beginning of a line: the harness does not end its own first line.
                if let Some((_, text)) = line.split_once(MARK) {
                    let _ = sender.send(text.to_owned());
                }
            }
        });
        let input = process.stdin.take();
        Self { process, input, lines }
    }

    /// Returns the next line of the child.
    ///
    /// # Panics
    ///
    /// If the child ends without another line, or takes longer than
    /// [`TIME_LIMIT`](crate::wait::TIME_LIMIT).
    pub async fn says(&mut self) -> String {
        deadline(self.lines.recv()).await.expect("the child has ended")
    }

    /// Returns the next line that has already arrived.
    pub fn try_line(&mut self) -> Option<String> {
        self.lines.try_recv().ok()
    }

    /// Sends a line to the child. A stopped child reads it after [`go_on`](Self::go_on).
    pub fn tell(&mut self, line: &str) {
        let input = self.input.as_mut().expect("only the end takes the input");
        writeln!(input, "{line}").expect("the child reads");
    }

    /// Kills the child with SIGKILL, and returns when it has ended.
    pub fn kill(&mut self) {
        // Not by pid: after the child is reaped, its pid may belong to another process.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Stops the child with SIGSTOP, and returns when the kernel reports it as stopped.
    pub fn stop(&self) {
        let pid = Pid::from_child(&self.process);
        kill_process(pid, Signal::STOP).expect("the child runs");
        let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(pid), options).expect("the child is ours");
        assert!(status.is_some_and(|status| status.stopped()), "the child ended when stopped");
    }

    /// Continues a stopped child with SIGCONT.
    pub fn go_on(&self) {
        kill_process(Pid::from_child(&self.process), Signal::CONT).expect("the child runs");
    }
}

fn command(part: &str, arguments: &[&str]) -> Command {
    let program = env::current_exe().expect("the test binary knows its own path");
    let mut command = Command::new(program);
    command.args(["child", "--exact", "--nocapture", "--test-threads=1"]);
    command.env(PART, part).env(ARGUMENTS, arguments.join("\n"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

/// In the child: plays the part it was started for. Does nothing if [`Child::start`] did not start this process.
pub fn play(parts: impl FnOnce(&str, &[&str])) {
    let (Ok(part), Ok(arguments)) = (env::var(PART), env::var(ARGUMENTS)) else { return };
    parts(&part, &arguments.lines().collect::<Vec<_>>());
}

/// In the child: sends a line to the test.
pub fn say(line: &str) {
    println!("{MARK}{line}");
    io::stdout().flush().expect("the test listens");
}

/// In the child: the lines that the test sends. When standard input is closed, the test has ended,
/// and so this process exits.
#[must_use]
pub fn lines_from_test() -> UnboundedReceiver<String> {
    let (sender, lines) = unbounded_channel();
    thread::spawn(move || {
        for line in io::stdin().lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
        std::process::exit(0);
    });
    lines
}

/// A forked copy of a [`Child`], which the child reports by its process id. It is killed when dropped.
#[derive(Debug)]
pub struct ForkedCopy(Pid);

impl ForkedCopy {
    /// # Panics
    ///
    /// If this is no process id.
    #[must_use]
    pub fn new(pid: &str) -> Self {
        Self(pid.parse().ok().and_then(Pid::from_raw).expect("a process id"))
    }

    /// Fails the test if the copy has ended.
    ///
    /// # Panics
    ///
    /// If it has.
    pub fn assert_alive(&self) {
        assert_eq!(test_kill_process(self.0), Ok(()), "the copy has ended");
    }
}

impl Drop for ForkedCopy {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}
