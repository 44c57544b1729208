//! `leasehold`: share scarce things fairly from the shell.

use clap::Parser;

/// Share scarce things fairly between processes and machines: at most so many at once, first come first
/// served.
#[derive(Debug, Parser)]
#[command(name = "leasehold", version, arg_required_else_help = true)]
struct Arguments {}

fn main() {
    Arguments::parse();
}
