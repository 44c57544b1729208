//! A table that fits into the available width.
//!
//! If the width is too small, columns of a high rank are left out first. After that, elastic columns, which hold names and
//! labels, share the remaining width and are cut with `…`.

use ratatui::style::Style;
use ratatui::text::Span;
use unicode_width::UnicodeWidthStr;

use super::text::Charset;

const GAP: usize = 2;
/// Columns are left out before an elastic column becomes narrower than this.
const NARROW: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fit {
    /// Cut if it does not fit.
    Elastic,
    /// Left out if it does not fit, the highest first.
    Rank(u8),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    pub(super) title: &'static str,
    pub(super) need: Fit,
    /// Numbers are aligned to the right.
    pub(super) right: bool,
    pub(super) style: Style,
    /// The smallest width, so that the column does not move while rows change.
    pub(super) least: usize,
}

impl Column {
    pub(super) const fn text(title: &'static str, need: Fit) -> Self {
        Self { title, need, right: false, style: Style::new(), least: 0 }
    }

    pub(super) const fn number(title: &'static str, rank: u8, least: usize) -> Self {
        Self { title, need: Fit::Rank(rank), right: true, style: Style::new(), least }
    }

    pub(super) const fn styled(self, style: Style) -> Self {
        Self { style, ..self }
    }
}

/// Columns, and the rows that are shown. The cells are escaped.
#[derive(Debug)]
pub(super) struct Grid {
    pub(super) columns: Vec<Column>,
    pub(super) rows: Vec<Vec<String>>,
}

impl Grid {
    /// Returns the width of each column in a line of `total` columns, or `None` for a column that is left out.
    pub(super) fn widths(&self, total: usize) -> Vec<Option<usize>> {
        let natural = |at: usize, column: &Column| {
            let cells = self.rows.iter().map(|row| row[at].width());
            cells.max().unwrap_or_default().max(column.title.width()).max(column.least)
        };
        let natural: Vec<_> =
            self.columns.iter().enumerate().map(|(at, column)| natural(at, column)).collect();
        let is_elastic = |at: &usize| self.columns[*at].need == Fit::Elastic;
        let elastic: Vec<_> = (0..self.columns.len()).filter(is_elastic).collect();
        let gaps = GAP * elastic.len().saturating_sub(1);
        let least: usize = elastic.iter().map(|at| natural[*at].min(NARROW)).sum::<usize>() + gaps;
        let mut left = total.saturating_sub(least);
        let mut ranked: Vec<_> = (0..self.columns.len()).filter(|at| !is_elastic(at)).collect();
        ranked.sort_by_key(|at| match self.columns[*at].need {
            Fit::Elastic => 0,
            Fit::Rank(rank) => rank,
        });
        let mut widths = vec![None; self.columns.len()];
        for at in ranked {
            let cost = natural[at] + GAP;
            if cost <= left {
                left -= cost;
                widths[at] = Some(natural[at]);
            }
        }
        let mut room = left + least - gaps;
        if total < least {
            room = total.saturating_sub(gaps);
        }
        // The widest is cut first.
        let mut shares: Vec<_> = elastic.iter().map(|at| natural[*at]).collect();
        while shares.iter().sum::<usize>() > room {
            let Some(widest) = shares.iter_mut().max() else { break };
            *widest -= 1;
        }
        for (at, share) in elastic.into_iter().zip(shares) {
            widths[at] = Some(share);
        }
        widths
    }

    pub(super) fn titles(&self, widths: &[Option<usize>], charset: Charset) -> String {
        let titles: Vec<_> = self.columns.iter().map(|column| column.title.to_owned()).collect();
        self.spans(&titles, widths, charset).iter().map(|span| &*span.content).collect()
    }

    pub(super) fn spans(
        &self,
        row: &[String],
        widths: &[Option<usize>],
        charset: Charset,
    ) -> Vec<Span<'static>> {
        let mut spans = Vec::new();
        for ((column, text), width) in self.columns.iter().zip(row).zip(widths) {
            let Some(width) = width else { continue };
            if !spans.is_empty() {
                spans.push(Span::raw(" ".repeat(GAP)));
            }
            let text = charset.cut(text, *width);
            let space = " ".repeat(width - text.width());
            let text = if column.right { space + &text } else { text + &space };
            spans.push(Span::styled(text, column.style));
        }
        spans
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(name: &str) -> Grid {
        let columns = vec![
            Column::text("NAME", Fit::Elastic),
            Column::number("HELD", 0, 6),
            Column::number("WAITING", 1, 0),
            Column::number("OLDEST HOLD", 2, 0),
        ];
        Grid { columns, rows: vec![[name, "1", "22", "333"].map(str::to_owned).to_vec()] }
    }

    fn line(grid: &Grid, total: usize) -> String {
        let widths = grid.widths(total);
        let spans = grid.spans(&grid.rows[0], &widths, Charset::Unicode);
        spans.iter().map(|span| &*span.content).collect()
    }

    #[test]
    fn the_least_important_columns_are_left_out_and_then_the_name_is_cut() {
        let grid = grid("a-name-of-25-characters-ok");
        assert_eq!(line(&grid, 80), "a-name-of-25-characters-ok       1       22          333");
        assert_eq!(line(&grid, 46), "a-name-of-25-ch…       1       22          333");
        assert_eq!(line(&grid, 40), "a-name-of-25-character…       1       22");
        assert_eq!(line(&grid, 24), "a-name-of-25-ch…       1");
        assert_eq!(line(&grid, 10), "a-name-of…");
    }

    #[test]
    fn no_line_is_longer_than_the_terminal_is_wide() {
        for name in ["", "夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜", &"x".repeat(512), "👍🏽👍🏽 e\u{301}"]
        {
            let grid = grid(name);
            for total in 0..250 {
                assert!(line(&grid, total).width() <= total, "{name:?} in {total}");
            }
        }
    }
}
