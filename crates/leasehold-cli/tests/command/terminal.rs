//! On a terminal: the waiting line, signals from the keyboard, the foreground.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::Instant;

use rustix::fs::OFlags;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use testkit::redis_server::RedisServer;

use crate::support::{Captured, Inspector, PAUSE, TIME_LIMIT, until};

const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";
const CTRL_Z: &str = "\x1a";

/// A pseudo-terminal with a running program.
struct Terminal {
    keyboard: File,
    screen: Captured,
    child: std::process::Child,
    seen: usize,
}

impl Terminal {
    /// Starts a program on this terminal.
    fn start(store: &str, program: &[&str]) -> Self {
        Self::start_in(120, store, program)
    }

    /// As [`start`](Self::start), in a terminal with this many columns.
    fn start_in(columns: u16, store: &str, program: &[&str]) -> Self {
        let master =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let size = Winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&master, size).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let mut options = OpenOptions::new();
        let no_terminal = i32::try_from(OFlags::NOCTTY.bits()).unwrap();
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, no_terminal);
        let slave = options.read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let stdio = || Stdio::from(OwnedFd::from(slave.try_clone().unwrap()));
        let mut command = Command::new("setsid");
        command.args(["--ctty", "--wait"]).args(program);
        command.env("LEASEHOLD_STORE", store).env("TERM", "xterm").env("PS1", "ready$ ");
        command.env_remove("NO_COLOR").env_remove("ENV");
        command.stdin(stdio()).stdout(stdio()).stderr(stdio());
        let child = command.spawn().unwrap();
        let keyboard = File::from(master);
        let screen = Captured::listen(keyboard.try_clone().unwrap());
        Self { keyboard, screen, child, seen: 0 }
    }

    /// Starts the command itself.
    fn leasehold(store: &str, arguments: &[&str]) -> Self {
        let program: Vec<_> =
            [env!("CARGO_BIN_EXE_leasehold")].iter().chain(arguments).copied().collect();
        Self::start(store, &program)
    }

    /// Waits until the screen shows this after what was seen before.
    #[track_caller]
    fn shows(&mut self, expected: &str) {
        let begun = Instant::now();
        loop {
            let screen = self.screen.so_far();
            let rest = screen.get(self.seen..).unwrap_or_default();
            if let Some(at) = rest.find(expected) {
                self.seen += at + expected.len();
                return;
            }
            assert!(begun.elapsed() < TIME_LIMIT, "no {expected:?} in {rest:?}");
            std::thread::sleep(PAUSE);
        }
    }

    fn types(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits for the end of the program, and returns its exit code as a shell does.
    fn code(&mut self) -> i32 {
        until(|| self.child.try_wait().unwrap().is_some());
        let status = self.child.wait().unwrap();
        status.code().or_else(|| Some(128 + status.signal()?)).unwrap()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_waiter_sees_its_place_and_the_holder() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let held = inspector.hold("deploy");
    let mut terminal =
        Terminal::leasehold(&server.url(), &["run", "deploy", "--", "echo", "it", "runs"]);
    terminal.shows("waiting for \"deploy\" (");
    terminal.shows("s): 1st in the queue; held by ");
    let pid = format!(" pid {} \"nightly\" for ", std::process::id());
    terminal.shows(&pid);
    // It is drawn again as time passes.
    terminal.shows("waiting for \"deploy\" (");
    assert!(inspector.block_on(held.release()).unwrap());
    terminal.shows("it runs\r\n");
    assert_eq!(terminal.code(), 0);
}

/// A job is known by its label.
#[test]
fn on_a_narrow_terminal_the_label_is_cut_last() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let held = inspector.hold("deploy");
    let program = [env!("CARGO_BIN_EXE_leasehold"), "run", "deploy", "--", "echo", "it", "runs"];
    let mut terminal = Terminal::start_in(40, &server.url(), &program);
    terminal.shows("\"deploy\" (");
    terminal.shows("): 1st; \"nightly\"");
    assert!(inspector.block_on(held.release()).unwrap());
    terminal.shows("it runs\r\n");
    assert_eq!(terminal.code(), 0);
}

#[test]
fn a_waiter_for_a_lock_sees_its_holder_and_age() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let lock = inspector.client.lock("it").label("nightly").build().unwrap();
    let guard = inspector.block_on(lock.acquire()).unwrap();
    let mut terminal = Terminal::leasehold(&server.url(), &["lock", "it", "--", "echo", "runs"]);
    terminal.shows("waiting for the lock \"it\" (");
    terminal.shows("s): locked with fence 0000000000000000001; held by ");
    terminal.shows(&format!(" pid {} \"nightly\" for ", std::process::id()));
    assert!(inspector.block_on(guard.release()).unwrap());
    terminal.shows("runs\r\n");
    assert_eq!(terminal.code(), 0);
}

#[test]
fn ctrl_c_leaves_the_queue_at_once() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let _held = inspector.hold("it");
    let mut terminal = Terminal::leasehold(&server.url(), &["run", "it", "--", "true"]);
    terminal.shows("1st in the queue");
    terminal.types(CTRL_C);
    assert_eq!(terminal.code(), 130);
    assert_eq!(inspector.held_and_waiting("it"), (1, 0));
}

