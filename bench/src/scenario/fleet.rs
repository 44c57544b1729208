//! Many clients, each a process with one task, so that no batches hide the cost of a request.

use std::time::Duration;

use super::{NANOS, RATE};
use crate::bench::Bench;
use crate::contender::{Contender, REDIS_SEMAPHORE, RSLOCK, SEMAPHORE};
use crate::driver::Driver;
use crate::sample::count;
use crate::server_time::ServerTime;

/// Large enough that no client has to wait.
const CAPACITY: usize = 256;
/// The limit for warming up all processes together.
const WARM_UP: Duration = Duration::from_secs(120);

/// The number of clients, and whether all of them use one name. For a single client that is the same.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fleet {
    OneName(u32),
    NameEach(u32),
}

const FLEETS: [Fleet; 5] = [
    Fleet::NameEach(1),
    Fleet::OneName(10),
    Fleet::NameEach(10),
    Fleet::OneName(50),
    Fleet::NameEach(50),
];

impl Fleet {
    fn clients(self) -> usize {
        match self {
            Self::OneName(clients) | Self::NameEach(clients) => clients as usize,
        }
    }

    /// A lock is held by one client, so several clients on one name would wait for each other.
    fn suits(self, contender: &Contender) -> bool {
        *contender != RSLOCK || matches!(self, Self::NameEach(_))
    }

    fn pairs(self) -> String {
        match self {
            Self::OneName(clients) => format!("{clients} clients, one name"),
            Self::NameEach(clients) => pairs_with_a_name_each(clients),
        }
    }

    fn server_time(self) -> String {
        format!("{}, server time of a pair", self.pairs())
    }

    fn server_cpu(self) -> String {
        format!("{}, server CPU of a pair", self.pairs())
    }
}

pub(crate) fn pairs_with_a_name_each(clients: u32) -> String {
    if clients == 1 { "1 client".to_owned() } else { format!("{clients} clients, a name each") }
}

pub(super) fn run(bench: &mut Bench) {
    let mut members = [&SEMAPHORE, &REDIS_SEMAPHORE, &RSLOCK].map(Member::new);
    for member in &mut members {
        bench.step(&format!("{}, starting", member.contender.name));
        if let Err(why) = member.start(bench) {
            bench.trouble(member.contender.name, why);
            member.failed = true;
        }
    }
    let mut rounds = 0;
    while rounds == 0 || (rounds < bench.repetitions() && bench.in_time()) {
        rounds += 1;
        for fleet in FLEETS {
            bench.step(&format!("{}, round {rounds}", fleet.pairs()));
            for member in &mut members {
                let Some(pairs) = member.measure(bench, fleet) else { continue };
                let name = member.contender.name;
                bench.add(&fleet.pairs(), name, RATE, pairs.rate);
                bench.add(&fleet.server_time(), name, NANOS, pairs.server_time);
                bench.add(&fleet.server_cpu(), name, NANOS, pairs.server_cpu);
            }
        }
    }
    for (bar, what) in [
        ("fleet/10/one", Fleet::OneName(10).pairs()),
        ("fleet/10/each", Fleet::NameEach(10).pairs()),
        ("fleet/one", Fleet::OneName(50).pairs()),
        ("fleet/each", Fleet::NameEach(50).pairs()),
        ("fleet/server", Fleet::NameEach(1).server_time()),
    ] {
        bench.judge_ratio(bar, &what, SEMAPHORE.name, REDIS_SEMAPHORE.name);
    }
}

/// The pairs of one measurement.
struct Pairs {
    /// The pairs per second of all clients together.
    rate: f64,
    /// The nanoseconds that the server's commands took for a pair.
    server_time: f64,
    /// The nanoseconds of a processor that the server used for a pair.
    server_cpu: f64,
}

/// A contender and its processes. After a failure it is left out, so that rounds stay comparable.
struct Member {
    contender: &'static Contender,
    drivers: Vec<Driver>,
    failed: bool,
}

impl Member {
    fn new(contender: &'static Contender) -> Self {
        Self { contender, drivers: Vec::new(), failed: false }
    }

    /// Starts all its processes, and warms them up at the same time.
    fn start(&mut self, bench: &mut Bench) -> Result<(), String> {
        let most = FLEETS.map(Fleet::clients).into_iter().max();
        for _ in 0..most.unwrap_or(0) {
            self.drivers.push(Driver::start(self.contender, &bench.url)?);
        }
        for driver in &mut self.drivers {
            let Some(request) = self.contender.warm_up(&bench.name()) else { return Ok(()) };
            driver.send(&request)?;
        }
        self.drivers.iter_mut().try_for_each(|driver| driver.answer(WARM_UP).map(drop))
    }

    /// Returns `None` if the contender does not take part.
    fn measure(&mut self, bench: &mut Bench, fleet: Fleet) -> Option<Pairs> {
        if self.failed || !fleet.suits(self.contender) {
            return None;
        }
        let pairs = self.pairs(bench, fleet);
        if let Err(why) = &pairs {
            bench.trouble(self.contender.name, format!("{}: {why}", fleet.pairs()));
            self.failed = true;
        }
        pairs.ok()
    }

    fn pairs(&mut self, bench: &mut Bench, fleet: Fleet) -> Result<Pairs, String> {
        let drivers = &mut self.drivers[..fleet.clients()];
        let (name, window) = (bench.name(), bench.window());
        let before = ServerTime::now(bench)?;
        for (index, driver) in drivers.iter_mut().enumerate() {
            let name = match fleet {
                Fleet::OneName(_) => name.clone(),
                Fleet::NameEach(_) => format!("{name}-{index}"),
            };
            driver.send(&format!("pairs {name} 1 1 {CAPACITY} {}", window.as_millis()))?;
        }
        let (mut rate, mut all) = (0.0, 0.0);
        for driver in drivers {
            match driver.answer(window * 2 + Duration::from_secs(15))?[..] {
                [pairs, nanos, with_warm_up] => {
                    rate += count(pairs) / count(nanos) * 1e9;
                    all += count(with_warm_up);
                }
                ref other => return Err(format!("answered {other:?}")),
            }
        }
        let spent = ServerTime::now(bench)?.since(&before);
        Ok(Pairs {
            rate,
            server_time: spent.nanos(self.contender) / all,
            server_cpu: spent.process_nanos() / all,
        })
    }
}
