//! Two kinds of plot, drawn for print: labels beside what they name, no legend, few colours.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::sample::formatted;

/// Our figures, those of peers, and physical limits. The colours also differ in print and for colour-blind readers.
const OURS: RGBColor = RGBColor(0, 90, 160);
const THEIRS: RGBColor = RGBColor(200, 95, 0);
const LIMIT: RGBColor = RGBColor(110, 110, 110);
const FAINT: RGBColor = RGBColor(225, 225, 225);
const INK: RGBColor = RGBColor(30, 30, 30);

const WIDTH: u32 = 900;
const FONT: &str = "Helvetica, Arial, sans-serif";

type Drawn = Result<(), Box<dyn Error>>;

/// Whose figure a row or a line shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Ours,
    Theirs,
    Limit,
}

impl Side {
    fn colour(self) -> RGBColor {
        match self {
            Self::Ours => OURS,
            Self::Theirs => THEIRS,
            Self::Limit => LIMIT,
        }
    }
}

/// One contender: a dot, and a bar over a range.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) label: String,
    pub(crate) side: Side,
    pub(crate) dot: f64,
    pub(crate) range: (f64, f64),
}

/// One contender over several settings.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) label: String,
    pub(crate) side: Side,
    pub(crate) points: Vec<(f64, f64)>,
}

/// A plot whose title states the result, with axes that state what is measured.
#[derive(Debug)]
pub(crate) struct Plot {
    pub(crate) file: &'static str,
    pub(crate) title: String,
    /// What the value is, and how to read the dot and the bar.
    pub(crate) axis: String,
    pub(crate) unit: &'static str,
    pub(crate) kind: Kind,
}

#[derive(Debug)]
pub(crate) enum Kind {
    Rows(Vec<Row>),
    Lines { across: &'static str, lines: Vec<Line> },
}

impl Plot {
    pub(crate) fn draw(&self, folder: &Path) -> Drawn {
        let height = match &self.kind {
            Kind::Rows(rows) => 130 + 38 * u32::try_from(rows.len())?,
            Kind::Lines { .. } => 480,
        };
        let path = folder.join(self.file);
        let root = SVGBackend::new(&path, (WIDTH, height)).into_drawing_area();
        root.fill(&WHITE)?;
        let title = (FONT, 19).into_font().style(FontStyle::Bold).color(&INK);
        root.draw(&Text::new(self.title.as_str(), (16, 14), title))?;
        let (_, below) = root.split_vertically(44);
        match &self.kind {
            Kind::Rows(rows) => self.rows(&below, rows)?,
            Kind::Lines { across, lines } => self.lines(&below, across, lines)?,
        }
        root.present()?;
        Ok(())
    }

    fn rows(&self, area: &DrawingArea<SVGBackend<'_>, Shift>, rows: &[Row]) -> Drawn {
        let positive = |value: &f64| *value > 0.0 && value.is_finite();
        let all =
            || rows.iter().flat_map(|row| [row.dot, row.range.0, row.range.1]).filter(positive);
        let least = all().fold(f64::INFINITY, f64::min);
        let most = all().fold(0.0, f64::max);
        // Space for the value that is written to the right of each bar.
        let (from, to) = (decade_below(least), most * 12.0);
        let many = u32::try_from(rows.len())?;
        let mut chart = ChartBuilder::on(area)
            .margin_right(20)
            .x_label_area_size(58)
            .y_label_area_size(230)
            .build_cartesian_2d((from..to).log_scale(), (0..many - 1).into_segmented())?;
        let named = |at: &SegmentValue<u32>| match at {
            SegmentValue::CenterOf(index) => {
                // From the top, in reading order.
                rows.iter()
                    .rev()
                    .nth(*index as usize)
                    .map_or_else(String::new, |row| row.label.clone())
            }
            _ => String::new(),
        };
        let ticked = |value: &f64| tick(*value, self.unit);
        chart
            .configure_mesh()
            .disable_y_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(FAINT)
            .axis_style(INK)
            .x_desc(self.axis.as_str())
            .x_label_formatter(&ticked)
            .y_label_formatter(&named)
            .y_labels(rows.len())
            .label_style((FONT, 15).into_font().color(&INK))
            .axis_desc_style((FONT, 15).into_font().color(&INK))
            .draw()?;
        for (index, row) in (0_u32..).zip(rows.iter().rev()) {
            let at = |value: f64| (value.max(from), SegmentValue::CenterOf(index));
            let colour = row.side.colour();
            let (low, high) = row.range;
            chart.draw_series([PathElement::new(
                vec![at(low), at(high)],
                colour.mix(0.45).stroke_width(7),
            )])?;
            chart.draw_series([Circle::new(at(row.dot), 6, colour.filled())])?;
            let style =
                (FONT, 15).into_font().color(&colour).pos(Pos::new(HPos::Left, VPos::Center));
            let (x, y) = chart.plotting_area().map_coordinate(&at(high.max(row.dot)));
            let (left, top) = area.get_base_pixel();
            let mut text = formatted(row.dot, self.unit);
            if low >= row.dot && high > low {
                text = format!("{text} … {}", formatted(high, self.unit));
            }
            area.draw(&Text::new(text, (x + 12 - left, y - top), style))?;
        }
        Ok(())
    }

