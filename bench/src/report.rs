//! The results of a run: figures, bars, and what could not be measured.

mod files;
mod table;

use std::collections::BTreeMap;

use crate::bars::{BARS, Bar};
use crate::sample::Sample;

/// One measure of one contender in one configuration.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub(crate) scenario: &'static str,
    /// The configuration and the measure: "20 waiters, p99".
    pub(crate) what: String,
    pub(crate) contender: String,
    pub(crate) unit: &'static str,
    pub(crate) better: Better,
    pub(crate) sample: Sample,
}

/// Which direction is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Better {
    More,
    Less,
}

/// Something that could not be measured.
#[derive(Clone, Debug)]
pub(crate) struct Trouble {
    pub(crate) scenario: &'static str,
    pub(crate) contender: String,
    pub(crate) why: String,
}

/// Everything that a run has measured.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) figures: Vec<Figure>,
    pub(crate) troubles: Vec<Trouble>,
    /// What a reader should know first: the machine, the versions, the duration.
    pub(crate) about: Vec<String>,
    /// What a reader should know about a scenario.
    pub(crate) notes: Vec<(&'static str, String)>,
    measured: BTreeMap<&'static str, (f64, String)>,
    pub(crate) scenarios: Vec<&'static str>,
}

/// A bar, the value that it was compared with, and the verdict.
#[derive(Debug)]
pub(crate) struct Judged<'a> {
    pub(crate) bar: &'static Bar,
    pub(crate) measured: Option<&'a (f64, String)>,
    pub(crate) verdict: Verdict,
}

/// The verdict about a bar.
#[derive(Debug)]
pub(crate) enum Verdict {
    Met,
    /// The factor by which it is missed.
    Missed(f64),
    NotMeasured,
}

impl Report {
    /// Adds a value to a figure. The first value creates the figure.
    pub(crate) fn add(
        &mut self,
        scenario: &'static str,
        what: &str,
        contender: &str,
        (unit, better): (&'static str, Better),
        value: f64,
    ) {
        let same = |figure: &&mut Figure| {
            figure.scenario == scenario && figure.what == what && figure.contender == contender
        };
        if let Some(figure) = self.figures.iter_mut().find(same) {
            figure.sample.0.push(value);
            return;
        }
        self.figures.push(Figure {
            scenario,
            what: what.to_owned(),
            contender: contender.to_owned(),
            unit,
            better,
            sample: Sample(vec![value]),
        });
    }

    pub(crate) fn trouble(&mut self, scenario: &'static str, contender: &str, why: String) {
        self.troubles.push(Trouble { scenario, contender: contender.to_owned(), why });
    }

    /// Adds a note below the table of a scenario, one per subject. The subject is the text before the colon.
    pub(crate) fn note(&mut self, scenario: &'static str, note: String) {
        let subject = |note: &str| note.split(':').next().map(str::to_owned);
        let same =
            |(of, other): &(&str, String)| *of == scenario && subject(other) == subject(&note);
        if !self.notes.iter().any(same) {
            self.notes.push((scenario, note));
        }
    }

    /// Returns the values of a figure; an empty sample if there is no such figure.
    pub(crate) fn sample(&self, scenario: &str, what: &str, contender: &str) -> Sample {
        let same = |figure: &&Figure| {
            figure.scenario == scenario && figure.what == what && figure.contender == contender
        };
        self.figures.iter().find(same).map(|figure| figure.sample.clone()).unwrap_or_default()
    }

    /// Returns all contenders that have this figure, in the order in which they were measured.
    pub(crate) fn row(&self, scenario: &str, what: &str) -> Vec<(&str, &Sample)> {
        self.figures
            .iter()
            .filter(|figure| figure.scenario == scenario && figure.what == what)
            .map(|figure| (figure.contender.as_str(), &figure.sample))
            .collect()
    }

    /// Records the value that a bar is compared with, and its range as text. A value that is not finite counts as not
    /// measured.
    pub(crate) fn judge(&mut self, bar: &'static str, sample: &Sample) {
        debug_assert!(BARS.iter().any(|one| one.key == bar), "no bar is called {bar}");
        if sample.is_empty() || !sample.median().is_finite() {
            return;
        }
        let spread = if sample.0.len() > 1 {
            let digits = crate::sample::digits;
            format!("{} – {}", digits(sample.min()), digits(sample.max()))
        } else {
            "once".to_owned()
        };
        self.measured.insert(bar, (sample.median(), spread));
    }

    /// Returns the bars of the scenarios that ran, and their verdicts.
    pub(crate) fn bars(&self) -> Vec<Judged<'_>> {
        let ran = |bar: &&Bar| self.scenarios.contains(&bar.scenario);
        let judged = |bar: &'static Bar| {
            let measured = self.measured.get(bar.key);
            let verdict = measured.map_or(Verdict::NotMeasured, |(value, _)| bar.verdict(*value));
            Judged { bar, measured, verdict }
        };
        BARS.iter().filter(ran).map(judged).collect()
    }
}

impl Bar {
    fn verdict(&self, value: f64) -> Verdict {
        let missed_by = if self.at_most { value / self.limit } else { self.limit / value };
        if missed_by <= 1.0 { Verdict::Met } else { Verdict::Missed(missed_by) }
    }
}