#[test]
fn ctrl_c_goes_to_the_child() {
    let server = RedisServer::start();
    let script = "trap 'echo caught; exit 3' INT; echo set; while :; do sleep 0.01; done";
    let mut terminal = Terminal::leasehold(&server.url(), &["run", "it", "--", "sh", "-c", script]);
    terminal.shows("set\r\n");
    terminal.types(CTRL_C);
    terminal.shows("caught\r\n");
    assert_eq!(terminal.code(), 3);
}

#[test]
fn the_child_has_the_terminal() {
    let server = RedisServer::start();
    let mut terminal = Terminal::leasehold(&server.url(), &["run", "it", "--", "head", "-n1"]);
    until(|| Inspector::new(&server.url()).held_and_waiting("it") == (1, 0));
    terminal.types("a line\r");
    terminal.shows("a line\r\na line\r\n");
    assert_eq!(terminal.code(), 0);
}

/// `less` needs the terminal while the child writes to it. The two read one after the other: if two
/// processes read from one terminal at a time, each gets some of the characters.
#[test]
fn a_child_in_a_pipeline_has_the_terminal_only_when_it_asks() {
    let server = RedisServer::start();
    let directory = tempfile::tempdir().unwrap();
    let turn = directory.path().join("turn");
    let turn = turn.display();
    let binary = env!("CARGO_BIN_EXE_leasehold");
    let mut shell = Terminal::start(&server.url(), &["sh", "-i"]);
    shell.shows("ready$ ");
    let child = format!(
        "while ! [ -e {turn} ]; do sleep 0.01; done; read go < /dev/tty; echo \"child $go\""
    );
    let reader = format!("{{ read line < /dev/tty; echo \"typed $line\"; touch {turn}; cat; }}");
    shell.types(&format!("{binary} run it -- sh -c '{child}' | {reader}\r"));
    let inspector = Inspector::new(&server.url());
    until(|| inspector.held_and_waiting("it") == (1, 0));
    shell.types("one\r");
    shell.shows("typed one\r\n");
    shell.types("two\r");
    shell.shows("child two\r\n");
    shell.shows("ready$ ");
    shell.types("exit\r");
    assert_eq!(shell.code(), 0);
}

#[test]
fn ctrl_z_stops_the_job_and_the_shell_continues_it() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let binary = env!("CARGO_BIN_EXE_leasehold");
    let mut shell = Terminal::start(&server.url(), &["sh", "-i"]);
    shell.shows("ready$ ");
    shell.types(&format!("{binary} run it -- cat\r"));
    until(|| inspector.held_and_waiting("it") == (1, 0));
    shell.types("one\r");
    shell.shows("one\r\none\r\n");
    for word in ["two", "three"] {
        shell.types(CTRL_Z);
        shell.shows("Stopped");
        shell.shows("ready$ ");
        shell.types("echo back in the $((1+1))shell\r");
        shell.shows("back in the 2shell\r\n");
        shell.types("fg\r");
        shell.shows("run it -- cat\r\n");
        shell.types(&format!("{word}\r"));
        shell.shows(&format!("{word}\r\n{word}\r\n"));
    }
    shell.types(CTRL_D);
    shell.shows("ready$ ");
    shell.types("echo code=$?\r");
    shell.shows("code=0\r\n");
    assert_eq!(inspector.held_and_waiting("it"), (0, 0));
    shell.types("exit\r");
    assert_eq!(shell.code(), 0);
}

#[test]
fn ctrl_z_stops_a_waiting_command() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let held = inspector.hold("it");
    let binary = env!("CARGO_BIN_EXE_leasehold");
    let mut shell = Terminal::start(&server.url(), &["sh", "-i"]);
    shell.shows("ready$ ");
    shell.types(&format!("{binary} run it -- echo it runs\r"));
    shell.shows("1st in the queue");
    shell.types(CTRL_Z);
    shell.shows("Stopped");
    shell.types("fg\r");
    assert!(inspector.block_on(held.release()).unwrap());
    shell.shows("it runs\r\n");
    shell.types("exit\r");
    assert_eq!(shell.code(), 0);
}

/// Without a shell nothing could continue the command.
#[test]
fn ctrl_z_without_a_shell_stops_no_process() {
    let server = RedisServer::start();
    let mut terminal = Terminal::leasehold(&server.url(), &["run", "it", "--", "cat"]);
    terminal.types("one\r");
    terminal.shows("one\r\none\r\n");
    terminal.types(CTRL_Z);
    terminal.types("two\r");
    terminal.shows("two\r\ntwo\r\n");
    terminal.types(CTRL_D);
    assert_eq!(terminal.code(), 0);
}

#[test]
fn colours_are_for_terminals() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let _held = inspector.hold("deploy");
    let mut terminal = Terminal::leasehold(&server.url(), &["ls"]);
    terminal.shows("\x1b[1mSEMAPHORE");
    assert_eq!(terminal.code(), 0);
    let binary = env!("CARGO_BIN_EXE_leasehold");
    let mut terminal = Terminal::start(&server.url(), &["env", "NO_COLOR=1", binary, "ls"]);
    terminal.shows("SEMAPHORE");
    assert_eq!(terminal.code(), 0);
    assert!(!terminal.screen.so_far().contains('\x1b'));
}
