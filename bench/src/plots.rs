//! The plots, and their titles.

use std::error::Error;
use std::path::Path;

use crate::contender::{is_limit, is_ours, label};
use crate::plot::{Kind, Line, Plot, Row, Side};
use crate::report::Report;
use crate::sample::{Sample, digits, formatted};
use crate::scenario::fleet::pairs_with_a_name_each;

/// Draws the plots whose scenarios ran. Returns the file and the title of each.
pub(crate) fn draw(
    report: &Report,
    folder: &Path,
) -> Result<Vec<(&'static str, String)>, Box<dyn Error>> {
    let plots = [
        pairs(report),
        fleet(report),
        locks(report),
        hand_off(report),
        hand_off_by_waiters(report),
        throughput(report),
        fairness(report),
        waiting(report),
        footprint(report),
        recovery(report),
        queue(report),
        in_process(report),
        command(report),
        command_on_redis(report),
    ];
    let mut drawn = Vec::new();
    for plot in plots.into_iter().flatten() {
        plot.draw(folder)?;
        drawn.push((plot.file, plot.title));
    }
    Ok(drawn)
}

fn side(name: &str) -> Side {
    match name {
        _ if is_ours(name) => Side::Ours,
        _ if is_limit(name) => Side::Limit,
        _ => Side::Theirs,
    }
}

/// Returns the median of every contender, and its range over the repetitions.
fn rows(report: &Report, scenario: &str, what: &str) -> Vec<Row> {
    let row = |(name, sample): (&str, &Sample)| Row {
        label: label(name),
        side: side(name),
        dot: sample.median(),
        range: (sample.min(), sample.max()),
    };
    report.row(scenario, what).into_iter().map(row).collect()
}

/// Returns a dot from one measure, and a bar from there to another: from the median to the longest, for example.
fn rows_to(report: &Report, scenario: &str, what: &str, to: &str) -> Vec<Row> {
    let mut rows = rows(report, scenario, what);
    for (row, (_, sample)) in rows.iter_mut().zip(report.row(scenario, to)) {
        row.range = (row.dot, sample.median());
    }
    rows
}

/// Returns the median of the first of our contenders, and the name and median of the best peer.
fn best(
    report: &Report,
    scenario: &str,
    what: &str,
    more_is_better: bool,
) -> Option<(f64, String, f64)> {
    let all = report.row(scenario, what);
    let ours = all.iter().find(|(name, _)| is_ours(name))?.1.median();
    let sign = if more_is_better { -1.0 } else { 1.0 };
    let (name, theirs) = all
        .iter()
        .filter(|(name, _)| side(name) == Side::Theirs)
        .map(|(name, sample)| (*name, sample.median()))
        .min_by(|a, b| (a.1 * sign).total_cmp(&(b.1 * sign)))?;
    Some((ours, name.to_owned(), theirs))
}

fn pairs(report: &Report) -> Option<Plot> {
    let what = "256 tasks, 1 name, capacity 256";
    let (ours, peer, theirs) = best(report, "pairs", what, true)?;
    Some(Plot {
        file: "pairs.svg",
        title: format!(
            "A hot semaphore: {} pairs a second, {} × those of {peer}",
            digits(ours),
            digits(ours / theirs)
        ),
        axis: "acquire + release, 256 tasks, 1 name (dot: median; bar: all repetitions)".to_owned(),
        unit: "/s",
        kind: Kind::Rows(rows(report, "pairs", what)),
    })
}

fn fleet(report: &Report) -> Option<Plot> {
    let what = pairs_with_a_name_each;
    let (ours, peer, theirs) = best(report, "fleet", &what(50), true)?;
    Some(Plot {
        file: "fleet.svg",
        title: format!(
            "50 clients: {} pairs a second; the best peer, {peer}, does {}",
            digits(ours),
            digits(theirs)
        ),
        axis: "acquire + release, all clients together".to_owned(),
        unit: "/s",
        kind: Kind::Lines {
            across: "clients, each a process with one task and a name of its own",
            lines: lines(report, "fleet", &[1, 10, 50], what),
        },
    })
}

fn locks(report: &Report) -> Option<Plot> {
    let what = "200 tasks";
    let (ours, peer, theirs) = best(report, "locks", what, true)?;
    Some(Plot {
        file: "locks.svg",
        title: format!(
            "200 tasks, a lock each: {} pairs a second; the best peer, {peer}, does {}",
            digits(ours),
            digits(theirs)
        ),
        axis: "acquire + release, 200 tasks and keys (dot: median; bar: all repetitions)"
            .to_owned(),
        unit: "/s",
        kind: Kind::Rows(rows(report, "locks", what)),
    })
}

