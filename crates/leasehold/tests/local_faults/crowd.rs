//! Many processes at once: never more holders than the capacity, every process makes progress, and
//! nothing is left behind.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

use leasehold::Client;
use rustix::fs::{FlockOperation, flock};
use testkit::Rng;
use testkit::child::{self, Child};
use testkit::local_store::LocalStore;
use testkit::wait::eventually;

use super::{count, open};

const CAPACITY: usize = 3;
const PROCESSES: usize = 12;
const ROUNDS: usize = 15;
const CROWD: &str = "hammered";

/// File locks, one per permit. The kernel frees the lock of a process that is killed while it works.
struct Slots(PathBuf);

impl Slots {
    fn make(directory: &Path) -> Self {
        let slots = Self(directory.to_owned());
        for number in 0..CAPACITY {
            File::create(slots.path(number)).unwrap();
        }
        slots
    }

    fn path(&self, number: usize) -> PathBuf {
        self.0.join(format!("slot {number}"))
    }

    /// Locks a free slot. Fails if there is none: then more processes work than the capacity allows.
    fn enter(&self) -> File {
        let taken = (0..CAPACITY).find_map(|number| {
            let slot = OpenOptions::new().write(true).open(self.path(number)).unwrap();
            flock(&slot, FlockOperation::NonBlockingLockExclusive).ok().map(|()| slot)
        });
        taken.expect("no more workers than permits")
    }
}

/// In the child: acquires and releases.
pub(crate) async fn play(arguments: &[&str]) {
    let _told = child::lines_from_test();
    let slots = Slots(PathBuf::from(arguments[1]));
    let client = Client::local(arguments[0]).await.unwrap();
    let semaphore = client.semaphore(CROWD, u32::try_from(CAPACITY).unwrap()).build().unwrap();
    let mut rng = Rng::with_seed(arguments[2].parse().unwrap());
    for round in 0..ROUNDS {
        let permit = semaphore.acquire().await.unwrap();
        let slot = slots.enter();
        for _ in 0..rng.u32(0..4) {
            tokio::task::yield_now().await;
        }
        // Another acquire that gives up while it waits, or when it has just been granted the permit.
        let mut other = Box::pin(semaphore.acquire());
        let _ =
            tokio::time::timeout(std::time::Duration::from_micros(rng.u64(0..2000)), &mut other)
                .await;
        drop(slot);
        if rng.bool() {
            assert!(permit.release().await.unwrap());
        } else {
            drop(permit);
        }
        drop(other);
        child::say(&format!("did {round}"));
    }
    client.close().await.unwrap();
    child::say("done");
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn many_processes_share_and_some_are_killed() {
    let store = LocalStore::new();
    let slots = Slots::make(store.directory());
    let path = store.path();
    let start = |seed: usize| {
        let (path, slots) = (path.to_str().unwrap(), slots.0.to_str().unwrap());
        Child::start("hammer", &[path, slots, &seed.to_string()])
    };
    let children: Vec<_> = (0..PROCESSES).map(start).collect();
    let tasks: Vec<_> = children
        .into_iter()
        .enumerate()
        .map(|(number, mut child)| {
            tokio::spawn(async move {
                // Every third process is killed in the middle of its work.
                let last = if number % 3 == 0 {
                    format!("did {}", number % ROUNDS)
                } else {
                    "done".to_owned()
                };
                while child.says().await != last {}
                child.kill();
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("a child that was not killed came to its end");
    }

    let client = open(&store).await;
    let semaphore = client.semaphore(CROWD, u32::try_from(CAPACITY).unwrap()).build().unwrap();
    testkit::counts::assert_all_are_free(&semaphore).await;
    for table in ["holders", "waiters", "evicted"] {
        assert_eq!(count(&store, table), 0, "{table}");
    }
    assert_eq!(count(&store, "clients"), 1);
    let mut files: Vec<_> = std::fs::read_dir(store.clients())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    let client_id = client.id().to_string();
    let mut expected = [client_id.clone(), format!("{client_id}.wake"), "turn".to_owned()];
    expected.sort();
    assert_eq!(files, expected);

    // Its record is removed with the last handle.
    drop(semaphore);
    drop(client);
    eventually(async || count(&store, "clients") == 0).await;
}
