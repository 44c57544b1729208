//! `leasehold completions` and `leasehold man`: what shells and `man` read.

use clap::CommandFactory;
use clap_complete::{Shell, generate};

use crate::args::{self, Arguments, CompletionsArgs, ManArgs};
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
    generate(shell, &mut Arguments::command(), "leasehold", &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(0)
}

pub(crate) fn man(arguments: &ManArgs) -> Result<u8, Failure> {
    let mut all = Arguments::command();
    let command = match &arguments.command {
        None => all,
        Some(name) => {
            all.build();
            let found = all.find_subcommand_mut(name).ok_or_else(|| {
                Failure::usage(format!("there is no subcommand {name:?}: see `leasehold --help`"))
            })?;
            // The page's own way to say it would forget the `--` before a child.
            let usage = found.render_usage().to_string();
            let usage = usage.trim_start_matches("Usage: ").to_owned();
            let found = found.clone().override_usage(usage);
            found.bin_name(format!("leasehold {name}")).display_name(format!("leasehold-{name}"))
        }
    };
    let mut page = Vec::new();
    let source = concat!("leasehold ", env!("CARGO_PKG_VERSION"));
    let rendered = clap_mangen::Man::new(command).source(source).render(&mut page);
    rendered.map_err(|error| Failure::internal("no manual page", error))?;
    output::print(&String::from_utf8_lossy(&page))?;
    Ok(0)
}
