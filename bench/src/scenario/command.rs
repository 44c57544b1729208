//! The command on one host, against `flock` and GNU `sem`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{NANOS, contention};
use crate::bench::Bench;
use crate::host;
use crate::sample::{Sample, count};

const OURS: &str = "leasehold run";
/// How many want the same at once, and how long each holds.
const PROCESSES: usize = 8;
const HOLD_MS: &str = "5";

/// How to run something under one permit.
struct Tool {
    name: &'static str,
    words: Vec<String>,
}

impl Tool {
    fn command(&self, folder: &Path, child: &[&str]) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).args(child);
        // GNU sem keeps its files here, and not in the user's home.
        command.env("PARALLEL_HOME", folder);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }
}

pub(super) fn run(bench: &mut Bench) {
    let folder = tempfile::tempdir().expect("a directory");
    let tools = tools(bench, folder.path());
    start_up(bench, &tools, folder.path());
    let mut round = 0;
    while bench.again(round) {
        for tool in &tools {
            bench.step(&format!("hand-off, {}", tool.name));
            match hand_off(tool, folder.path(), round) {
                Ok(delays) => {
                    bench.add("hand-off, p50", tool.name, NANOS, delays.median());
                    bench.add("hand-off, p99", tool.name, NANOS, delays.quantile(0.99));
                }
                Err(why) => bench.trouble(tool.name, why),
            }
        }
        round += 1;
    }
    let ours = bench.sample("hand-off, p99", OURS);
    bench
        .report
        .judge("command/handoff", &Sample(ours.0.iter().map(|nanos| nanos / 1e6).collect()));
}

/// Those that are here; the others are reported.
fn tools(bench: &mut Bench, folder: &Path) -> Vec<Tool> {
    let file = |name: &str| folder.join(name).display().to_string();
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    let (database, lock) = (format!("sqlite:{}", file("leases.db")), file("flock"));
    let binary = binary().display().to_string();
    let ours = [binary.as_str(), "run", "--store", &database, "-n", "1", "x", "--"];
    let candidates = [
        Tool { name: OURS, words: words(&ours) },
        Tool { name: "flock", words: words(&["flock", &lock]) },
        Tool { name: "GNU sem", words: words(&["sem", "--fg", "--id", "x", "-j1"]) },
    ];
    let mut there = Vec::new();
    for tool in candidates {
        match tool.command(folder, &["true"]).status() {
            Ok(status) if status.success() => there.push(tool),
            Ok(status) if tool.name == OURS => {
                bench.trouble(OURS, format!("not built yet ({status})"));
            }
            Ok(status) => bench.trouble(tool.name, format!("does not work: {status}")),
            Err(why) => bench.trouble(tool.name, format!("could not be had: {why}")),
        }
    }
    there
}

/// Beside us in the target folder, unless the environment names another.
fn binary() -> PathBuf {
    let beside = || std::env::current_exe().map(|bench| bench.with_file_name("leasehold"));
    std::env::var_os("LEASEHOLD_BIN").map_or_else(|| beside().unwrap_or_default(), PathBuf::from)
}

/// From nothing to nothing, with a child that does nothing.
fn start_up(bench: &mut Bench, tools: &[Tool], folder: &Path) {
    bench.step("start-up");
    let times = if bench.quick { 5 } else { 20 };
    let version = Tool { name: "", words: vec![binary().display().to_string()] };
    let nothing = Tool { name: "", words: vec!["true".to_owned()] };
    for _ in 0..times {
        for tool in tools {
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
    let what = "a child that does nothing";
    let against = bench.sample(what, OURS).over(&bench.sample(what, "flock"));
    bench.report.judge("command/flock", &against);
}

fn wall(mut command: Command) -> f64 {
    let begun = Instant::now();
    // A tool that fails was left out before; one that cannot be started says so in the time.
    let _ = command.status();
    count(begun.elapsed().as_nanos())
}

/// From the end of one child to the start of the next, while several wait.
fn hand_off(tool: &Tool, folder: &Path, round: usize) -> Result<Sample, String> {
    let stamps = folder.join(format!("stamps-{}-{round}", tool.name.replace(' ', "-")));
    let (stamps_text, ourselves) = (stamps.display().to_string(), std::env::current_exe());
    let ourselves = ourselves.map_err(|why| why.to_string())?.display().to_string();
    let child = [ourselves.as_str(), "stamp", &stamps_text, HOLD_MS];
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
    let text = std::fs::read_to_string(stamps).map_err(|why| why.to_string())?;
    let mut held: Vec<(u64, u64)> = text
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(from, to)| Some((from.parse().ok()?, to.parse().ok()?)))
        .collect();
    held.sort_unstable();
    let delays = held.windows(2).map(|two| contention::between(two[0].1, two[1].0)).collect();
    Ok(Sample(delays))
}

/// The child: says in a file from when to when it ran.
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
