//! The terminal is as it was, however `top` ends.

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use super::{BINARY, LARGE, SMALL, top};
use crate::parts::part;
use crate::pty::Pty;
use crate::support::{Looker, Store, until};

#[test]
fn every_end_restores_the_terminal() {
    let store = Store::local();
    let looker = Looker::new(&store.url());
    let _held = looker.hold("deploy");
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
    let looker = Looker::new(&store.url());
    let _held = looker.hold("deploy");
    for script in ["exec \"$@\"", "trap '' HUP; exec \"$@\""] {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", script, "sh", BINARY, "top"]).env("LEASEHOLD_STORE", store.url());
        let mut top = Pty::start(SMALL, &mut command);
        top.shows("> deploy");
        top.hang_up();
        assert_eq!(top.code(), 129, "{script}");
    }
}

/// The id of the job in the foreground of a shell.
fn job(shell: &Pty) -> Pid {
    let shell = shell.pid().as_raw_pid();
    let mut job = None;
    until(|| {
        let children = std::fs::read_to_string(format!("/proc/{shell}/task/{shell}/children"));
        let child = children.unwrap().split_whitespace().next().map(|pid| pid.parse().unwrap());
        job = child.and_then(Pid::from_raw);
        job.is_some()
    });
    job.unwrap()
}

#[test]
fn it_is_suspended_and_continued() {
    let store = Store::local();
    let looker = Looker::new(&store.url());
    let _held = looker.hold("deploy");
    let mut command = std::process::Command::new("sh");
    let mut shell = Pty::start(SMALL, command.arg("-i").env("LEASEHOLD_STORE", store.url()));
    shell.shows("ready$");
    shell.restores();
    shell.types(&format!("{BINARY} top\r"));
    shell.shows("> deploy");
    for by_signal in [false, true] {
        assert!(!shell.is_restored());
        if by_signal {
            kill_process_group(job(&shell), Signal::TSTP).unwrap();
        } else {
            shell.types("\x1a");
        }
        shell.shows("Stopped");
        shell.restores();
        shell.types("echo back in the $((1+1))shell\r");
        shell.shows("back in the 2shell");
        shell.types("fg\r");
        shell.until("the list again", |text| {
            text.starts_with("leasehold top") && text.contains("> deploy")
        });
        assert!(shell.parser().screen().hide_cursor());
    }
    // After SIGSTOP nobody could restore anything, but what a shell has changed is set again.
    kill_process(job(&shell), Signal::STOP).unwrap();
    shell.shows("Stopped");
    shell.types("\nfg\n");
    shell.until("the list again", |text| {
        text.starts_with("leasehold top") && text.contains("> deploy")
    });
    shell.types("q");
    shell.shows("ready$");
    shell.restores();
    shell.types("echo code=$?\r");
    shell.shows("code=0");

    // A job in the background ends without the terminal.
    shell.types(&format!("{BINARY} top\r"));
    shell.until("the list", |text| text.starts_with("leasehold top"));
    shell.types("\x1a");
    shell.restores();
    let job = job(&shell).as_raw_pid();
    shell.types("kill %1; kill -CONT %1\r");
    until(|| {
        let stat = std::fs::read_to_string(format!("/proc/{job}/stat"));
        stat.map_or(true, |stat| stat.contains(") Z "))
    });
    shell.types("wait %1; echo code=$?\r");
    shell.shows("code=143");
    shell.restores();
    shell.types("exit\r");
    assert_eq!(shell.code(), 0);
}

#[test]
fn a_panic_restores_the_terminal_before_its_message() {
    let line = part("panic on a screen", &[]);
    let mut command = std::process::Command::new(&line[0]);
    let mut program = Pty::start(SMALL, command.args(&line[1..]));
    assert_ne!(program.code(), 0);
    program.shows("a panic to be read");
    program.restores();
}
