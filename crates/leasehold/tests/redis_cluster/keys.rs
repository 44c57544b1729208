//! How names are spelled in a cluster, and the errors for URLs of other deployments.

use std::time::Duration;

use leasehold::{Client, Error, LockId};
use testkit::redis_cluster::{RedisCluster, slot_of};
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};

use super::{CLUSTER, acquire, connect, semaphore};

/// Returns every key on the primaries that contains this text.
async fn keys_with(text: &'static str) -> Vec<String> {
    CLUSTER
        .blocking(move |cluster| {
            let primaries = (0..3).map(|slot| cluster.primary_of(slot * 6000));
            let keys = primaries.flat_map(|node| cluster.node(node).keys());
            keys.filter(|key| key.contains(text)).collect()
        })
        .await
}

#[tokio::test]
async fn all_keys_of_a_name_are_in_one_slot() {
    let client = connect(&CLUSTER).await;
    let limited = client
        .semaphore("one slot", 3)
        .ttl(Duration::from_secs(60))
        .numbered()
        .rate(1000, Duration::from_secs(1));
    let limited = limited.burst(10).build().unwrap();
    let held = deadline(limited.acquire().weight(2)).await.unwrap();
    let waiter = tokio::spawn(limited.acquire().weight(3).into_future());
    eventually(async || limited.stats().await.unwrap().waiting == 1).await;
    let keys = keys_with("{one slot}").await;
    assert!(keys.len() >= 8, "{keys:?}");
    assert!(keys.contains(&"adv-sem:semaphore_slots:{one slot}".to_owned()), "{keys:?}");
    assert!(keys.iter().all(|key| slot_of(key) == slot_of("one slot")), "{keys:?}");
    held.release().await.unwrap();
    deadline(waiter).await.unwrap().unwrap().release().await.unwrap();
    let all = deadline(client.stats().unused().limit(100_000)).await.unwrap();
    assert!(all.iter().any(|one| one.name == "one slot"));
}

#[tokio::test]
async fn a_name_with_a_hash_tag_is_used_as_it_is() {
    let client = connect(&CLUSTER).await;
    let [one, other] = ["eu{tenant}", "us{tenant}"].map(|name| semaphore(&client, name, 1));
    let held = acquire(&one).await;
    acquire(&other).await.release().await.unwrap();
    let keys = keys_with("eu{tenant}").await;
    assert!(keys.iter().all(|key| key.ends_with(":eu{tenant}")), "{keys:?}");
    assert_eq!(slot_of(&keys[0]), slot_of("tenant"));
    held.release().await.unwrap();
}

#[tokio::test]
async fn names_that_cannot_be_spelled_are_refused() {
    let client = connect(&CLUSTER).await;
    for name in ["{tenant}", "a{", "}", "{}a"] {
        let refused = [
            client.semaphore(name, 1).build().map(drop),
            client.lock(name).build().map(drop),
            client.pool(name, 1).build().map(drop),
        ];
        for refused in refused {
            assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{name}: {refused:?}");
        }
    }
    let builder = Client::redis_builder(&CLUSTER.url()).lock_prefix(&"p".repeat(495));
    let long = deadline(builder.open()).await.unwrap();
    let error = long.lock("key").build().unwrap_err().to_string();
    assert!(error.contains("the limit in a cluster is 1000"), "{error}");
}

