//! The command, as people and scripts use it, on a real Redis server.

mod crowd;
mod deployments;
mod edges;
mod exit_codes;
mod input;
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

// The command's own, for a part that panics while it has the terminal.
#[path = "../../src/command/top/terminal.rs"]
#[allow(dead_code)]
mod screen;

/// Not a test, but the way in for the children that the tests let the command run.
#[test]
fn child() {
    testkit::child::play(parts::play);
}
