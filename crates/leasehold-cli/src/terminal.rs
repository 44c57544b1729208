//! Who has the terminal.

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
    own: Pid,
}

impl Terminal {
    pub(crate) fn open() -> Option<Self> {
        let tty = OpenOptions::new().read(true).write(true).open("/dev/tty").ok()?;
        Some(Self { tty, own: getpgrp() })
    }

    /// Whether our own group is in the foreground.
    pub(crate) fn is_ours(&self) -> bool {
        self.belongs_to(self.own)
    }

    pub(crate) fn belongs_to(&self, group: Pid) -> bool {
        tcgetpgrp(&self.tty) == Ok(group)
    }

    /// Whether a child is to have it from the beginning. If our output goes into a pipe, who reads it may want the
    /// terminal, as a pager does: then the child has it only when it asks.
    pub(crate) fn is_for_the_child(&self) -> bool {
        self.is_ours() && !output_is_a_pipe()
    }

    pub(crate) fn give_to(&self, group: Pid) {
        // If it fails, the terminal has gone, or the child's group has.
        let _ = from_the_background(|| tcsetpgrp(&self.tty, group));
    }

    /// If this group has it. Somebody else may have taken it, as a shell does that gets its job back.
    pub(crate) fn take_back_from(&self, group: Pid) {
        if self.belongs_to(group) {
            self.give_to(self.own);
        }
    }
}

/// In the guard, as soon as there is a child: it may want to read.
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
