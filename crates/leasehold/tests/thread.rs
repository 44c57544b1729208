//! The engine's thread lives no longer than its client. This test is alone in its file, because it
//! counts the threads of the process.

#![cfg(target_os = "linux")]

use std::fs;
use std::time::Duration;

use leasehold::{Client, Semaphore, SemaphoreBuilder};
use testkit::by_hand::{ByHand, block_on, until};

fn engines() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let named = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm"));
    tasks.flatten().filter_map(|task| named(task).ok()).filter(|name| name == "leasehold\n").count()
}

/// Uses a semaphore of a new client, drops everything, and waits until the thread has ended.
#[track_caller]
fn check(
    declare: impl FnOnce(SemaphoreBuilder) -> SemaphoreBuilder,
    work: impl FnOnce(&Semaphore),
) {
    let client = Client::memory();
    let semaphore = declare(client.semaphore("short-lived", 1)).build().unwrap();
    until(|| engines() == 1);
    work(&semaphore);
    drop((semaphore, client));
    until(|| engines() == 0);
}

fn detach(semaphore: &Semaphore) {
    let _nobody_keeps_it = block_on(semaphore.acquire()).unwrap().detach();
}

#[test]
fn the_engine_ends_with_its_client() {
    const LONG: Duration = Duration::from_secs(600);

    check(|plain| plain, |semaphore| drop(block_on(semaphore.acquire()).unwrap()));
    check(|plain| plain.ttl(LONG), |semaphore| drop(block_on(semaphore.acquire()).unwrap()));
    check(
        |plain| plain.within(LONG),
        |semaphore| {
            let held = block_on(semaphore.acquire()).unwrap();
            let mut waiter = ByHand::new(semaphore.acquire());
            assert!(waiter.poll().is_none());
            drop((waiter, held));
        },
    );
    // A detached permit is held until its client is dropped. It must not keep the client alive.
    check(|plain| plain, detach);
    check(|plain| plain.ttl(LONG), detach);
    check(|plain| plain.label("detached"), detach);
    check(
        |plain| plain,
        |semaphore| {
            let permit = block_on(semaphore.acquire()).unwrap();
            drop(permit.lost());
            let _nobody_keeps_it = permit.detach();
        },
    );
}
