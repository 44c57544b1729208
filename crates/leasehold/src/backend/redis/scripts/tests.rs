//! Compares the header of each script with the function that calls it: the same KEYS and ARGV, in the same order.

use super::*;
use crate::AcquisitionId;

impl Scripts {
    /// Returns scripts that read the time from a key, in microseconds, instead of the server's clock.
    pub(in crate::backend::redis) fn with_injected_time(key: &str) -> Self {
        Self::with_time(|script| {
            let read = "call('TIME')";
            assert_eq!(script.matches(read).count(), 1, "how does it read the time? {script}");
            // Seconds and microseconds, of any size.
            script.replace(read, &format!("{{ 0, call('GET', '{key}') }}"))
        })
    }
}

const NAMESPACE: &str = "ns";
const NAME: &str = "a name";
const LABEL: &str = "a label";
const CONFIRM_WITHIN: Span = Span::from_micros(4001);
const FOREIGN_HEARTBEAT: Span = Span::from_micros(5001);
const TERMS: Terms =
    Terms { lease: Some(Span::from_micros(6001)), ttl: Some(Span::from_micros(7001)) };
const CAPACITY: u32 = 8001;
const DECLARED: Declared = Declared::capacity(CAPACITY, true);
const BY: &str = "an operator";
const REASON: &str = "a reason";

/// Whether every command of this transition is a group of its own.
fn is_alone(transition: &str) -> bool {
    matches!(transition, "sweep" | "change_limits")
}

/// One line of a header: a position, the name of the argument there, and its description.
#[derive(Debug)]
struct Entry<'a> {
    position: usize,
    name: &'a str,
    more: &'a str,
}

/// Returns the lines of one section of a header that begin with a position.
fn section<'a>(script: &'a str, title: &str) -> Vec<Entry<'a>> {
    let comment = script.lines().map_while(|line| line.strip_prefix("--"));
    let mut lines = comment.skip_while(|line| line.split_whitespace().next() != Some(title));
    let first = lines.next().and_then(|line| line.trim_start().strip_prefix(title));
    let first = first.unwrap_or_else(|| panic!("no {title} in the header of {script}"));
    // The lines of a section are indented further than its title.
    let rest = lines.take_while(|line| line.starts_with("   "));
    std::iter::once(first).chain(rest).filter_map(entry).collect()
}

fn entry(line: &str) -> Option<Entry<'_>> {
    let (position, rest) = line.trim().split_once(' ')?;
    let (name, more) = rest.split_once(' ').unwrap_or((rest, ""));
    Some(Entry { position: position.parse().ok()?, name, more: more.trim() })
}

fn client() -> ClientId {
    ClientId::from_bits(9001)
}

fn ids() -> [AcquisitionId; 2] {
    [1, 2].map(|number| AcquisitionId::new(client(), number))
}

fn commands(transition: &str) -> Vec<Command> {
    let terms = TERMS;
    let command = |id| match transition {
        "release" => Command::Release { id, hint: ReleaseHint::Held { limited: true } },
        "renew" => Command::Renew { id, terms, holds: true },
        "sweep" => Command::Sweep,
        "change_limits" => {
            let (by, reason) = (BY.into(), Some(REASON.into()));
            Command::ChangeLimits { capacity: None, change: LimitChange::Pause { by, reason } }
        }
        _ => {
            let label = Some(LABEL.into());
            Command::Enqueue { id, declared: DECLARED, wait: true, terms, share: Share::ONE, label }
        }
    };
    let all: Vec<_> = ids().map(command).into();
    assert!(is_alone(transition) || are_one_group(&all[0], &all[1]));
    all
}

/// Returns the values that are sent for an argument of a header.
fn expected(transition: &str, name: &str) -> Vec<String> {
    let value = match (name, transition) {
        ("namespace", _) => NAMESPACE.to_owned(),
        ("name", _) => NAME.to_owned(),
        ("client", _) => client().to_string(),
        ("confirm_within", _) => CONFIRM_WITHIN.micros().to_string(),
        ("foreign_heartbeat", _) => FOREIGN_HEARTBEAT.micros().to_string(),
        // A single server has no channel suffix, and a pause has no capacity.
        ("channel", _) | ("capacity", "change_limits") => String::new(),
        ("capacity", _) => CAPACITY.to_string(),
        ("what", _) => "pause".to_owned(),
        ("by", _) => BY.to_owned(),
        ("reason", _) => REASON.to_owned(),
        ("wait", _) => "1".to_owned(),
        ("heartbeat", _) => "6001".to_owned(),
        ("ttl", _) => "7001".to_owned(),
        ("label", _) => LABEL.to_owned(),
        ("known", _) => "limited".to_owned(),
        ("ids", _) => return ids().map(|id| id.to_string()).into(),
        _ => panic!("{transition}: nobody knows what {name:?} is"),
    };
    vec![value]
}

