//! What can be asked for, and what is said when it cannot.

use std::ffi::OsString;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum, ValueHint};

use crate::failure::Failure;
use crate::store;

/// Share scarce things fairly between processes and machines: at most so many at once, first come first served.
///
/// A permit or a lock is a lease: it is renewed while its holder lives and expires when the holder dies. A child is stopped
/// before its lease can pass on.
#[derive(Debug, Parser)]
#[command(name = "leasehold", version, arg_required_else_help = true, after_help = AFTER)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const AFTER: &str = "\
Examples:
  leasehold run -n 2 build -- make          two builds at a time, the others queue
  leasehold lock nightly -- ./nightly.sh    one at a time, fenced
  leasehold ls                              what is held, and how many wait
  leasehold show build                      who holds, and who waits
  leasehold lookup nightly                  who has the lock: host, process, label
  leasehold limit build 4 --pin             four at a time from now on, whatever -n says
  leasehold pause build --reason 'disk full'

Exit codes:
  the child's    the child ran and ended (128 + n if by signal n)
  1              nothing of that name or id is there; doctor: leases are not safe on the store
  64             bad usage or bad input
  69, 77         store unreachable, also if --wait ends during an outage; access denied by the store
  70             our own fault
  75 (-E)        not acquired: --no-wait, or --wait ran out; drain, forget: it is in use
  124            the lease was lost or its TTL ran out, and the child was stopped
  126, 127       the child could not be run, was not found
  128 + n        signal n came while waiting";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command under a permit of a fair semaphore.
    #[command(after_help = "\
Examples:
  leasehold run -n 3 deploy -- ./deploy.sh
  leasehold run --store redis://redis.internal -n 5 --label invoices api -- ./import
  leasehold run --no-wait -n 1 backup -- ./backup.sh || echo 'one is running already'
  leasehold run -n 4 gpu -- sh -c 'CUDA_VISIBLE_DEVICES=$((LEASEHOLD_SLOT - 1)) ./train'
  leasehold run -n 5 --rate 100/1m --burst 10 api -- ./call    5 at a time, 100 per minute
  leasehold run -n 64 --weight 16 memory -- ./build            16 of 64 gigabytes

The child gets LEASEHOLD_NAME, LEASEHOLD_ID, LEASEHOLD_SLOT (the lowest number from 1 on that no
other child of that name has), LEASEHOLD_FENCE (a number) and LEASEHOLD_FENCE_PADDED (the same in
19 digits, which sort as text). What it leaves behind in its process group has --grace to end before
it is stopped; the permit is given back after that.

Durations (D): 500ms, 30s, 5m, 1h30m.")]
    Run(RunArgs),
    /// Run a command under a fenced lock.
    #[command(after_help = "\
Examples:
  leasehold lock nightly -- ./nightly.sh
  leasehold lock --wait 30s --lease 10s invoice:42 -- ./send-invoice 42
  leasehold lock --ttl 1h --label cron nightly -- ./nightly.sh    stop it after an hour: exit 124

The lock is not fair: when it is released, the first to ask gets it. Where order matters, use
`leasehold run -n 1`. The child gets LEASEHOLD_NAME, LEASEHOLD_ID, LEASEHOLD_FENCE (a number) and
LEASEHOLD_FENCE_PADDED (the same in 19 digits, which sort as text); what it writes to should refuse
an older fence.

Durations (D): 500ms, 30s, 5m, 1h30m.")]
    Lock(LockArgs),
    /// List semaphores, locks and pools: what is held, and how many wait.
    #[command(after_help = "\
Examples:
  leasehold ls
  leasehold ls --watch
  leasehold ls --json | jq '.semaphores[] | select(.waiting > 0)'

Lock ids are not shown: who knows one can release the lock.")]
    Ls(LsArgs),
    /// Show who holds and who waits, of a semaphore, a lock or a pool.
    #[command(after_help = "\
Examples:
  leasehold show deploy
  leasehold show invoice:42
  leasehold show --json deploy | jq -r '.holders[].id'
  leasehold show --json deploy | jq '., .also[] | select(.kind == \"lock\")'

If a semaphore, a lock and a pool have the name, all of them are shown, each under a heading.

