//! `leasehold top` and `show --watch`, in a pseudo-terminal that is read through a terminal emulator.

mod acting;
mod fences;
mod hostile;
mod restoring;

use std::process::Command;
use std::time::Duration;

use leasehold::Client;
use testkit::redis_server::RedisServer;
use testkit::users::{PASSWORD, add_users};

use crate::pty::{Pty, Size, has};
use crate::support::{Inspector, Store, run, until};

const SMALL: Size = (80, 24);
const LARGE: Size = (200, 50);
const BINARY: &str = env!("CARGO_BIN_EXE_leasehold");

fn leasehold(store: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    command.args(arguments).env("LEASEHOLD_STORE", store);
    command
}

fn top(store: &str, size: Size) -> Pty {
    Pty::start(size, &mut leasehold(store, &["top"]))
}

/// Waiters that queue for a name until this is dropped.
struct Queue {
    task: tokio::task::JoinHandle<()>,
    _runtime: tokio::runtime::Runtime,
}

impl Queue {
    fn new(store: &str, name: &str, label: &str, length: usize) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = { runtime }.worker_threads(1).enable_all().build().unwrap();
        let (url, store) = (store.to_owned(), Inspector::new(store));
        let (name, label) = (name.to_owned(), label.to_owned());
        let queued = name.clone();
        let task = runtime.spawn(async move {
            let client = Client::open(&url).await.unwrap();
            let semaphore = client.semaphore(&queued, 1).unless_declared().label(label);
            let semaphore = semaphore.build().unwrap();
            let mut waiting = tokio::task::JoinSet::new();
            for _ in 0..length {
                let semaphore = semaphore.clone();
                waiting.spawn(async move { semaphore.acquire().await.map(std::mem::forget) });
            }
            waiting.join_all().await;
        });
        until(|| store.held_and_waiting(&name).1 == length);
        Self { task, _runtime: runtime }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[test]
fn top_draws_holders_and_waiters_in_every_size() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let _held = inspector.hold("deploy");
        let _queue = Queue::new(&store.url(), "deploy", "patient", 3);
        for size in [SMALL, LARGE] {
            let mut top = top(&store.url(), size);
            top.shows_line(&["NAME", "HELD", "OF", "WAITING", "OLDEST WAIT", "GRANTS/s", "STATE"]);
            top.shows_line(&["> deploy", " 1 ", " 1 ", " 3 ", "s ", " 0.0"]);
            top.shows_line(&["1 held  3 waiting"]);
            // A new holder appears without a key press.
            let other = inspector.hold("zebra");
            top.shows_line(&["  zebra", " 1 ", " 1 ", " 0 ", " - "]);
            let text = top.shows_line(&["2 held  3 waiting"]);
            assert_eq!(text.contains("RATE"), size == LARGE, "{text}");
            if size == LARGE {
                // One character of each sparkline for each poll.
                top.shows_line(&["deploy", "█", "▁"]);
            }
            assert!(inspector.block_on(other.release()).unwrap());
            top.types("q");
            assert_eq!(top.code(), 0);
            top.restores();
        }
    }
}

#[test]
fn it_is_drawn_again_in_a_new_size() {
    let store = Store::local();
    let inspector = Inspector::new(&store.url());
    let _held = inspector.hold("deploy");
    let mut top = top(&store.url(), SMALL);
    top.shows("> deploy");
    assert!(!top.text().contains("OLDEST HOLD"));
    top.resize(LARGE);
    top.shows("OLDEST HOLD");
    top.shows("> deploy");
    top.until("keys in the last line", |text| {
        text.lines().nth(49).is_some_and(|line| line.contains("q quit"))
    });
    top.resize((60, 12));
    top.until("keys in the last line", |text| {
        text.lines().nth(11).is_some_and(|line| line.contains("Enter open"))
    });
    top.shows_line(&["> deploy", " 1 "]);
    for tiny in [(39, 24), (80, 9), (1, 1), (3, 2), (20, 3)] {
        top.resize(tiny);
        let expected = "terminal too small"[..usize::from(tiny.0 - 1).min(18)].to_owned();
        top.shows(&expected);
    }
    top.resize((40, 10));
    top.shows("> deploy");
    top.types("?");
    top.shows("leasehold top");
    top.types("?q");
    assert_eq!(top.code(), 0);
}

#[test]
fn enter_opens_a_name_with_its_holders_and_its_queue() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let _held = inspector.hold("deploy");
        let _queue = Queue::new(&store.url(), "deploy", "patient", 2);
        for size in [SMALL, LARGE] {
            let mut top = top(&store.url(), size);
            top.shows("> deploy");
            top.types("\r");
            top.shows("semaphore: deploy");
            top.shows("limit 1; 1 held; 2 waiting for up to ");
            top.shows("the first in the queue needs 1 unit: 1 of 1 is held");
            let pid = std::process::id().to_string();
            top.shows_line(&["PLACE", "LABEL", "HOST", "PID", "FOR", "SILENT FOR", "FENCE"]);
            top.shows_line(&["> held", "nightly", &pid]);
            top.shows_line(&["1.", "patient", &pid]);
            top.shows_line(&["2.", "patient", &pid]);
            top.types("jx");
            top.shows("deploy: cancel patient");
            top.types("n\x1b");
            top.shows("Enter open");
            top.types("q");
            assert_eq!(top.code(), 0);
        }
    }
}

