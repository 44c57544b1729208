//! Measurements, as ratios within one run: this machine may be shared, and absolute times say little.
//!
//! `cargo run --release -p bench -- memory [uncontended | contended | queue | bytes]`

mod measure;
mod memory;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments.first().copied() {
        None | Some("memory") => memory::run(arguments.get(1).copied()),
        Some(other) => {
            eprintln!("no scenario is called {other:?}: there is memory");
            return ExitCode::from(64);
        }
    }
    ExitCode::SUCCESS
}
