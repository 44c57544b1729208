//! How things are measured: interleaved, repeated, and told with their spread.

use std::time::{Duration, Instant};

/// Several times of the same thing.
pub(crate) struct Times(Vec<f64>);

impl Times {
    /// Nanoseconds an operation.
    pub(crate) fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    }

    /// The quarter above and the quarter below the median, as a share of it.
    fn spread(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let quarter = sorted.len() / 4;
        (sorted[sorted.len() - 1 - quarter] - sorted[quarter]) / self.median() * 50.0
    }
}

/// Runs ours and theirs in turn, so that whatever else the machine does hits both alike. Each run answers
/// with how long it took and how many operations that was.
pub(crate) fn in_turn(
    repetitions: usize,
    mut ours: impl FnMut() -> (Duration, usize),
    mut theirs: impl FnMut() -> (Duration, usize),
) -> (Times, Times) {
    ours();
    theirs();
    let mut times = (Times(Vec::new()), Times(Vec::new()));
    for _ in 0..repetitions {
        times.0.0.push(per_operation(ours()));
        times.1.0.push(per_operation(theirs()));
    }
    times
}

#[allow(clippy::cast_precision_loss)] // counts of operations are far below 2^52
fn per_operation((time, operations): (Duration, usize)) -> f64 {
    time.as_secs_f64() * 1e9 / operations as f64
}

pub(crate) fn timed(operations: usize, work: impl FnOnce()) -> (Duration, usize) {
    let start = Instant::now();
    work();
    (start.elapsed(), operations)
}

/// One line: what, ours, theirs, the ratio, and the bar it is held to.
pub(crate) fn report(what: &str, ours: &Times, theirs: &Times, bar: f64) {
    let ratio = ours.median() / theirs.median();
    println!(
        "{what:<46} {:>9.1} ns ±{:>2.0}%  {:>9.1} ns ±{:>2.0}%  {ratio:>6.2} ×  (at most {bar}) {}",
        ours.median(),
        ours.spread(),
        theirs.median(),
        theirs.spread(),
        if ratio <= bar { "met" } else { "MISSED" }
    );
}

/// The resident memory of this process, in bytes.
pub(crate) fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<usize>().ok());
    pages.unwrap_or(0) * 4096
}

/// The value below which this share of the values lies.
pub(crate) fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let index = (values.len() as f64 * share) as usize;
    values[index.min(values.len() - 1)]
}
