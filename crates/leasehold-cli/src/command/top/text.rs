//! Text for a terminal: escaping, cutting, wrapping, and sparklines.

use std::env;

use ratatui::symbols::border;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::output::one_line;

/// The characters that the terminal can show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Charset {
    Unicode,
    Ascii,
}

const ASCII_BORDER: border::Set<'static> = border::Set {
    top_left: "+",
    top_right: "+",
    bottom_left: "+",
    bottom_right: "+",
    vertical_left: "|",
    vertical_right: "|",
    horizontal_top: "-",
    horizontal_bottom: "-",
};

impl Charset {
    /// Returns the character set of the locale.
    pub(super) fn of_locale() -> Self {
        let set = |name| env::var(name).ok().filter(|value| !value.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default();
        let locale = locale.to_ascii_lowercase();
        if locale.contains("utf-8") || locale.contains("utf8") {
            Self::Unicode
        } else {
            Self::Ascii
        }
    }

    /// Escapes text from the store: control characters, invisible characters, and characters that the terminal lacks.
    pub(super) fn clean(self, text: &str) -> String {
        let line = one_line(text);
        if self == Self::Unicode || line.is_ascii() {
            return line;
        }
        line.chars().fold(String::new(), |mut line, c| {
            if c.is_ascii() {
                line.push(c);
            } else {
                line.extend(c.escape_default());
            }
            line
        })
    }

    /// Cuts text to at most `width` columns. Cut text ends with `…`.
    pub(super) fn cut(self, text: &str, width: usize) -> String {
        if text.width() <= width {
            return text.to_owned();
        }
        let end = if self == Self::Unicode { "…" } else { "~" };
        let mut cut = String::new();
        let mut used = end.width();
        for c in text.chars() {
            used += c.width().unwrap_or_default();
            if used > width {
                break;
            }
            cut.push(c);
        }
        if width > 0 { cut + end } else { String::new() }
    }

    /// Draws the newest `width` values, the newest at the right, scaled to the largest. Zero looks different from any other
    /// value.
    pub(super) fn sparkline(
        self,
        values: impl DoubleEndedIterator<Item = u32>,
        width: usize,
    ) -> String {
        let levels: &[char] = match self {
            Self::Unicode => &['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'],
            Self::Ascii => &['.', '1', '2', '3', '4', '5', '6', '7', '8', '9'],
        };
        let mut newest: Vec<_> = values.rev().take(width).collect();
        newest.reverse();
        let largest = newest.iter().copied().max().unwrap_or_default().max(1) as usize;
        let steps = levels.len() - 1;
        let level = |value: &u32| levels[(*value as usize * steps).div_ceil(largest)];
        let line: String = newest.iter().map(level).collect();
        " ".repeat(width - newest.len()) + &line
    }

    pub(super) fn border(self) -> border::Set<'static> {
        if self == Self::Unicode { border::PLAIN } else { ASCII_BORDER }
    }
}

/// Breaks text into lines of at most `width` columns, at blanks where possible.
pub(super) fn wrap(text: &str, width: usize) -> Vec<String> {
    let width = width.max(2);
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is a line");
        if line.is_empty() || line.width() + 1 + word.width() <= width {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
        break_last(&mut lines, width);
    }
    lines
}

/// Breaks a last line that is one long word.
fn break_last(lines: &mut Vec<String>, width: usize) {
    while let Some(last) = lines.pop() {
        let mut used = 0;
        let end = last.char_indices().find_map(|(at, c)| {
            used += c.width().unwrap_or_default();
            (used > width).then_some(at)
        });
        let Some(end) = end else {
            lines.push(last);
            return;
        };
        lines.push(last[..end].to_owned());
        lines.push(last[end..].to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_cut_by_columns_and_not_by_characters() {
        let cut = |text, width| Charset::Unicode.cut(text, width);
        assert_eq!([cut("short", 5), cut("longer", 5)], ["short", "long…"]);
        assert_eq!(
            [cut("夜夜夜", 6), cut("夜夜夜", 5), cut("夜夜夜", 4)],
            ["夜夜夜", "夜夜…", "夜…"]
        );
        assert_eq!([cut("ab", 1), cut("ab", 0), cut("", 0)], ["…", "", ""]);
        assert_eq!(Charset::Ascii.cut("longer", 5), "long~");
        for width in 0..20 {
            assert!(cut("👍🏽 e\u{301} 夜 👩 flag 🇨🇭", width).width() <= width);
        }
    }

    #[test]
    fn without_unicode_everything_is_ascii() {
        assert_eq!(Charset::Ascii.clean("é\x1b夜"), "\\u{e9}\\u{1b}\\u{591c}");
        assert_eq!(Charset::Unicode.clean("é\x1b夜"), "é\\u{1b}夜");
        assert!(Charset::Ascii.sparkline([0, 3, 9].into_iter(), 5).is_ascii());
    }

    #[test]
    fn sparklines_end_with_the_newest_and_scale_to_the_largest() {
        let draw = |values: &[u32]| Charset::Unicode.sparkline(values.iter().copied(), 4);
        assert_eq!(draw(&[]), "    ");
        assert_eq!(draw(&[0, 0]), "  ▁▁");
        assert_eq!(draw(&[9, 0, 1, 100, u32::MAX]), "▁▂▂█");
        assert_eq!(draw(&[0, 1, 4, 8]), "▁▂▅█");
        assert_eq!(Charset::Ascii.sparkline([0, 1, 9].into_iter(), 3), ".19");
    }

    #[test]
    fn lines_are_broken_at_blanks_and_long_words_anywhere() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("a abcdefgh b", 3), ["a", "abc", "def", "gh", "b"]);
        assert_eq!(wrap("夜夜夜", 5), ["夜夜", "夜"]);
        assert_eq!(wrap("", 5), [""]);
    }
}
