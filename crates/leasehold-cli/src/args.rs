//! The command line: its options, and the messages about wrong ones.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::FalseyValueParser;
use clap::error::ErrorKind;
use clap::{
    Arg, ArgAction, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum, ValueHint,
};

use leasehold::url;

use crate::failure::Failure;
use crate::store;

mod help;
mod values;

pub(crate) use values::{RateArgument, RateChange};
use values::{
    count, duration, exit_code, measurable, period, positive, rate_or_none, socket_address,
};

/// Share scarce resources fairly between processes and machines: a limited number at once, first come first served.
///
/// A permit or a lock is a lease: it is renewed while its holder lives and expires when the holder dies. A child is
/// stopped before its lease can pass to another holder.
#[derive(Debug, Parser)]
#[command(name = "leasehold", version, arg_required_else_help = true, after_help = help::AFTER)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command under a permit of a fair semaphore.
    #[command(after_help = help::RUN)]
    Run(RunArgs),
    /// Run a command under a fenced lock.
    #[command(after_help = help::LOCK)]
    Lock(LockArgs),
    /// List semaphores, locks and pools with the numbers of holders and waiters.
    #[command(after_help = help::LS)]
    Ls(LsArgs),
    /// Show the holders and waiters of a semaphore, a lock or a pool.
    #[command(after_help = help::SHOW)]
    Show(ShowArgs),
    /// Show semaphores, locks and pools on a terminal as they change, and act on them.
    #[command(after_help = help::TOP)]
    Top(TopArgs),
    /// Show or change the limits of a semaphore while it is in use.
    #[command(after_help = help::LIMIT)]
    Limit(LimitArgs),
    /// Grant no more permits of a semaphore. Holders continue, waiters keep their places.
    #[command(after_help = help::PAUSE)]
    Pause(PauseArgs),
    /// Grant permits of a paused semaphore again, in the order of the queue.
    #[command(after_help = help::RESUME)]
    Resume(ResumeArgs),
    /// Pause a semaphore, and wait until no permit is held.
    #[command(after_help = help::DRAIN)]
    Drain(DrainArgs),
    /// Remove an unused semaphore: its limits, its pause and its last fence.
    #[command(after_help = help::FORGET)]
    Forget(ForgetArgs),
    /// Release a permit or a lock by hand, or cancel a waiter.
    #[command(after_help = help::RELEASE)]
    Release(ReleaseArgs),
    /// Look up the holder of a lock by its key.
    #[command(after_help = help::LOOKUP)]
    Lookup(LookupArgs),
    /// Show the store in a browser, and let operators control it.
    #[command(after_help = help::SERVE)]
    Serve(ServeArgs),
    /// Check that the store can be reached and that leases are safe on it.
    #[command(after_help = help::DOCTOR)]
    Doctor(DoctorArgs),
    /// Measure the cost of leases on the store, and explain the result.
    #[command(after_help = help::BENCH)]
    Bench(BenchArgs),
    /// Print completions for a shell.
    #[command(after_help = help::COMPLETIONS)]
    Completions(CompletionsArgs),
    /// Print the manual page.
    #[command(after_help = help::MAN)]
    Man(ManArgs),
}

const NAMESPACE: &str = "\
The prefix of the keys of semaphores [default: adv-sem] [env: LEASEHOLD_NAMESPACE]";
const LOCK_PREFIX: &str = "\
The prefix of the keys of locks [default: syncguard] [env: LEASEHOLD_LOCK_PREFIX]";
const LOCK_LAYOUT: &str = "\
The key layout of locks, that of version 1 or 2 of the library SyncGuard: syncguard-1 or syncguard-2 [default: syncguard-1] [env: LEASEHOLD_LOCK_LAYOUT]";
const CA_CERTIFICATE: &str = "\
Over TLS: trust only the authorities in this PEM file [env: LEASEHOLD_CA_CERTIFICATE]";

fn stores() -> String {
    format!("The store: {}. Default: a file in your state directory", url::SHARED)
}

/// The store of the leases.
#[derive(Args, Debug)]
pub(crate) struct StoreArgs {
    #[arg(long, value_name = "URL", env = "LEASEHOLD_STORE", hide_env_values = true, help = stores())]
    pub(crate) store: Option<String>,
    // Clap does not read their variables: a variable that does not apply to the store must not be refused.
    #[arg(long, value_name = "NAMESPACE", help = NAMESPACE)]
    pub(crate) namespace: Option<String>,
    #[arg(long, value_name = "PREFIX", help = LOCK_PREFIX)]
    pub(crate) lock_prefix: Option<String>,
    #[arg(long, value_name = "LAYOUT", help = LOCK_LAYOUT)]
    pub(crate) lock_layout: Option<String>,
    #[arg(long, value_name = "FILE", help = CA_CERTIFICATE, value_hint = ValueHint::FilePath)]
    pub(crate) ca_certificate: Option<String>,
}