--json prints one object: kind (semaphore, lock or pool), name, held, holders, and also: an array of
the same objects for the other kinds of that name, in that order, most often empty. What is not
known is null. Further fields:
  semaphore  capacity, declared, pinned, paused (for_seconds, by, reason), units, rate
             (interval_seconds, burst, next_in_seconds), waiting, waits_for (what the first waits for:
             room, rate, resume, capacity: it weighs more than that, or client: it cannot be reached),
             waiters, oldest_hold_seconds, oldest_wait_seconds; each holder and waiter: id, slot,
             units, host, pid, label, for_seconds, ends_in_seconds, fence
  lock       its holder: lock_id_hash, host, pid, label, for_seconds, ends_in_seconds, fence
  pool       each holder: instance_id, silent_for_seconds, ends_in_seconds

Lock ids are not shown: who knows one can release the lock.")]
    Show(ShowArgs),
    /// Show or change what a semaphore allows, while it is in use.
    #[command(after_help = "\
Examples:
  leasehold limit deploy              what it is
  leasehold limit deploy 5            5, until somebody declares another number
  leasehold limit deploy 5 --pin      5, whatever `run -n` and programs declare
  leasehold limit deploy --unpin      what was declared last counts again
  leasehold limit api --rate 100/1m   no more than 100 starts a minute
  leasehold limit api --rate none     as many as there is room for

If the limit grows, those who wait begin at once. If it shrinks, nobody is stopped, and the next
begins when there is room.")]
    Limit(LimitArgs),
    /// Grant no more permits of a semaphore. Holders go on, waiters keep their places.
    #[command(after_help = "\
Examples:
  leasehold pause deploy --reason 'release freeze'
  leasehold resume deploy

Commands that wait show since when, by whom and why. A pause does not end by itself.")]
    Pause(PauseArgs),
    /// Grant permits of a paused semaphore again, in the order of the queue.
    #[command(after_help = "\
Examples:
  leasehold resume deploy")]
    Resume(ResumeArgs),
    /// Pause a semaphore, and wait until nobody holds a permit.
    #[command(after_help = "\
Examples:
  leasehold drain deploy --wait 10m && ./maintenance.sh; leasehold resume deploy

It stays paused, also if --wait runs out (exit code 75).

Durations (D): 500ms, 30s, 5m, 1h30m.")]
    Drain(DrainArgs),
    /// Remove a semaphore that nobody uses: its capacity, rate, pin, pause and last fence.
    #[command(after_help = "\
Examples:
  leasehold forget old-name --yes

It is refused while anybody holds or waits (exit code 75). Without its last fence the next one comes
from the clock alone: a resource that compares fences accepts it only if that clock was not set
back.")]
    Forget(ForgetArgs),
    /// Release a permit or a lock by hand, by its id.
    #[command(after_help = "\
Examples:
  leasehold release deploy 7Vd3kQ0aZx1-0

Its holder is told that it has lost it, and its child is stopped, but the next one may have begun
before that.")]
    Release(ReleaseArgs),
    /// Look up who has a lock, by its key.
    #[command(after_help = "\
Examples:
  leasehold lookup invoice:42
  leasehold lookup --raw --json invoice:42
  leasehold lookup --json invoice:42 | jq '.host, .pid, .label'

The host, the process and the label are what the holder says about itself. They are unknown (- or
null) if another program holds the lock.

Without --raw the key and the lock id are shown as hashes: who knows a lock id can release the
lock.")]
    Lookup(LookupArgs),
    /// Examine the store: can it be reached, and are leases safe on it?
    #[command(after_help = "\
Examples:
  leasehold doctor --store redis://redis.internal

Exit codes:
  0       nothing is bad, though there may be warnings
  1       something is bad: leases are not safe on this store
  64      --store is no store
  69, 77  the store cannot be reached or is not there; refuses us

It acquires and releases a semaphore, a lock and a pool of the name leasehold-doctor. Nothing of the
semaphore and the pool stays behind; of the lock the store keeps the last fence.")]
    Doctor(DoctorArgs),
    /// Measure what leases cost on the store, and say what that means.
    #[command(after_help = "\
Examples:
  leasehold bench --store redis://redis.internal
  leasehold bench --for 5s --json

It keeps the store busy meanwhile. The semaphores that it uses have names that begin with
leasehold-bench, and are forgotten at the end.

Durations (D): 500ms, 30s, 5m, 1h30m.")]
    Bench(BenchArgs),
    /// Print completions for a shell.
    #[command(after_help = "\
Examples:
  leasehold completions bash > ~/.local/share/bash-completion/completions/leasehold
  leasehold completions zsh > ~/.zfunc/_leasehold")]
    Completions(CompletionsArgs),
    /// Print the manual page.
    #[command(after_help = "\
