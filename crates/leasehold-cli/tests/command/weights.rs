//! Texts with a number of units or permits: "1 unit" and "2 units".

use crate::pty::Pty;
use crate::support::{Inspector, Running, Store, leasehold, run, until};

/// Of three units, the holder has `held` and the first waiter needs `needed`. The texts are the beginnings of lines of
/// `show`, `ls` and `top`.
fn is_counted(store: &Store, (held, needed): (u32, &str), texts: [&str; 4]) {
    let inspector = Inspector::new(&store.url());
    let semaphore = inspector.client.semaphore("it", 3).build().unwrap();
    let _held = inspector.block_on(semaphore.acquire().weight(held)).unwrap();
    let words = ["run", "--weight", needed, "it", "--", "true"];
    let _waiting = Running::start(&store.url(), &words);
    until(|| inspector.held_and_waiting("it") == (1, 1));

    let [shown, listed, summary, first] = texts;
    let show = run(&store.url(), &["show", "it"]).stdout;
    assert!(show.starts_with(&format!("it: {shown}\n")), "{show}");
    let ls = run(&store.url(), &["ls"]).stdout;
    let line = ls.lines().find(|line| line.starts_with("it ")).unwrap();
    let words = line.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.starts_with(&format!("it {listed} ")), "{ls}");
    let mut top = Pty::start((200, 50), leasehold(&store.url()).arg("top"));
    top.shows("> it ");
    top.types("\r");
    top.shows(&format!("limit 3; {summary} for up to "));
    top.shows(&format!("the first in the queue needs {first} held"));
}

#[test]
fn one_unit_and_several_units_are_counted_in_words() {
    let light = ["1 of 3 held, 1 waiting", "1 3 33% 1", "1 held; 1 waiting", "3 units: 1 of 3 is"];
    let heavy = [
        "3 of 3 units held by 1 permit, 1 waiting",
        "1 (3 units) 3 100% 1",
        "3 units held by 1 permit; 1 waiting",
        "1 unit: 3 of 3 are",
    ];
    for (weights, texts) in [((1, "3"), light), ((3, "1"), heavy)] {
        for store in Store::both() {
            is_counted(&store, weights, texts);
        }
    }
}

#[test]
fn the_units_that_are_not_free_are_counted_in_words() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let semaphore = inspector.client.semaphore("it", 2).build().unwrap();
        let _held = inspector.block_on(semaphore.acquire().weight(2)).unwrap();
        for (weight, says) in
            [("1", "no permit of \"it\" is free: "), ("2", "2 units of \"it\" are not free: ")]
        {
            let words = ["run", "--no-wait", "--weight", weight, "it", "--", "true"];
            let ended = run(&store.url(), &words);
            assert_eq!(ended.code, 75, "{ended:?}");
            assert!(ended.stderr.starts_with(&format!("leasehold: {says}held by ")), "{ended:?}");
        }
    }
}
