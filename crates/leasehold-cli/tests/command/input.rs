//! Bad input: one line that says what to do, and 64.

use crate::support::{leasehold, run};

/// What is said, without the name of the command.
fn refused(arguments: &[&str]) -> String {
    let ended = run("memory:", arguments);
    assert_eq!((ended.code, &*ended.stdout), (64, ""), "{arguments:?}: {}", ended.stderr);
    let line = ended.stderr.strip_prefix("leasehold: ").expect("it says who speaks");
    let line = line.strip_suffix('\n').expect("a whole line");
    assert!(!line.contains('\n'), "one line: {line:?}");
    line.to_owned()
}

#[test]
fn a_missing_or_unknown_command() {
    insta::assert_snapshot!(refused(&["run", "it"]));
    insta::assert_snapshot!(refused(&["run", "it", "--"]));
    insta::assert_snapshot!(refused(&["run", "--", "true"]));
    insta::assert_snapshot!(refused(&["rnu", "it", "--", "true"]));
    insta::assert_snapshot!(refused(&["run", "--frobnicate", "it", "--", "true"]));
    insta::assert_snapshot!(refused(&["completions", "tcsh"]));
}

#[test]
fn without_arguments_it_says_what_it_can_do() {
    let ended = run("memory:", &[""; 0]);
    assert_eq!((ended.code, &*ended.stdout), (64, ""));
    assert!(ended.stderr.contains("Usage: leasehold <COMMAND>"), "{}", ended.stderr);
}

#[test]
fn stores_that_are_none() {
    insta::assert_snapshot!(refused(&["ls", "--store", "zookeeper://user:secret@host"]));
    insta::assert_snapshot!(refused(&["ls", "--store", "somewhere"]));
    insta::assert_snapshot!(refused(&["ls", "--store", "redis://user:secret@host:port"]));
}

#[test]
fn no_store_at_all() {
    let output = leasehold("").env_remove("LEASEHOLD_STORE").env_remove("HOME").arg("ls").output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(64));
    let said = "leasehold: no store: give --store URL, or set LEASEHOLD_STORE or HOME\n";
    assert_eq!(String::from_utf8(output.stderr).unwrap(), said);
}

#[test]
fn numbers_and_durations() {
    let with = |options: &[&str]| refused(&[&["run"], options, &["it", "--", "true"]].concat());
    insta::assert_snapshot!(with(&["-n", "0"]));
    insta::assert_snapshot!(with(&["-n", "many"]));
    insta::assert_snapshot!(with(&["--wait"]));
    insta::assert_snapshot!(with(&["--wait", "5"]));
    insta::assert_snapshot!(with(&["--ttl", "0s"]));
    insta::assert_snapshot!(with(&["--ttl=-5s"]));
    insta::assert_snapshot!(with(&["--heartbeat", "100ms"]));
    insta::assert_snapshot!(with(&["--heartbeat", "5s", "--grace", "2s"]));
    insta::assert_snapshot!(with(&["--wait", "5s", "--no-wait"]));
    insta::assert_snapshot!(with(&["-E", "256"]));
    insta::assert_snapshot!(refused(&["lock", "--lease", "0s", "it", "--", "true"]));
    insta::assert_snapshot!(refused(&[
        "lock", "--lease", "1s", "--grace", "1s", "it", "--", "true"
    ]));
}

#[test]
fn names_that_cannot_be() {
    insta::assert_snapshot!(refused(&["run", "", "--", "true"]));
    insta::assert_snapshot!(refused(&["run", "a\nb", "--", "true"]));
    insta::assert_snapshot!(refused(&["run", &"x".repeat(513), "--", "true"]));
    insta::assert_snapshot!(refused(&["run", "--label", "a\tb", "it", "--", "true"]));
    insta::assert_snapshot!(refused(&["lock", "fence:it", "--", "true"]));
    insta::assert_snapshot!(refused(&["show", ""]));
    insta::assert_snapshot!(refused(&["lookup", ""]));
    insta::assert_snapshot!(refused(&["release", "it", "not an id"]));
    insta::assert_snapshot!(refused(&["ls", "--watch"]));
}
