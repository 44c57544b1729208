//! What a run consists of.

use super::*;

/// Everything that decides a run. It follows from the seed, and [`shrink`](super::shrink) removes parts of it.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Scenario {
    pub(super) seed: u64,
    pub(super) processes: usize,
    /// The processes that take part, as bits.
    pub(super) workers: u32,
    /// The number of users of each process.
    pub(super) users: usize,
    /// The semaphores that are used.
    pub(super) things: Vec<usize>,
    /// When the users finish.
    pub(super) finish: Micros,
    pub(super) injections: Vec<Injection>,
    /// Whether the clients' requests may be applied after their connection was replaced.
    pub(super) stragglers: bool,
    /// Whether operators are at work.
    pub(super) operators: bool,
    /// The rule that is broken on purpose.
    pub(super) broken: Option<&'static str>,
}

/// A fault that is injected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Injection {
    pub(super) at: Micros,
    pub(super) kind: Kind,
    /// The process that it hits, if it hits only one.
    pub(super) worker: usize,
    pub(super) lasts: Micros,
    /// By how much the replica is behind, or the clock is set.
    pub(super) lag: Micros,
}

/// The faults of one process.
const OF_A_PROCESS: [Kind; 10] = [
    Kind::Kill,
    Kind::Stop,
    Kind::Cut,
    Kind::Reset,
    Kind::Flap,
    Kind::Delay,
    Kind::Stall,
    Kind::Forget,
    Kind::LoseReply,
    Kind::LoseRequest,
];

/// The faults of the store.
const OF_THE_STORE: [Kind; 8] = [
    Kind::Restart,
    Kind::Crash,
    Kind::RestartEmpty,
    Kind::Freeze,
    Kind::ClientKill,
    Kind::PrimaryKilled,
    Kind::ClockForward,
    Kind::ClockBack,
];

impl Scenario {
    /// Each scenario has only some kinds of faults, so that every kind also comes alone, and some have none.
    pub(super) fn new(seed: u64) -> Self {
        Self::focused(seed, None)
    }

    /// The same, with many faults of one kind.
    pub(super) fn focused(seed: u64, focus: Option<Kind>) -> Self {
        let mut rng = Rng::with_seed(seed);
        let processes = rng.usize(2..=6);
        let mut things: Vec<usize> = (0..THINGS.len()).collect();
        rng.shuffle(&mut things);
        things.truncate(rng.usize(1..=3));
        things.sort_unstable();
        let length = rng.u64(60..150) * SECOND;
        let finish = BEGIN + length;
        let mut kinds: Vec<Kind> = focus.into_iter().collect();
        for (all, most) in [(OF_A_PROCESS.as_slice(), 4), (OF_THE_STORE.as_slice(), 2)] {
            let mut all = all.to_vec();
            rng.shuffle(&mut all);
            all.truncate(if focus.is_none() { rng.usize(0..=most) } else { 0 });
            kinds.extend(all);
        }
        let mut injections = Vec::new();
        if !kinds.is_empty() && rng.u32(..6) > 0 {
            for _ in 0..rng.usize(1..=30) {
                let kind = kinds[rng.usize(..kinds.len())];
                let at = BEGIN + rng.u64(5 * SECOND..length - 15 * SECOND);
                let longest = match kind {
                    Kind::Stop => 7 * SECOND,
                    Kind::Restart | Kind::Crash | Kind::RestartEmpty => SECOND,
                    // A holder whose last renewal was not copied has to be back before its lease ends at the new
                    // primary. docs/guarantees.md says what happens otherwise.
                    Kind::PrimaryKilled => 200 * MILLISECOND,
                    _ => 3 * SECOND,
                };
                let lasts = rng.u64(30 * MILLISECOND..longest);
                let lag = match kind {
                    Kind::ClockForward | Kind::ClockBack => rng.u64(50 * MILLISECOND..3 * SECOND),
                    Kind::PrimaryKilled => rng.u64(0..100 * MILLISECOND),
                    _ => rng.u64(0..900 * MILLISECOND),
                };
                let worker = rng.usize(..processes);
                injections.push(Injection { at, kind, worker, lasts, lag });
            }
        }
        injections.sort_by_key(|injection| injection.at);
        let stragglers = rng.u32(..4) == 0;
        let operators = rng.u32(..3) > 0;
        let users = rng.usize(1..=4);
        let workers = (1 << processes) - 1;
        let broken = None;
        Self {
            seed,
            processes,
            workers,
            users,
            things,
            finish,
            injections,
            stragglers,
            operators,
            broken,
        }
    }

    pub(super) fn but(self, broken: &'static str) -> Self {
        Self { broken: Some(broken), ..self }
    }
}
