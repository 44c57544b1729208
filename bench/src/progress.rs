//! A progress bar on a terminal; elsewhere one line per scenario.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// The progress of a run, in the seconds that each scenario is expected to take.
pub(crate) struct Progress {
    bar: ProgressBar,
    /// How many milliseconds of the bar one step of this scenario takes, and how many are left for the scenario.
    step: u64,
    left: u64,
}

impl Progress {
    pub(crate) fn new(seconds: u64) -> Self {
        let bar = if std::io::stderr().is_terminal() {
            ProgressBar::new(seconds * 1000)
        } else {
            ProgressBar::hidden()
        };
        let style =
            ProgressStyle::with_template("[{elapsed_precise}] {bar:30} {percent:>3}% {msg}");
        bar.set_style(style.expect("a template that is known to be valid"));
        bar.enable_steady_tick(Duration::from_millis(200));
        Self { bar, step: 0, left: 0 }
    }

    pub(crate) fn scenario(&mut self, name: &str, seconds: u64, steps: usize) {
        self.bar.inc(self.left);
        self.left = seconds * 1000;
        self.step = self.left / u64::try_from(steps.max(1)).expect("few steps");
        self.bar.set_message(name.to_owned());
        if self.bar.is_hidden() {
            eprintln!("{name} …");
        }
    }

    /// Starts the next measurement.
    pub(crate) fn step(&mut self, what: String) {
        let worth = self.step.min(self.left);
        self.left -= worth;
        self.bar.inc(worth);
        self.bar.set_message(what);
    }

    /// Prints a line above the bar.
    pub(crate) fn say(&self, line: &str) {
        if self.bar.is_hidden() {
            eprintln!("{line}");
        } else {
            self.bar.println(line);
        }
    }

    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
