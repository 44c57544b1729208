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

/// Each command line with what is said of it.
fn all_refused(lines: &[&[&str]]) -> String {
    let said = lines.iter().map(|words| {
        let line = words.join(" ").escape_debug().to_string();
        // Too long to be read.
        let line = line.replace(&"x".repeat(513), "xxx…");
        format!("leasehold {line}\n  {}\n", refused(words))
    });
    said.collect::<Vec<_>>().concat()
}

#[test]
fn commands_that_are_missing_or_unknown() {
    insta::assert_snapshot!(all_refused(&[
        &["run", "it"],
        &["run", "it", "--"],
        &["run", "--", "true"],
        &["rnu", "it", "--", "true"],
        &["guard", "--", "true"],
        &["run", "--frobnicate", "it", "--", "true"],
        &["completions", "tcsh"],
    ]));
}

#[test]
fn without_arguments_it_says_what_it_can_do() {
    let ended = run("memory:", &[""; 0]);
    assert_eq!((ended.code, &*ended.stdout), (64, ""));
    assert!(ended.stderr.contains("Usage: leasehold <COMMAND>"), "{}", ended.stderr);
}

#[test]
fn stores_that_are_none() {
    let unknown = refused(&["ls", "--store", "zookeeper://user:secret@host"]);
    assert!(unknown.starts_with("invalid store: \"zookeeper:\" is not a store"), "{unknown}");
    assert!(!unknown.contains("secret"), "{unknown}");
    let nowhere = refused(&["ls", "--store", "somewhere"]);
    assert!(nowhere.starts_with("invalid store: it is not a URL: expected"), "{nowhere}");
    let odd = refused(&["ls", "--store", "redis://user:secret@host:port"]);
    assert!(odd.starts_with("invalid url: it does not parse: expected"), "{odd}");
    assert!(!odd.contains("secret"), "{odd}");
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
    insta::assert_snapshot!(all_refused(&[
        &["run", "-n", "0", "it", "--", "true"],
        &["run", "-n", "many", "it", "--", "true"],
        &["run", "--wait", "it", "--", "true"],
        &["run", "--wait", "5", "it", "--", "true"],
        &["run", "--wait", "5s", "--no-wait", "it", "--", "true"],
        &["run", "--ttl", "0s", "it", "--", "true"],
        &["run", "--ttl=-5s", "it", "--", "true"],
        &["run", "--heartbeat", "100ms", "it", "--", "true"],
        &["run", "--heartbeat", "5s", "--grace", "2s", "it", "--", "true"],
        &["run", "-E", "256", "it", "--", "true"],
        &["lock", "--lease", "0s", "it", "--", "true"],
        &["lock", "--lease", "1s", "--grace", "1s", "it", "--", "true"],
    ]));
}

#[test]
fn names_that_cannot_be() {
    insta::assert_snapshot!(all_refused(&[
        &["run", "", "--", "true"],
        &["run", "a\nb", "--", "true"],
        &["run", &"x".repeat(513), "--", "true"],
        &["run", "--label", "a\tb", "it", "--", "true"],
        &["lock", "fence:it", "--", "true"],
        &["show", ""],
        &["lookup", ""],
        &["release", "it", "not an id"],
        &["ls", "--watch"],
    ]));
}
