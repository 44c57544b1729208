//! The command on one host, against `flock` and GNU `sem`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{NANOS, contention};
use crate::bench::Bench;
use crate::host;
use crate::sample::{Sample, count};

pub(super) const OURS: &str = "leasehold run";
/// The semaphore that the commands acquire.
pub(super) const NAME: &str = "x";
/// How many processes compete at once, and how long each holds.
const PROCESSES: usize = 8;
const HOLD_MS: &str = "5";
pub(super) const FLOCK: &str = "flock";
const SEM: &str = "GNU sem";

/// A tool that runs a command under one permit.
pub(super) struct Tool {
    pub(super) name: &'static str,
    words: Vec<String>,
}

impl Tool {
    pub(super) fn new(name: &'static str, words: &[&str]) -> Self {
        Self { name, words: words.iter().map(|word| (*word).to_owned()).collect() }
    }

    /// Runs a child that does nothing. Fails if the tool does not work.
    pub(super) fn check(&self, folder: &Path) -> Result<(), String> {
        match self.command(folder, &["true"]).status() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(format!("does not work: {status}")),
            Err(why) => Err(format!("could not be run: {why}")),
        }
    }

    pub(super) fn command(&self, folder: &Path, child: &[&str]) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).args(child);
        // GNU sem keeps its files here, instead of in the user's home.
        command.env("PARALLEL_HOME", folder);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }
}

pub(super) fn run(bench: &mut Bench) {
    let folder = tempfile::tempdir().expect("a directory");
    let mut tools = tools(bench, folder.path());
    start_up(bench, &tools, folder.path());
    let mut round = 0;
    while bench.again(round) {
        // A tool that fails is left out from then on, so that rounds stay comparable.
        tools.retain(|tool| {
            bench.step(&format!("hand-off, {}", tool.name));
            match hand_offs(tool, folder.path(), bench.window() * 2) {
                Ok(delays) => {
                    bench.add("hand-off, p50", tool.name, NANOS, delays.median());
                    bench.add("hand-off, p99", tool.name, NANOS, delays.quantile(0.99));
                    true
                }
                Err(why) => {
                    bench.trouble(tool.name, why);
                    false
                }
            }
        });
        round += 1;
    }
    bench.judge_ratio("command/handoff", "hand-off, p99", OURS, FLOCK);
}

/// Returns the tools that work; the others are reported.
fn tools(bench: &mut Bench, folder: &Path) -> Vec<Tool> {
    let lock = folder.join("flock").display().to_string();
    let candidates = [
        ours(folder),
        Tool::new(FLOCK, &["flock", &lock]),
        Tool::new(SEM, &["sem", "--fg", "--id", "x", "-j1"]),
    ];
    let mut there = Vec::new();
    for tool in candidates {
        match tool.check(folder) {
            Ok(()) => there.push(tool),
            Err(why) => bench.trouble(tool.name, why),
        }
    }
    there
}

/// Our command, with its store in this folder.
pub(super) fn ours(folder: &Path) -> Tool {
    let store = format!("sqlite:{}", database(folder).display());
    let binary = binary().display().to_string();
    Tool::new(OURS, &[&binary, "run", "--store", &store, "-n", "1", NAME, "--"])
}

pub(super) fn database(folder: &Path) -> PathBuf {
    folder.join("leases.db")
}

/// Returns the path of our command: beside this program in the target folder, unless the environment names another.
pub(super) fn binary() -> PathBuf {
    let beside = || std::env::current_exe().map(|bench| bench.with_file_name("leasehold"));
    std::env::var_os("LEASEHOLD_BIN").map_or_else(|| beside().unwrap_or_default(), PathBuf::from)
}

