//! A pseudo-terminal with an emulator at its other end: what a program draws can be read as a screen.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::process::Pid;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Termios, Winsize, tcgetattr, tcgetpgrp, tcsetwinsize};

/// How long anything may take before it fails. Far more than it should.
const TIME_LIMIT: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(5);

/// Columns and rows.
pub(crate) type Size = (u16, u16);

pub(crate) struct Pty {
    keyboard: File,
    /// The program's end, to read its modes, also when the program has ended.
    line: File,
    parser: Arc<Mutex<vt100::Parser>>,
    reader: Option<JoinHandle<()>>,
    hung_up: Arc<AtomicBool>,
    child: Child,
    before: Termios,
}

impl Pty {
    /// Starts a program that has this terminal and no other.
    pub(crate) fn start(size: Size, program: &mut Command) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let keyboard = File::from(master);
        set_size(&keyboard, size);
        let name = ptsname(&keyboard, Vec::new()).unwrap();
        let mut options = OpenOptions::new();
        let no_terminal = i32::try_from(OFlags::NOCTTY.bits()).unwrap();
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, no_terminal);
        let line = options.read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let stdio = || Stdio::from(OwnedFd::from(line.try_clone().unwrap()));
        let before = tcgetattr(&line).unwrap();
        let mut command = Command::new("setsid");
        command.args(["--ctty", "--wait"]).arg(program.get_program()).args(program.get_args());
        if let Some(directory) = program.get_current_dir() {
            command.current_dir(directory);
        }
        command.env_remove("NO_COLOR").env_remove("ENV").env_remove("LC_ALL");
        command.env("TERM", "xterm-256color").env("LANG", "C.UTF-8").env("PS1", "ready$ ");
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let child = command.stdin(stdio()).stdout(stdio()).stderr(stdio()).spawn().unwrap();
        let (columns, rows) = numbers(size);
        let parser = Arc::new(Mutex::new(vt100::Parser::new(rows, columns, 0)));
        let (mut output, screen) = (keyboard.try_clone().unwrap(), Arc::clone(&parser));
        let hung_up = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&hung_up);
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            let pause = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
            while !ends.load(Ordering::Acquire) {
                let ready = poll(&mut [PollFd::new(&output, PollFlags::IN)], Some(&pause));
                if ready.is_ok_and(|ready| ready == 0) {
                    continue;
                }
                let Ok(read @ 1..) = output.read(&mut bytes) else { return };
                screen.lock().unwrap().process(&bytes[..read]);
            }
        });
        Self { keyboard, line, parser, reader: Some(reader), hung_up, child, before }
    }

    pub(crate) fn parser(&self) -> MutexGuard<'_, vt100::Parser> {
        self.parser.lock().unwrap()
    }

    /// The screen as text, without blanks at the ends of lines.
    pub(crate) fn text(&self) -> String {
        let parser = self.parser();
        let (_, columns) = parser.screen().size();
        let rows: Vec<_> = parser.screen().rows(0, columns.get()).collect();
        rows.iter().map(|row| row.trim_end()).collect::<Vec<_>>().join("\n")
    }

    /// Waits until the screen is as it should be.
    #[track_caller]
    pub(crate) fn until(&self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        let begun = Instant::now();
        loop {
            let text = self.text();
            if is_so(&text) {
                return text;
            }
            assert!(begun.elapsed() < TIME_LIMIT, "no {what} on the screen:\n{text}");
            std::thread::sleep(PAUSE);
        }
    }

    #[track_caller]
    pub(crate) fn shows(&self, expected: &str) -> String {
        self.until(&format!("{expected:?}"), |text| text.contains(expected))
    }

    /// Waits until one line has all of these, in this order.
    #[track_caller]
    pub(crate) fn shows_line(&self, parts: &[&str]) -> String {
        self.until(&format!("{parts:?}"), |text| text.lines().any(|line| has(line, parts)))
    }

    #[track_caller]
    pub(crate) fn hides(&self, unexpected: &str) -> String {
        self.until(&format!("end of {unexpected:?}"), |text| !text.contains(unexpected))
    }

    pub(crate) fn types(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// The kernel sends SIGWINCH.
    pub(crate) fn resize(&mut self, size: Size) {
        let (columns, rows) = numbers(size);
        self.parser().set_size(rows, columns);
        set_size(&self.keyboard, size);
    }

    /// Closes the terminal, as a connection does that is lost.
    pub(crate) fn hang_up(&mut self) {
        self.hung_up.store(true, Ordering::Release);
        self.reader.take().unwrap().join().unwrap();
        self.keyboard = File::open("/dev/null").unwrap();
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Waits until this process group is in the foreground, and so reads the keys that are typed next.
    ///
    /// A shell takes the foreground back when its job has stopped or ended. Before that, the job may still read keys,
    /// although it has restored the screen.
    #[track_caller]
    pub(crate) fn foreground(&self, group: Pid) {
        let begun = Instant::now();
        while tcgetpgrp(&self.keyboard) != Ok(group) {
            assert!(
                begun.elapsed() < TIME_LIMIT,
                "{group:?} is not in the foreground:\n{}",
                self.text()
            );
            std::thread::sleep(PAUSE);
        }
    }

    /// Whether the terminal has the modes from before, is on its main screen and shows its cursor.
    pub(crate) fn is_restored(&self) -> bool {
        let now = tcgetattr(&self.line).unwrap();
        // Speeds are compared as numbers: Linux may write the same input speed with other bits.
        let modes = |termios: &Termios| {
            let control = termios.control_modes.bits() & !0x100f_100f;
            let speeds = (termios.input_speed(), termios.output_speed());
            (termios.input_modes, termios.output_modes, control, termios.local_modes, speeds)
        };
        let parser = self.parser();
        let screen = parser.screen();
        modes(&now) == modes(&self.before) && !screen.alternate_screen() && !screen.hide_cursor()
    }

    /// Waits until it is.
    #[track_caller]
    pub(crate) fn restores(&self) {
        let begun = Instant::now();
        while !self.is_restored() {
            let modes = (tcgetattr(&self.line).unwrap(), &self.before);
            let text = self.text();
            assert!(begun.elapsed() < TIME_LIMIT, "not restored: {modes:?}\n{text}");
            std::thread::sleep(PAUSE);
        }
    }

    /// Waits for the end of the program. As a shell would say it.
    #[track_caller]
    pub(crate) fn code(&mut self) -> i32 {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().or_else(|| Some(128 + status.signal()?)).unwrap();
            }
            assert!(begun.elapsed() < TIME_LIMIT, "it has not ended:\n{}", self.text());
            std::thread::sleep(PAUSE);
        }
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn has(line: &str, parts: &[&str]) -> bool {
    let mut rest = line;
    parts.iter().all(|part| match rest.split_once(part) {
        Some((_, after)) => {
            rest = after;
            true
        }
        None => false,
    })
}

fn set_size(terminal: &File, (columns, rows): Size) {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size).unwrap();
}

fn numbers((columns, rows): Size) -> (NonZeroU16, NonZeroU16) {
    (NonZeroU16::new(columns).unwrap(), NonZeroU16::new(rows).unwrap())
}
