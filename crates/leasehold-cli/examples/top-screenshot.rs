//! Writes the screen of `leasehold top` as an SVG.
//!
//! ```text
//! cargo build -p leasehold-cli
//! cargo run -p leasehold-cli --example top-screenshot -- docs/console/top-80x24.svg 80x24 ''
//! cargo run -p leasehold-cli --example top-screenshot -- docs/console/top-detail.svg 100x24 '\r'
//! ```
//!
//! The keys are typed after a while of activity on a demo store; `\r` is Enter and `\e` is Esc. With `LEASEHOLD_STORE` that store
//! is shown instead. `LEASEHOLD_BINARY` names the command; the default is the one that was built beside this example.

#[allow(dead_code)]
#[path = "../tests/command/pty.rs"]
mod pty;

use std::fmt::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use leasehold::{Client, Error, Semaphore};
use pty::{Pty, Size};
use tokio::time::sleep;

/// How long the demo store is in use before the picture, because sparklines need some history.
const ACTIVITY: Duration = Duration::from_secs(25);
const CELL: (f32, f32) = (8.4, 18.0);
const MARGIN: f32 = 10.0;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [path, size, keys] = &arguments[..] else {
        return Err("usage: top-screenshot FILE.svg 80x24 KEYS".into());
    };
    let (columns, rows) = size.split_once('x').ok_or("the size is as in 80x24")?;
    let size: Size = (columns.parse()?, rows.parse()?);
    let directory = tempfile::tempdir()?;
    let given = std::env::var("LEASEHOLD_STORE").ok();
    if given.is_none() {
        let file = directory.path().join("demo.db");
        tokio::spawn(demo(format!("sqlite:{}", file.display())));
        while !file.exists() {
            sleep(Duration::from_millis(10)).await;
        }
    }
    let mut command = Command::new(binary()?);
    command.arg("top").current_dir(directory.path()).env("USER", "ada");
    command.env("LEASEHOLD_STORE", given.as_deref().unwrap_or("sqlite:demo.db"));
    let mut top = Pty::start(size, &mut command);
    sleep(ACTIVITY).await;
    for key in keys.replace("\\r", "\r").replace("\\e", "\x1b").chars() {
        top.types(&key.to_string());
        sleep(Duration::from_millis(1500)).await;
    }
    std::fs::write(path, svg(top.parser().screen()))?;
    Ok(())
}

fn binary() -> Result<PathBuf, Box<dyn std::error::Error>> {
    if let Some(path) = std::env::var_os("LEASEHOLD_BINARY") {
        return Ok(path.into());
    }
    let program = std::env::current_exe()?;
    let target =
        program.parent().and_then(|examples| examples.parent()).ok_or("no target folder")?;
    Ok(target.join("leasehold"))
}

/// Fills a store with holders, waiters, locks and pools, and keeps it busy.
async fn demo(url: String) -> Result<(), Error> {
    let client = Client::open(&url).await?;
    let work = |name: &str, capacity: u32, label: &str| {
        client.semaphore(name, capacity).label(label).build()
    };
    let builds = work("build", 4, "ci")?;
    builds.pin(4).await?;
    for label in ["web", "api", "docs", "mobile", "cli", "search", "billing"] {
        keep_busy(work("build", 8, label)?, 2500);
    }
    for label in ["import", "export", "mail"] {
        keep_busy(work("database", 8, label)?, 900);
    }
    let calls = client.semaphore("payments-api", 20).rate(4, Duration::from_secs(1)).build()?;
    for _ in 0..6 {
        keep_busy(calls.clone(), 500);
    }
    let deploys = work("deploy", 1, "release 1.4")?;
    let deploy = deploys.acquire().await?;
    for _ in 0..3 {
        keep_busy(work("deploy", 1, "hotfix")?, 1000);
    }
    deploys.pause().by("ada@build-7").reason("release freeze").await?;
    let memory = client.semaphore("memory-gb", 64).label("train").build()?;
    let large = memory.acquire().weight(48).await?;
    let waits = tokio::spawn(async move { memory.acquire().weight(32).await });
    let lock = client.lock("nightly").label("backup").build()?;
    let lock = lock.acquire().await?;
    let pool = client.pool("licences", 3).build()?;
    let lease = pool.acquire("workstation-12").await?;
    std::future::pending::<()>().await;
    drop((deploy, large, waits, lock, lease));
    Ok(())
}

