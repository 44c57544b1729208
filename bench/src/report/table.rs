//! The tables of a report, for a terminal and for a Markdown page.

use std::fmt::Write;

use comfy_table::presets::{ASCII_MARKDOWN, UTF8_BORDERS_ONLY};
use comfy_table::{CellAlignment, Table, TableStyle};

use super::{Better, Figure, Judged, Report, Verdict};
use crate::contender::{is_limit, is_ours, label};
use crate::sample::{Sample, digits, formatted};
use crate::scenario::SCENARIOS;

impl Report {
    pub(crate) fn for_terminal(&self) -> String {
        self.render(UTF8_BORDERS_ONLY, "")
    }

    pub(crate) fn for_markdown(&self) -> String {
        self.render(ASCII_MARKDOWN, "## ")
    }

    fn render(&self, style: TableStyle, heading: &str) -> String {
        let mut text = String::new();
        for line in &self.about {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{line}  ");
        }
        for scenario in SCENARIOS.iter().filter(|one| self.scenarios.contains(&one.name)) {
            let figures: Vec<_> =
                self.figures.iter().filter(|figure| figure.scenario == scenario.name).collect();
            let _ = writeln!(text, "\n{heading}{}: {}\n", scenario.name, scenario.about);
            if !figures.is_empty() {
                let _ = writeln!(text, "{}", figures_table(&figures, style));
            }
            let notes = self.notes.iter().filter(|(of, _)| *of == scenario.name);
            for (at, (_, note)) in notes.enumerate() {
                let _ = writeln!(text, "{}- {note}", if at == 0 { "\n" } else { "" });
            }
        }
        let _ = writeln!(text, "\n{heading}Bars\n\n{}", self.bars_table(style));
        if !self.troubles.is_empty() {
            let _ = writeln!(text, "\n{heading}Could not be measured\n");
        }
        for trouble in &self.troubles {
            let _ =
                writeln!(text, "- {}, {}: {}", trouble.scenario, trouble.contender, trouble.why);
        }
        text
    }

    fn bars_table(&self, style: TableStyle) -> Table {
        let mut table =
            table(style, &["bar", "limit", "measured", "from – to", "verdict"], &[1, 2, 3]);
        for Judged { bar, measured, verdict } in self.bars() {
            let bound = if bar.at_most { "at most" } else { "at least" };
            let (value, spread) = measured.map_or(("–".to_owned(), "–"), |(value, spread)| {
                (formatted(*value, bar.unit), spread.as_str())
            });
            table.add_row([
                bar.what.to_owned(),
                format!("{bound} {}", formatted(bar.limit, bar.unit)),
                value,
                spread.to_owned(),
                match verdict {
                    Verdict::Met => "met".to_owned(),
                    Verdict::Missed(by) => format!("MISSED by {} ×", digits(by)),
                    Verdict::NotMeasured => "not measured".to_owned(),
                },
            ]);
        }
        table
    }
}

fn table(style: TableStyle, header: &[&str], right: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_style(style).set_header(header);
    for column in right {
        if let Some(column) = table.column_mut(*column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Returns all figures of a scenario. Those of one configuration are grouped, and compared with the first of ours.
fn figures_table(figures: &[&Figure], style: TableStyle) -> Table {
    let header = ["measure", "who", "median", "from – to", "ours is", "from – to", "reading"];
    let mut table = table(style, &header, &[2, 3, 4, 5]);
    let mut last = "";
    let mut order: Vec<&str> = Vec::new();
    for figure in figures {
        if !order.contains(&figure.what.as_str()) {
            order.push(&figure.what);
        }
    }
    for what in order {
        let group = || figures.iter().filter(|figure| figure.what == what);
        let ours = group().find(|figure| is_ours(&figure.contender));
        for figure in group() {
            let named = if figure.what == last { "" } else { figure.what.as_str() };
            last = &figure.what;
            let compared = ours.filter(|_| !is_ours(&figure.contender));
            let (ratio, spread, reading) =
                compared.map_or_else(Default::default, |ours| compare(ours, figure));
            table.add_row([
                named.to_owned(),
                label(&figure.contender),
                formatted(figure.sample.median(), figure.unit),
                range(&figure.sample, figure.unit),
                ratio,
                spread,
                reading,
            ]);
        }
    }
    table
}

/// Returns how many times as good ours is, the range of that over the repetitions, and what it says.
fn compare(ours: &Figure, theirs: &Figure) -> (String, String, String) {
    let ratios = match ours.better {
        Better::More => ours.sample.over(&theirs.sample),
        Better::Less => theirs.sample.over(&ours.sample),
    };
    let none = match (ours.sample.median() == 0.0, theirs.sample.median() == 0.0) {
        (true, true) => Some("both none"),
        (true, false) => Some("ours is none"),
        (false, true) => Some("theirs is none"),
        (false, false) => None,
    };
    if let Some(none) = none {
        return (String::new(), String::new(), none.to_owned());
    }
    let apart = ratios.min() > 1.0 || ratios.max() < 1.0;
    let reading = match (is_limit(&theirs.contender), ratios.0.len() > 1 && apart) {
        (true, _) => "of the limit",
        (false, false) if ratios.0.len() == 1 => "once: no spread",
        (false, false) => "cannot be told apart",
        (false, true) if ratios.median() > 1.0 => "better",
        (false, true) => "worse",
    };
    let spread = if ratios.0.len() > 1 { range(&ratios, "") } else { String::new() };
    (format!("{} ×", digits(ratios.median())), spread, reading.to_owned())
}

/// Returns the range of a sample; empty for a single value.
fn range(sample: &Sample, unit: &str) -> String {
    if sample.0.len() < 2 {
        return String::new();
    }
    format!("{} – {}", formatted(sample.min(), unit), formatted(sample.max(), unit))
}
