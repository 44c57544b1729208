//! Draws dialogs in a box in the middle of the screen.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::Line;
use ratatui::widgets::{Block, Clear};

use super::{Appearance, BOLD, put};
use crate::action::Action;
use crate::command::top::dialog::Dialog;
use crate::command::top::text::wrap;

const WIDEST: u16 = 70;

const HELP: [&str; 18] = [
    "Up Down j k PgUp PgDn Home End   move",
    "Enter  open a name               Esc  back; remove the filter",
    "Tab    semaphores, locks, pools (also 1 2 3)",
    "s      sort by another column    /    filter by a part of the name",
    "p      pause                     r    resume",
    "d      drain                     l    change the limit, pin, unpin",
    "x      release the selected holder, in a name that is open",
    "q      quit (also Ctrl-C)        Ctrl-Z  suspend",
    "Every action says what it does and asks. Only y does it.",
    "",
    "HELD and OF count units: a permit weighs one unit or more.",
    "STATE: paused; pinned (pin): programs cannot change the limit; rate.",
    "GRANTS/s counts the permits that polls have seen: a lower bound.",
    "A permit that is released before the next poll is not counted.",
    "Sparklines: one character for each poll, the newest at the right.",
    "The store is read once a second, less often if it answers slowly.",
    "After kill -9 nothing restores the terminal: type `reset`.",
    "",
];

const HELP_OF_ONE: [&str; 6] = [
    "Up Down j k PgUp PgDn Home End   move",
    "Tab    the other kinds that have this name",
    "q      quit (also Esc, Ctrl-C)   Ctrl-Z  suspend",
    "The name is read once a second, less often if the store answers slowly.",
    "To change something, use `leasehold top`.",
    "",
];

pub(super) fn draw(frame: &mut Frame<'_>, dialog: &Dialog, appearance: &Appearance, area: Rect) {
    let width = area.width.saturating_sub(2).min(WIDEST + 4);
    let inside = usize::from(width).saturating_sub(4);
    let (title, text, footer) = content(dialog, appearance);
    let text: Vec<_> = text.iter().flat_map(|line| wrap(line, inside)).collect();
    let footer = wrap(footer, inside);
    // The footer says how to answer, so it is never cut off.
    let room = usize::from(area.height).saturating_sub(2 + footer.len());
    let from = match dialog {
        Dialog::Help { from, .. } => (*from).min(text.len().saturating_sub(room)),
        _ => 0,
    };
    let shown = text.iter().skip(from).take(room);
    let lines: Vec<_> = shown.chain(&footer).collect();
    let height = u16::try_from(lines.len() + 2).unwrap_or(area.height).min(area.height);
    let outer = Rect {
        x: area.x + (area.width - width) / 2,
        y: area.y + (area.height - height) / 2,
        width,
        height,
    };
    frame.render_widget(Clear, outer);
    let title = appearance.charset.cut(&format!(" {title} "), inside);
    let block =
        Block::bordered().border_set(appearance.charset.border()).title(title).title_style(BOLD);
    frame.render_widget(block, outer);
    let inner = Rect {
        x: outer.x + 2,
        y: outer.y + 1,
        width: width.saturating_sub(4),
        height: height.saturating_sub(2),
    };
    let answers = lines.len() - footer.len();
    for (at, line) in lines.into_iter().enumerate() {
        let style = if at >= answers { BOLD } else { super::Style::new() };
        put(
            frame,
            inner,
            u16::try_from(at).unwrap_or(u16::MAX),
            Line::styled(line.as_str(), style),
        );
    }
}

/// Returns the title, the text and the footer, all escaped.
fn content(dialog: &Dialog, appearance: &Appearance) -> (String, Vec<String>, &'static str) {
    match dialog {
        Dialog::Help { only: true, .. } => (
            "leasehold show --watch".to_owned(),
            HELP_OF_ONE.map(str::to_owned).to_vec(),
            "any key: close",
        ),
        Dialog::Help { .. } => {
            ("leasehold top".to_owned(), HELP.map(str::to_owned).to_vec(), "any key: close")
        }
        Dialog::Reason { name, text, drains } => {
            let what = if *drains { "Drain" } else { "Pause" };
            let lines = vec![
                "Reason, shown by waiting commands (may be empty):".to_owned(),
                format!("{}_", appearance.clean(text)),
            ];
            (format!("{what} {}", appearance.clean(name)), lines, "Enter: go on    Esc: cancel")
        }
        Dialog::Limit { name, text, pins, pinned, problem } => {
            let pins = if *pins { "[x]" } else { "[ ]" };
            let mut lines = vec![
                format!("New limit: {text}_"),
                format!("{pins} pin it: programs cannot change it (Tab)"),
            ];
            lines.extend(problem.map(str::to_owned));
            let footer = if *pinned {
                "Enter: go on    u: unpin    Esc: cancel"
            } else {
                "Enter: go on    Esc: cancel"
            };
            (format!("Limit of {}", appearance.clean(name)), lines, footer)
        }
        Dialog::Confirm { name, action, who } => {
            let name = appearance.clean(name);
            let mut lines = Vec::new();
            if let Some(who) = who {
                let verb =
                    if matches!(action, Action::Cancel { .. }) { "cancel" } else { "release" };
                lines.push(format!("{name}: {verb} {}.", appearance.clean(who)));
            }
            lines.push(appearance.clean(&action.effect(&name)));
            if let Action::Pause { reason: Some(reason) } | Action::Drain { reason: Some(reason) } =
                action
            {
                lines.push(format!("Reason: {}", appearance.clean(reason)));
            }
            lines.push(String::new());
            (appearance.clean(&action.question(&name)), lines, "y: do it    n: cancel")
        }
    }
}
