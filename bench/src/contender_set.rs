//! Contenders that are measured in turn.

use std::time::Duration;

use crate::bench::Bench;
use crate::contender::Contender;
use crate::driver::Driver;
use crate::report::Better;

const WARM_UP: Duration = Duration::from_secs(30);

/// The contenders of a scenario, one process each. A contender that fails is reported, and left out until the next
/// measurement.
pub(crate) struct ContenderSet {
    members: Vec<Member>,
}

struct Member {
    contender: &'static Contender,
    driver: Option<Driver>,
    /// The measurement at which it failed last. It is not asked for that again.
    failed_at: String,
}

impl ContenderSet {
    pub(crate) fn new(contenders: &[&'static Contender]) -> Self {
        let member = |contender: &&'static Contender| Member {
            contender,
            driver: None,
            failed_at: String::new(),
        };
        Self { members: contenders.iter().map(member).collect() }
    }

    /// Measures the same thing of every contender, in turn, once per repetition.
    pub(crate) fn measure(
        &mut self,
        bench: &mut Bench,
        what: &str,
        kind: (&'static str, Better),
        mut measure_driver: impl FnMut(&mut Driver, &mut Bench) -> Result<f64, String>,
    ) {
        let mut rounds = 0;
        while rounds == 0 || (rounds < bench.repetitions() && bench.in_time()) {
            rounds += 1;
            bench.step(&format!("{what}, round {rounds}"));
            for member in &mut self.members {
                if member.failed_at == what {
                    continue;
                }
                match member.measure(bench, &mut measure_driver) {
                    Ok(value) => bench.add(what, member.contender.name, kind, value),
                    Err(why) => {
                        bench.trouble(member.contender.name, format!("{what}: {why}"));
                        what.clone_into(&mut member.failed_at);
                        member.driver = None;
                    }
                }
            }
        }
    }
}

impl Member {
    fn measure(
        &mut self,
        bench: &mut Bench,
        measure: &mut impl FnMut(&mut Driver, &mut Bench) -> Result<f64, String>,
    ) -> Result<f64, String> {
        let driver = match &mut self.driver {
            Some(driver) => driver,
            none => {
                let mut driver = Driver::start(self.contender, &bench.url_of(self.contender)?)?;
                if let Some(request) = self.contender.warm_up(&bench.name()) {
                    driver.call(&request, WARM_UP)?;
                }
                none.insert(driver)
            }
        };
        measure(driver, bench)
    }
}
