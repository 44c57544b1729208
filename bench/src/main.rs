//! Measurements, as ratios within one run: this machine may be shared, and absolute times say little.
//!
//! `cargo run --release -p bench -- memory [uncontended | contended | queue | bytes]`
//! `cargo run --release -p bench -- redis [hot | handoff | waiters | queue]`
//! `cargo run --release -p bench -- locks [pairs | handoff]`

mod locks;
mod measure;
mod memory;
mod redis;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments.first().copied() {
        Some("memory") => memory::run(arguments.get(1).copied()),
        Some("locks") => locks::run(arguments.get(1).copied()),
        Some("redis") => redis::run(arguments.get(1).copied()),
        // How the hand-off starts its second process.
        Some("redis-waiters") => redis::waiters_of(arguments[1]),
        None => {
            memory::run(None);
            redis::run(None);
            locks::run(None);
        }
        Some(other) => {
            eprintln!("no scenario is called {other:?}: there are memory, redis and locks");
            return ExitCode::from(64);
        }
    }
    ExitCode::SUCCESS
}
