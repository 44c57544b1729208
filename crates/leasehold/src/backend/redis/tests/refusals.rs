//! A small script that refuses a command has changed nothing, whatever is in its way.

use super::by_crate::try_query;
use super::*;

/// A situation in which a small script serves a command, and what can be in its way.
struct Common {
    form: Form,
    outlook: Outlook,
    /// The commands before it, of two clients.
    before: Vec<(usize, Command)>,
    commands: Vec<Command>,
}

fn common_cases() -> Vec<Common> {
    use Outlook::{Full, Queue, Room};
    let id = |client_number, number| AcquisitionId::new(client(client_number), number);
    let enqueue = |id, ttl: Option<u64>| {
        let terms = Terms { lease: Some(Span::from_millis(5000)), ttl: ttl.map(Span::from_millis) };
        let (declared, share) = (Declared::capacity(2, false), Share::ONE);
        Command::Enqueue { id, declared, wait: true, terms, share, label: Some("label".into()) }
    };
    let release = |id, limited| Command::Release { id, hint: ReleaseHint::Held { limited } };
    let terms = Terms { lease: Some(Span::from_millis(6000)), ttl: None };
    let renew = |id, holds| Command::Renew { id, terms, holds };
    let one = |ttl| vec![(0, enqueue(id(0, 1), ttl))];
    let two = |ttl| [one(ttl), vec![(0, enqueue(id(0, 2), ttl))]].concat();
    let queue = |from| [two(None), vec![(from, enqueue(id(from, 3), None))]].concat();
    let case = |form, outlook, before, commands| Common { form, outlook, before, commands };
    vec![
        case(Form::Acquire, Room, vec![], vec![enqueue(id(0, 5), None)]),
        case(Form::Acquire, Room, vec![], vec![enqueue(id(0, 5), Some(9000))]),
        case(Form::Acquire, Room, one(None), vec![enqueue(id(0, 5), None)]),
        case(Form::Acquire, Room, one(Some(9000)), vec![enqueue(id(0, 5), Some(9000))]),
        case(Form::Acquire, Room, vec![], vec![enqueue(id(0, 5), None), enqueue(id(0, 6), None)]),
        case(Form::Release, Room, one(None), vec![release(id(0, 1), false)]),
        case(Form::Release, Room, two(Some(9000)), vec![release(id(0, 1), true)]),
        case(Form::Release, Full, two(None), vec![release(id(0, 1), false)]),
        case(Form::Release, Queue, queue(0), vec![release(id(0, 1), false)]),
        case(Form::Release, Queue, queue(1), vec![release(id(0, 1), false)]),
        case(Form::Renew, Full, two(None), vec![renew(id(0, 1), true), renew(id(0, 2), true)]),
        case(Form::Renew, Full, two(Some(9000)), vec![renew(id(0, 1), true)]),
        case(Form::Renew, Queue, queue(1), vec![renew(id(0, 1), true)]),
        case(Form::Query, Queue, queue(0), vec![renew(id(0, 3), false)]),
    ]
}

impl Both {
    /// Returns the state before the commands of a common case.
    fn before(place: &Place, case: &Common) -> Self {
        let mut both = Self::new(place);
        (0..CLIENTS).for_each(|client| both.listen(client, true));
        redis::cmd("SET").arg(NOW).arg(both.now).exec(&mut both.connection).unwrap();
        for (from, command) in &case.before {
            both.send(*from, std::slice::from_ref(command), Outlook::Special);
        }
        both
    }

    /// Returns the form of the only call for these commands, and its answer, unless it failed.
    fn send(
        &mut self,
        from: usize,
        commands: &[Command],
        outlook: Outlook,
    ) -> (Form, Option<RedisValue>) {
        let declared = Declared::capacity(2, false);
        let calls = self.scripts.calls(&self.keys[from], declared, commands, outlook);
        let [(call, form, _)] = &calls[..] else { panic!("{} calls", calls.len()) };
        (*form, try_query(call, &mut self.connection).ok())
    }

