//! Measures leasehold and its peers, interleaved in one run. The results are ratios, because the machine may be shared,
//! and then absolute times say little.
//!
//! `bench/run` installs the peers and calls this program. It also works without them, and reports them as missing:
//! `cargo run --release -p bench -- [--quick] [--store URL] [SCENARIO…]`

mod bars;
mod bench;
mod contender;
mod contender_set;
mod driver;
mod etcd_server;
mod host;
mod plot;
mod plots;
mod progress;
mod report;
mod sample;
mod scenario;
mod server_time;
mod wire_log;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use crate::bench::Bench;
use crate::scenario::{SCENARIOS, Scenario};

/// Measures leasehold against its peers and against what Redis can do at all.
#[derive(Debug, Parser)]
#[command(name = "bench/run")]
struct Arguments {
    /// End within three minutes: fewer repetitions and shorter windows
    #[arg(long)]
    quick: bool,
    /// Measure on this Redis server instead of one of our own
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// Where to write CSV, Markdown and SVG
    #[arg(long, value_name = "DIR", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/results"))]
    out: PathBuf,
    /// List the scenarios, and exit
    #[arg(long)]
    list: bool,
    /// Which scenarios to run; all of them if none is named
    #[arg(value_name = "SCENARIO", value_parser = scenario::parse)]
    scenarios: Vec<&'static Scenario>,
}

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        // The bench starts leasehold and the other Rust contenders in this way, as separate processes.
        ["driver", contender, url] => driver::serve(contender, url),
        // The child of a command under test.
        ["stamp", ref rest @ ..] => scenario::command::stamp(rest),
        _ => return measure(Arguments::parse()),
    }
    ExitCode::SUCCESS
}

fn measure(arguments: Arguments) -> ExitCode {
    if arguments.list {
        for scenario in SCENARIOS {
            println!("{:<16} {}", scenario.name, scenario.about);
        }
        return ExitCode::SUCCESS;
    }
    let scenarios = if arguments.scenarios.is_empty() {
        SCENARIOS.iter().collect()
    } else {
        arguments.scenarios
    };
    let mut bench = match Bench::new(arguments.quick, arguments.store, &scenarios) {
        Ok(bench) => bench,
        Err(why) => {
            eprintln!("bench/run: {why}");
            return ExitCode::from(69);
        }
    };
    for scenario in &scenarios {
        bench.run(scenario);
    }
    let report = bench.finish();
    println!("{}", report.for_terminal());
    if let Err(why) = report.write(&arguments.out) {
        eprintln!("bench/run: the results were not written to {}: {why}", arguments.out.display());
        return ExitCode::from(74);
    }
    println!("written to {}", arguments.out.display());
    ExitCode::SUCCESS
}
