//! The terminal is as it was, however `top` ends.

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use super::{BINARY, LARGE, SMALL, top};
use crate::parts::part;
use crate::pty::Pty;
use crate::support::{Inspector, Store, until};

#[test]
fn every_end_restores_the_terminal() {
    let store = Store::local();
    let inspector = Inspector::new(&store.url());
    let _held = inspector.hold("deploy");
    let ends: [(Option<Signal>, &str, i32); 9] = [
        (None, "q", 0),
        (None, "\x03", 130),
        // Also while something is open.
        (None, "\rq", 0),
        (None, "p\x03", 130),
        (Some(Signal::TERM), "", 143),
        (Some(Signal::HUP), "", 129),
        (Some(Signal::INT), "", 130),
        (Some(Signal::QUIT), "?", 131),
        (Some(Signal::USR1), "", 138),
    ];
    for (at, (signal, keys, code)) in ends.into_iter().enumerate() {
        let mut top = top(&store.url(), if at % 2 == 0 { SMALL } else { LARGE });
        top.shows("> deploy");
        assert!(!top.is_restored() && top.parser().screen().alternate_screen());
        assert!(top.parser().screen().hide_cursor());
        top.types(keys);
        if let Some(signal) = signal {
            kill_process(top.pid(), signal).unwrap();
        }
        assert_eq!(top.code(), code, "{signal:?} {keys:?}");
        top.restores();
    }
}

/// Nothing is left to restore, but the command ends, also if it was told to ignore SIGHUP.
#[test]
fn it_ends_with_its_terminal() {
    let store = Store::local();
    let inspector = Inspector::new(&store.url());
    let _held = inspector.hold("deploy");
    for script in ["exec \"$@\"", "trap '' HUP; exec \"$@\""] {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", script, "sh", BINARY, "top"]).env("LEASEHOLD_STORE", store.url());
        let mut top = Pty::start(SMALL, &mut command);
        top.shows("> deploy");
        top.hang_up();
        assert_eq!(top.code(), 129, "{script}");
    }
}

/// Starts `top` in a shell, and returns its process id when it shows the list.
fn start_in(shell: &mut Pty) -> Pid {
    shell.types(&format!("{BINARY} top\r"));
    shell.until("the list", |text| text.starts_with("leasehold top") && text.contains("> deploy"));
    let shell = shell.pid().as_raw_pid();
    let children = std::fs::read_to_string(format!("/proc/{shell}/task/{shell}/children"));
    let child = children.unwrap().split_whitespace().next().map(|pid| pid.parse().unwrap());
    child.and_then(Pid::from_raw).unwrap()
}

/// Continues `top` in the foreground, and returns when it shows the list.
fn continue_in(shell: &mut Pty, top: Pid) {
    shell.types("fg\n");
    shell.foreground(top);
    shell.until("the list again", |text| {
        text.starts_with("leasehold top") && text.contains("> deploy")
    });
}

#[test]
fn it_is_suspended_and_continued() {
    let store = Store::local();
    let inspector = Inspector::new(&store.url());
    let _held = inspector.hold("deploy");
    let mut command = std::process::Command::new("sh");
    let mut shell = Pty::start(SMALL, command.arg("-i").env("LEASEHOLD_STORE", store.url()));
    shell.shows("ready$");
    shell.restores();
    let top = start_in(&mut shell);
    for by_signal in [false, true] {
        assert!(!shell.is_restored());
        if by_signal {
            kill_process_group(top, Signal::TSTP).unwrap();
        } else {
            shell.types("\x1a");
        }
        shell.foreground(shell.pid());
        shell.restores();
        shell.shows("Stopped");
        let number = 1 + i32::from(by_signal);
        shell.types(&format!("echo back in the $(({number}+1))shell\r"));
        shell.shows(&format!("back in the {}shell", number + 1));
        continue_in(&mut shell, top);
        shell.until("no cursor", |_| shell.parser().screen().hide_cursor());
    }
    // After SIGSTOP no process restores the terminal. `top` sets again what the shell has changed.
    kill_process(top, Signal::STOP).unwrap();
    shell.foreground(shell.pid());
    shell.shows("Stopped");
    // The terminal is still in raw mode, in which only a line feed ends a line.
    shell.types("printf '\\033[2J\\033[H'\n");
    shell.until("an empty screen", |text| text.trim() == "ready$");
    continue_in(&mut shell, top);
    shell.types("q");
    shell.foreground(shell.pid());
    shell.restores();
    shell.types("echo code=$?\r");
    shell.shows("code=0");

    // A job in the background ends without the terminal.
    let top = start_in(&mut shell);
    shell.types("\x1a");
    shell.foreground(shell.pid());
    shell.restores();
    shell.types("kill %1; kill -CONT %1\r");
    let top = top.as_raw_pid();
    // The shell can learn of the end only when the last thread has ended.
    until(|| {
        let stat = std::fs::read_to_string(format!("/proc/{top}/stat"));
        let threads = std::fs::read_dir(format!("/proc/{top}/task")).map_or(0, Iterator::count);
        threads <= 1 && stat.map_or(true, |stat| stat.contains(") Z "))
    });
    // A shell reports the end of a job before a prompt. `wait` would not do: dash returns at once for a stopped job.
    shell.types("\r");
    shell.until("the exit code", |text| {
        ["Done(143)", "Exit 143"].iter().any(|end| text.contains(end))
    });
    shell.restores();
    shell.types("exit\r");
    assert_eq!(shell.code(), 0);
}

#[test]
fn a_panic_restores_the_terminal_before_its_message() {
    let line = part("panic on a screen", &[]);
    let mut command = std::process::Command::new(&line[0]);
    // A backtrace would push the message off the screen.
    let mut program = Pty::start(SMALL, command.args(&line[1..]).env("RUST_BACKTRACE", "0"));
    assert_ne!(program.code(), 0);
    program.shows("a panic to be read");
    program.restores();
}
