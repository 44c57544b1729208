//! The command, as people and scripts use it, on real stores.

mod contended;
mod crowd;
mod deployments;
mod edges;
mod exhausted;
mod exit_codes;
mod input;
mod killed;
mod limits;
mod matrix;
mod outages;
mod output;
mod parts;
mod places;
mod pty;
mod running;
mod schedules;
mod stopping;
mod support;
mod terminal;
mod top;
mod weights;

// The command's own module, for the part that panics while it draws on the terminal.
#[path = "../../src/command/top/terminal.rs"]
#[allow(dead_code)]
mod screen;

/// Not a test, but the entry point of the children that the command runs in tests.
#[test]
fn child() {
    testkit::child::play(parts::play);
}