    fn lines(
        &self,
        area: &DrawingArea<SVGBackend<'_>, Shift>,
        across: &str,
        lines: &[Line],
    ) -> Drawn {
        let points = || lines.iter().flat_map(|line| &line.points);
        let span = |of: fn(&(f64, f64)) -> f64| {
            points()
                .map(of)
                .filter(|value| *value > 0.0)
                .fold((f64::INFINITY, 0.0_f64), |(a, b), v| (a.min(v), b.max(v)))
        };
        let (left, right) = span(|point| point.0);
        let (least, most) = span(|point| point.1);
        let below = decade_below(least);
        // Ticks only where something was measured.
        let mut marks: Vec<f64> = points().map(|point| point.0).collect();
        marks.sort_by(f64::total_cmp);
        marks.dedup();
        let mut chart = ChartBuilder::on(area)
            .margin_left(14)
            // Space for the names at the ends of the lines.
            .margin_right(220)
            .x_label_area_size(58)
            .y_label_area_size(100)
            .build_cartesian_2d(
                (left..right * 1.1).log_scale().with_key_points(marks),
                (below..most * 2.0).log_scale(),
            )?;
        let marked = |value: &f64| tick(*value, "");
        let ticked = |value: &f64| tick(*value, self.unit);
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(FAINT)
            .axis_style(INK)
            .x_desc(across)
            .y_desc(self.axis.as_str())
            .x_label_formatter(&marked)
            .y_label_formatter(&ticked)
            .label_style((FONT, 15).into_font().color(&INK))
            .axis_desc_style((FONT, 15).into_font().color(&INK))
            .draw()?;
        let mut ends = Vec::new();
        for line in lines {
            let colour = line.side.colour();
            let width = if line.side == Side::Ours { 4 } else { 2 };
            chart
                .draw_series([PathElement::new(line.points.clone(), colour.stroke_width(width))])?;
            for point in &line.points {
                chart.draw_series([Circle::new(*point, 4, colour.filled())])?;
            }
            let Some(end) = line.points.last() else { continue };
            let (x, y) = chart.plotting_area().map_coordinate(end);
            let (left, top) = area.get_base_pixel();
            ends.push((y - top, x - left, line, end.1));
        }
        // Names that would overlap are moved apart, downwards.
        ends.sort_by_key(|(y, ..)| *y);
        let mut free = i32::MIN;
        for (y, x, line, value) in ends {
            let y = y.max(free);
            free = y + 19;
            let style = (FONT, 14).into_font().color(&line.side.colour());
            let style = style.pos(Pos::new(HPos::Left, VPos::Center));
            let text = format!("{}  {}", line.label, formatted(value, self.unit));
            area.draw(&Text::new(text, (x + 10, y), style))?;
        }
        Ok(())
    }
}

/// Returns a power of ten below the value, so that the axis begins with a tick.
fn decade_below(value: f64) -> f64 {
    if value.is_finite() { 10_f64.powf((value * 0.8).log10().floor()) } else { 0.1 }
}

/// Formats a round value for an axis: "1 ms", not "1.00 ms".
fn tick(value: f64, unit: &str) -> String {
    let text = formatted(value, unit);
    let (number, rest) =
        text.split_at(text.find(|c: char| !"0123456789.,".contains(c)).unwrap_or(text.len()));
    let number = if number.contains('.') {
        number.trim_end_matches('0').trim_end_matches('.')
    } else {
        number
    };
    format!("{number}{rest}")
}
