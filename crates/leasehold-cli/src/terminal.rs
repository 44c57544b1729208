//! The foreground process group of the terminal.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;

use rustix::process::{Pid, getpgrp};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

use crate::signals::from_the_background;

/// The terminal that this process was started from.
#[derive(Debug)]
pub(crate) struct Terminal {
    tty: File,
    group: Pid,
}

impl Terminal {
    pub(crate) fn open() -> Option<Self> {
        let tty = OpenOptions::new().read(true).write(true).open("/dev/tty").ok()?;
        Some(Self { tty, group: getpgrp() })
    }

    /// Whether our own group is in the foreground.
    pub(crate) fn is_ours(&self) -> bool {
        self.belongs_to(self.group)
    }

    pub(crate) fn belongs_to(&self, group: Pid) -> bool {
        tcgetpgrp(&self.tty) == Ok(group)
    }

    /// Whether the child gets the terminal at its start. If our output goes into a pipe, its reader may use the terminal,
    /// as a pager does. Then the child gets the terminal only when it uses it.
    pub(crate) fn is_for_the_child(&self) -> bool {
        self.is_ours() && !output_is_a_pipe()
    }

    pub(crate) fn give_to(&self, group: Pid) {
        // If this fails, the terminal is closed, or the child's group has ended.
        let _ = from_the_background(|| tcsetpgrp(&self.tty, group));
    }

    /// Takes the terminal back from the child's group. Another process, such as a shell, may have it by now.
    pub(crate) fn take_back_from(&self, group: Pid) {
        if self.belongs_to(group) {
            self.give_to(self.group);
        }
    }
}

/// Gives the terminal to the child, in the guard, as soon as there is a child.
pub(crate) fn give_to(group: Pid) {
    if let Some(terminal) = Terminal::open() {
        terminal.give_to(group);
    }
}

fn output_is_a_pipe() -> bool {
    let stdout = io::stdout();
    if stdout.is_terminal() {
        return false;
    }
    let file = stdout.as_fd().try_clone_to_owned().map(File::from);
    file.and_then(|file| file.metadata()).is_ok_and(|metadata| metadata.file_type().is_fifo())
}
