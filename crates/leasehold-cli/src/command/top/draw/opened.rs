//! Draws the details of an opened name.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::Color;
use ratatui::text::{Line, Span};

use super::{Appearance, BOLD, draw_grid, first_row, put};
use crate::command::top::detail::Detail;
use crate::command::top::grid::{Column, Fit, Grid};
use crate::command::top::text::wrap;
use crate::command::top::view::{OpenName, View};
use crate::monitor::{History, Kind};

/// The largest number of summary lines, so that holders stay on the screen.
const MOST_LINES: usize = 8;

pub(super) fn draw(frame: &mut Frame<'_>, view: &mut View, appearance: &Appearance, area: Rect) {
    let Some(open) = &view.open else { return };
    let width = usize::from(area.width);
    let kind = format!("{}: ", open.kind.as_str());
    let name =
        appearance.charset.cut(&appearance.clean(&open.name), width.saturating_sub(kind.len()));
    put(frame, area, 0, Line::from(vec![Span::raw(kind), Span::styled(name, BOLD)]));
    let Some(detail) = &open.detail else {
        let text = if open.read { "not in use now" } else { "reading the store" };
        return put(
            frame,
            area,
            2,
            Line::raw(appearance.charset.cut(&appearance.clean(text), width)),
        );
    };
    let mut y = 1;
    let lines = detail.summary();
    let lines = lines.iter().flat_map(|line| wrap(&appearance.clean(line), width));
    let most = MOST_LINES.min(usize::from(area.height) / 2);
    for line in lines.take(most) {
        put(frame, area, y, Line::raw(line));
        y += 1;
    }
    if let Some(history) = view.monitor.history(&open.name)
        && open.kind == Kind::Semaphore
    {
        put(frame, area, y, sparklines(history, appearance, width));
        y += 1;
    }
    // Add an empty line above, if there is room.
    y += u16::from(area.height > 12);
    let body = Rect { y: area.y + y, height: area.height.saturating_sub(y), ..area };
    let page = draw_entries(frame, open, detail, appearance, body);
    view.page = page;
}

fn sparklines(history: &History, appearance: &Appearance, width: usize) -> Line<'static> {
    let newest = history.recent().next_back();
    let waiting = newest.map_or(0, |sample| sample.waiting);
    let titles = [
        format!("waiting {waiting:>5} "),
        format!("  grants/s {:>5.1} ", history.grants_per_second()),
    ];
    let each = (width.saturating_sub(titles[0].len() + titles[1].len()) / 2).min(60);
    let style = appearance.colour(Color::Cyan);
    let [first, second] = titles;
    let waiting = history.recent().map(|sample| sample.waiting);
    let grants = history.recent().map(|sample| sample.grants);
    Line::from(vec![
        Span::raw(first),
        Span::styled(appearance.charset.sparkline(waiting, each), style),
        Span::raw(second),
        Span::styled(appearance.charset.sparkline(grants, each), style),
    ])
}

/// Returns how many entries fit.
fn draw_entries(
    frame: &mut Frame<'_>,
    open: &OpenName,
    detail: &Detail,
    appearance: &Appearance,
    area: Rect,
) -> usize {
    let entries = detail.entries();
    let unlisted = detail.unlisted();
    let page = usize::from(area.height).saturating_sub(1 + usize::from(unlisted.is_some()));
    if entries.is_empty() {
        put(frame, area, 0, Line::raw("no holders and no waiters"));
        return page;
    }
    let from = first_row(open.at, entries.len(), page);
    let shown = entries.iter().skip(from).take(page);
    let clean = |cells: &Vec<String>| cells.iter().map(|cell| appearance.clean(cell)).collect();
    let rows: Vec<Vec<String>> = shown.map(|entry| clean(&entry.cells)).collect();
    let last = rows.len();
    let grid = Grid { columns: columns(detail), rows };
    draw_grid(frame, appearance, area, &grid, Some(open.at - from));
    if let (Some(unlisted), Ok(y)) = (unlisted, u16::try_from(last + 1)) {
        put(frame, area, y, Line::raw(format!("  and {unlisted}")));
    }
    page
}

/// Returns the columns, in the order of the cells of an entry.
fn columns(detail: &Detail) -> Vec<Column> {
    match detail {
        Detail::Semaphore(_) => vec![
            Column { least: 5, ..Column::text("PLACE", Fit::Rank(0)) },
            Column::text("LABEL", Fit::Elastic).styled(BOLD),
            Column::text("HOST", Fit::Elastic),
            Column::number("PID", 1, 0),
            Column::number("FOR", 0, 7),
            Column::number("SILENT FOR", 2, 7),
            Column::number("TTL LEFT", 4, 7),
            Column::number("FENCE", 3, 0),
            Column::number("UNITS", 4, 0),
            Column::number("SLOT", 4, 0),
            Column::text("ID", Fit::Rank(5)),
        ],
        Detail::Lock(_) => vec![
            Column::text("LABEL", Fit::Elastic).styled(BOLD),
            Column::text("HOST", Fit::Elastic),
            Column::number("PID", 1, 0),
            Column::number("FOR", 0, 7),
            Column::number("LEASE LEFT", 0, 7),
            Column::number("FENCE", 2, 0),
        ],
        Detail::Pool(_) => vec![
            Column::text("INSTANCE", Fit::Elastic).styled(BOLD),
            Column::number("SILENT FOR", 0, 0),
            Column::number("LEASE LEFT", 1, 7),
        ],
    }
}
