//! Compares the lock machine with its implementation in Lua: the same random operations, the same injected time, the
//! same outcomes. Also tests the keys.

use proptest::prelude::*;
use redis::Connection;
use testkit::redis_server::RedisServer;

use super::*;
use crate::LockId;
use crate::backend::differential::locks::{KEYS, Seen, Step, by_machine, holder, id, key, steps};
use crate::backend::redis::scripts::Scripts;
use crate::backend::redis::tests::by_crate::query;
use crate::machine::lock::LockMachine;

const NOW: &str = "test:now";

struct Both {
    machine: LockMachine,
    scripts: Scripts,
    lock_scripts: LockScripts,
    connection: Connection,
    now: u64,
    /// How many commands were sent.
    sent: usize,
}

impl Both {
    fn new(server: &RedisServer) -> Self {
        let mut connection = server.connection();
        redis::cmd("FLUSHALL").exec(&mut connection).unwrap();
        let scripts = Scripts::with_injected_time(NOW);
        for load in scripts.load() {
            query(&load, &mut connection).checked().unwrap();
        }
        let lock_scripts = LockScripts::new(Prefix::default(), LockLayout::default(), "ns");
        // Far in the future, so that no key expires by the server's own clock.
        let (machine, now) = (LockMachine::default(), 4_000_000_000_000);
        Self { machine, scripts, lock_scripts, connection, now, sent: 0 }
    }

    fn by_redis(&mut self, step: Step) -> Seen {
        // Real expiry would follow another clock than the scripts'. So keys are persisted, and removed explicitly.
        redis::cmd("SET").arg(NOW).arg(self.now * 1000).exec(&mut self.connection).unwrap();
        let notify = NotifyWhen::IfLocked;
        let command = match step {
            Step::Acquire { key: k, id: i, ttl, holder: h } => {
                let (key, id, holder, expected) = (key(k), id(i), holder(h), self.expected(k));
                LockCommand::Acquire { key, id, ttl, notify, holder, expected }
            }
            Step::Release { id: i } => {
                let key = self.held(id(i));
                LockCommand::Release { id: id(i), held: key.is_some(), key }
            }
            Step::Extend { id: i, ttl, only_longer } => {
                LockCommand::Extend { id: id(i), key: None, ttl, only_longer }
            }
            Step::IsLocked { key: k, clean_up } => LockCommand::IsLocked { key: key(k), clean_up },
            Step::LookupKey { key: k } => LockCommand::Lookup(LockRef::Key(key(k))),
            Step::LookupId { id: i } => LockCommand::Lookup(LockRef::Id(id(i))),
            Step::Mislead { id: i, key: k } => {
                let mut set = redis::cmd("SET");
                set.arg(format!("syncguard:id:{}", id(i))).arg(key(k).as_str());
                set.exec(&mut self.connection).unwrap();
                self.persist_all();
                return Seen::Nothing;
            }
            Step::RemoveExpired => {
                self.remove_expired();
                return Seen::Nothing;
            }
            Step::Pass(_) => return Seen::Nothing,
        };
        let outcome = self.send(&command);
        self.persist_all();
        match outcome {
            LockOutcome::Acquire(acquired) => Seen::Acquired(acquired),
            LockOutcome::Release(verdict) => Seen::Ended(verdict.map(drop)),
            LockOutcome::Extend(verdict) => Seen::Extended(verdict),
            LockOutcome::IsLocked(locked) => Seen::Locked(locked),
            LockOutcome::Lookup(record) => Seen::Found(record),
        }
    }

    /// Returns the fence that the client expects: mostly the next one, sometimes another one or none.
    fn expected(&mut self, number: usize) -> Option<Fence> {
        let counter = format!("syncguard:fence:{}", key(number).as_str());
        let last: Option<u64> = redis::cmd("GET").arg(counter).query(&mut self.connection).unwrap();
        match self.sent % 6 {
            0 => None,
            1 => Some(Fence::new(7)),
            _ => Some(Fence::new(last.unwrap_or(0) + 1)),
        }
    }

