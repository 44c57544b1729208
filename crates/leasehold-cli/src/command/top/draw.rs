//! Draws the view. Everything that comes from the store passes [`Charset::clean`] here.

mod dialogs;
mod lists;
mod opened;

use std::time::{Duration, SystemTime};

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use unicode_width::UnicodeWidthStr;

use super::grid::Grid;
use super::list;
use super::text::Charset;
use super::view::{View, place};
use crate::monitor::{Kind, MOST, since};
use crate::output::ago;

const LEAST_WIDTH: u16 = 40;
const LEAST_HEIGHT: u16 = 10;
/// The age of an older snapshot is shown.
const FRESH: Duration = Duration::from_secs(5);

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);

/// The settings for drawing.
#[derive(Debug)]
pub(super) struct Appearance {
    pub(super) charset: Charset,
    pub(super) colour: bool,
    /// The URL of the store without secrets.
    pub(super) place: String,
}

impl Appearance {
    /// Returns a colour if colours are on. A colour never adds information that is not in the text.
    fn colour(&self, colour: Color) -> Style {
        if self.colour { Style::new().fg(colour) } else { Style::new() }
    }

    fn clean(&self, text: &str) -> String {
        self.charset.clean(text)
    }
}

pub(super) fn draw(frame: &mut Frame<'_>, view: &mut View, appearance: &Appearance) {
    let area = frame.area();
    if area.width < LEAST_WIDTH || area.height < LEAST_HEIGHT {
        let text = format!("terminal too small: {LEAST_WIDTH}x{LEAST_HEIGHT} at least");
        return put(frame, area, 0, Line::raw(appearance.charset.cut(&text, area.width.into())));
    }
    let header = if view.only.is_some() { 1 } else { draw_header(frame, view, appearance, area) };
    if let Some(notice) = notice(view) {
        let text = appearance.charset.cut(&appearance.clean(&notice), area.width.into());
        let style = BOLD.patch(appearance.colour(Color::Red));
        put(frame, area, header - 1, Line::styled(text, style));
    }
    let body = Rect { y: header, height: area.height - header - 2, ..area };
    if view.open.is_some() {
        opened::draw(frame, view, appearance, body);
    } else {
        lists::draw(frame, view, appearance, body);
    }
    draw_status(frame, view, appearance, area);
    if let Some(dialog) = &view.dialog {
        dialogs::draw(frame, dialog, appearance, area);
    }
}

/// Returns the number of lines. The last one is free for a notice.
fn draw_header(frame: &mut Frame<'_>, view: &View, appearance: &Appearance, area: Rect) -> u16 {
    let width = usize::from(area.width);
    let clock = utc(SystemTime::now());
    let title = "leasehold top";
    let room = width.saturating_sub(title.len() + clock.len() + 4);
    let store = appearance.charset.cut(&appearance.clean(&appearance.place), room);
    let space = " ".repeat(room - store.width() + 2);
    let first =
        vec![Span::styled(title, BOLD), Span::raw(format!("  {store}{space}")), Span::raw(clock)];
    put(frame, area, 0, Line::from(first));
    let total = view.monitor.total();
    let newest = total.recent().next_back();
    let (held, waiting) = newest.map_or((0, 0), |sample| (sample.held, sample.waiting));
    let grants = total.grants_per_second();
    let sums = format!("{held} held  {waiting} waiting  {grants:.1} grants/s");
    let mut spans = vec![Span::raw(sums.clone())];
    // Two sparklines with their titles fill the rest.
    let left = width.saturating_sub(sums.width() + "  waiting   grants ".len());
    let each = (left / 2).min(40);
    if each >= 8 {
        let style = appearance.colour(Color::Cyan);
        let waiting = total.recent().map(|sample| sample.waiting);
        let grants = total.recent().map(|sample| sample.grants);
        spans.push(Span::raw("  waiting "));
        spans.push(Span::styled(appearance.charset.sparkline(waiting, each), style));
        spans.push(Span::raw("  grants "));
        spans.push(Span::styled(appearance.charset.sparkline(grants, each), style));
    }
    put(frame, area, 1, Line::from(spans));
    put(frame, area, 2, tabs(view, appearance, width));
    4
}

fn tabs(view: &View, appearance: &Appearance, width: usize) -> Line<'static> {
    let mut spans = Vec::new();
    for (kind, title) in
        [(Kind::Semaphore, "Semaphores"), (Kind::Lock, "Locks"), (Kind::Pool, "Pools")]
    {
        let count = view.monitor.latest().map_or(0, |snapshot| list::count(snapshot, kind));
        let text = format!("{} {title} ({count})", place(kind) + 1);
        // The brackets mark it on terminals without attributes.
        if kind == view.kind {
            spans.push(Span::styled(format!("[{text}]"), BOLD));
        } else {
            spans.push(Span::raw(format!(" {text} ")));
        }
    }
    let used: usize = spans.iter().map(Span::width).sum();
    let mut rest = format!("  sort: {}", view.sort().as_str());
    if view.enters_filter || !view.filter.is_empty() {
        let cursor = if view.enters_filter { "_" } else { "" };
        rest = format!("  filter: {}{cursor}{rest}", appearance.clean(&view.filter));
    }
    spans.push(Span::raw(appearance.charset.cut(&rest, width.saturating_sub(used))));
    Line::from(spans)
}