Examples:
  leasehold man > ~/.local/share/man/man1/leasehold.1
  leasehold man run > ~/.local/share/man/man1/leasehold-run.1
  leasehold man run | man -l -")]
    Man(ManArgs),
}

const STORES: &str = "\
The store: sqlite:PATH, redis://host:port, rediss://host:port for TLS, or unix:///path/of/its/socket; a file in your \
state directory by default";

const NAMESPACE: &str = "\
On Redis: what the keys of semaphores begin with [default: adv-sem] [env: LEASEHOLD_NAMESPACE]";
const LOCK_PREFIX: &str = "\
On Redis: what the keys of locks begin with [default: syncguard] [env: LEASEHOLD_LOCK_PREFIX]";
const LOCK_LAYOUT: &str = "\
On Redis: which version of SyncGuard the programs have that share locks: syncguard-1 or syncguard-2 [default: syncguard-1] [env: LEASEHOLD_LOCK_LAYOUT]";
const CA_CERTIFICATE: &str = "\
Over TLS: trust only the authorities in this PEM file [env: LEASEHOLD_CA_CERTIFICATE]";

/// Where leases are kept.
#[derive(Args, Debug)]
pub(crate) struct StoreArgs {
    #[arg(long, value_name = "URL", env = "LEASEHOLD_STORE", hide_env_values = true, help = STORES)]
    pub(crate) store: Option<String>,
    // Their variables are not clap's to read: what was not given here must not be refused where it has no use.
    #[arg(long, value_name = "NAMESPACE", help = NAMESPACE)]
    pub(crate) namespace: Option<String>,
    #[arg(long, value_name = "PREFIX", help = LOCK_PREFIX)]
    pub(crate) lock_prefix: Option<String>,
    #[arg(long, value_name = "LAYOUT", help = LOCK_LAYOUT)]
    pub(crate) lock_layout: Option<String>,
    #[arg(long, value_name = "FILE", help = CA_CERTIFICATE, value_hint = ValueHint::FilePath)]
    pub(crate) ca_certificate: Option<String>,
}

/// How long to wait, and what to say if that was not long enough.
#[derive(Args, Debug)]
pub(crate) struct WaitArgs {
    /// Wait no longer than this, for the store to answer and for the permit or lock
    #[arg(long, value_name = "D", value_parser = duration, conflicts_with = "no_wait")]
    wait: Option<Duration>,
    /// Do not wait for a permit or lock. The store has 5 s to answer
    #[arg(long)]
    no_wait: bool,
    /// Exit with this code if it could not be had in time
    #[arg(short = 'E', long = "conflict-exit-code", value_name = "CODE", default_value_t = crate::failure::NOT_ACQUIRED)]
    pub(crate) conflict_code: u8,
}

/// How long to wait for a permit or a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Patience {
    None,
    Within(Duration),
    Endless,
}

