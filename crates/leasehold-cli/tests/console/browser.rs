//! The real pages in a real browser.

use rustix::process::Signal;
use testkit::redis_server::RedisServer;

use crate::client::{Console, TOKEN};
use crate::support::{Inspector, Running, run, until};
use crate::webdriver::Browser;

/// The Tab key, as `WebDriver` encodes it.
const TAB: &str = "\u{e004}";
const SCRIPT: &str = "<script>alert(1)</script>";

#[test]
fn a_browser_shows_changes_and_performs_actions() {
    let server = RedisServer::start_with(&["--appendonly yes"]);
    let store = server.url();
    let console = Console::with_token(&store);
    let inspector = Inspector::new(&store);
    let browser = Browser::start();
    appears_and_disappears(&browser, &console, &store, &inspector);
    acts(&browser, &console, &store);
    can_be_used_without_a_mouse(&browser, &console);
    is_inert(&browser, &console, &store);
    survives_an_outage(&browser, &console, &server);
    let complaints = browser.complaints();
    let policy = complaints.iter().filter(|line| line.contains("Content Security Policy"));
    assert_eq!(policy.count(), 0, "{complaints:?}");
}

/// Each field has a label, each page one heading, and the focus survives updates.
fn can_be_used_without_a_mouse(browser: &Browser, console: &Console) {
    for path in ["/", "/semaphore?name=demo", "/locks", "/pools", "/clients", "/events", "/login"] {
        browser.go(&console.url(path));
        let headings = browser.run("return document.querySelectorAll('h1').length");
        assert_eq!(headings, 1, "{path}");
        let unlabelled = browser.run(
            "return [...document.querySelectorAll('input:not([type=hidden]), select')].filter((one) => !one.labels.length).length",
        );
        assert_eq!(unlabelled, 0, "{path}");
    }
    browser.go(&console.url("/"));
    browser.press(TAB);
    assert_eq!(focused(browser, "className"), "skip");
    browser.run("document.getElementById('find').focus()");
    wait_for_an_update(console);
    assert_eq!(focused(browser, "id"), "find");
}

fn focused(browser: &Browser, property: &str) -> String {
    let value = browser.run(&format!("return document.activeElement.{property}"));
    value.as_str().unwrap_or_default().to_owned()
}

/// Waits until an open page must have been updated.
fn wait_for_an_update(console: &Console) {
    let version = || console.json("/api/overview")["version"].as_u64();
    let before = version();
    until(|| version() > before.map(|before| before + 2));
}

/// Sets a mark that a reload would remove.
fn mark(browser: &Browser) {
    browser.run("window.mark = 1");
}

fn is_marked(browser: &Browser) -> bool {
    browser.run("return window.mark") == 1
}

fn appears_and_disappears(
    browser: &Browser,
    console: &Console,
    store: &str,
    inspector: &Inspector,
) {
    browser.go(&console.url("/"));
    browser.shows("No semaphore has been used yet.");
    mark(browser);
    let job = |label| ["run", "--label", label, "demo", "--", "sleep", "600"];
    let first = Running::start(store, &job("job-one"));
    browser.shows("1 of 1");
    let second = Running::start(store, &job("job-two"));
    browser.shows("1 waiting");
    assert!(is_marked(browser));
    browser.click("a[href='/semaphore?name=demo']");
    browser.shows("The first waiter needs 1 unit; the only one is held.");
    mark(browser);
    for shown in ["job-one", "job-two", &first.pid().as_raw_pid().to_string()] {
        browser.shows(shown);
    }
    first.signal(Signal::TERM);
    browser.shows("Nobody waits.");
    browser.shows("job-two");
    assert!(!browser.text().contains("job-one"));
    assert_eq!(inspector.held_and_waiting("demo"), (1, 0));
    second.signal(Signal::TERM);
    browser.shows("Nobody holds a permit.");
    assert!(is_marked(browser));
    // The events show the loss and the grant.
    browser.go(&console.url("/events?kind=granted"));
    browser.shows("granted to job-two");
    first.end();
    second.end();
}

fn acts(browser: &Browser, console: &Console, store: &str) {
    browser.go(&console.url("/semaphore?name=demo"));
    browser.shows("Log in with the token");
    assert!(!browser.has("form[data-confirm]"));
    browser.go(&console.url("/login"));
    browser.type_into("#token", "a-wrong-token-of-some-length");
    browser.click("main button");
    browser.shows("The token is wrong.");
    browser.type_into("#token", TOKEN);
    browser.click("main button");
    browser.shows("Log out");

    browser.go(&console.url("/semaphore?name=demo"));
    browser.type_into("#limit", "3");
    // Text that is being typed survives updates.
    wait_for_an_update(console);
    assert_eq!(browser.run("return document.querySelector('#limit').value"), "3");
    browser.click("button[value='limit']");
    browser.shows("Change the limit of demo to 3?");
    browser.shows("Nobody loses a permit");
    browser.click("dialog .cancel");
    browser.click("button[value='limit']");
    browser.click("dialog button.confirm");
    browser.shows("demo: limit set to 3.");
    browser.shows("0 of 3 held");
    assert_eq!(run(store, &["limit", "demo"]).stdout, "demo: 3 permits\n");

    browser.type_into("#reason", "release freeze");
    browser.click("button[value='pause']");
    browser.click("dialog button.confirm");
    browser.shows("paused: release freeze.");
    let waits = Running::start(store, &["run", "-v", "demo", "--", "true"]);
    waits.says("paused by console, from 127.0.0.1 ");
    waits.says(" ago: release freeze");
    browser.shows("by console, from 127.0.0.1: release freeze");
    browser.click("button[value='resume']");
    browser.click("dialog button.confirm");
    assert_eq!(waits.end().code, 0);
    browser.go(&console.url("/events?kind=action"));
    for event in ["limit set to 3", "paused: release freeze", "resumed"] {
        browser.shows(&format!("{event} (by console, from 127.0.0.1)"));
    }
}

fn is_inert(browser: &Browser, console: &Console, store: &str) {
    let job = ["run", "--label", SCRIPT, SCRIPT, "--", "sleep", "600"];
    let job = Running::start(store, &job);
    browser.go(&console.url("/"));
    browser.shows(SCRIPT);
    browser.click("a[href^='/semaphore?name=%3Cscript']");
    browser.shows("Silent for");
    for path in ["/semaphore?name=%3Cscript%3Ealert%281%29%3C%2Fscript%3E", "/clients", "/events"] {
        browser.go(&console.url(path));
        browser.shows(SCRIPT);
        assert_eq!(browser.run("return document.querySelectorAll('main script').length"), 0);
        assert!(!browser.has_alert());
    }
    job.signal(Signal::TERM);
    job.end();
}

fn survives_an_outage(browser: &Browser, console: &Console, server: &RedisServer) {
    browser.go(&console.url("/"));
    browser.shows("demo");
    mark(browser);
    server.kill();
    browser.shows("Store unreachable since");
    browser.shows("Showing what was read at");
    assert!(browser.text().contains("demo"), "the last data stays visible");
    assert_eq!(console.get("/healthz").status, 503);
    server.crash();
    browser.shows_no_more("Store unreachable");
    browser.shows("demo");
    assert!(is_marked(browser));
    assert_eq!(console.get("/healthz").status, 200);
    // The time of the outage does not count as the duration of a poll, so the next poll is soon.
    assert_eq!(run(&server.url(), &["run", "afterwards", "--", "true"]).code, 0);
    browser.shows("afterwards");
}