/// Returns notices about the data, such as an outage or its age.
fn notice(view: &View) -> Option<String> {
    if let Some(outage) = view.monitor.outage() {
        return Some(format!("store unreachable since {}: {}", utc(outage.since), outage.problem));
    }
    if let Some((_, problem)) = view.open.as_ref().and_then(|open| open.problem.as_ref()) {
        return Some(problem.clone());
    }
    let snapshot = view.monitor.latest()?;
    if !snapshot.hidden.is_empty() {
        let hidden = snapshot.hidden.join(" and ");
        return Some(format!("the store denies access to {hidden}"));
    }
    if snapshot.semaphores.len() >= MOST || snapshot.locks.len() >= MOST {
        return Some(format!("only the first {MOST} names are read"));
    }
    let age = since(snapshot.at);
    (age > FRESH).then(|| format!("read {} ago: the store takes long to answer", ago(age)))
}

fn draw_status(frame: &mut Frame<'_>, view: &View, appearance: &Appearance, area: Rect) {
    let width = usize::from(area.width);
    if let Some(status) = &view.status {
        let text = appearance.charset.cut(&appearance.clean(&status.text), width);
        let colour = if status.failed { Color::Red } else { Color::Green };
        let style = BOLD.patch(appearance.colour(colour));
        put(frame, area, area.height - 2, Line::styled(text, style));
    }
    let keys = match (&view.only, &view.open) {
        (Some(kinds), _) if kinds.len() > 1 => "Tab other kind  ? help  q quit",
        (Some(_), _) => "? help  q quit",
        (None, None) if view.enters_filter => "Enter keep the filter  Esc remove it",
        (None, None) if view.kind != Kind::Semaphore => {
            "Enter open  s sort  / filter  Tab next kind  ? help  q quit"
        }
        (None, None) if view.is_paused() => {
            "Enter open  s sort  / filter  r resume  l limit  d drain  ? help  q quit"
        }
        (None, None) => "Enter open  s sort  / filter  p pause  l limit  d drain  ? help  q quit",
        (None, Some(open)) if open.kind != Kind::Semaphore => "Esc back  x release  ? help  q quit",
        (None, Some(_)) => {
            "Esc back  x release  p pause  r resume  l limit  d drain  ? help  q quit"
        }
    };
    let text = appearance.charset.cut(keys, width);
    put(frame, area, area.height - 1, Line::styled(text, appearance.colour(Color::Cyan)));
}

/// Draws a grid with its titles, and marks the selected row.
fn draw_grid(
    frame: &mut Frame<'_>,
    appearance: &Appearance,
    area: Rect,
    grid: &Grid,
    selected: Option<usize>,
) {
    let widths = grid.widths(usize::from(area.width).saturating_sub(2));
    let titles = format!("  {}", grid.titles(&widths, appearance.charset));
    put(frame, area, 0, Line::styled(titles, BOLD));
    for (at, row) in grid.rows.iter().enumerate() {
        let Ok(y) = u16::try_from(at + 1) else { return };
        let is_selected = selected == Some(at);
        let mut spans = vec![Span::raw(if is_selected { "> " } else { "  " })];
        spans.extend(grid.spans(row, &widths, appearance.charset));
        let line = Line::from(spans);
        put(frame, area, y, if is_selected { reversed(line) } else { line });
    }
}

/// Marks the row, except for the sparklines at its end: in reverse video, high values look low.
fn reversed(line: Line<'static>) -> Line<'static> {
    let mut sparklines = false;
    let reverse = |span: Span<'static>| {
        sparklines |= span.content.contains(['▁', '█']);
        if sparklines {
            return span;
        }
        Span::styled(span.content, Style::new().add_modifier(Modifier::REVERSED))
    };
    Line::from(line.spans.into_iter().map(reverse).collect::<Vec<_>>())
}

/// Draws one line, if it is inside the area.
fn put(frame: &mut Frame<'_>, area: Rect, y: u16, line: Line<'_>) {
    if y < area.height {
        frame.render_widget(line, Rect { y: area.y + y, height: 1, ..area });
    }
}

/// Returns the first row to show, so that the selected row is visible.
fn first_row(selected: usize, rows: usize, page: usize) -> usize {
    selected.saturating_sub(page / 2).min(rows.saturating_sub(page))
}

/// The time of day.
pub(super) fn utc(time: SystemTime) -> String {
    let text = humantime::format_rfc3339_seconds(time).to_string();
    format!("{} UTC", text.get(11..19).unwrap_or_default())
}