impl WaitArgs {
    pub(crate) fn patience(&self) -> Patience {
        match self.wait {
            _ if self.no_wait => Patience::None,
            Some(Duration::ZERO) => Patience::None,
            Some(limit) => Patience::Within(limit),
            None => Patience::Endless,
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// How many may run at once. The latest -n given for a name counts for everybody, unless `limit --pin` says otherwise. Default: what the name has, else 1, or with --rate no limit
    #[arg(short = 'n', value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) capacity: Option<u32>,
    /// How many units of -n this one takes, all or nothing. Nobody overtakes one that waits for more
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) weight: u32,
    /// How many may start in a time, evenly spread, as in 100/1m. The latest given for a name counts for everybody. Default: what the name has
    #[arg(long, value_name = "N/D", value_parser = rate)]
    pub(crate) rate: Option<Rate>,
    /// With --rate: how many may start at once after a quiet time [default: 1]
    #[arg(long, value_name = "N", requires = "rate", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) burst: Option<u32>,
    /// The longest the child may run
    #[arg(long, value_name = "D", value_parser = positive)]
    pub(crate) ttl: Option<Duration>,
    /// On Redis: how long this process may be silent before its child is stopped and its permit passes on. No effect on
    /// a store on this host, where the kernel reports dead processes
    #[arg(long, visible_alias = "heartbeat", value_name = "D", value_parser = positive, default_value = "30s")]
    pub(crate) lease: Duration,
    /// How long the child has to end after SIGTERM, before SIGKILL [default: 2s; on Redis at most a sixth of --lease]
    #[arg(long, value_name = "D", value_parser = duration)]
    pub(crate) grace: Option<Duration>,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
    /// What others see beside your permit
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// Say what happens, also without a terminal
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// What is shared
    pub(crate) name: String,
    /// The command to run
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

#[derive(Args, Debug)]
pub(crate) struct LockArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// The longest the child may run
    #[arg(long, value_name = "D", value_parser = positive)]
    pub(crate) ttl: Option<Duration>,
    /// How long this process may be silent before its child is stopped and the lock passes on
    #[arg(long, value_name = "D", value_parser = positive, default_value = "30s")]
    pub(crate) lease: Duration,
    /// How long the child has to end after SIGTERM, before SIGKILL [default: 2s, at most half of --lease]
    #[arg(long, value_name = "D", value_parser = duration)]
    pub(crate) grace: Option<Duration>,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
    /// What others see beside your host and process
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// Say what happens, also without a terminal
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// What is locked
    pub(crate) key: String,
    /// The command to run
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

#[derive(Args, Debug)]
pub(crate) struct LsArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Also what nobody holds or waits for now
    #[arg(short, long)]
    pub(crate) all: bool,
    /// For scripts
    #[arg(long)]
    pub(crate) json: bool,
    /// Redraw every second, on a terminal
    #[arg(long, conflicts_with = "json")]
    pub(crate) watch: bool,
}

#[derive(Args, Debug)]
pub(crate) struct ShowArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// For scripts
    #[arg(long)]
    pub(crate) json: bool,
    /// The name of a semaphore or a pool, or the key of a lock
    pub(crate) name: String,
}

#[derive(Args, Debug)]
pub(crate) struct LimitArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// For scripts
    #[arg(long)]
    pub(crate) json: bool,
    /// Keep the limit, whatever programs declare
    #[arg(long, conflicts_with = "unpin")]
    pub(crate) pin: bool,
    /// Let the newest declaration count again
    #[arg(long, conflicts_with = "capacity")]
    pub(crate) unpin: bool,
    /// How many may start in a time, evenly spread, as in 100/1m; or none
    #[arg(long, value_name = "N/D", value_parser = rate_or_none)]
    pub(crate) rate: Option<RateChange>,
    /// With --rate: how many may start at once after a quiet time [default: 1]
    #[arg(long, value_name = "N", requires = "rate", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) burst: Option<u32>,
    /// The semaphore's name
    pub(crate) name: String,
    /// How many permits it has from now on
    #[arg(value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) capacity: Option<u32>,
}

#[derive(Args, Debug)]
pub(crate) struct PauseArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// The reason, which commands that wait show
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    /// The semaphore's name
    pub(crate) name: String,
}

#[derive(Args, Debug)]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// The semaphore's name
    pub(crate) name: String,
}

#[derive(Args, Debug)]
pub(crate) struct DrainArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// The reason, which commands that wait show
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    /// Wait no longer than this
    #[arg(long, value_name = "D", value_parser = positive)]
    pub(crate) wait: Option<Duration>,
    /// The semaphore's name
    pub(crate) name: String,
}

#[derive(Args, Debug)]
pub(crate) struct ForgetArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Do it: without this, what it means is printed
    #[arg(long)]
    pub(crate) yes: bool,
    /// The semaphore's name
    pub(crate) name: String,
}

#[derive(Args, Debug)]
pub(crate) struct ReleaseArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// For scripts
    #[arg(long)]
    pub(crate) json: bool,
    /// The semaphore's name, or the lock's key
    pub(crate) name: String,
    /// The permit's id, or the lock's
    #[arg(allow_hyphen_values = true)]
    pub(crate) id: String,
}

#[derive(Args, Debug)]
pub(crate) struct LookupArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// For scripts
    #[arg(long)]
    pub(crate) json: bool,
    /// With the key and the lock id as they are
    #[arg(long)]
    pub(crate) raw: bool,
    /// The lock's key
    pub(crate) key: String,
}

#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// For scripts
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// For scripts
    #[arg(long)]
    pub(crate) json: bool,
    /// How long to measure
    #[arg(long = "for", value_name = "D", value_parser = positive, default_value = "30s")]
    pub(crate) lasting: Duration,
}