/// Acquires and releases repeatedly, and holds for about `millis` milliseconds each time.
fn keep_busy(semaphore: Semaphore, millis: u64) {
    tokio::spawn(async move {
        while let Ok(permit) = semaphore.acquire().await {
            sleep(Duration::from_millis(millis / 2 + fastrand::u64(0..millis))).await;
            let _ = permit.release().await;
        }
    });
}

/// Returns the screen as an SVG, with one text element for each run of cells that look the same.
fn svg(screen: &vt100::Screen) -> String {
    let (rows, columns) = screen.size();
    let (rows, columns) = (rows.get(), columns.get());
    let width = f32::from(columns) * CELL.0 + 2.0 * MARGIN;
    let height = f32::from(rows) * CELL.1 + 2.0 * MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\">\n\
         <rect width=\"100%\" height=\"100%\" rx=\"6\" fill=\"#16181d\"/>\n\
         <g font-family=\"DejaVu Sans Mono, Menlo, Consolas, monospace\" font-size=\"14\">\n"
    );
    for row in 0..rows {
        let cells: Vec<_> = (0..columns).filter_map(|at| screen.cell(row, at)).collect();
        let texts = without_host(&cells);
        let mut from = 0;
        while from < cells.len() {
            let look = look(cells[from]);
            let same = cells[from..].iter().take_while(|cell| self::look(cell) == look);
            let to = from + same.count();
            draw_run(&mut svg, row, from, &texts[from..to], look);
            from = to;
        }
    }
    svg + "</g>\n</svg>\n"
}

/// Returns the text of each cell, with another name in place of this host's.
fn without_host(cells: &[&vt100::Cell]) -> Vec<String> {
    let mut texts: Vec<_> = cells.iter().map(|cell| cell.contents().to_owned()).collect();
    let uname = rustix::system::uname();
    let host: Vec<_> = uname.nodename().to_string_lossy().chars().map(String::from).collect();
    let shown = "build-7";
    if host.len() < shown.len() {
        return texts;
    }
    for at in 0..texts.len() {
        // The name of the host may be cut off.
        let same = texts[at..].iter().zip(&host).take_while(|(text, cell)| text == cell).count();
        if same >= 5.min(host.len()) {
            let cut = usize::from(same < host.len());
            for (place, text) in texts[at..].iter_mut().take(same + cut).enumerate() {
                *text = shown.chars().nth(place).unwrap_or(' ').to_string();
            }
        }
    }
    texts
}

type CellStyle = (vt100::Color, bool, bool);

fn look(cell: &vt100::Cell) -> CellStyle {
    (cell.fgcolor(), cell.bold(), cell.inverse())
}

fn draw_run(svg: &mut String, row: u16, from: usize, texts: &[String], look: CellStyle) {
    let (colour, bold, inverse) = look;
    #[allow(clippy::cast_precision_loss)]
    let (x, columns) = (from as f32 * CELL.0 + MARGIN, texts.len() as f32 * CELL.0);
    let y = f32::from(row) * CELL.1 + MARGIN;
    let mut fill = match colour {
        vt100::Color::Idx(1 | 9) => "#ff6b6b",
        vt100::Color::Idx(2 | 10) => "#7bd88f",
        vt100::Color::Idx(3 | 11) => "#f2c55c",
        vt100::Color::Idx(6 | 14) => "#5ccfe6",
        _ => "#d6d9e0",
    };
    if inverse {
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{columns:.1}\" height=\"{:.1}\" fill=\"#d6d9e0\"/>",
            CELL.1
        );
        fill = "#16181d";
    }
    let text: String = texts.iter().map(|text| if text.is_empty() { " " } else { text }).collect();
    if text.trim().is_empty() {
        return;
    }
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    // Browsers collapse ordinary spaces.
    let text = text.replace(' ', "\u{a0}");
    let weight = if bold { " font-weight=\"bold\"" } else { "" };
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{:.1}\" textLength=\"{columns:.1}\" fill=\"{fill}\"{weight}>{text}</text>",
        y + 14.0
    );
}
