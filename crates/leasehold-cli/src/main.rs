//! `leasehold`: shares scarce resources fairly from the shell.

use std::process::ExitCode;

mod action;
mod advice;
mod args;
mod child;
mod clock;
mod command;
mod failure;
mod monitor;
mod output;
mod program;
mod signals;
mod store;
mod terminal;

use args::Command;
use failure::Failure;

fn main() -> ExitCode {
    failure::without_backtraces();
    match std::panic::catch_unwind(run) {
        Ok(Ok(code)) => ExitCode::from(code),
        Ok(Err(failure)) => failure.report(),
        Err(_) => ExitCode::from(failure::INTERNAL),
    }
}

fn run() -> Result<u8, Failure> {
    // The torture test asks before a run which rules this build can break.
    #[cfg(leasehold_broken)]
    if std::env::args_os().nth(1).is_some_and(|argument| argument == "--broken-rules") {
        output::print(&(leasehold::broken::RULES.join("\n") + "\n"))?;
        return Ok(0);
    }
    match args::parse()? {
        Command::Run(arguments) => command::run::run(arguments),
        Command::Lock(arguments) => command::lock::run(arguments),
        Command::Ls(arguments) => command::ls::run(&arguments),
        Command::Show(arguments) => command::show::run(&arguments),
        Command::Top(arguments) => command::top::run(&arguments),
        Command::Limit(arguments) => command::limit::limit(&arguments),
        Command::Pause(arguments) => command::limit::pause(&arguments),
        Command::Resume(arguments) => command::limit::resume(&arguments),
        Command::Drain(arguments) => command::limit::drain(&arguments),
        Command::Forget(arguments) => command::limit::forget(&arguments),
        Command::Release(arguments) => command::release::run(&arguments),
        Command::Lookup(arguments) => command::lookup::run(&arguments),
        Command::Serve(arguments) => command::serve::run(&arguments),
        Command::Doctor(arguments) => command::doctor::run(&arguments),
        Command::Bench(arguments) => command::bench::run(&arguments),
        Command::Completions(arguments) => command::completions::run(&arguments),
        Command::Man(arguments) => command::man::run(&arguments),
    }
}
