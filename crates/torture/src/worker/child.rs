//! The child of the command. It records that it is alive. Whether it may be alive is the responsibility of the command.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use super::history_path;
use crate::clock;
use crate::history::{Event, HistoryFile, OpId};

/// The id of its acquisition in the histories, and the name of its client. What id the store lists is not known.
pub(crate) const COMMAND: &str = "command";
/// The acquisition that the driver has requested.
pub(crate) const ONLY_OP: OpId = 1;
/// The time between two lines that record that it is alive.
const BEAT: Duration = Duration::from_millis(10);

#[derive(clap::Args, Clone, Debug)]
pub struct Settings {
    #[arg(long)]
    pub index: usize,
    #[arg(long)]
    pub life: u32,
    #[arg(long)]
    pub dir: PathBuf,
    #[arg(long)]
    pub millis: u64,
}

/// Runs for the given time.
#[must_use]
pub fn run(settings: &Settings) -> ExitCode {
    let history_file =
        HistoryFile::open(&history_path(&settings.dir, settings.index, settings.life));
    let history_file = history_file.expect("a directory for the history");
    let op = ONLY_OP;
    let fence = std::env::var("LEASEHOLD_FENCE").ok().and_then(|fence| fence.parse().ok());
    let mut now = history_file.note(Event::Grant { op, fence, slot: 0, weight: 1 });
    let until = now + 1000 * settings.millis;
    while now < until {
        now = history_file.note(Event::Hold { op, since: clock::now() });
        std::thread::sleep(BEAT);
    }
    history_file.note(Event::Ending { op });
    ExitCode::SUCCESS
}
