//! Output: tables, JSON and colours.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, SystemTime};

use comfy_table::{CellAlignment, Table, presets};
use leasehold::SemaphoreStats;
use serde::Serialize;
use serde_json::Value;

use crate::failure::{Failure, INTERNAL};

/// Writes to stdout. A closed pipe is not an error: its reader has read enough.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(Failure::new(INTERNAL, format!("stdout cannot be written to: {error}"))),
        Ok(()) => Ok(()),
    }
}

/// Returns the text as one line.
pub(crate) fn line(text: &str) -> String {
    format!("{}\n", one_line(text))
}

/// Prints a value as JSON, with its fields in alphabetical order.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    print(&format!("{:#}\n", json(value)))
}

/// Returns a value of the library as JSON.
pub(crate) fn json(value: &impl Serialize) -> Value {
    serde_json::to_value(value).unwrap_or_default()
}

/// Returns a semaphore as JSON without its holders and waiters, for lists.
pub(crate) fn summary(stats: &SemaphoreStats) -> Value {
    let mut value = json(stats);
    if let Some(fields) = value.as_object_mut() {
        fields.retain(|name, _| !["holders", "waiters"].contains(&name.as_str()));
    }
    value
}

/// Whether to use colours: stdout is a terminal, and `NO_COLOR` is not set.
pub(crate) fn in_colour() -> bool {
    let asked_not_to = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    io::stdout().is_terminal() && !asked_not_to && !dumb
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Style {
    Bold,
    Green,
    Yellow,
    Red,
}

pub(crate) fn styled(text: &str, style: Style) -> String {
    let code = match style {
        Style::Bold => 1,
        Style::Green => 32,
        Style::Yellow => 33,
        Style::Red => 31,
    };
    if in_colour() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
}

/// Returns a table without borders. `numbers` are the columns that are aligned to the right.
pub(crate) fn table<const N: usize>(
    titles: [&str; N],
    numbers: &[usize],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(titles);
    for row in rows {
        table.add_row(row.map(|cell| one_line(&cell)));
    }
    for (at, column) in table.column_iter_mut().enumerate() {
        let last = at + 1 == N;
        column.set_padding((0, if last { 0 } else { 2 }));
        if numbers.contains(&at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut text = String::new();
    for (at, line) in table.lines().enumerate() {
        let line = line.trim_end();
        let line = if at == 0 { styled(line, Style::Bold) } else { line.to_owned() };
        let _ = writeln!(text, "{line}");
    }
    text
}

/// Escapes control characters and invisible characters. Text that other programs have stored may contain anything; after
/// this it is one line, reads from left to right, and hides nothing.
pub(crate) fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() || is_invisible(c) {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
    }
    line
}

/// Whether a character changes the direction of text, separates lines, or has no width.
fn is_invisible(c: char) -> bool {
    matches!(
        c,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'
    )
}

/// Formats a duration: `340ms`, `12s`, `2m 5s`, `3h 7m`, `5d 2h`.
pub(crate) fn ago(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match seconds {
        0 => format!("{}ms", duration.as_millis()),
        1..60 => format!("{seconds}s"),
        60..3600 => format!("{minutes}m {}s", seconds % 60),
        3600..86_400 => format!("{hours}h {}m", minutes % 60),
        _ => format!("{days}d {}h", hours % 24),
    }
}

/// Formats a lease as the value of an option, rounded up: `460ms`, `1800ms`, `6s` or `12s`.
pub(crate) fn lease_text(lease: Duration) -> String {
    let millis = lease.as_millis().div_ceil(10) * 10;
    match millis {
        0..10_000 if !millis.is_multiple_of(1000) => format!("{millis}ms"),
        _ => format!("{}s", millis.div_ceil(1000)),
    }
}

/// Formats a number of things, as in "1 unit" and "2 units".
pub(crate) fn counted(number: u32, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

pub(crate) fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

pub(crate) fn seconds(duration: Option<Duration>) -> Value {
    // Milliseconds are exact enough, and stay readable.
    duration.map_or(Value::Null, |duration| {
        let millis = u32::try_from(duration.as_millis()).map_or(f64::INFINITY, f64::from);
        let seconds = if millis.is_finite() { millis / 1000.0 } else { duration.as_secs_f64() };
        seconds.into()
    })
}

pub(crate) fn timestamp(time: SystemTime) -> String {
    humantime::format_rfc3339_millis(time).to_string()
}

pub(crate) fn ordinal(number: usize) -> String {
    let suffix = match (number % 10, number % 100) {
        (_, 11..=13) => "th",
        (1, _) => "st",
        (2, _) => "nd",
        (3, _) => "rd",
        _ => "th",
    };
    format!("{number}{suffix}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_short() {
        let ages = [0, 59, 60, 3599, 3600, 86_399, 86_400 * 5 + 7200];
        let ages = ages.map(|seconds| ago(Duration::from_secs(seconds)));
        assert_eq!(ages, ["0ms", "59s", "1m 0s", "59m 59s", "1h 0m", "23h 59m", "5d 2h"]);
        assert_eq!(ago(Duration::from_millis(340)), "340ms");
    }

    #[test]
    fn leases_are_rounded_up() {
        let leases =
            [454, 1796, 6000, 11_500].map(|millis| lease_text(Duration::from_millis(millis)));
        assert_eq!(leases, ["460ms", "1800ms", "6s", "12s"]);
    }

    #[test]
    fn places_are_counted_as_people_do() {
        let places = [1, 2, 3, 4, 11, 12, 13, 21, 111, 1002].map(ordinal);
        let expected = "1st 2nd 3rd 4th 11th 12th 13th 21st 111th 1002nd";
        assert_eq!(places.join(" "), expected);
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(one_line("a\x1b[2Jb\nc"), "a\\u{1b}[2Jb\\nc");
    }

    #[test]
    fn invisible_characters_are_escaped() {
        let ranges = [0x202a..=0x202e, 0x2066..=0x2069, 0x200b..=0x200f, 0x2028..=0x2029];
        let single = [0x61c, 0xfeff, 0x2060, 0xad].into_iter();
        for code in ranges.into_iter().flatten().chain(single) {
            let c = char::from_u32(code).unwrap();
            assert_eq!(one_line(&format!("a{c}b")), format!("a\\u{{{code:x}}}b"));
        }
        let seen = "a b é 夜 عربي 🦀 ~";
        assert_eq!(one_line(seen), seen);
    }

    #[test]
    fn tables_are_aligned() {
        let rows = [["api".to_owned(), "12".to_owned()], ["a longer name".to_owned(), "1".into()]];
        insta::assert_snapshot!(table(["NAME", "HELD"], &[1], rows), @r"
        NAME           HELD
        api              12
        a longer name     1
        ");
    }
}