#[test]
fn long_queues_are_listed_in_part() {
    let store = Store::local();
    let inspector = Inspector::new(&store.url());
    let _held = inspector.hold("deploy");
    let _queue = Queue::new(&store.url(), "deploy", "patient", 503);
    let mut top = top(&store.url(), SMALL);
    top.shows_line(&["> deploy", " 503 "]);
    top.types("\r");
    top.shows("and 3 more wait");
    top.types("\x1b[F");
    top.shows_line(&["> 500.", "patient"]);
    top.types("\x1b[H");
    top.shows_line(&["> held", "nightly"]);
    top.types("\x1b[6~");
    top.until("another page", |text| !text.contains("> held"));
}

#[test]
fn names_are_sorted_and_filtered() {
    let store = Store::local();
    let inspector = Inspector::new(&store.url());
    let _alpha = inspector.hold("alpha");
    let _beta = inspector.hold("beta");
    let _gamma = inspector.hold("gamma");
    let _queue = Queue::new(&store.url(), "beta", "patient", 2);
    let _queue = Queue::new(&store.url(), "gamma", "patient", 1);
    let order = |text: &str| {
        let at = |name: &str| text.lines().position(|line| has(line, &[name, " 1 "]));
        let mut names = [("alpha", at("alpha")), ("beta", at("beta")), ("gamma", at("gamma"))];
        names.sort_by_key(|(_, at)| *at);
        names.map(|(name, _)| name)
    };
    let mut top = top(&store.url(), SMALL);
    top.shows("sort: use");
    top.until("all names", |text| order(text) == ["beta", "gamma", "alpha"]);
    top.types("ssss");
    top.shows("sort: name");
    top.until("the order of names", |text| order(text) == ["alpha", "beta", "gamma"]);
    // The selection has stayed with its name.
    top.shows("> beta");
    top.types("ss");
    top.shows("sort: waiting");
    top.until("the order of waiters", |text| order(text) == ["beta", "gamma", "alpha"]);
    top.types("/AMM");
    top.shows("filter: AMM_");
    top.hides("alpha");
    top.shows("> gamma");
    top.types("\r");
    top.hides("AMM_");
    top.types("/z");
    top.shows("none of 3 names contains the filter");
    top.types("\x1b");
    top.shows("alpha");
    top.types("?");
    top.shows("a lower bound");
    top.shows("kill -9");
    top.types(" ");
    top.hides("a lower bound");
    top.types("q");
    assert_eq!(top.code(), 0);
}

#[test]
fn an_outage_keeps_the_last_numbers_and_ends_by_itself() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let _held = inspector.hold("deploy");
    let mut top = top(&server.url(), SMALL);
    top.shows("> deploy");
    server.kill();
    let text = top.shows_line(&["store unreachable since ", ":", ":", " UTC: "]);
    assert!(text.contains("> deploy"), "{text}");
    // Keys still work, and a failed action is shown in the status line.
    top.types("?");
    top.shows("a lower bound");
    top.types(" ");
    top.types("pwhy\ry");
    top.shows("deploy: nothing was changed: ");
    server.restart_empty();
    top.hides("store unreachable");
    top.types("q");
    assert_eq!(top.code(), 0);
    top.restores();
}

#[test]
fn without_colour_the_text_has_all_information() {
    let store = Store::local();
    let inspector = Inspector::new(&store.url());
    let _held = inspector.hold("deploy");
    let coloured = |top: &Pty| {
        let parser = top.parser();
        let (rows, columns) = parser.screen().size();
        let cells = (0..rows.get()).flat_map(|row| (0..columns.get()).map(move |at| (row, at)));
        cells.filter_map(|(row, at)| parser.screen().cell(row, at)).any(|cell| {
            (cell.fgcolor(), cell.bgcolor()) != (vt100::Color::Default, vt100::Color::Default)
        })
    };
    let mut plain = leasehold(&store.url(), &["top"]);
    let plain = Pty::start(SMALL, plain.env("NO_COLOR", "1"));
    plain.shows_line(&["> deploy", " 1 "]);
    assert!(!coloured(&plain));
    let top = top(&store.url(), SMALL);
    top.shows_line(&["> deploy", " 1 "]);
    assert!(coloured(&top));
}