fn hand_off(report: &Report) -> Option<Plot> {
    let (p50, p99) = ("20 waiters, p50", "20 waiters, p99");
    let (ours, peer, theirs) = best(report, "handoff", p99, false)?;
    Some(Plot {
        file: "handoff.svg",
        title: format!(
            "The next of 20 runs within {} of a release (p99); with {peer}, the best peer, {}",
            formatted(ours, "ns"),
            formatted(theirs, "ns")
        ),
        axis: "release in one process → running in another (dot: p50; bar: to p99)".to_owned(),
        unit: "ns",
        kind: Kind::Rows(rows_to(report, "handoff", p50, p99)),
    })
}

/// Returns one line for each contender over the number of waiters.
fn by_waiters(report: &Report, scenario: &str, measure: &str) -> Vec<Line> {
    let what = |waiters| format!("{waiters} waiters, {measure}");
    lines(report, scenario, &[2, 20, 200], what)
}

/// Returns one line for each contender over a number on which the figure depends.
fn lines(
    report: &Report,
    scenario: &str,
    numbers: &[u32],
    what: impl Fn(u32) -> String,
) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for number in numbers {
        for (name, sample) in report.row(scenario, &what(*number)) {
            let point = (f64::from(*number), sample.median());
            let name = label(name);
            match lines.iter_mut().find(|line| line.label == name) {
                Some(line) => line.points.push(point),
                None => lines.push(Line { side: side(&name), label: name, points: vec![point] }),
            }
        }
    }
    lines
}

fn hand_off_by_waiters(report: &Report) -> Option<Plot> {
    let ours = |waiters: u32| {
        let what = format!("{waiters} waiters, p50");
        report.sample("handoff", &what, "leasehold").median()
    };
    let (few, many) = (ours(2), ours(200));
    (few.is_finite() && many.is_finite()).then(|| Plot {
        file: "handoff-waiters.svg",
        title: format!(
            "leasehold hands over in {} with 2 that wait, and in {} with 200",
            formatted(few, "ns"),
            formatted(many, "ns")
        ),
        axis: "release → running in another process, p50".to_owned(),
        unit: "ns",
        kind: Kind::Lines {
            across: "tasks that wait, in two processes",
            lines: by_waiters(report, "handoff", "p50"),
        },
    })
}

fn throughput(report: &Report) -> Option<Plot> {
    let measure = "grants to another than before";
    let (ours, peer, theirs) = best(report, "fairness", &format!("200 waiters, {measure}"), true)?;
    Some(Plot {
        file: "throughput.svg",
        title: format!(
            "One permit, 200 waiters: it changes hands {} times a second; best peer, {peer}: {}",
            digits(ours),
            digits(theirs)
        ),
        axis: "grants to another than before, one permit".to_owned(),
        unit: "/s",
        kind: Kind::Lines {
            across: "tasks that want it, in two processes",
            lines: by_waiters(report, "fairness", measure),
        },
    })
}

fn fairness(report: &Report) -> Option<Plot> {
    let (median, longest) = ("20 waiters, median wait", "20 waiters, longest wait");
    let spread = |name: &str| {
        let of = |what| report.sample("fairness", what, name).median();
        of(longest) / of(median)
    };
    let ours = spread("leasehold");
    ours.is_finite().then(|| Plot {
        file: "fairness.svg",
        title: format!("Served in turn, the longest of 20 waits is {} × the median", digits(ours)),
        axis: "wait for one permit among 20 (dot: median; bar: to the longest)".to_owned(),
        unit: "ns",
        kind: Kind::Rows(rows_to(report, "fairness", median, longest)),
    })
}

fn waiting(report: &Report) -> Option<Plot> {
    let what = "a second of waiting, of 20, requests";
    let rows = rows(report, "traffic", what);
    let ours = report.sample("traffic", what, "leasehold").median();
    ours.is_finite().then(|| Plot {
        file: "waiting.svg",
        title: format!(
            "Waiting is quiet: {} requests a second for each of 20 that wait",
            digits(ours)
        ),
        axis: "requests a second for each that waits".to_owned(),
        unit: "/s",
        kind: Kind::Rows(rows),
    })
}