    fn is_served(&mut self, case: &Common) -> bool {
        let (form, answer) = self.send(0, &case.commands, case.outlook);
        assert_eq!(form, case.form);
        matches!(answer, Some(RedisValue::Array(_)))
    }

    /// Checks that the small script of this case changes nothing now. Returns whether it refuses.
    fn changes_nothing_or_serves(&mut self, case: &Common, why: &str) -> bool {
        let before = self.dump();
        let is_served = self.is_served(case);
        let is_unchanged = self.dump() == before;
        assert!(
            is_served || is_unchanged,
            "{:?} refuses because of {why}, and changes something",
            case.form
        );
        !is_served
    }
}

#[test]
fn a_small_script_that_refuses_a_command_changes_nothing() {
    let place = Place::Server(Box::new(RedisServer::start()));
    let mut refusals = [0; 5];
    for case in common_cases() {
        assert!(Both::before(&place, &case).is_served(&case), "{:?}", case.form);
        let mut refused = |both: &mut Both, why: &str| {
            if both.changes_nothing_or_serves(&case, why) {
                refusals[case.form as usize] += 1;
            }
        };
        // Each of the keys belongs to another program.
        for key in storage_keys("ns", NAME) {
            let mut both = Both::before(&place, &case);
            redis::cmd("DEL").arg(&key).exec(&mut both.connection).unwrap();
            redis::cmd("RPUSH").arg(&key).arg("theirs").exec(&mut both.connection).unwrap();
            both.others.insert(key.clone());
            refused(&mut both, &key);
        }
        // Another program takes part, has removed a key, or has written into it.
        for key in storage_keys("ns", NAME) {
            let mut both = Both::before(&place, &case);
            redis::cmd("DEL").arg(&key).exec(&mut both.connection).unwrap();
            refused(&mut both, &format!("no {key}"));
        }
        for (kind, score) in
            [("main", "4000000000"), ("waiting", "1"), ("waiting_heartbeat", "1"), ("ttl", "1")]
        {
            let mut both = Both::before(&place, &case);
            let key = format!("ns:semaphore_{kind}:{NAME}");
            redis::cmd("ZADD")
                .arg(&key)
                .arg(score)
                .arg("theirs")
                .exec(&mut both.connection)
                .unwrap();
            refused(&mut both, &format!("a foreign member of {key}"));
        }
        for (kind, text) in [
            ("max", "many"),
            ("max", "1"),
            ("max", "1e400"),
            ("fence", "-1"),
            ("fence", "nan"),
            ("limits", "1 1 - 0 - - - - -\n\n"),
        ] {
            let mut both = Both::before(&place, &case);
            let key = format!("ns:semaphore_{kind}:{NAME}");
            redis::cmd("SET").arg(&key).arg(text).exec(&mut both.connection).unwrap();
            refused(&mut both, &format!("{key} = {text}"));
        }
        // Nobody listens, or everything has expired.
        let mut both = Both::before(&place, &case);
        (0..CLIENTS).for_each(|client| both.listen(client, false));
        refused(&mut both, "a client that does not listen");
        let mut both = Both::before(&place, &case);
        redis::cmd("SET").arg(NOW).arg(both.now + 60_000_000).exec(&mut both.connection).unwrap();
        refused(&mut both, "expired members");
        // The server is full: a script may not even begin to write.
        let mut both = Both::before(&place, &case);
        let set =
            |memory: &str| redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(memory).to_owned();
        set("1").exec(&mut both.connection).unwrap();
        let before = both.dump();
        let is_served = both.is_served(&case);
        let is_unchanged = both.dump() == before;
        set("0").exec(&mut both.connection).unwrap();
        assert!(is_served || is_unchanged, "{:?} changes something on a full server", case.form);
    }
    assert!(refusals[1..].iter().all(|refused| *refused >= 10), "{refusals:?}");
}
