//! Commands that had to wait on Redis run their child.

use std::time::Duration;

use leasehold::{Client, Permit};
use testkit::redis_server::RedisServer;

use crate::support::{Inspector, Running, until};

const PAGES: [&str; 3] = ["README.md", "docs/how-to.md", "docs/recipes.md"];

/// Returns the options, the subcommand and the name of every documented command that waits, each without its child.
fn documented() -> Vec<Vec<String>> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let pages = PAGES.map(|page| std::fs::read_to_string(format!("{root}/{page}")).unwrap());
    let lines = pages.iter().flat_map(|page| page.lines());
    let found =
        lines.flat_map(|line| line.match_indices("leasehold ").map(move |(at, _)| (line, at)));
    let commands = found.filter_map(|(line, at)| {
        let (command, _) = line[at..].split_once(" -- ")?;
        let words: Vec<_> = command.split_whitespace().skip(1).map(str::to_owned).collect();
        let runs = words.first().is_some_and(|word| word == "run" || word == "lock");
        let elsewhere = ["--no-wait", "--once-per", "--store"];
        let waits = !words.iter().any(|word| elsewhere.contains(&word.as_str()));
        // The label of a continuous integration job is a variable.
        let plain = !command.contains('"');
        (runs && waits && plain).then_some(words)
    });
    let mut commands: Vec<_> = commands.collect();
    commands.sort();
    commands.dedup();
    commands
}

fn option(words: &[String], name: &str) -> Option<String> {
    let at = words.iter().position(|word| word == name)?;
    words.get(at + 1).cloned()
}

/// Waits until the command is queued, or waits for the lock, behind a holder that then releases.
fn runs_after_a_wait(store: &str, inspector: &Inspector, words: &[String]) {
    let name = words.last().unwrap();
    let child = ["--", "true"].map(str::to_owned);
    let line: Vec<_> = words.iter().cloned().chain(child).collect();
    let (ended, line) = if words[0] == "run" {
        let capacity = option(words, "-n").map_or(1, |n| n.parse().unwrap());
        let semaphore = inspector.client.semaphore(name, capacity).build().unwrap();
        let held = inspector.block_on(semaphore.acquire().weight(capacity)).unwrap();
        let waiting = Running::start(store, &line);
        until(|| inspector.held_and_waiting(name).1 == 1);
        assert!(inspector.block_on(held.release()).unwrap());
        (waiting.end(), line)
    } else {
        let lock = inspector.client.lock(name).build().unwrap();
        let held = inspector.block_on(lock.acquire()).unwrap();
        let verbose = ["lock", "-v"].map(str::to_owned).into_iter();
        let line: Vec<_> = verbose.chain(line.into_iter().skip(1)).collect();
        let waiting = Running::start(store, &line);
        waiting.says("waiting for");
        assert!(inspector.block_on(held.release()).unwrap());
        (waiting.end(), line)
    };
    assert_eq!(ended.code, 0, "{line:?}: {ended:?}");
}

#[test]
fn documented_commands_run_after_a_wait() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let commands = documented();
    assert!(commands.len() >= 8, "{commands:#?}");
    let grace = |words: &Vec<String>| option(words, "--grace").is_some_and(|grace| grace == "5s");
    assert!(commands.iter().any(grace), "no command has a long grace: {commands:#?}");
    for words in commands {
        runs_after_a_wait(&server.url(), &inspector, &words);
    }
}

/// The client that releases gives the waiter the shortest time to claim its permit.
#[test]
fn a_child_starts_with_the_shortest_time_to_claim_a_permit() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let releasing: Client = {
        let builder = Client::redis_builder(&server.url()).claim_within(Duration::from_secs(1));
        inspector.block_on(builder.open()).unwrap()
    };
    for options in [&["--grace", "2s"][..], &["--ttl", "10m", "--grace", "5s"], &["--grace", "0s"]]
    {
        let semaphore = releasing.semaphore("it", 1).build().unwrap();
        let held: Permit = inspector.block_on(semaphore.acquire()).unwrap();
        let words = [&["run", "-n", "1"], options, &["it", "--", "true"]].concat();
        let waiting = Running::start(&server.url(), &words);
        until(|| inspector.held_and_waiting("it") == (1, 1));
        assert!(inspector.block_on(held.release()).unwrap());
        let ended = waiting.end();
        assert_eq!(ended.code, 0, "{words:?}: {ended:?}");
    }
}
