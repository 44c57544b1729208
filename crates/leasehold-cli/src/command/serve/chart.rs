//! Charts as SVG, without styles, because the content security policy allows no inline styles.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use leasehold::SemaphoreStats;
use maud::{Markup, html};

use crate::monitor::{History, Sample, since};
use crate::output::counted;

/// The time spans of a chart. The shortest that covers the history is used, so that unseen time takes no room.
const SPANS: [(u64, &str, &str); 3] =
    [(300, "5 min ago", "2.5 min"), (900, "15 min ago", "7.5 min"), (3600, "1 h ago", "30 min")];
const WIDTH: f64 = 360.0;
const HEIGHT: f64 = 100.0;
/// A longer time without a sample is a gap: the store could not be read. The longest pause between two polls is a minute.
const GAP: Duration = Duration::from_secs(90);
/// With more units than this, a bar has no segments.
const MOST_SEGMENTS: u32 = 64;

/// Held units and waiters over the last hour.
pub(super) fn chart(history: &History, what: &str) -> Markup {
    let samples: Vec<_> = history.hour().copied().collect();
    let now = SystemTime::now();
    let top = |value: fn(&Sample) -> u32| samples.iter().map(value).max().unwrap_or_default();
    let (held, waiting) = (top(|sample| sample.held), top(|sample| sample.waiting));
    let highest = held.max(waiting).max(1);
    let newest = samples.last();
    let (held_now, waiting_now) = newest.map_or((0, 0), |sample| (sample.held, sample.waiting));
    let label = format!(
        "Held units and waiters of {what} over the last hour: now {held_now} held and {waiting_now} waiting, at most {held} held \
         and {waiting} waiting."
    );
    let oldest = samples.first().map(|sample| since(sample.at).as_secs()).unwrap_or_default();
    let span = SPANS.iter().find(|(seconds, ..)| oldest <= *seconds).unwrap_or(&SPANS[2]);
    let (span, begin, middle) = (Duration::from_secs(span.0), span.1, span.2);
    let held_line = lines(&samples, now, span, highest, |sample| sample.held);
    let waiting_line = lines(&samples, now, span, highest, |sample| sample.waiting);
    html! {
        figure.chart {
            figcaption {
                span.key.held { "held" } " " (held_now) ", at most " (held) "; "
                span.key.waiting { "waiting" } " " (waiting_now) ", at most " (waiting)
                span.faint { " in the last hour" }
            }
            div.plot {
                span.top { (highest) }
                svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } preserveAspectRatio="none" role="img" aria-label=(label) {
                    path.grid d="M0 0.5H360M0 50H360M0 99.5H360M90 0V100M180 0V100M270 0V100" {}
                    path.held d=(held_line) {}
                    path.waiting d=(waiting_line) {}
                }
            }
            div.axis aria-hidden="true" { span { (begin) } span { (middle) } span { "now" } }
        }
    }
}

/// The data of a path, with gaps where nothing is known.
fn lines(
    samples: &[Sample],
    now: SystemTime,
    span: Duration,
    highest: u32,
    value: fn(&Sample) -> u32,
) -> String {
    let (mut data, mut before) = (String::new(), None);
    for sample in samples {
        let age = now.duration_since(sample.at).unwrap_or_default();
        if age > span {
            continue;
        }
        let x = WIDTH * (1.0 - age.as_secs_f64() / span.as_secs_f64());
        let y = HEIGHT - 1.0 - (HEIGHT - 2.0) * f64::from(value(sample)) / f64::from(highest);
        // Steps: a value stays until the next sample.
        let _ = match before {
            Some(before) if age + GAP > before => write!(data, "H{x:.1}V{y:.1}"),
            _ => write!(data, "M{x:.1} {y:.1}h0.5"),
        };
        before = Some(age);
    }
    // The newest value is still valid.
    if before.is_some_and(|before| before < GAP) {
        let _ = write!(data, "H{WIDTH}");
    }
    data
}

/// Draws how much of the capacity is held.
pub(super) fn bar(one: &SemaphoreStats) -> Markup {
    let (units, capacity) = (one.held_units, one.capacity);
    let width = 100.0 * (f64::from(units) / f64::from(capacity.max(1))).min(1.0);
    let full = units >= capacity;
    html! {
        @if one.limited_to().is_some() {
            // The amount is next to it as text.
            svg.bar viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true" {
                rect.track width="100" height="10" {}
                rect.fill.full[full] width={ (format!("{width:.1}")) } height="10" {}
            }
        }
    }
}

/// A bar with a segment for each holder.
pub(super) fn segments(one: &SemaphoreStats) -> Markup {
    let (units, capacity) = (one.held_units, one.capacity);
    if !(1..=MOST_SEGMENTS).contains(&capacity) || units > MOST_SEGMENTS {
        return html! { div.units { (bar(one)) } };
    }
    // After a shrink more units may be held than the limit allows.
    let whole = f64::from(capacity.max(units));
    let mut ends = 0;
    let ends: Vec<_> = one
        .holders
        .iter()
        .map(|holder| {
            ends += holder.weight;
            100.0 * f64::from(ends) / whole
        })
        .collect();
    let between = ends.iter().rev().skip(1);
    let holders = counted(u32::try_from(ends.len()).unwrap_or(u32::MAX), "holder");
    let label = format!("{units} of {} held by {holders}", counted(capacity, "unit"));
    html! {
        div.units {
            svg.bar.large viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label=(label) {
                rect.track width="100" height="10" {}
                rect.fill.full[units >= capacity] width=(format!("{:.2}", ends.last().copied().unwrap_or_default())) height="10" {}
                @for end in between { rect.gap x=(format!("{:.2}", end - 0.1)) width="0.2" height="10" {} }
                @if units > capacity {
                    rect.limit x=(format!("{:.2}", 100.0 * f64::from(capacity) / whole - 0.2)) width="0.4" height="10" {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_not_bridged() {
        let now = SystemTime::now();
        let sample = |ago: u64, held| Sample {
            at: now - Duration::from_secs(ago),
            held,
            waiting: 0,
            grants: 0,
        };
        let samples = [sample(4000, 9), sample(600, 1), sample(590, 2), sample(100, 0)];
        let hour = Duration::from_secs(3600);
        let data = lines(&samples, now, hour, 2, |sample| sample.held);
        assert_eq!(data, "M300.0 50.0h0.5H301.0V1.0M350.0 99.0h0.5");
    }
}