#[test]
fn without_utf_8_everything_is_ascii() {
    let store = Store::local();
    let inspector = Inspector::new(&store.url());
    let _held = inspector.hold("déploy-夜");
    let mut ascii = leasehold(&store.url(), &["top"]);
    let mut top = Pty::start(LARGE, ascii.env("LANG", "C"));
    top.shows("> d\\u{e9}ploy-\\u{591c}");
    top.types("p");
    let text = top.shows("Reason, shown");
    assert!(text.is_ascii() && text.contains("+---"), "{text}");
}

#[test]
fn one_name_is_watched() {
    for (store, size) in Store::both().into_iter().zip([SMALL, LARGE]) {
        let inspector = Inspector::new(&store.url());
        let _held = inspector.hold("deploy");
        let mut watch =
            Pty::start(size, &mut leasehold(&store.url(), &["show", "--watch", "deploy"]));
        watch.shows_line(&["> held", "nightly"]);
        let queue = Queue::new(&store.url(), "deploy", "patient", 1);
        watch.shows_line(&["1.", "patient"]);
        drop(queue);
        watch.hides("patient");
        // It only shows: these keys do nothing.
        watch.types("pxld\r");
        watch.types("?");
        watch.shows("any key: close");
        watch.types("\x1b");
        watch.hides("any key: close");
        assert!(watch.text().contains("semaphore: deploy"));
        watch.types("\x03");
        assert_eq!(watch.code(), 130);
        watch.restores();
    }
    let store = Store::local();
    let _ = Inspector::new(&store.url());
    let mut missing = Pty::start(SMALL, &mut leasehold(&store.url(), &["show", "--watch", "no"]));
    assert_eq!(missing.code(), 1);
    missing.shows("there is no semaphore, lock or pool \"no\"");
}

#[test]
fn top_reports_that_it_needs_a_terminal() {
    let store = Store::local();
    let ended = run(&store.url(), &["top"]);
    let expected =
        "leasehold: top needs a terminal; stdout is not one. For scripts: leasehold ls --json\n";
    assert_eq!((ended.code, &*ended.stderr), (64, expected));
    let ended = run(&store.url(), &["show", "--watch", "it"]);
    let expected = "leasehold: show --watch needs a terminal; stdout is not one. For scripts: leasehold show --json\n";
    assert_eq!((ended.code, &*ended.stderr), (64, expected));
    let mut dumb = leasehold(&store.url(), &["top"]);
    let mut dumb = Pty::start(SMALL, dumb.env("TERM", "dumb"));
    assert_eq!(dumb.code(), 64);
    dumb.shows("top needs a terminal that can move its cursor");
    // An error at the start is printed on the main screen.
    let mut missing = top(&store.url(), SMALL);
    assert_eq!(missing.code(), 69);
    missing.shows("there is no store at ");
    missing.restores();
    let mut away = top("redis://127.0.0.1:1", SMALL);
    assert_eq!(away.code(), 69);
    away.shows("nothing listens there");
    away.restores();
}

/// Polls of an idle store do not keep the command busy.
#[test]
fn it_is_idle_between_polls() {
    let store = Store::local();
    let inspector = Inspector::new(&store.url());
    let _held = inspector.hold("deploy");
    let mut top = top(&store.url(), SMALL);
    top.shows("> deploy");
    top.types("\r");
    top.shows("> held");
    top.types("\x1b");
    top.shows("Enter open");
    let cpu = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", top.pid().as_raw_pid()));
        let stat = stat.unwrap();
        let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    let clock = || top.text().lines().next().unwrap_or_default().to_owned();
    let (before, mut seen) = (cpu(), vec![clock()]);
    until(|| {
        if seen.last() != Some(&clock()) {
            seen.push(clock());
        }
        seen.len() > 3
    });
    // In hundredths of a second, over more than two seconds.
    let used = Duration::from_millis(10 * (cpu() - before));
    assert!(used < Duration::from_secs(1), "{used:?}");
}

/// The users are those of docs/guarantees.md.
#[test]
fn a_read_only_user_is_enough_to_list() {
    let server = RedisServer::start();
    add_users(&mut server.connection());
    let (user, reader) = ("leasehold", "leasehold-reader");
    let [user, reader] = [user, reader].map(|user| server.url_with(user, PASSWORD));
    let inspector = Inspector::new(&user);
    let held = inspector.hold("deploy");
    for arguments in [&["ls"][..], &["show", "deploy"], &["ls", "--json"]] {
        let ended = run(&reader, arguments);
        assert_eq!((ended.code, &*ended.stderr), (0, ""), "{arguments:?}");
        assert!(ended.stdout.contains("deploy"), "{}", ended.stdout);
    }
    assert_eq!(run(&reader, &["lookup", "nobody"]).code, 1);
    let ended = run(&reader, &["pause", "deploy"]);
    assert_eq!(ended.code, 77, "{}", ended.stderr);
    top(&reader, SMALL).shows_line(&["deploy", "1"]);
    drop(held);
}
