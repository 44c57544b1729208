//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::store::Store;
use crate::worker::{Settings, child};

/// Injects faults while leasehold is in use, and checks that it keeps its promises. Exits with 0 if it does, 1 if it
/// does not, and 2 if the run is inconclusive.
#[derive(Debug, Parser)]
#[command(name = "torture", args_conflicts_with_subcommands = true)]
pub struct Arguments {
    #[command(flatten)]
    pub run: Run,
    #[command(subcommand)]
    pub part: Option<Part>,
}

#[derive(clap::Args, Clone, Debug)]
pub struct Run {
    /// How long to run, not counting start-up and clean-up.
    #[arg(long, default_value_t = 2.0)]
    pub minutes: f64,
    /// The seed of everything random. A new one each time by default. It is printed.
    #[arg(long)]
    pub seed: Option<u64>,
    /// `redis:`, `redis-cluster:` and `redis-sentinel:` start their own servers; `sqlite:PATH` is a file on this host.
    #[arg(long, default_value = "redis:")]
    pub store: Store,
    /// How many processes use the library.
    #[arg(long, default_value_t = 5)]
    pub workers: usize,
    /// The `leasehold` command, which takes part as another worker. Without this, the command is not tested.
    #[arg(long, value_name = "PATH")]
    pub command: Option<PathBuf>,
    /// The directory for the histories and the report. By default a temporary one, which is removed unless something
    /// was found.
    #[arg(long)]
    pub keep: Option<PathBuf>,
    /// The file for the report, as Markdown.
    #[arg(long)]
    pub report: Option<PathBuf>,
    /// The rule that this build breaks. Only for the report; the library reads it from the environment.
    #[arg(long, hide = true)]
    pub broken: Option<String>,
    /// Ends the run as soon as a check of the histories so far finds a violation.
    #[arg(long, hide = true)]
    pub until_found: bool,
}

#[derive(Debug, Subcommand)]
pub enum Part {
    /// Runs as one of the workers.
    #[command(hide = true)]
    Worker(Settings),
    /// Runs as the child of the command.
    #[command(hide = true)]
    Child(child::Settings),
    /// Checks the histories of an earlier run again.
    Check {
        /// The directory that `--keep` kept.
        dir: PathBuf,
    },
}