fn footprint(report: &Report) -> Option<Plot> {
    let (few, many) = ("200 waiters, each", "10000 waiters, each");
    let mut rows = rows(report, "footprint", few);
    let ours = report.sample("footprint", many, "leasehold").median();
    for row in &mut rows {
        // The memory of 200 waiters of ours is lost among the pages that a process has anyway.
        if row.label == "leasehold" {
            (row.dot, row.range, row.label) =
                (ours, (ours, ours), "leasehold (of 10,000)".to_owned());
        }
    }
    ours.is_finite().then(|| Plot {
        file: "footprint.svg",
        title: format!("One that waits takes {} of its process", formatted(ours, "bytes")),
        axis: "resident memory for each of 200 that wait".to_owned(),
        unit: "bytes",
        kind: Kind::Rows(rows),
    })
}

fn recovery(report: &Report) -> Option<Plot> {
    let what = "from the kill to the next holder";
    let ours = report.sample("recovery", what, "leasehold");
    (!ours.is_empty()).then(|| Plot {
        file: "recovery.svg",
        title: format!(
            "A holder is killed: the next one runs after {} to {}, with leases of 2 s",
            formatted(ours.min(), "ns"),
            formatted(ours.max(), "ns")
        ),
        axis: "SIGKILL of the holder → the next holder (dot: median; bar: all repetitions)"
            .to_owned(),
        unit: "ns",
        kind: Kind::Rows(rows(report, "recovery", what)),
    })
}

fn queue(report: &Report) -> Option<Plot> {
    let lengths = [10_u32, 100, 1000, 10_000, 100_000];
    let median = |length: &u32| {
        let what = crate::scenario::queue::what(*length as usize);
        (f64::from(*length), report.sample("queue", &what, "leasehold").median())
    };
    let points: Vec<_> = lengths.iter().map(median).collect();
    let ratio = points[4].1 / points[0].1;
    ratio.is_finite().then(|| Plot {
        file: "queue.svg",
        title: format!("A queue of 100,000 costs {} × what a queue of 10 costs", digits(ratio)),
        axis: "joining the queue and leaving it".to_owned(),
        unit: "ns",
        kind: Kind::Lines {
            across: "length of the queue",
            lines: vec![Line { label: "leasehold".to_owned(), side: Side::Ours, points }],
        },
    })
}

fn in_process(report: &Report) -> Option<Plot> {
    let what = "1 permit, 100 tasks, a grant";
    let (ours, peer, theirs) = best(report, "memory", what, false)?;
    Some(Plot {
        file: "memory.svg",
        title: format!(
            "In one process a contended grant takes {}, {} × that of {peer}",
            formatted(ours, "ns"),
            digits(ours / theirs)
        ),
        axis: "a grant, 1 permit, 100 tasks (dot: median; bar: all repetitions)".to_owned(),
        unit: "ns",
        kind: Kind::Rows(rows(report, "memory", what)),
    })
}

fn command(report: &Report) -> Option<Plot> {
    let what = "a child that does nothing";
    let rows = rows(report, "command", what);
    let flock = report.sample("command", what, "flock").median();
    let ours = report.sample("command", what, "leasehold run").median();
    flock.is_finite().then(|| Plot {
        file: "command.svg",
        title: if ours.is_finite() {
            format!(
                "`leasehold run` takes {}, {} × flock",
                formatted(ours, "ns"),
                digits(ours / flock)
            )
        } else {
            format!("flock takes {} to run a child that does nothing", formatted(flock, "ns"))
        },
        axis: "wall time around a child that does nothing".to_owned(),
        unit: "ns",
        kind: Kind::Rows(rows),
    })
}

fn command_on_redis(report: &Report) -> Option<Plot> {
    let scenario = "command-on-redis";
    let (p50, p99) = ("a child that does nothing, p50", "a child that does nothing, p99");
    let median = |name: &str| report.sample(scenario, p50, name).median();
    let (ours, script) = (median("leasehold run"), median("redis-cli in a script"));
    (ours.is_finite() && script.is_finite()).then(|| Plot {
        file: "command-on-redis.svg",
        title: format!(
            "`leasehold run` on Redis takes {}, {} × a script with redis-cli",
            formatted(ours, "ns"),
            digits(ours / script)
        ),
        axis: "wall time around a child that does nothing (dot: p50; bar: to p99)".to_owned(),
        unit: "ns",
        kind: Kind::Rows(rows_to(report, scenario, p50, p99)),
    })
}
