//! Actions: each asks first, and then changes the store for everybody.

use super::{LARGE, SMALL, top};
use crate::support::{Inspector, Store};

impl Inspector {
    /// The reason of a pause; empty if it has none.
    fn paused(&self, name: &str) -> Option<String> {
        let stats = self.block_on(self.client.stats().names([name]).unused()).unwrap();
        let paused = stats.first()?.paused.as_ref()?;
        Some(paused.reason.as_deref().unwrap_or_default().to_owned())
    }

    fn capacity(&self, name: &str) -> (u32, Option<u32>) {
        let stats = self.block_on(self.client.stats().names([name]).unused()).unwrap();
        (stats[0].capacity, stats[0].pinned)
    }
}

#[test]
fn a_pause_is_confirmed_and_holds_for_all_clients() {
    for (store, size) in Store::both().into_iter().zip([SMALL, LARGE]) {
        let inspector = Inspector::new(&store.url());
        let _held = inspector.hold("deploy");
        let mut top = top(&store.url(), size);
        top.shows("> deploy");
        for refusal in ["n", "\x1b", "q"] {
            top.types("p");
            top.shows("Reason, shown by waiting commands");
            top.types("disk\r");
            top.shows("No more permits of deploy are granted until it is resumed.");
            top.shows("Reason: disk");
            // Neither Enter nor any other key does it.
            top.types("\rxYp ");
            top.types(refusal);
            top.hides("No more permits");
        }
        assert_eq!(inspector.paused("deploy"), None);
        top.types("pdisk full\r");
        top.shows("y: do it");
        top.types("y");
        top.shows("deploy: paused: disk full");
        assert_eq!(inspector.paused("deploy"), Some("disk full".to_owned()));
        top.shows_line(&["> deploy", "paused"]);
        top.types("\r");
        top.shows_line(&["paused by ", "@", " ago: disk full"]);
        top.types("r");
        top.shows("Permits of deploy are granted again, in the order of the queue.");
        assert_eq!(inspector.paused("deploy"), Some("disk full".to_owned()));
        top.types("y");
        top.shows("deploy: resumed");
        assert_eq!(inspector.paused("deploy"), None);
        top.hides("paused by");
    }
}

#[test]
fn a_limit_is_changed_pinned_and_unpinned() {
    for (store, size) in Store::both().into_iter().zip([LARGE, SMALL]) {
        let inspector = Inspector::new(&store.url());
        let _held = inspector.hold("deploy");
        let mut top = top(&store.url(), size);
        top.shows("> deploy");
        top.types("l\r");
        top.shows("enter a number from 1 to 4294967294");
        top.types("0\r");
        top.shows("enter a number from 1 to 4294967294");
        top.types("\x7f4294967295\r");
        top.shows("enter a number from 1 to 4294967294");
        top.types(&"\x7f".repeat(10));
        top.types("x5\r");
        top.shows("deploy gets a limit of 5, until a program declares another.");
        assert_eq!(inspector.capacity("deploy"), (1, None));
        top.types("y");
        top.shows("deploy: limit set to 5");
        assert_eq!(inspector.capacity("deploy"), (5, None));
        top.shows_line(&["> deploy", " 1 ", " 5 "]);
        top.types("l7\t");
        top.shows("[x] pin it");
        top.types("\ry");
        top.shows("deploy: limit pinned to 7");
        assert_eq!(inspector.capacity("deploy"), (7, Some(7)));
        top.shows_line(&["> deploy", " 7 ", "pin"]);
        top.types("l");
        top.shows("u: unpin");
        top.types("u");
        top.shows("Unpin the limit of deploy?");
        top.types("y");
        top.shows("deploy: limit unpinned");
        assert_eq!(inspector.capacity("deploy"), (5, None));
    }
}

#[test]
fn a_drain_is_over_when_nothing_is_held() {
    let store = Store::local();
    let inspector = Inspector::new(&store.url());
    let held = inspector.hold("deploy");
    let mut top = top(&store.url(), SMALL);
    top.shows("> deploy");
    top.types("d\ry");
    top.shows("deploy: draining");
    assert_eq!(inspector.paused("deploy"), Some(String::new()));
    assert!(inspector.block_on(held.release()).unwrap());
    top.shows("deploy is drained: nothing is held, and it stays paused");
}

#[test]
fn holders_of_every_kind_can_be_released() {
    for (store, size) in Store::both().into_iter().zip([SMALL, LARGE]) {
        let inspector = Inspector::new(&store.url());
        let held = inspector.hold("deploy");
        let lock = inspector.client.lock("invoice:42").label("nightly").build().unwrap();
        let _guard = inspector.block_on(lock.acquire()).unwrap();
        let pool = inspector.client.pool("gpus", 2).build().unwrap();
        let _lease = inspector.block_on(pool.acquire("worker-1")).unwrap();
        let mut top = top(&store.url(), size);
        top.shows("[1 Semaphores (1)] 2 Locks (1)  3 Pools (1)");
        top.types("x");
        top.shows("open the name with Enter");
        top.types("\r");
        top.shows_line(&["> held", "nightly"]);
        top.types("x");
        top.shows("Release the permit");
        top.shows("deploy: release nightly (");
        top.types("n");
        top.hides("Release a permit");
        assert_eq!(inspector.held_and_waiting("deploy"), (1, 0));
        top.types("xy");
        top.shows("released");
        assert_eq!(inspector.held_and_waiting("deploy"), (0, 0));
        top.shows("no holders and no waiters");
        inspector.block_on(held.lost());

        top.types("\x1b");
        top.shows("Enter open");
        top.types("2");
        top.shows_line(&["> invoice:42", "nightly"]);
        top.types("\r");
        top.shows("lock: invoice:42");
        top.shows_line(&["> nightly"]);
        top.types("p");
        top.shows("a lock cannot be paused");
        top.types("x");
        top.shows("Release the lock invoice:42?");
        top.types("y");
        top.shows("not in use now");
        assert!(
            inspector.block_on(inspector.client.locks().lookup("invoice:42")).unwrap().is_none()
        );

        top.types("\x1b");
        top.shows("no lock is held");
        top.types("\t");
        top.shows_line(&["> gpus", " 1 "]);
        top.types("\r");
        top.shows_line(&["> worker-1"]);
        top.types("xy");
        top.shows("lease of worker-1 released");
        assert!(
            inspector.block_on(inspector.client.pools().lookup(pool.name())).unwrap().is_none()
        );
    }
}
