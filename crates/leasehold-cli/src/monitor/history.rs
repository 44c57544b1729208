//! The numbers of held units, waiting acquires and granted permits over the last hour.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The last polls, each a sample.
const RECENT: usize = 120;
/// An hour, in samples of ten seconds.
const HOUR: usize = 360;
const STEP: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sample {
    pub(crate) at: SystemTime,
    /// In units.
    pub(crate) held: u32,
    pub(crate) waiting: u32,
    /// Permits granted since the sample before, as far as polls have seen them.
    pub(crate) grants: u32,
}

impl Sample {
    pub(super) fn at(at: SystemTime) -> Self {
        Self { at, held: 0, waiting: 0, grants: 0 }
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.held = self.held.saturating_add(other.held);
        self.waiting = self.waiting.saturating_add(other.waiting);
        self.grants = self.grants.saturating_add(other.grants);
    }

    /// Merges two samples: the higher numbers, so that a short peak stays visible, and the sum of the grants.
    fn merge(&mut self, other: &Self) {
        self.held = self.held.max(other.held);
        self.waiting = self.waiting.max(other.waiting);
        self.grants = self.grants.saturating_add(other.grants);
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    recent: VecDeque<Sample>,
    hour: VecDeque<Sample>,
}

impl History {
    pub(super) fn record(&mut self, sample: Sample) {
        self.recent.push_back(sample);
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        match self.hour.back_mut() {
            Some(last) if step(last.at) == step(sample.at) => last.merge(&sample),
            _ => self.hour.push_back(sample),
        }
        if self.hour.len() > HOUR {
            self.hour.pop_front();
        }
    }

    /// One sample for each of the last polls, the oldest first.
    pub(crate) fn recent(&self) -> impl DoubleEndedIterator<Item = &Sample> + ExactSizeIterator {
        self.recent.iter()
    }

    /// One sample for each ten seconds of the last hour, the oldest first. Ten seconds without a poll have none.
    pub(crate) fn hour(&self) -> impl DoubleEndedIterator<Item = &Sample> + ExactSizeIterator {
        self.hour.iter()
    }

    /// Permits granted per second over the last ten polls, as far as polls have seen them.
    pub(crate) fn grants_per_second(&self) -> f64 {
        let from = self.recent.len().saturating_sub(11);
        let last: Vec<_> = self.recent.range(from..).collect();
        let (Some(first), Some(newest)) = (last.first(), last.last()) else { return 0.0 };
        // The grants of the first sample were before this period.
        let grants: u32 = last[1..].iter().map(|sample| sample.grants).sum();
        let span = newest.at.duration_since(first.at).unwrap_or_default().as_secs_f64();
        if span > 0.0 { f64::from(grants) / span } else { 0.0 }
    }
}

fn step(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() / STEP.as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(seconds: u64, held: u32, grants: u32) -> Sample {
        let at = UNIX_EPOCH + Duration::from_secs(1_000_000 + seconds);
        Sample { held, grants, ..Sample::at(at) }
    }

    #[test]
    fn an_hour_is_kept_in_steps_of_ten_seconds() {
        let mut history = History::default();
        for second in 0..2 * 3600 {
            history.record(sample(second, u32::from(second % 10 == 3), 1));
        }
        assert_eq!((history.recent().len(), history.hour().len()), (RECENT, HOUR));
        assert!(history.hour().all(|sample| (sample.held, sample.grants) == (1, 10)));
    }

    #[test]
    #[allow(clippy::float_cmp)] // small whole numbers
    fn the_rate_of_grants_counts_whole_intervals() {
        let mut history = History::default();
        assert!((history.grants_per_second() - 0.0).abs() < 1e-9);
        history.record(sample(0, 0, 7));
        assert!((history.grants_per_second() - 0.0).abs() < 1e-9);
        history.record(sample(2, 0, 6));
        assert!((history.grants_per_second() - 3.0).abs() < 1e-9);
        for second in 1..20 {
            history.record(sample(2 + second, 0, 5));
        }
        assert!((history.grants_per_second() - 5.0).abs() < 1e-9);
    }
}
