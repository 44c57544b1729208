//! Jobs that are scheduled on several hosts: `run --at-least` and `lock --once-per`.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::{Inspector, Running, Store, run, until};

#[test]
fn a_quick_job_is_held_at_least_that_long() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let begun = Instant::now();
        let words = ["run", "--at-least", "2s", "it", "--", "sh", "-c", "echo ran; exit 5"];
        let mut first = Running::start(&store.url(), &words);
        assert_eq!(first.line(), "ran");
        let second = run(&store.url(), &["run", "--no-wait", "it", "--", "echo", "twice"]);
        assert_eq!((second.code, &*second.stdout), (75, ""), "{second:?}");
        let ended = first.end();
        assert_eq!(ended.code, 5, "{ended:?}");
        assert!(begun.elapsed() >= Duration::from_secs(2));
        assert_eq!(inspector.held_and_waiting("it"), (0, 0));
        // A signal ends the hold, and the permit is released.
        let words = ["run", "-v", "--at-least", "1h", "it", "--", "true"];
        let long = Running::start(&store.url(), &words);
        long.says("the child has ended; the permit ");
        assert_eq!(inspector.held_and_waiting("it"), (1, 0));
        long.signal(Signal::TERM);
        assert_eq!(long.end().code, 128 + 15);
        until(|| inspector.held_and_waiting("it") == (0, 0));
    }
}

#[test]
fn at_least_is_not_longer_than_the_ttl() {
    let store = Store::local();
    let words = ["run", "--ttl", "1m", "--at-least", "2m", "it", "--", "true"];
    let ended = run(&store.url(), &words);
    let says = "leasehold: --at-least 2m is longer than --ttl 1m, which ends the permit: give a shorter --at-least or a longer --ttl\n";
    assert_eq!((ended.code, &*ended.stderr), (64, says));
}

#[test]
fn a_job_runs_once_in_a_period_although_nobody_is_there() {
    for store in Store::both() {
        let inspector = Inspector::new(&store.url());
        let once = |period: &str, command: &[&str]| {
            let words = [&["lock", "--once-per", period, "it", "--"], command].concat();
            run(&store.url(), &words)
        };
        // A program that does not exist does not count.
        assert_eq!(once("1h", &["no-such-program"]).code, 127);
        // A run that fails counts as well.
        assert_eq!(once("1h", &["false"]).code, 1);
        let again = once("1h", &["echo", "twice"]);
        assert_eq!((again.code, &*again.stdout), (75, ""), "{again:?}");
        let says = "leasehold: the job of lock \"it\" is running, or ran within the last 1h (--once-per); the lock expires in 59m ";
        assert!(again.stderr.starts_with(says), "{again:?}");
        // After the period the job runs again.
        let raw = inspector.block_on(inspector.client.locks().lookup_raw("it")).unwrap().unwrap();
        assert!(inspector.block_on(inspector.client.locks().release(&raw.lock_id)).unwrap());
        assert_eq!(once("1s", &["true"]).code, 0);
        until(|| once("1s", &["echo", "again"]).stdout == "again\n");
        // A job that takes longer than the period leaves no lock behind.
        assert!(inspector.block_on(async {
            let locks = inspector.client.locks();
            while locks.is_locked("it").await.unwrap() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            true
        }));
        assert_eq!(once("100ms", &["sleep", "0.2"]).code, 0);
        assert!(!inspector.block_on(inspector.client.locks().is_locked("it")).unwrap());
    }
}
