use super::*;
use crate::proxy::FaultProxy;
use crate::query::query;
use crate::redis_server::RedisServer;

const DEADLINE: Duration = Duration::from_secs(20);
const LONG: Option<Duration> = Some(Duration::from_secs(1000));

async fn start() -> (RedisServer, Seed000) {
    let server = RedisServer::start();
    let seed = Seed000::connect(&server.url(), "ns").await.unwrap();
    (server, seed)
}

/// The same program on a machine whose clock is ahead, so that timeouts have already passed for it.
async fn ahead(server: &RedisServer, clock_skew: f64) -> Seed000 {
    let options = Options { clock_skew, ..Options::default() };
    Seed000::connect_with(&server.url(), "ns", options).await.unwrap()
}

/// Calls `holds` until it returns true.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < DEADLINE, "not in {DEADLINE:?}: {what}");
    }
}

#[tokio::test]
async fn the_steps_write_the_documented_keys() {
    let (server, seed) = start().await;
    let (mut redis, id) = (server.connection(), new_id());
    assert!(id.len() == 32 && id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')));
    assert_eq!((&id[12..13], "89ab".contains(&id[16..17])), ("4", true));
    let about = |score: f64, ahead: f64| {
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
        assert!((score - now - ahead).abs() < 10.0, "{score} is not {now} + {ahead}");
    };

    seed.queue("n", &id, HEARTBEAT, LONG).await.unwrap();
    assert_eq!(server.keys(), ["ns:semaphore_waiting:n", "ns:semaphore_waiting_heartbeat:n"]);
    let queued: f64 = query(&mut redis, &format!("ZSCORE ns:semaphore_waiting:n {id}"));
    about(queued, 0.0);
    about(query(&mut redis, &format!("ZSCORE ns:semaphore_waiting_heartbeat:n {id}")), 180.0);
    assert_eq!(seed.ping("n", &id).await.unwrap(), (1, 0));
    let score: f64 = query(&mut redis, &format!("ZSCORE ns:semaphore_waiting:n {id}"));
    assert!((score - queued).abs() < f64::EPSILON);

    assert!(!seed.wait_notification(&id, Duration::ZERO).await.unwrap());
    assert_eq!(seed.wake_up_nexts("n", 3, HEARTBEAT, LONG).await.unwrap(), 1);
    let list = format!("ns:acquisition_notification:{id}");
    assert_eq!(server.keys(), [&list, "ns:semaphore_main:n"]);
    about(query(&mut redis, &format!("ZSCORE ns:semaphore_main:n {id}")), 180.0);
    assert_eq!(query::<Vec<String>>(&mut redis, &format!("LRANGE {list} 0 -1")), ["1"]);
    assert!(seed.wait_notification(&id, DEADLINE).await.unwrap());

    assert_eq!(seed.confirm("n", &id, 3, HEARTBEAT, LONG).await.unwrap(), (1, 1));
    assert_eq!(server.keys(), ["ns:semaphore_main:n", "ns:semaphore_max:n", "ns:semaphore_ttl:n"]);
    about(query(&mut redis, &format!("ZSCORE ns:semaphore_ttl:n {id}")), 1000.0);
    assert_eq!(query::<String>(&mut redis, "GET ns:semaphore_max:n"), "3");
    for key in ["main", "ttl", "max"] {
        let left: u64 = query(&mut redis, &format!("TTL ns:semaphore_{key}:n"));
        assert!((1000..=1010).contains(&left), "{key} expires in {left}");
    }

    assert_eq!(seed.ping("n", &id).await.unwrap(), (0, 1));
    assert_eq!(seed.card("n").await.unwrap(), 1);
    assert_eq!(seed.release("n", &id).await.unwrap(), 1);
    assert_eq!(seed.release("n", &id).await.unwrap(), 0);
    assert_eq!(seed.ping("n", &id).await.unwrap(), (0, 0));
    assert_eq!(seed.confirm("n", &id, 3, HEARTBEAT, LONG).await.unwrap(), (0, 0));
    assert_eq!(server.keys(), ["ns:semaphore_max:n"]);
}

#[tokio::test]
async fn slots_are_assigned_in_arrival_order() {
    let (_server, seed) = start().await;
    let ids: Vec<_> = (0..5).map(|_| new_id()).collect();
    for id in &ids {
        seed.queue("n", id, HEARTBEAT, None).await.unwrap();
    }
    assert_eq!(seed.wake_up_nexts("n", 2, HEARTBEAT, None).await.unwrap(), 2);
    assert_eq!(seed.wake_up_nexts("n", 2, HEARTBEAT, None).await.unwrap(), 0);
    for (index, id) in ids.iter().enumerate() {
        let woken = seed.wait_notification(id, Duration::ZERO).await.unwrap();
        assert_eq!(woken, index < 2, "{index}");
    }
    for (leaving, next) in [(1, 2), (0, 3), (2, 4)] {
        seed.release("n", &ids[leaving]).await.unwrap();
        assert_eq!(seed.wake_up_nexts("n", 2, HEARTBEAT, None).await.unwrap(), 1);
        assert!(seed.wait_notification(&ids[next], Duration::ZERO).await.unwrap(), "{next}");
    }
}

#[tokio::test]
async fn acquires_share_a_limit() {
    let (server, seed) = start().await;
    let first = seed.acquire("n", 2, HEARTBEAT, None, None).await.unwrap();
    let second = seed.acquire("n", 2, HEARTBEAT, None, None).await.unwrap();
    assert_eq!((first.slot_number, second.slot_number), (1, 2));
    let waiter = seed.clone();
    let third =
        tokio::spawn(async move { waiter.acquire("n", 2, HEARTBEAT, None, None).await.unwrap() });
    let short = Some(Duration::from_millis(50));
    let fourth = seed.acquire("n", 2, HEARTBEAT, None, short).await;
    assert!(matches!(fourth, Err(AcquireError::Timeout)));
    assert_eq!(query::<u64>(&mut server.connection(), "ZCARD ns:semaphore_waiting:n"), 1);
    seed.release("n", &first.id).await.unwrap();
    let third = tokio::time::timeout(DEADLINE, third).await.unwrap().unwrap();
    assert_eq!((third.slot_number, seed.card("n").await.unwrap()), (2, 2));

    seed.acquire("other", 7, HEARTBEAT, None, None).await.unwrap();
    let stats = seed.stats(None).await.unwrap();
    let n = Stats { acquired_slots: 2, max_slots: Some(2) };
    let other = Stats { acquired_slots: 1, max_slots: Some(7) };
    assert_eq!(stats, [("n".to_owned(), n), ("other".to_owned(), other)].into());
    let named = seed.stats(Some(&["n", "none"])).await.unwrap();
    let none = Stats { acquired_slots: 0, max_slots: None };
    assert_eq!(named, [("n".to_owned(), n), ("none".to_owned(), none)].into());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquire_that_is_dropped_leaves_the_queue() {
    let (server, seed) = start().await;
    seed.acquire("n", 1, HEARTBEAT, None, None).await.unwrap();
    let waiter = seed.clone();
    let task = tokio::spawn(async move { waiter.acquire("n", 1, HEARTBEAT, None, None).await });
    let mut redis = server.connection();
    until("a waiter", || query::<u64>(&mut redis, "EXISTS ns:semaphore_waiting:n") == 1);
    task.abort();
    until("no waiter", || query::<u64>(&mut redis, "EXISTS ns:semaphore_waiting:n") == 0);
    assert_eq!(seed.card("n").await.unwrap(), 1);
}

#[tokio::test]
async fn the_dead_lose_their_slots_and_places() {
    let (server, seed) = start().await;
    let [holder, dead, alive] = [new_id(), new_id(), new_id()];
    for id in [&holder, &dead] {
        seed.queue("n", id, HEARTBEAT, None).await.unwrap();
        seed.wake_up_nexts("n", 1, HEARTBEAT, None).await.unwrap();
    }
    let later = ahead(&server, 1000.0).await;
    later.queue("n", &alive, HEARTBEAT, None).await.unwrap();
    assert_eq!(later.wake_up_nexts("n", 1, HEARTBEAT, None).await.unwrap(), 1);
    assert!(later.wait_notification(&alive, Duration::ZERO).await.unwrap());
    assert_eq!(seed.ping("n", &dead).await.unwrap(), (0, 0));
    assert_eq!(seed.confirm("n", &holder, 1, HEARTBEAT, None).await.unwrap(), (0, 1));
}

#[tokio::test]
async fn a_slot_ends_with_its_ttl_however_alive_its_holder() {
    let (server, seed) = start().await;
    let (id, ttl) = (new_id(), Some(Duration::from_secs(60)));
    seed.queue("n", &id, HEARTBEAT, ttl).await.unwrap();
    seed.wake_up_nexts("n", 1, HEARTBEAT, ttl).await.unwrap();
    seed.confirm("n", &id, 1, HEARTBEAT, ttl).await.unwrap();
    assert_eq!(ahead(&server, 30.0).await.card("n").await.unwrap(), 1);
    assert_eq!(ahead(&server, 70.0).await.card("n").await.unwrap(), 0);
    assert_eq!(
        server.keys(),
        [format!("ns:acquisition_notification:{id}"), "ns:semaphore_max:n".into()]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeats_continue_until_the_client_ends() {
    let (server, seed) = start().await;
    let heartbeat = Duration::from_millis(2400);
    let held = seed.acquire("n", 1, heartbeat, None, None).await.unwrap();
    let (mut redis, score) =
        (server.connection(), format!("ZSCORE ns:semaphore_main:n {}", held.id));
    let before: f64 = query(&mut redis, &score);
    until("two renewals", || query::<f64>(&mut redis, &score) > before + 0.5);
    let other = Seed000::connect(&server.url(), "ns").await.unwrap();
    drop(seed);
    let next = other.acquire("n", 1, heartbeat, None, Some(DEADLINE)).await.unwrap();
    assert_eq!(next.slot_number, 1);
}

#[tokio::test]
async fn polls_without_blocking_after_a_while() {
    let server = RedisServer::start();
    let options = Options { long_polling: Duration::ZERO, ..Options::default() };
    let seed = Seed000::connect_with(&server.url(), "ns", options).await.unwrap();
    seed.acquire("n", 1, HEARTBEAT, None, None).await.unwrap();
    assert_eq!((server.command_count("blpop"), server.command_count("lpop")), (0, 1));
}

/// The program's rule, kept with its flaw: one client's TTL plus ten seconds becomes the expiry of shared keys.
#[tokio::test]
async fn a_short_ttl_shortens_the_life_of_shared_keys() {
    let (server, seed) = start().await;
    for (ttl, most) in [(1000, 1010), (5, 15), (70, 80)] {
        let ttl = Some(Duration::from_secs(ttl));
        seed.queue("n", &new_id(), HEARTBEAT, ttl).await.unwrap();
        let left: u64 = query(&mut server.connection(), "TTL ns:semaphore_waiting:n");
        assert!((most - 4..=most).contains(&left), "{left}");
    }
}

#[tokio::test]
async fn tries_again_on_a_new_connection() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let seed = Seed000::connect(&proxy.url(), "ns").await.unwrap();
    proxy.lose_request(b"ZRANGEBYSCORE");
    assert_eq!(seed.card("n").await.unwrap(), 0);
    assert_eq!((proxy.traffic().lost, proxy.traffic().accepted), (1, 2));
}
