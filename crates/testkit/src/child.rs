//! Processes of a test's own: the test binary once more, playing a part.
//!
//! A test file that needs them has one test which is no test but the way in. Run as a test, it does nothing:
//!
//! ```text
//! #[test]
//! fn child() {
//!     testkit::child::play(|part, arguments| …);
//! }
//! ```
//!
//! The two talk in lines, over standard input and output. A child ends, at the latest, when it is dropped or
//! when its standard input ends, which it does with the process that holds it.

use std::env;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child as Process, ChildStdin, Command, Stdio};
use std::thread;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::wait::deadline;

/// Which part to play, and with what.
const PART: &str = "LEASEHOLD_TEST_PART";
const ARGUMENTS: &str = "LEASEHOLD_TEST_ARGUMENTS";
/// The test harness writes lines too.
const MARK: &str = "child says: ";

/// A process that plays a part. Killed, by its own pid, when dropped.
#[derive(Debug)]
pub struct Child {
    process: Process,
    input: Option<ChildStdin>,
    lines: UnboundedReceiver<String>,
}

impl Child {
    /// Starts this very test binary again, at its test `child`.
    #[must_use]
    pub fn start(part: &str, arguments: &[&str]) -> Self {
        let process = command(part, arguments).spawn().expect("the test binary can be run");
        Self::of(process)
    }

    /// The same as another user, who has no rights. None if he may not run the test binary, or we may not be him.
    #[must_use]
    pub fn start_as(user: u32, part: &str, arguments: &[&str]) -> Option<Self> {
        command(part, arguments).uid(user).gid(user).spawn().ok().map(Self::of)
    }

    fn of(mut process: Process) -> Self {
        let output = BufReader::new(process.stdout.take().expect("a piped output"));
        let (sender, lines) = unbounded_channel();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // Not always at the beginning: the harness leaves its own first line open.
                if let Some((_, said)) = line.split_once(MARK) {
                    let _ = sender.send(said.to_owned());
                }
            }
        });
        let input = process.stdin.take();
        Self { process, input, lines }
    }

    /// What it says next.
    ///
    /// # Panics
    ///
    /// If it ends without a word, or takes too long.
    pub async fn says(&mut self) -> String {
        deadline(self.lines.recv()).await.expect("the child has ended")
    }

    /// What it has said and nobody has heard yet.
    pub fn said(&mut self) -> Option<String> {
        self.lines.try_recv().ok()
    }

    /// Says a line to it. It is there for the child to read even while it is stopped.
    pub fn tell(&mut self, line: &str) {
        let input = self.input.as_mut().expect("only the end takes the input");
        writeln!(input, "{line}").expect("the child reads");
    }

    /// Ends it with SIGKILL, and returns when it has ended.
    pub fn kill(&mut self) {
        // Not by pid: once it has been reaped, that may be somebody else's.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Stops it with SIGSTOP, and returns when the kernel says that it is stopped.
    pub fn stop(&self) {
        let pid = Pid::from_child(&self.process);
        kill_process(pid, Signal::STOP).expect("the child runs");
        let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(pid), options).expect("the child is ours");
        assert!(status.is_some_and(|status| status.stopped()), "the child ended when stopped");
    }

    /// Lets it go on.
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

/// In the child: plays the part that it was started for; nothing if it was not started by [`Child::start`].
pub fn play(parts: impl FnOnce(&str, &[&str])) {
    let (Ok(part), Ok(arguments)) = (env::var(PART), env::var(ARGUMENTS)) else { return };
    parts(&part, &arguments.lines().collect::<Vec<_>>());
}

/// In the child: says a line.
pub fn say(line: &str) {
    println!("{MARK}{line}");
    io::stdout().flush().expect("the test listens");
}

/// In the child: the lines that the test says. When there are no more, the process ends: the test has.
#[must_use]
pub fn told() -> UnboundedReceiver<String> {
    let (sender, lines) = unbounded_channel();
    thread::spawn(move || {
        for line in io::stdin().lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
        std::process::exit(0);
    });
    lines
}
