//! The `torture` command: see the library.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use torture::args::{Arguments, Part, Run};
use torture::driver::{self, Log};
use torture::report::{self, Outcome};
use torture::{check, clock, worker};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = match &arguments.part {
        Some(Part::Worker(settings)) => return worker::run(settings),
        Some(Part::Child(settings)) => return worker::child::run(settings),
        Some(Part::Check { dir }) => {
            Log::load(dir).and_then(|log| judge(dir, "checked again", &log))
        }
        None => torture(&arguments.run),
    };
    match outcome {
        Ok((outcome, report)) => {
            print!("{report}");
            outcome.code()
        }
        Err(why) => {
            println!("inconclusive: {why}");
            Outcome::Inconclusive.code()
        }
    }
}

fn torture(run: &Run) -> Result<(Outcome, String), String> {
    let seed = run.seed.unwrap_or_else(|| fastrand::u64(..1_000_000_000));
    println!("torture: seed {seed}, {} minutes on {}", run.minutes, run.store);
    let temporary = tempfile::Builder::new().prefix("torture-").tempdir();
    let temporary = temporary.map_err(|error| error.to_string())?;
    let dir = run.keep.as_deref().unwrap_or(temporary.path());
    std::fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let log = driver::run(run, seed, dir)?;
    log.save(dir).map_err(|error| error.to_string())?;
    let broken = run.broken.as_ref().map(|rule| format!(", broken: {rule}")).unwrap_or_default();
    let title = format!("{} seed {seed}{broken}", run.store);
    let (outcome, mut report) = judge(dir, &title, &log)?;
    if run.until_found && outcome == Outcome::Violated {
        report += &found(dir, &log)?;
    }
    if let Some(path) = &run.report {
        std::fs::write(path, &report).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    if outcome == Outcome::Violated && run.keep.is_none() && run.broken.is_none() {
        let path = keep(temporary);
        println!("the histories are in {}", path.display());
    }
    Ok((outcome, report))
}

fn judge(dir: &Path, title: &str, log: &Log) -> Result<(Outcome, String), String> {
    let history = driver::gather(dir, log)?;
    let mut verdict = check::check(&history);
    let outcome = report::judge(log, &mut verdict);
    Ok((outcome, report::write(title, log, &verdict, outcome)))
}

/// Says which rules were broken, and how soon.
fn found(dir: &Path, log: &Log) -> Result<String, String> {
    let verdict = check::check(&driver::gather(dir, log)?);
    let mut rules: Vec<_> = verdict.violations.iter().map(|found| found.rule.as_str()).collect();
    rules.sort_unstable();
    rules.dedup();
    let seconds = (log.ended - log.began) / clock::SECOND;
    Ok(format!("found after {seconds} s: {}\n", rules.join(", ")))
}

fn keep(dir: tempfile::TempDir) -> PathBuf {
    dir.keep()
}
