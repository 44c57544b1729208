//! The cost of commands, as the server reports it (`INFO`).

use std::collections::HashMap;

use crate::bench::Bench;
use crate::contender::{Contender, RSLOCK};

/// The commands that run a script. Their time includes that of the commands that the script calls, which are also
/// listed.
const SCRIPTS: [&str; 3] = ["eval", "evalsha", "fcall"];

/// The number of calls of each command and their microseconds, and the processor seconds of the whole process.
pub(crate) struct ServerTime {
    commands: HashMap<String, (f64, f64)>,
    process: f64,
}

impl ServerTime {
    /// Reads the totals since the server was started.
    pub(crate) fn now(bench: &Bench) -> Result<Self, String> {
        let text = |why: redis::RedisError| why.to_string();
        let client = redis::Client::open(bench.url.as_str()).map_err(text)?;
        let mut connection = client.get_connection().map_err(text)?;
        let mut info = |section: &str| -> Result<String, String> {
            redis::cmd("INFO").arg(section).query(&mut connection).map_err(text)
        };
        let process = info("cpu")?;
        let seconds = |name: &str| field(process.lines(), name, ':').unwrap_or_default();
        let command = |line: &str| {
            let (command, fields) = line.strip_prefix("cmdstat_")?.split_once(':')?;
            let of = |name| field(fields.split(','), name, '=');
            Some((command.to_owned(), (of("calls")?, of("usec")?)))
        };
        Ok(Self {
            commands: info("commandstats")?.lines().filter_map(command).collect(),
            process: seconds("used_cpu_user") + seconds("used_cpu_sys"),
        })
    }

    /// Returns the difference from an earlier reading.
    pub(crate) fn since(&self, before: &Self) -> Self {
        let added = |(name, (calls, micros)): (&String, &(f64, f64))| {
            let (calls_before, micros_before) = before.of(name);
            (name.clone(), (calls - calls_before, micros - micros_before))
        };
        Self {
            commands: self.commands.iter().map(added).collect(),
            process: self.process - before.process,
        }
    }

    /// Returns the nanoseconds that the server spent on the requests of this contender, if no other client sent any.
    pub(crate) fn nanos(&self, contender: &Contender) -> f64 {
        // rslock acquires without a script.
        let plain = (*contender == RSLOCK).then_some("set");
        SCRIPTS.into_iter().chain(plain).map(|command| self.of(command).1).sum::<f64>() * 1e3
    }

    /// Returns the number of scripts that ran.
    pub(crate) fn scripts(&self) -> f64 {
        SCRIPTS.into_iter().map(|command| self.of(command).0).sum()
    }

    /// Returns the processor time of the server in nanoseconds, including the network and everything else.
    pub(crate) fn process_nanos(&self) -> f64 {
        self.process * 1e9
    }

    fn of(&self, command: &str) -> (f64, f64) {
        self.commands.get(command).copied().unwrap_or_default()
    }
}

fn field<'a>(mut fields: impl Iterator<Item = &'a str>, name: &str, then: char) -> Option<f64> {
    fields.find_map(|field| field.strip_prefix(name)?.strip_prefix(then)?.trim().parse().ok())
}
