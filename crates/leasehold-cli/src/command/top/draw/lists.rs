//! Draws the lists of semaphores, locks and pools.

use std::time::SystemTime;

use leasehold::{LockInfo, PoolStats, SemaphoreStats};
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::Color;
use ratatui::text::Line;

use super::{Appearance, BOLD, draw_grid, first_row, put};
use crate::command::limit::rate;
use crate::command::top::detail::text;
use crate::command::top::grid::{Column, Fit, Grid};
use crate::command::top::list;
use crate::command::top::view::View;
use crate::monitor::{History, Kind, Monitor, Snapshot};
use crate::output::{ago, or_dash};

/// From this width on, words are written out and the rate has a column.
const WIDE: u16 = 120;

pub(super) fn draw(frame: &mut Frame<'_>, view: &mut View, appearance: &Appearance, area: Rect) {
    let page = usize::from(area.height).saturating_sub(1);
    view.page = page;
    let from = first_row(view.at, view.rows.len(), page);
    let shown = &view.rows[from..view.rows.len().min(from + page)];
    let Some(snapshot) = view.monitor.latest() else { return };
    if shown.is_empty() {
        let all = list::count(snapshot, view.kind);
        let text = match view.kind {
            _ if all > 0 => format!("none of {all} names contains the filter"),
            Kind::Semaphore => "no semaphore has been used here".to_owned(),
            Kind::Lock => "no lock is held".to_owned(),
            Kind::Pool => "no pool lease is held".to_owned(),
        };
        return put(frame, area, 1, Line::raw(appearance.charset.cut(&text, area.width.into())));
    }
    let grid = match view.kind {
        Kind::Semaphore => semaphores(&view.monitor, snapshot, shown, appearance, area.width),
        Kind::Lock => locks(snapshot, shown, appearance),
        Kind::Pool => pools(snapshot, shown, appearance),
    };
    draw_grid(frame, appearance, area, &grid, Some(view.at - from));
}

fn semaphores(
    monitor: &Monitor,
    snapshot: &Snapshot,
    shown: &[usize],
    appearance: &Appearance,
    width: u16,
) -> Grid {
    let wide = width >= WIDE;
    let cyan = appearance.colour(Color::Cyan);
    let mut columns = vec![
        Column::text("NAME", Fit::Elastic).styled(BOLD),
        Column::number("HELD", 0, 5),
        Column::number("OF", 0, 5),
        Column::number("WAITING", 0, 0),
        Column::number("OLDEST WAIT", 2, 0),
        Column::number("GRANTS/s", 3, 0),
        Column::text("STATE", Fit::Rank(1)).styled(appearance.colour(Color::Yellow)),
    ];
    let spark = usize::from(width.saturating_sub(WIDE - 16)) / 3;
    let spark = spark.min(30);
    if wide {
        columns.extend([
            Column::text("RATE", Fit::Rank(5)),
            Column::number("OLDEST HOLD", 6, 0),
            Column::text("WAITING OVER TIME", Fit::Rank(4)).styled(cyan),
            Column::text("GRANTS OVER TIME", Fit::Rank(4)).styled(cyan),
        ]);
    }
    let row = |at: &usize| {
        let one = &snapshot.semaphores[*at];
        let history = monitor.history(&one.name);
        let grants = history.map_or(0.0, History::grants_per_second);
        let mut row = vec![
            appearance.clean(&one.name),
            one.held_units.to_string(),
            capacity(one),
            one.waiting.to_string(),
            or_dash(one.oldest_wait.map(ago)),
            format!("{grants:.1}"),
            state(one, wide),
        ];
        if wide {
            row.extend([or_dash(rate(one)), or_dash(one.oldest_hold().map(ago))]);
            let samples = || history.into_iter().flat_map(History::recent);
            row.push(appearance.charset.sparkline(samples().map(|sample| sample.waiting), spark));
            row.push(appearance.charset.sparkline(samples().map(|sample| sample.grants), spark));
        }
        row
    };
    let rows = shown.iter().map(row).collect();
    Grid { columns, rows }
}

fn capacity(one: &SemaphoreStats) -> String {
    or_dash(one.limited_to().map(|limit| limit.to_string()))
}

/// Describes pins, pauses and rates.
fn state(one: &SemaphoreStats, wide: bool) -> String {
    let pinned = if wide { "pinned" } else { "pin" };
    let all = [
        one.paused.as_ref().map(|_| "paused"),
        one.pinned.map(|_| pinned),
        one.rate.map(|_| "rate").filter(|_| !wide),
    ];
    all.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

fn locks(snapshot: &Snapshot, shown: &[usize], appearance: &Appearance) -> Grid {
    let columns = vec![
        Column::text("KEY", Fit::Elastic).styled(BOLD),
        Column::text("LABEL", Fit::Elastic),
        Column::text("HOST", Fit::Rank(3)),
        Column::number("PID", 2, 0),
        Column::number("FOR", 0, 7),
        Column::number("LEASE LEFT", 0, 7),
        Column::number("FENCE", 1, 0),
    ];
    let now = SystemTime::now();
    let row = |lock: &LockInfo| {
        let (held_for, expires_in) = list::spans(lock, now);
        let info = &lock;
        vec![
            appearance.clean(&lock.key),
            appearance.clean(&text(info.label.as_deref())),
            appearance.clean(&text(info.host.as_deref())),
            or_dash(info.pid.map(|pid| pid.to_string())),
            ago(held_for),
            ago(expires_in),
            info.fence.to_string(),
        ]
    };
    Grid { columns, rows: shown.iter().map(|at| row(&snapshot.locks[*at])).collect() }
}

fn pools(snapshot: &Snapshot, shown: &[usize], appearance: &Appearance) -> Grid {
    let columns = vec![
        Column::text("NAME", Fit::Elastic).styled(BOLD),
        Column::number("HELD", 0, 6),
        Column::number("LONGEST SILENCE", 1, 0),
        Column::number("LEAST LEFT", 2, 0),
    ];
    let row = |pool: &PoolStats| {
        vec![
            appearance.clean(&pool.name),
            pool.members.len().to_string(),
            or_dash(list::longest_silence(pool).map(ago)),
            or_dash(pool.members.iter().filter_map(|one| one.expires_in).min().map(ago)),
        ]
    };
    Grid { columns, rows: shown.iter().map(|at| row(&snapshot.pools[*at])).collect() }
}