#[derive(Args, Debug)]
pub(crate) struct ManArgs {
    /// Of which subcommand; the page of all of them by default
    pub(crate) command: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct CompletionsArgs {
    /// Which shell
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

/// Parses the command line. Help and the version are printed here.
pub(crate) fn parse() -> Result<Command, Failure> {
    match Arguments::try_parse() {
        Ok(arguments) => Ok(arguments.command),
        Err(error) => Err(refusal(&error)),
    }
}

/// Clap explains itself in paragraphs; we do it in a line.
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
            let mut said: Vec<_> = paragraphs
                .take_while(|part| !part.starts_with("Usage:") && !part.starts_with("For more"))
                // Behind `--` would be the child.
                .filter(|part| !part.trim_start().starts_with("tip: to pass"))
                .map(|part| part.split_whitespace().collect::<Vec<_>>().join(" "))
                .collect();
            if error.kind() == ErrorKind::UnknownArgument && takes_a_child() {
                said.push("put `--` before the command that is to run".to_owned());
            }
            let help = format!("; see `leasehold{} --help`", subcommand());
            Failure::usage(said.join("; ") + &help)
        }
    }
}

/// The command line, as far as it can be shown.
fn words() -> impl Iterator<Item = String> {
    std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned())
}

/// Clap repeats what it does not expect, and that may be the URL of a store.
fn without_secrets(text: String) -> String {
    words().fold(text, |text, word| {
        let value = word.split_once('=').filter(|_| word.starts_with('-'));
        let url = value.map_or(&*word, |(_, value)| value);
        if url.contains("://") { text.replace(url, &store::without_secrets(url)) } else { text }
    })
}

/// Whether something is to be run, and nobody has said where it begins.
fn takes_a_child() -> bool {
    let words: Vec<_> = words().collect();
    let runs = words.first().is_some_and(|word| word == "run" || word == "lock");
    runs && !words.iter().any(|word| word == "--")
}

/// What was asked for, with a blank before it; nothing if there is no such thing.
fn subcommand() -> String {
    let asked = words().next().unwrap_or_default();
    let known = Arguments::command().find_subcommand(&asked).is_some();
    if known { format!(" {asked}") } else { String::new() }
}

fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|_| "expected a number and a unit, as in 500ms, 30s or 5m".to_owned())
}

/// So many starts in a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rate {
    pub(crate) starts: u64,
    pub(crate) period: Duration,
}

/// What becomes of a rate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RateChange {
    To(Rate),
    Removed,
}

/// "100/1m"; also "100/m".
fn rate(text: &str) -> Result<Rate, String> {
    let bad = || "expected a number and a time, as in 100/1m or 5/s".to_owned();
    let (starts, period) = text.split_once('/').ok_or_else(bad)?;
    let starts = starts.trim().parse().map_err(|_| bad())?;
    let period = period.trim();
    let one = if period.starts_with(|c: char| c.is_ascii_digit()) { "" } else { "1" };
    let period = humantime::parse_duration(&format!("{one}{period}")).map_err(|_| bad())?;
    if starts == 0 || period.is_zero() {
        return Err(
            "it has to be more than nothing, as in 100/1m; to stop all, pause it".to_owned()
        );
    }
    Ok(Rate { starts, period })
}

fn rate_or_none(text: &str) -> Result<RateChange, String> {
    if text == "none" { Ok(RateChange::Removed) } else { rate(text).map(RateChange::To) }
}

fn positive(text: &str) -> Result<Duration, String> {
    let duration = duration(text)?;
    if duration.is_zero() {
        return Err("it has to be longer than nothing, as in 500ms, 30s or 5m".to_owned());
    }
    Ok(duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_do_not_contradict_themselves() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn rates_have_a_number_and_a_time() {
        let minute = Duration::from_secs(60);
        assert_eq!(rate("100/1m"), Ok(Rate { starts: 100, period: minute }));
        assert_eq!(rate("100/m"), rate("100/60s"));
        assert_eq!(rate_or_none("none"), Ok(RateChange::Removed));
        for bad in
            ["", "100", "/", "100/", "/1m", "0/1m", "100/0s", "-1/s", "1.5/s", "100/minute or so"]
        {
            assert!(rate(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn durations_have_units() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("5m"), Ok(Duration::from_secs(300)));
        assert_eq!(duration("1h30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(duration("0s"), Ok(Duration::ZERO));
        for bad in ["", "5", "-5s", "five", "5 parsecs", "99999999999999999999y"] {
            assert!(duration(bad).is_err(), "{bad:?}");
        }
        assert!(positive("0s").is_err());
    }
}
