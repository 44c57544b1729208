//! `leasehold completions`: completions for shells.

use clap_complete::{Shell, generate};

use crate::args::{self, CompletionsArgs};
use crate::failure::Failure;
use crate::output;

pub(crate) fn run(arguments: &CompletionsArgs) -> Result<u8, Failure> {
    let shell = match arguments.shell {
        args::Shell::Bash => Shell::Bash,
        args::Shell::Elvish => Shell::Elvish,
        args::Shell::Fish => Shell::Fish,
        args::Shell::Powershell => Shell::PowerShell,
        args::Shell::Zsh => Shell::Zsh,
    };
    let mut script = Vec::new();
    generate(shell, &mut args::definition(), "leasehold", &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(0)
}
