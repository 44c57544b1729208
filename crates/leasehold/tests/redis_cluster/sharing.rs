//! Another program that shares a semaphore with us in a cluster: the stand-in for asyncio-advanced-semaphores.

use std::time::Duration;

use leasehold::Client;
use testkit::redis_cluster::slot_of;
use testkit::seed000::Seed000;
use testkit::wait::{deadline, eventually};

use super::{CLUSTER, acquire, connect, semaphore};

const HEARTBEAT: Duration = Duration::from_secs(60);

/// Returns the other program, connected to the node that has this key.
async fn other_program(key: &str, namespace: &str) -> Seed000 {
    let node = CLUSTER.primary_of(slot_of(key));
    let url = format!("redis://{}", CLUSTER.addresses()[node]);
    Seed000::connect(&url, namespace).await.unwrap()
}

/// Below a namespace with a hash tag everything is in one slot, and both programs wait in one queue.
#[tokio::test]
async fn both_wait_in_one_queue_below_a_namespace_with_a_tag() {
    let namespace = "{shared queue}";
    let builder = Client::redis_builder(&CLUSTER.url()).namespace(namespace);
    let ours = semaphore(&deadline(builder.open()).await.unwrap(), "both", 1);
    let theirs = other_program(namespace, namespace).await;

    let held = acquire(&ours).await;
    let waiting = tokio::spawn(async move {
        let acquired = theirs.acquire("both", 1, HEARTBEAT, None, None).await;
        (theirs, acquired.expect("our release hands the permit over to it"))
    });
    eventually(async || ours.stats().await.unwrap().waiting == 1).await;
    held.release().await.unwrap();
    let (theirs, acquired) = deadline(waiting).await.unwrap();

    let waiter = tokio::spawn(ours.acquire());
    eventually(async || ours.stats().await.unwrap().waiting == 1).await;
    assert_eq!(theirs.release("both", &acquired.id).await.unwrap(), 1);
    deadline(waiter).await.unwrap().unwrap().release().await.unwrap();
}

/// Under the spelling of a single name the other program can hold, and is counted. Its waiters
/// cannot be notified, so they are skipped.
#[tokio::test]
async fn a_name_is_shared_under_its_spelling() {
    let client = connect(&CLUSTER).await;
    let ours = semaphore(&client, "spelled", 1);
    let theirs = other_program("spelled", "adv-sem").await;
    let id = testkit::seed000::new_id();
    theirs.queue("{spelled}", &id, HEARTBEAT, None).await.unwrap();
    acquire(&ours).await.release().await.unwrap();
    assert_eq!(theirs.release("{spelled}", &id).await.unwrap(), 0, "it was never granted a permit");

    let held = acquire(&ours).await;
    assert_eq!(theirs.card("{spelled}").await.unwrap(), 1);
    held.release().await.unwrap();
}