/// Other programs can share everything below a namespace with a hash tag: it is all in one slot.
#[tokio::test]
async fn a_namespace_with_a_hash_tag_is_one_slot() {
    let builder =
        Client::redis_builder(&CLUSTER.url()).namespace("{shared}").lock_prefix("{locks}");
    let client = deadline(builder.open()).await.unwrap();
    let held = acquire(&semaphore(&client, "plain", 1)).await;
    let keys = keys_with("{shared}:semaphore_main").await;
    assert_eq!(keys, ["{shared}:semaphore_main:plain"]);
    let waiter = tokio::spawn(semaphore(&client, "plain", 1).acquire());
    held.release().await.unwrap();
    deadline(waiter).await.unwrap().unwrap().release().await.unwrap();

    let lock = client.lock("plain").build().unwrap();
    let guard = deadline(lock.acquire()).await.unwrap();
    let keys = keys_with("{locks}").await;
    assert!(keys.contains(&"{locks}:plain".to_owned()), "{keys:?}");
    assert!(keys.iter().all(|key| slot_of(key) == slot_of("locks")), "{keys:?}");
    let waiting = lock.clone();
    let waiter = tokio::spawn(async move { waiting.acquire().await });
    guard.release().await.unwrap();
    drop(deadline(waiter).await.unwrap().unwrap());
    let refused = Client::redis_builder(&CLUSTER.url()).namespace("{shared").open();
    assert!(matches!(deadline(refused).await, Err(Error::InvalidArgument { .. })));
}

/// The index of a lock id is in another slot than the lock. It leads to the lock, which says whether the id holds it.
#[tokio::test]
async fn a_lock_is_found_by_its_id_and_verified_at_its_key() {
    let client = connect(&CLUSTER).await;
    let (locks, ttl) = (client.locks(), Duration::from_secs(60));
    let id = LockId::random();
    let held = deadline(locks.try_acquire_as("by id", ttl, &id)).await.unwrap().unwrap();
    assert!(deadline(locks.owns(&id)).await.unwrap());
    assert!(deadline(locks.extend(&id, ttl)).await.unwrap());
    let index = format!("syncguard:id:{id}");
    let node = CLUSTER.primary_of_key(&index);
    let found: String = CLUSTER
        .blocking(move |cluster| {
            redis::cmd("GET").arg(index).query(&mut cluster.connection(node)).unwrap()
        })
        .await;
    assert_eq!(found, "{by id}");

    // An index that leads to a lock with another id releases nothing.
    let wrong = LockId::random();
    let index = format!("syncguard:id:{wrong}");
    let node = CLUSTER.primary_of_key(&index);
    CLUSTER
        .blocking(move |cluster| {
            let mut set = redis::cmd("SET");
            set.arg(index).arg("{by id}").exec(&mut cluster.connection(node)).unwrap();
        })
        .await;
    assert!(!deadline(locks.owns(&wrong)).await.unwrap());
    assert!(!deadline(locks.extend(&wrong, ttl)).await.unwrap());
    assert!(!deadline(locks.release(&wrong)).await.unwrap());
    assert!(deadline(locks.is_locked("by id")).await.unwrap());

    assert!(deadline(locks.release(&held.id)).await.unwrap());
    assert!(!deadline(locks.release(&held.id)).await.unwrap());
    assert!(!deadline(locks.is_locked("by id")).await.unwrap());
}

#[tokio::test]
async fn the_url_of_another_deployment_is_named() {
    let plain = RedisServer::start();
    let node = format!("redis://{}", CLUSTER.addresses()[0]);
    let error = deadline(Client::redis(&node)).await.unwrap_err().to_string();
    let address = &CLUSTER.addresses()[0];
    assert!(
        error.contains(&format!("the server is a cluster node: use redis-cluster://{address}")),
        "{error}"
    );
    let url = format!("redis-cluster://127.0.0.1:{}", plain.port());
    let error = deadline(Client::redis(&url)).await.unwrap_err().to_string();
    let expected =
        format!("the server is not a cluster node: use redis://127.0.0.1:{}", plain.port());
    assert!(error.contains(&expected), "{error}");
}

#[tokio::test]
async fn a_cluster_over_tls_is_reached_by_any_of_its_nodes() {
    let cluster = RedisCluster::start_tls(&[]);
    let authority = cluster.ca_certificate().unwrap();
    let builder = Client::redis_builder(&cluster.url_of(&[4])).ca_certificate(authority);
    let client = deadline(builder.open()).await.unwrap();
    for number in 0..10 {
        acquire(&semaphore(&client, &format!("tls {number}"), 1)).await.release().await.unwrap();
    }
}
