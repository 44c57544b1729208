//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::store::Store;
use crate::worker::{Settings, child};

/// Ill-treats leasehold and checks that it keeps its word. Ends with 0 if it did, 1 if it did not, 2 if nobody can
/// tell.
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
    /// How long, without building up and clearing away.
    #[arg(long, default_value_t = 2.0)]
    pub minutes: f64,
    /// Where everything random comes from; a new one each time by default. It is printed.
    #[arg(long)]
    pub seed: Option<u64>,
    /// `redis:` starts servers of its own; `sqlite:PATH` is a file on this host.
    #[arg(long, default_value = "redis:")]
    pub store: Store,
    /// How many processes use the library.
    #[arg(long, default_value_t = 5)]
    pub workers: usize,
    /// The `leasehold` command, which takes part as another worker; without it the command is not tested.
    #[arg(long, value_name = "PATH")]
    pub command: Option<PathBuf>,
    /// Where the histories and the report go; a directory that is removed afterwards, unless something was found, by
    /// default.
    #[arg(long)]
    pub keep: Option<PathBuf>,
    /// Where the report goes as Markdown.
    #[arg(long)]
    pub report: Option<PathBuf>,
    /// The rule that this build breaks: for the report only, the environment says it to the library.
    #[arg(long, hide = true)]
    pub broken: Option<String>,
    /// Ends the run as soon as a first look at the histories finds something.
    #[arg(long, hide = true)]
    pub until_found: bool,
}

#[derive(Debug, Subcommand)]
pub enum Part {
    /// One of the processes.
    #[command(hide = true)]
    Worker(Settings),
    /// What the command runs.
    #[command(hide = true)]
    Child(child::Settings),
    /// Checks the histories of an earlier run once more.
    Check {
        /// What `--keep` kept.
        dir: PathBuf,
    },
}