/// How long to wait, and the exit code if that was not long enough.
#[derive(Args, Debug)]
pub(crate) struct WaitArgs {
    /// Wait at most this long, for the store to answer and for the permit or lock
    #[arg(long, value_name = "D", value_parser = duration, conflicts_with = "no_wait")]
    wait: Option<Duration>,
    /// Fail at once if the permit or lock is not free. The store has up to 5 s to answer
    #[arg(long)]
    no_wait: bool,
    /// Exit with this code if the permit or lock was not acquired, because --wait ran out or --no-wait was given. With
    /// 0, the reason is printed only with -v
    #[arg(short = 'E', long = "conflict-exit-code", value_name = "CODE", value_parser = exit_code, default_value_t = crate::failure::NOT_ACQUIRED)]
    pub(crate) conflict_code: u8,
}

/// How long to wait for a permit or a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WaitLimit {
    None,
    Within(Duration),
    Endless,
}

impl WaitArgs {
    pub(crate) fn wait_limit(&self) -> WaitLimit {
        match self.wait {
            _ if self.no_wait => WaitLimit::None,
            Some(Duration::ZERO) => WaitLimit::None,
            Some(limit) => WaitLimit::Within(limit),
            None => WaitLimit::Endless,
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    /// How many may run at once. The latest -n for a name applies to all, unless `limit --pin` overrides it. Default:
    /// the current limit of the name; for a new name 1, or no limit with --rate
    #[arg(short = 'n', long, value_name = "N", value_parser = count)]
    pub(crate) capacity: Option<u32>,
    /// How many of the -n units this command needs. It gets all of them or none. Lighter commands do not overtake it
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count)]
    pub(crate) weight: u32,
    /// How many may start in any period, evenly spread, as in 100/1m. The latest rate for a name applies to all, and
    /// stays until it is changed or removed; `none` removes it. Default: the current rate of the name
    #[arg(long, value_name = "N/D", value_parser = rate_or_none)]
    pub(crate) rate: Option<RateArgument>,
    /// With --rate: how many of them may start at once after an idle period. Slows the others down: 100/1m with --burst
    /// 10 allows 91 per minute in the long run, and never more than 100 in a minute [default: 1]
    #[arg(long, value_name = "N", requires = "rate", value_parser = count)]
    pub(crate) burst: Option<u32>,
    /// The longest time that the child may run
    #[arg(long, value_name = "D", value_parser = positive)]
    pub(crate) ttl: Option<Duration>,
    /// Hold the permit at least this long, even if the child ends sooner. With --no-wait, a short job that several
    /// hosts start at about the same time runs only once, even if their clocks differ a little
    #[arg(long, value_name = "D", value_parser = positive)]
    pub(crate) at_least: Option<Duration>,
    /// On Redis: how long this process may be unable to renew before its child is stopped and its permit expires. No
    /// effect on a store on this host, where the kernel reports dead processes
    #[arg(long, visible_alias = "heartbeat", value_name = "D", value_parser = positive, default_value = "30s")]
    pub(crate) lease: Duration,
    /// How long the child has between SIGTERM and SIGKILL. On Redis, at most a sixth of --lease [default: 2s, on Redis
    /// less if --lease is below 12s]
    #[arg(long, value_name = "D", value_parser = duration)]
    pub(crate) grace: Option<Duration>,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
    /// A text that others see with the permit
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// Report on stderr which store is used, and when the permit or lock is waited for, acquired and released
    #[arg(short, long, env = "LEASEHOLD_VERBOSE", hide_env_values = true, value_parser = FalseyValueParser::new())]
    pub(crate) verbose: bool,
    /// The name of the semaphore
    pub(crate) name: String,
    /// The command to run
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

#[derive(Args, Debug)]
pub(crate) struct LockArgs {
    /// The longest time that the child may run
    #[arg(long, value_name = "D", value_parser = positive)]
    pub(crate) ttl: Option<Duration>,
    /// Run the child only if the lock is free, and keep the lock for this long from the start. Implies --no-wait
    #[arg(long, value_name = "D", value_parser = period, conflicts_with_all = ["wait", "no_wait"])]
    pub(crate) once_per: Option<Duration>,
    /// How long this process may be unable to renew before its child is stopped and the lock expires
    #[arg(long, value_name = "D", value_parser = positive, default_value = "30s")]
    pub(crate) lease: Duration,
    /// How long the child has between SIGTERM and SIGKILL. At most half of --lease [default: 2s, less if --lease is
    /// below 4s]
    #[arg(long, value_name = "D", value_parser = duration)]
    pub(crate) grace: Option<Duration>,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
    /// A text that others see with the lock
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// Report on stderr which store is used, and when the permit or lock is waited for, acquired and released
    #[arg(short, long, env = "LEASEHOLD_VERBOSE", hide_env_values = true, value_parser = FalseyValueParser::new())]
    pub(crate) verbose: bool,
    /// The key of the lock
    pub(crate) key: String,
    /// The command to run
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

#[derive(Args, Debug)]
pub(crate) struct LsArgs {
    /// Include names that are not in use now
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Print JSON, for scripts
    #[arg(long)]
    pub(crate) json: bool,
    /// Replaced by `top`
    #[arg(long, hide = true)]
    pub(crate) watch: bool,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

#[derive(Args, Debug)]
pub(crate) struct ShowArgs {
    /// Print JSON, for scripts
    #[arg(long)]
    pub(crate) json: bool,
    /// Redraw every second on a terminal, until q or Ctrl-C
    #[arg(long, conflicts_with = "json")]
    pub(crate) watch: bool,
    /// The name of a semaphore or a pool, or the key of a lock
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

#[derive(Args, Debug)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

#[derive(Args, Debug)]
pub(crate) struct LimitArgs {
    /// Keep this limit, even if `run -n` or a program declares another
    #[arg(long, conflicts_with = "unpin")]
    pub(crate) pin: bool,
    /// Undo --pin: the limit that `run -n` or a program declared last applies again
    #[arg(long, conflicts_with = "capacity")]
    pub(crate) unpin: bool,
    /// How many may start in any period, evenly spread, as in 100/1m. The rate stays until it is changed or removed;
    /// `none` removes it
    #[arg(long, value_name = "N/D", value_parser = rate_or_none)]
    pub(crate) rate: Option<RateArgument>,
    /// With --rate: how many of them may start at once after an idle period; see `run --help` [default: 1]
    #[arg(long, value_name = "N", requires = "rate", value_parser = count)]
    pub(crate) burst: Option<u32>,
    /// The semaphore's name
    pub(crate) name: String,
    /// The new limit
    #[arg(value_name = "N", value_parser = count)]
    pub(crate) capacity: Option<u32>,
    /// Print JSON, for scripts
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

#[derive(Args, Debug)]
pub(crate) struct PauseArgs {
    /// The reason, which waiting commands show
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    /// The semaphore's name
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

#[derive(Args, Debug)]
pub(crate) struct ResumeArgs {
    /// The semaphore's name
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

#[derive(Args, Debug)]
pub(crate) struct DrainArgs {
    /// The reason, which waiting commands show
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    /// Wait at most this long
    #[arg(long, value_name = "D", value_parser = positive)]
    pub(crate) wait: Option<Duration>,
    /// The semaphore's name
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

#[derive(Args, Debug)]
pub(crate) struct ForgetArgs {
    /// Remove the semaphore. Without --yes, only explain what that removes
    #[arg(long)]
    pub(crate) yes: bool,
    /// The semaphore's name
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

#[derive(Args, Debug)]
pub(crate) struct ReleaseArgs {
    /// Print JSON, for scripts
    #[arg(long)]
    pub(crate) json: bool,
    /// Without ID: release the lock. Without --yes, only show its holder
    #[arg(long, conflicts_with = "id")]
    pub(crate) yes: bool,
    /// The semaphore's name, or the lock's key
    pub(crate) name: String,
    /// The id of the permit, the waiter or the lock. Without it, NAME is the key of a lock
    #[arg(allow_hyphen_values = true)]
    pub(crate) id: Option<String>,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

#[derive(Args, Debug)]
pub(crate) struct LookupArgs {
    /// Print JSON, for scripts
    #[arg(long)]
    pub(crate) json: bool,
    /// Show the key and the lock id themselves, not their hashes
    #[arg(long)]
    pub(crate) raw: bool,
    /// The lock's key
    pub(crate) key: String,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

#[derive(Args, Debug)]
pub(crate) struct ServeArgs {
    /// The address and port to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = socket_address, default_value = "127.0.0.1:7878")]
    pub(crate) listen: SocketAddr,
    /// A file with the token that allows actions; must have mode 600
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) token_file: Option<PathBuf>,
    /// An additional host name to accept, such as that of a reverse proxy; can be repeated
    #[arg(long = "host", value_name = "NAME")]
    pub(crate) hosts: Vec<String>,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Print JSON, for scripts
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// How long to measure, at least 500ms
    #[arg(long = "for", value_name = "D", value_parser = measurable, default_value = "30s")]
    pub(crate) lasting: Duration,
    /// Print JSON, for scripts
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

#[derive(Args, Debug)]
pub(crate) struct ManArgs {
    /// The subcommand. Default: the page of `leasehold` itself
    pub(crate) command: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct CompletionsArgs {
    /// The shell
    pub(crate) shell: Shell,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Shell {
    Bash,
    Elvish,
    Fish,
    Powershell,
    Zsh,
}

/// Returns the command line's definition.
///
/// In the help of a subcommand, options are below the headings of [`help::HEADINGS`]. Headings come in the order of the
/// fields, so the store is the last field.
pub(crate) fn definition() -> clap::Command {
    let headed = |argument: Arg| {
        let has = |ids: &[&str]| ids.contains(&argument.get_id().as_str());
        let heading = help::HEADINGS.iter().find(|(_, ids)| has(ids) && !argument.is_positional());
        match heading {
            Some((heading, _)) => argument.help_heading(*heading),
            None => argument,
        }
    };
    Arguments::command().mut_subcommands(|command| {
        let command = command.mut_args(headed);
        if command.get_arguments().all(|argument| argument.get_help_heading() != Some(help::OUTPUT))
        {
            return command;
        }
        // Clap adds -h without a heading, so it would be alone below "Options".
        let help = Arg::new("help").short('h').long("help").action(ArgAction::Help);
        command.disable_help_flag(true).arg(help.help("Print help").help_heading(help::OUTPUT))
    })
}

/// Parses the command line. Help and the version are printed here.
pub(crate) fn parse() -> Result<Command, Failure> {
    let parsed = definition().try_get_matches();
    match parsed.and_then(|matches| Arguments::from_arg_matches(&matches)) {
        Ok(arguments) => Ok(arguments.command),
        Err(error) => Err(refusal(&error)),
    }
}

/// Clap prints paragraphs. This makes one line of them.
fn refusal(error: &clap::Error) -> Failure {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let _ = error.print();
            Failure::silent(0)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            Failure::silent(crate::failure::USAGE)
        }
        _ => {
            let text = without_secrets(error.render().to_string());
            let paragraphs = text.trim_start_matches("error: ").split("\n\n");
            let mut sentences: Vec<_> = paragraphs
                .take_while(|part| !part.starts_with("Usage:") && !part.starts_with("For more"))
                // Clap's tip is wrong here: what follows `--` is the child.
                .filter(|part| !part.trim_start().starts_with("tip: to pass"))
                .map(|part| part.split_whitespace().collect::<Vec<_>>().join(" "))
                .collect();
            if error.kind() == ErrorKind::UnknownArgument && takes_a_child() {
                sentences.push("put `--` before the command to run".to_owned());
            }
            let help = format!("; see `leasehold{} --help`", subcommand());
            Failure::usage(sentences.join("; ") + &help)
        }
    }
}

/// The words of the command line, with a replacement for bytes that are not UTF-8.
fn words() -> impl Iterator<Item = String> {
    std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned())
}

/// Removes passwords: clap repeats words that it does not expect, and such a word may be the URL of a store.
fn without_secrets(text: String) -> String {
    words().fold(text, |text, word| {
        let value = word.split_once('=').filter(|_| word.starts_with('-'));
        let url = value.map_or(&*word, |(_, value)| value);
        if url.contains("://") { text.replace(url, &store::without_secrets(url)) } else { text }
    })
}

/// Whether the subcommand runs a child, and there is no `--` before the child.
fn takes_a_child() -> bool {
    let words: Vec<_> = words().collect();
    let runs = words.first().is_some_and(|word| word == "run" || word == "lock");
    runs && !words.iter().any(|word| word == "--")
}

/// The name of the subcommand with a blank before it; empty if it is unknown.
fn subcommand() -> String {
    let name = words().next().unwrap_or_default();
    let exists = definition().find_subcommand(&name).is_some();
    if exists { format!(" {name}") } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_do_not_contradict_themselves() {
        definition().debug_assert();
    }
}