    /// Returns the key that a client holds with this id. If it holds none, sometimes returns a key that it wrongly
    /// believes to hold.
    fn held(&mut self, id: LockId) -> Option<Name> {
        let index = format!("syncguard:id:{id}");
        let key_held: Option<String> =
            redis::cmd("GET").arg(index).query(&mut self.connection).unwrap();
        let record = key_held.and_then(|key| self.record(&format!("syncguard:{key}")));
        if let Some(record) =
            record.filter(|record| record.id == id && record.expires_at > self.now)
        {
            return Some(record.key);
        }
        let another = key(self.sent % KEYS);
        let record = self.record(&format!("syncguard:{}", another.as_str()));
        (self.sent.is_multiple_of(2) && record.is_none_or(|record| record.id != id))
            .then_some(another)
    }

    fn send(&mut self, command: &LockCommand) -> LockOutcome {
        self.sent += 1;
        let client = ClientId::from_bits(1);
        let call = self.lock_scripts.call(&self.scripts, client, Slot::ONLY, command);
        let answer = query(&call, &mut self.connection);
        self.lock_scripts.decode(command, &answer).unwrap()
    }

    /// Checks that a lock and its index expire when the record says, and then persists both.
    fn persist_all(&mut self) {
        for number in 0..KEYS {
            let lock = format!("syncguard:{}", key(number).as_str());
            if self.expires_at(&lock) > 0 {
                let record = self.record(&lock).unwrap();
                let index = format!("syncguard:id:{}", record.id);
                for key in [&lock, &index] {
                    assert_eq!(self.expires_at(key), record.expires_at.cast_signed(), "{key}");
                    redis::cmd("PERSIST").arg(key).exec(&mut self.connection).unwrap();
                }
            }
        }
    }

    /// Negative if the key does not exist or does not expire.
    fn expires_at(&mut self, key: &str) -> i64 {
        testkit::redis_server::expires_at(&mut self.connection, key)
    }

    fn record(&mut self, lock: &str) -> Option<Record> {
        let text = query(&RedisCommand::new("GET").arg(lock), &mut self.connection);
        decode_record(&text).unwrap()
    }

    fn remove_expired(&mut self) {
        for number in 0..KEYS {
            let lock = format!("syncguard:{}", key(number).as_str());
            if let Some(record) = self.record(&lock).filter(|record| record.expires_at <= self.now)
            {
                let index = format!("syncguard:id:{}", record.id);
                redis::cmd("DEL").arg(&[lock, index]).exec(&mut self.connection).unwrap();
            }
        }
    }
}

#[test]
fn the_machine_of_locks_and_lua_agree() {
    let server = RedisServer::start();
    let config = ProptestConfig { cases: 150, failure_persistence: None, ..Default::default() };
    // The first acquire of a key is not a common case. So all keys are often used once beforehand.
    let used = (0..KEYS).flat_map(|key| {
        [Step::Acquire { key, id: 0, ttl: 1000, holder: 0 }, Step::Release { id: 0 }]
    });
    proptest!(config, |(steps in steps(), are_used in prop::bool::weighted(0.8))| {
        let mut both = Both::new(&server);
        let before = used.clone().filter(|_| are_used);
        for step in before.chain(steps) {
            if let Step::Pass(millis) = step {
                both.now += millis;
            }
            let expected = by_machine(&mut both.machine, step, both.now);
            let seen = both.by_redis(step);
            prop_assert_eq!(seen, expected, "after {:?}", step);
            let mut records: Vec<_> = both.machine.records().cloned().collect();
            records.sort_by(|a, b| a.key.cmp(&b.key));
            let stored = (0..KEYS).map(|number| format!("syncguard:{}", key(number).as_str()));
            let mut stored: Vec<_> = stored.filter_map(|lock| both.record(&lock)).collect();
            stored.sort_by(|a, b| a.key.cmp(&b.key));
            prop_assert_eq!(stored, records, "after {:?}", step);
        }
    });
}

