//! The command, as people and scripts use it, on a real Redis server.

mod crowd;
mod exit_codes;
mod input;
mod limits;
mod matrix;
mod outages;
mod output;
mod parts;
mod places;
mod running;
mod stopping;
mod support;
mod terminal;

/// Not a test, but the way in for the children that the tests let the command run.
#[test]
fn child() {
    testkit::child::play(parts::play);
}