/// Measures the whole run of a tool whose child does nothing.
fn start_up(bench: &mut Bench, tools: &[Tool], folder: &Path) {
    bench.step("start-up");
    let times = if bench.quick { 20 } else { 60 };
    let version = Tool::new("", &[&binary().display().to_string()]);
    let nothing = Tool::new("", &["true"]);
    for round in 0..times {
        for tool in tools {
            // It takes a hundred times as long as flock.
            if tool.name == SEM && round % 4 > 0 {
                continue;
            }
            let nanos = wall(tool.command(folder, &["true"]));
            bench.add("a child that does nothing", tool.name, NANOS, nanos);
        }
        for (what, tool, argument) in
            [("leasehold --version", &version, "--version"), ("`true` alone", &nothing, "")]
        {
            let nanos = wall(tool.command(folder, &[argument]));
            bench.add("start-up alone", what, NANOS, nanos);
        }
    }
    bench.judge_ratio("command/flock", "a child that does nothing", OURS, FLOCK);
}

pub(super) fn wall(mut command: Command) -> f64 {
    let begun = Instant::now();
    // Tools that fail were left out before. A tool that cannot be started shows in the time.
    let _ = command.status();
    count(begun.elapsed().as_nanos())
}

/// Measures as many hand-offs as there is time for, and at least those of one burst of processes.
pub(super) fn hand_offs(tool: &Tool, folder: &Path, time: Duration) -> Result<Sample, String> {
    let (begun, mut delays) = (Instant::now(), Sample::default());
    while delays.is_empty() || begun.elapsed() < time {
        delays.0.extend(burst(tool, folder)?);
    }
    Ok(delays)
}

/// Returns the times from the end of one child to the start of the next, while several wait.
fn burst(tool: &Tool, folder: &Path) -> Result<Vec<f64>, String> {
    let stamps = folder.join(format!("stamps-{}", tool.name.replace(' ', "-")));
    let child = stamping_child(&stamps, HOLD_MS)?;
    let child: Vec<_> = child.iter().map(String::as_str).collect();
    let started: Result<Vec<_>, _> =
        (0..PROCESSES).map(|_| tool.command(folder, &child).spawn()).collect();
    let mut running = started.map_err(|why| why.to_string())?;
    let begun = Instant::now();
    for process in &mut running {
        while process.try_wait().map_err(|why| why.to_string())?.is_none() {
            if begun.elapsed() > Duration::from_secs(20) {
                let _ = process.kill();
                return Err(format!("{PROCESSES} processes were not done after 20 s"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let held = take_stamps(&stamps)?;
    if held.len() < PROCESSES {
        return Err(format!("only {} of {PROCESSES} processes ran", held.len()));
    }
    Ok(held.windows(2).map(|two| contention::between(two[0].1, two[1].0)).collect())
}

/// Returns a child that runs for so many milliseconds, and records in a file when that was.
pub(super) fn stamping_child(stamps: &Path, hold_ms: &str) -> Result<[String; 4], String> {
    let ourselves = std::env::current_exe().map_err(|why| why.to_string())?;
    let [ourselves, stamps] = [ourselves.as_path(), stamps].map(|path| path.display().to_string());
    Ok([ourselves, "stamp".to_owned(), stamps, hold_ms.to_owned()])
}

/// Returns from when to when each child ran, in order, and removes the file.
pub(super) fn take_stamps(stamps: &Path) -> Result<Vec<(u64, u64)>, String> {
    let text = std::fs::read_to_string(stamps).map_err(|why| why.to_string())?;
    std::fs::remove_file(stamps).map_err(|why| why.to_string())?;
    let mut held: Vec<(u64, u64)> = text
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(from, to)| Some((from.parse().ok()?, to.parse().ok()?)))
        .collect();
    held.sort_unstable();
    Ok(held)
}

/// The child: records in a file from when to when it ran.
pub(crate) fn stamp(words: &[&str]) {
    let [file, hold] = words else { return eprintln!("stamp FILE MILLISECONDS") };
    let from = host::nanos();
    std::thread::sleep(Duration::from_millis(hold.parse().unwrap_or(0)));
    let opened = std::fs::OpenOptions::new().create(true).append(true).open(file);
    let line = format!("{from} {}\n", host::nanos());
    if let Err(why) = opened.and_then(|mut file| file.write_all(line.as_bytes())) {
        eprintln!("{file}: {why}");
    }
}
