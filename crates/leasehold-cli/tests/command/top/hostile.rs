//! Names and labels that would break a terminal or a layout.

use super::{LARGE, Queue, SMALL, leasehold, top};
use crate::pty::Pty;
use crate::support::{Inspector, Store, run};

/// What a terminal obeys, what turns text around, what cannot be seen, what is wide, what is long.
const HOSTILE: [&str; 6] = [
    "a\u{9b}2J\u{9b}31mred",
    "b\u{202e}drawkcab\u{2066}x",
    "c夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜夜",
    "d👩\u{200d}👩\u{200d}👧 🇨🇭 👍🏽 ❤\u{fe0f} e\u{301}\u{301}\u{301}",
    "e\u{200b}\u{feff}\u{ad}",
    "f\u{7f}\u{85}",
];

/// Puts a semaphore into a store behind the library's back, which refuses control characters.
fn hold_raw(server: &testkit::redis_server::RedisServer, name: &str, inspector: &Inspector) {
    let semaphore = inspector.client.semaphore("plain", 3).label("plain").build().unwrap();
    let permit = inspector.block_on(semaphore.acquire()).unwrap();
    std::mem::forget(permit);
    let mut connection = server.connection();
    for key in server.keys() {
        if key.contains("plain") {
            let _: () = redis::cmd("COPY")
                .arg(&key)
                .arg(key.replace("plain", name))
                .query(&mut connection)
                .unwrap();
        }
    }
}

/// The frame of the screen: what is drawn around names does not depend on them.
#[track_caller]
fn assert_intact(top: &Pty, width: u16) {
    let text = top.text();
    let clean = |c: char| c == '\n' || (!c.is_control() && !"\u{202e}\u{2066}\u{200b}".contains(c));
    assert!(text.chars().all(clean), "{text:?}");
    assert!(text.starts_with("leasehold top  "), "{text}");
    assert!(text.lines().next().unwrap().ends_with(" UTC"), "{text}");
    assert!(text.lines().last().unwrap().contains("q quit"), "{text}");
    let parser = top.parser();
    let last = parser.screen().cell(0, width - 1).unwrap();
    assert_eq!(last.contents(), "C", "the clock ends at the margin:\n{text}");
}

#[test]
fn hostile_names_and_labels_are_inert() {
    for size in [SMALL, LARGE] {
        let store = Store::redis();
        let inspector = Inspector::new(&store.url());
        let mut held = Vec::new();
        for name in HOSTILE {
            // The library refuses control characters.
            let name: String = name.chars().filter(|c| !c.is_control()).collect();
            let semaphore = inspector.client.semaphore(&name, 1).label(&name).build().unwrap();
            held.push(inspector.block_on(semaphore.acquire()).unwrap());
            let lock = inspector.client.lock(&name).label(&name).build().unwrap();
            std::mem::forget(inspector.block_on(lock.acquire()).unwrap());
        }
        let long = "x".repeat(500);
        let _long = inspector.hold(&long);
        let mut top = top(&store.url(), size);
        top.shows("[1 Semaphores (7)]");
        // The numbers of every row are at the same place.
        let ends = |text: &str| -> Vec<Option<usize>> {
            let rows = text.lines().filter(|line| line.ends_with("0.0") || line.contains("0.0  "));
            rows.map(|line| {
                let at = line.find(" 1 ")?;
                Some(unicode_columns(&line[..at]))
            })
            .collect()
        };
        // The heading is drawn before the rows.
        top.until("seven rows with their numbers at the same place", |text| {
            let ends = ends(text);
            ends.len() >= 7 && ends.iter().all(|at| *at == ends[0])
        });
        assert_intact(&top, size.0);
        for _ in 0..7 {
            top.types("\r");
            top.shows("semaphore: ");
            top.shows("> held");
            assert_intact(&top, size.0);
            top.types("p\u{202e}\r");
            top.shows("y: do it");
            top.shows("Reason: \\u{202e}");
            top.types("n");
            top.hides("y: do it");
            top.types("x");
            top.shows("y: do it");
            top.types("n");
            top.hides("y: do it");
            top.types("\x1b");
            top.shows("Enter open");
            top.types("j");
        }
        top.types("2");
        top.shows("[2 Locks (6)]");
        assert_intact(&top, size.0);
        top.types("q");
        assert_eq!(top.code(), 0);
        top.restores();
    }
}

fn unicode_columns(text: &str) -> usize {
    // As the emulator counts: a wide character has two cells.
    let mut parser = vt100::Parser::new(2.try_into().unwrap(), 400.try_into().unwrap(), 0);
    parser.process(text.as_bytes());
    usize::from(parser.screen().cursor_position().1)
}

#[test]
fn terminal_escapes_of_other_programs_are_inert() {
    let server = testkit::redis_server::RedisServer::start();
    let inspector = Inspector::new(&server.url());
    hold_raw(&server, "evil\x1b[2J\x1b]0;title\x07\x1b[?1049l", &inspector);
    let _queue = Queue::new(&server.url(), "plain", "ok", 0);
    let mut top = top(&server.url(), LARGE);
    top.shows("evil\\u{1b}[2J\\u{1b}]0;title\\u{7}");
    assert_intact(&top, 200);
    assert!(top.parser().screen().alternate_screen());
    top.types("/evil\r\r");
    top.shows("semaphore: evil\\u{1b}[2J");
    // The library refuses the name, so that its queue cannot be read. Its holders are known from the list.
    top.shows("the name cannot be read since ");
    top.shows_line(&["> held", "plain"]);
    top.types("pr\r");
    top.shows("y: do it");
    assert!(top.parser().screen().alternate_screen());
    let ended = run(&server.url(), &["ls"]);
    assert!(ended.stdout.contains("evil\\u{1b}[2J") && !ended.stdout.contains('\x1b'));
    let mut ls = Pty::start(LARGE, &mut leasehold(&server.url(), &["ls"]));
    assert_eq!(ls.code(), 0);
    ls.shows("evil\\u{1b}[2J\\u{1b}]0;title\\u{7}\\u{1b}[?1049l");
}
