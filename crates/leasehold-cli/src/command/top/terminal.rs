//! The terminal while `top` draws on it: raw mode and the alternate screen, and how both end.
//!
//! [`restore`] is called when the [`Screen`] is dropped, by the panic hook, and before the process stops for Ctrl-Z. The modes
//! of the terminal are kept in a static, because a panic hook has no other way to reach them. Signals are not handled here: the
//! main loop receives them as values and returns, which drops the screen.

use std::io::{self, BufWriter, Stdout};
use std::mem::ManuallyDrop;
use std::sync::{Mutex, Once, PoisonError};

use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::style::{Attribute, SetAttribute};
use ratatui::crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen};
use ratatui::crossterm::{cursor, execute};
use ratatui::{Frame, Terminal};
use rustix::process::getpgrp;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr};

/// A frame of a large terminal is written at once.
const BUFFER: usize = 64 * 1024;

/// The modes before raw mode. `None` while the terminal is unchanged.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// A terminal to draw on. Restores it when dropped.
#[derive(Debug)]
pub(crate) struct Screen {
    /// Never dropped, because that would write the rest of a frame after the terminal was restored, and panic after a hang-up.
    terminal: ManuallyDrop<Terminal<CrosstermBackend<BufWriter<Stdout>>>>,
    entered: bool,
}

impl Screen {
    /// Takes the terminal of stdin and stdout. While another process group has it, this only
    /// prepares the screen, and a later [`enter`](Self::enter) takes the terminal.
    pub(crate) fn open() -> io::Result<Self> {
        restore_on_panic();
        let output = BufWriter::with_capacity(BUFFER, io::stdout());
        let terminal = ManuallyDrop::new(Terminal::new(CrosstermBackend::new(output))?);
        let mut screen = Self { terminal, entered: false };
        screen.enter()?;
        Ok(screen)
    }

    /// Takes the terminal, even if a shell has changed its modes meanwhile. Does nothing in the background, where changing the
    /// modes would stop the process.
    pub(crate) fn enter(&mut self) -> io::Result<()> {
        self.entered = false;
        if is_in_background() {
            return Ok(());
        }
        let stdin = io::stdin();
        let mut before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner);
        if before.is_none() {
            *before = Some(tcgetattr(&stdin)?);
        }
        if let Some(before) = &*before {
            let mut raw = before.clone();
            raw.make_raw();
            tcsetattr(&stdin, OptionalActions::Now, &raw)?;
        }
        // Release the lock before drawing: a panic while drawing restores the terminal, which needs the lock.
        drop(before);
        execute!(io::stdout(), EnterAlternateScreen, cursor::Hide)?;
        // Clears it and draws everything again. `Terminal::clear` would ask the terminal for the position of its cursor, and the
        // answer comes among the keys.
        let size = self.terminal.size()?;
        self.terminal.resize(size.into())?;
        self.entered = true;
        Ok(())
    }

    /// Whether it can be drawn on.
    pub(crate) fn is_entered(&self) -> bool {
        self.entered
    }

    /// Restores the terminal until the next [`enter`](Self::enter).
    pub(crate) fn leave(&mut self) {
        self.entered = false;
        restore();
    }

    /// Draws a frame, in the size that the terminal has now.
    pub(crate) fn draw(&mut self, render: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        if self.entered {
            self.terminal.draw(render)?;
        }
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Leaves the alternate screen, shows the cursor, and restores the modes. Does nothing the second time.
///
/// Errors are ignored: after a hang-up nothing can be written.
pub(crate) fn restore() {
    let before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(before) = before else { return };
    // In the background, the terminal has the modes of a shell, which has set them itself.
    if is_in_background() {
        return;
    }
    let _ =
        execute!(io::stdout(), SetAttribute(Attribute::Reset), LeaveAlternateScreen, cursor::Show);
    let _ = tcsetattr(io::stdin(), OptionalActions::Now, &before);
}

/// Restores the terminal before the message of a panic is printed, so that it can be read.
fn restore_on_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            report(panic);
        }));
    });
}

/// Whether the terminal was hung up.
pub(crate) fn is_closed() -> bool {
    tcgetattr(io::stdin()).is_err()
}

/// Whether another process group has the terminal.
fn is_in_background() -> bool {
    tcgetpgrp(io::stdin()).is_ok_and(|group| group != getpgrp())
}