/// Returns KEYS and ARGV as they are sent.
fn sent(transition: &str) -> (Vec<String>, Vec<String>) {
    let written = (NAMESPACE, NAME.into());
    let keys = Keys::new(written, NAME, client(), CONFIRM_WITHIN, FOREIGN_HEARTBEAT);
    let call = Scripts::new().apply(&keys, DECLARED, &commands(transition));
    let mut arguments = call.iter().map(|bytes| String::from_utf8(bytes.to_vec()).unwrap());
    assert_eq!(arguments.next().unwrap(), "EVALSHA");
    assert_eq!(arguments.next().unwrap(), Scripts::new().machine.hash);
    let count = arguments.next().unwrap().parse().unwrap();
    let mut keys: Vec<_> = arguments.collect();
    let argv = keys.split_off(count);
    (keys, argv)
}

#[test]
fn keys_are_those_of_the_header_in_its_order() {
    let header = section(MACHINE, "KEYS");
    let names: Vec<_> = header.iter().map(|entry| entry.name.to_uppercase()).collect();
    let unpacked = format!("{} = unpack(KEYS)\n", names.join(", "));
    assert!(MACHINE.contains(&unpacked), "{unpacked}");
    for (transition, _) in TRANSITIONS {
        let (keys, _) = sent(transition);
        assert_eq!(keys.len(), header.len(), "{transition}");
        for (at, ((entry, key), (_, kind))) in header.iter().zip(&keys).zip(KINDS).enumerate() {
            assert_eq!(entry.position, at + 1, "{entry:?}");
            let name = if entry.name == "alive" { "waiting_heartbeat" } else { entry.name };
            assert_eq!(*key, format!("{NAMESPACE}:semaphore_{name}:{NAME}"), "{transition}");
            let documented = entry.more.split(' ').next().unwrap_or_default();
            assert_eq!(documented.to_lowercase(), kind, "{entry:?}");
        }
    }
}

#[test]
fn arguments_are_those_of_the_headers_in_their_order() {
    for (transition, code) in TRANSITIONS {
        let headers = [MACHINE, code].map(|script| section(script, "ARGV"));
        for header in &headers {
            let positions: Vec<_> = header.iter().map(|entry| entry.position).collect();
            assert!(positions.iter().copied().eq(1..=header.len()), "{transition}: {positions:?}");
        }
        let [shared, specific] = &headers;
        let (for_all, of_a_name) = shared.split_at(5);
        let value = |entry: &Entry<'_>| expected(transition, entry.name);
        let specific: Vec<_> = specific.iter().flat_map(value).collect();
        let mut whole: Vec<_> = for_all.iter().flat_map(value).collect();
        let names: Vec<_> = of_a_name.iter().map(|entry| entry.name).collect();
        assert_eq!(names, ["name", "capacity", "declares", "transition", "arguments"]);
        let group = [transition.to_owned(), specific.len().to_string()].into_iter().chain(specific);
        let times = if is_alone(transition) { 2 } else { 1 };
        let group: Vec<_> = std::iter::repeat_n(group, times).flatten().collect();
        whole.extend([NAME.to_owned(), CAPACITY.to_string(), "1".to_owned()]);
        whole.extend(group);
        assert_eq!(sent(transition).1, whole, "{transition}: {headers:#?}");
    }
}

/// If a pattern were missing, its rule would not be broken, and the torture test would seem to have overlooked the
/// fault.
#[test]
fn every_text_to_be_replaced_exists() {
    let scripts = Scripts::new();
    for (rule, stands, _) in crate::broken::IN_LUA {
        assert!(scripts.all().any(|script| script.source.contains(stands)), "{rule}: {stands}");
    }
}