#[test]
fn a_million_keys_that_are_cut_down_do_not_collide() {
    let prefix = Prefix::new(&"p".repeat(500)).unwrap();
    let long = "k".repeat(500);
    let mut seen = std::collections::HashSet::with_capacity(1_000_000);
    for number in 0..1_000_000_u32 {
        let key = prefix.storage_key(LockLayout::SyncGuard1, "", &format!("{long}{number}"));
        assert_eq!(key.len(), 501 + HASH_BYTES);
        assert!(seen.insert(key), "{number}");
    }
}

#[test]
fn storage_keys_are_cut_down_only_where_they_must_be() {
    let prefix = Prefix::new("p").unwrap();
    assert_eq!(prefix.storage_key(LockLayout::SyncGuard1, "", "invoice:42"), "p:invoice:42");
    assert_eq!(
        prefix.storage_key(LockLayout::SyncGuard1, "fence:", "invoice:42"),
        "p:fence:invoice:42"
    );
    assert_eq!(
        Prefix::new("p:").unwrap().storage_key(LockLayout::SyncGuard1, "id:", "x"),
        "p:id:x"
    );
    let longest = "k".repeat(998);
    assert_eq!(prefix.storage_key(LockLayout::SyncGuard1, "", &longest), format!("p:{longest}"));
    // SHA-256 of "p:" and 999 times "k": the first 16 bytes, in base64url.
    let hash = Sha256::digest(format!("p:{}", "k".repeat(999)));
    let expected = format!("p:{}", URL_SAFE_NO_PAD.encode(&hash[..16]));
    assert_eq!(prefix.storage_key(LockLayout::SyncGuard1, "", &"k".repeat(999)), expected);
}

/// Their version 2 hashes what has more than 974 bytes with its prefix, and ignores colons at the end of a prefix.
#[test]
fn storage_keys_of_version_2_are_those_of_the_other_program() {
    let lock_scripts =
        |prefix: &str, layout| LockScripts::new(Prefix::new(prefix).unwrap(), layout, "ns");
    let key = |bytes: usize| Name::normalised("key", &"k".repeat(bytes)).unwrap();
    let prefix = "p".repeat(500);
    let two = lock_scripts(&prefix, LockLayout::SyncGuard2);
    let whole = |bytes: usize| format!("{prefix}:{}", "k".repeat(bytes));
    let hashed = |whole: &str| {
        format!("{prefix}:{}", URL_SAFE_NO_PAD.encode(&Sha256::digest(whole.as_bytes())[..16]))
    };
    assert_eq!(two.lock(&key(473)), whole(473));
    assert_eq!(two.lock(&key(474)), hashed(&whole(474)));
    assert_eq!(lock_scripts(&prefix, LockLayout::SyncGuard1).lock(&key(474)), whole(474));
    // The counter is named after the lock, and hashed by the same rule.
    let lock = hashed(&whole(474));
    let counter = hashed(&format!("{prefix}:fence:{lock}"));
    assert_eq!(two.counters(&key(474))[0], counter);
    assert_eq!(lock_scripts(&prefix, LockLayout::SyncGuard1).counters(&key(474))[1], counter);
    let two = lock_scripts("p::", LockLayout::SyncGuard2);
    assert_eq!(two.lock(&key(1)), "p:k");
}

#[test]
fn a_prefix_must_leave_room() {
    assert!(Prefix::new(&"p".repeat(512)).is_ok());
    let error = Prefix::new(&"p".repeat(513)).unwrap_err().to_string();
    assert_eq!(error, "invalid lock prefix: it is 513 bytes; the limit is 512");
    assert!(Prefix::new("").is_err());
}
