//! A fence has the same digits in `top` as in all other commands, with its leading zeros.

use leasehold::Client;
use leasehold::compat::sync_guard::{LockLayout, StoreSettings};
use serde_json::Value;
use testkit::redis_server::RedisServer;

use super::{LARGE, leasehold};
use crate::pty::Pty;
use crate::support::{Inspector, Store, run};

fn has_word(text: &str, word: &str) -> bool {
    text.split_whitespace().any(|part| part == word)
}

/// Every text and every JSON of the commands about one lock contains its fence.
fn is_in_all_texts(store: &str, options: &[&str], fence: &str) {
    for words in [&["ls"][..], &["show", "key"], &["lookup", "key"]] {
        let ended = run(store, &[words, options].concat());
        assert!(has_word(&ended.stdout, fence), "{words:?}: {ended:?}");
        let ended = run(store, &[words, options, &["--json"]].concat());
        let json: Value = serde_json::from_str(&ended.stdout).unwrap();
        let found = [&json["fence"], &json["holders"][0]["fence"], &json["locks"][0]["fence"]];
        assert!(found.contains(&&Value::from(fence)), "{words:?}: {ended:?}");
    }
}

/// The list of locks, an open lock, the question before its release, and the message after that.
fn is_in_top(top: &mut Pty, fence: &str) {
    top.types("2");
    top.until("the list with the fence", |text| {
        text.lines().any(|line| line.contains("> key ") && has_word(line, fence))
    });
    top.types("\r");
    top.shows("lock: key");
    top.until("the fence of the open lock", |text| {
        text.lines().any(|line| line.contains("> ") && has_word(line, fence))
    });
    top.types("x");
    top.shows(&format!("key: release fence {fence}"));
    top.types("y");
    top.shows(&format!("lock with fence {fence} released"));
}

#[test]
fn a_fence_has_the_same_digits_everywhere() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let held = inspector.hold("deploy");
        let lock = inspector.client.lock("key").build().unwrap();
        let guard = inspector.block_on(lock.acquire()).unwrap();
        let [permit, fence] = [held.fence(), guard.fence()].map(|fence| fence.to_string());
        assert!([&permit, &fence].iter().all(|fence| fence.len() == 19 && fence.starts_with('0')));
        is_in_all_texts(&store.url(), &[], &fence);
        assert!(has_word(&run(&store.url(), &["show", "deploy"]).stdout, &permit));
        let mut top = Pty::start(LARGE, &mut leasehold(&store.url(), &["top"]));
        top.shows("> deploy");
        top.types("\r");
        top.until("the fence of the permit", |text| {
            text.lines().any(|line| line.contains("> held ") && has_word(line, &permit))
        });
        top.types("\x1b");
        top.shows("Enter open");
        is_in_top(&mut top, &fence);
    }
}

/// `SyncGuard` 2 prints 15 digits.
#[test]
fn a_fence_has_the_digits_of_its_layout_everywhere() {
    let server = RedisServer::start();
    let inspector = Inspector::new(&server.url());
    let client = Client::redis_builder(&server.url()).lock_layout(LockLayout::SyncGuard2);
    let client = inspector.block_on(client.open()).unwrap();
    let guard = inspector.block_on(client.lock("key").build().unwrap().acquire()).unwrap();
    let fence = guard.fence().to_string();
    assert_eq!(fence, "000000000000001");
    let options = ["--lock-layout", "syncguard-2"];
    is_in_all_texts(&server.url(), &options, &fence);
    let words = [&["top"], &options[..]].concat();
    let mut top = Pty::start(LARGE, &mut leasehold(&server.url(), &words));
    top.shows("2 Locks (1)");
    is_in_top(&mut top, &fence);
}
