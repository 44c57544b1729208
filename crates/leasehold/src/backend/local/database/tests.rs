//! A full disk loses nothing, and the store continues when there is space. Fences are reserved before they are granted.

use testkit::local_store::LocalStore;

use super::*;
use crate::backend::{Answer, Part};
use crate::clock::Span;
use crate::machine::{Command, Declared, Held, Outcome, Outlook, ReleaseHint, Share, Terms};
use crate::name::Name;
use crate::{AcquisitionId, Error};

const DECLARED: Declared = Declared::capacity(1, true);

/// A store in which no other client is alive.
struct Nobody;

impl Peers for Nobody {
    fn reach(&self, _client: ClientId) -> Reach {
        Reach::Dead
    }

    fn is_dead(&self, _client: ClientId) -> bool {
        true
    }
}

/// Returns a transaction for tests of the SQL. It is never committed.
pub(in crate::backend::local) fn transaction(
    connection: &Connection,
    now: Time,
) -> Transaction<'_> {
    Transaction::new(connection, now, Span::from_millis(1), &Nobody, false)
}

fn open(place: &LocalStore) -> Database {
    let settings = LocalSettings {
        path: place.path(),
        answer_timeout: std::time::Duration::from_secs(5),
        confirm_within: Span::from_millis(5000),
        create_directories: false,
        read_only: false,
    };
    let lifeline = OnceLock::new();
    let (store, _) = Database::open(settings, ClientId::from_bits(1), &lifeline).unwrap();
    // Keep the lifeline for the life of the process, so that this client does not die.
    std::mem::forget(lifeline);
    store
}

fn apply(store: &mut Database, command: Command) -> Result<Outcome, Error> {
    let name = Name::new("name", "x").unwrap();
    let answers = super::super::apply(
        store,
        &[Part::Semaphore {
            name,
            declared: DECLARED,
            commands: vec![command],
            outlook: Outlook::Special,
        }],
    )?;
    let [Ok(Answer::Semaphore(reply))] = &answers[..] else { panic!("{answers:?}") };
    Ok(reply.outcomes[0])
}

fn enqueue(store: &mut Database, sequence: u64) -> Result<Outcome, Error> {
    let id = AcquisitionId::new(store.client, sequence);
    let (terms, label) = (Terms::default(), Some("a label, so that it takes some room".into()));
    apply(
        store,
        Command::Enqueue { id, declared: DECLARED, wait: true, terms, share: Share::ONE, label },
    )
}

fn limit(store: &Database, pages: u32) {
    store.connection.pragma_update(None, "max_page_count", pages).unwrap();
}

fn rows(store: &mut Database) -> u32 {
    let count = "SELECT (SELECT count(*) FROM holders) + (SELECT count(*) FROM waiters)";
    store.read(|tx| tx.first(count, [], |row| row.get(0))).unwrap().unwrap()
}

#[test]
fn a_full_disk_loses_nothing() {
    let place = LocalStore::new();
    let mut store = open(&place);
    // SQLite raises the limit to the current number of pages.
    limit(&store, 1);
    let (mut answered, mut last) = (0, 0);
    let error = loop {
        match enqueue(&mut store, last) {
            Ok(_) => answered += 1,
            Err(error) => break error,
        }
        last += 1;
        assert!(last < 10_000, "it is never full");
    };
    assert!(matches!(error, Error::NoRoom { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("the disk is full") && text.contains(place.path().to_str().unwrap()),
        "{text}"
    );
    assert_eq!(rows(&mut store), answered, "every answered enqueue is stored, and nothing else");

    // A release needs no disk space, and frees some.
    let first = AcquisitionId::new(store.client, 0);
    apply(&mut store, Command::Release { id: first, hint: ReleaseHint::Nothing }).unwrap();
    assert_eq!(rows(&mut store), answered - 1);
    limit(&store, 1_000_000);
    assert!(matches!(enqueue(&mut store, last).unwrap(), Outcome::Waiting { .. }));
    assert_eq!(rows(&mut store), answered);
}

#[test]
fn no_fence_is_granted_that_is_not_reserved() {
    let place = LocalStore::new();
    let mut store = open(&place);
    let reserved = |store: &Database| {
        let read = |row: &rusqlite::Row<'_>| row.get::<_, i64>(0);
        store.connection.query_row("SELECT horizon FROM meta", [], read).unwrap().cast_unsigned()
    };
    let first = store.reader.clock.horizon;
    assert_eq!(reserved(&store), first, "from the beginning");
    let fence = fence_of(enqueue(&mut store, 0).unwrap());
    assert!(fence < first && !store.copy_back, "{fence}");

    // Simulate that a minute has passed.
    store.reader.clock.horizon = fence;
    store
        .connection
        .execute("UPDATE meta SET horizon = ?1", [store.reader.clock.horizon.cast_signed()])
        .unwrap();
    let id = AcquisitionId::new(store.client, 0);
    apply(&mut store, Command::Release { id, hint: ReleaseHint::Nothing }).unwrap();
    let fence = fence_of(enqueue(&mut store, 1).unwrap());
    assert!(fence < reserved(&store), "{fence}");
    assert_eq!(reserved(&store), store.reader.clock.horizon);
    // The reservation must survive the loss of the log.
    store.tidy_log();
    let copy = LocalStore::new();
    fs::copy(place.path(), copy.path()).unwrap();
    let copy = Connection::open(copy.path()).unwrap();
    let copied: i64 = copy.query_row("SELECT horizon FROM meta", [], |row| row.get(0)).unwrap();
    assert!(copied.cast_unsigned() > fence);
}

fn fence_of(outcome: Outcome) -> u64 {
    match outcome {
        Outcome::Held(Held { fence, .. }) => fence.get(),
        other => panic!("{other:?}"),
    }
}
