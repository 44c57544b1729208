//! What a server may do: restart, forget scripts, refuse commands, and expire keys.

use std::time::{Duration, Instant};

use leasehold::{Error, LossReason};
use testkit::proxy::FaultProxy;
use testkit::redis_server::RedisServer;
use testkit::wait::{deadline, eventually};

use super::{
    AT_ONCE, Keys, LEASE, Waiter, acquire, all_are_free, builder, connect, held_and_waiting, one,
    one_beating, release,
};

#[tokio::test]
async fn a_server_that_comes_back_empty_ends_permits_and_queues_waiters_again() {
    let server = RedisServer::start();
    let (holder, other) = (connect(&server.url()).await, connect(&server.url()).await);
    let held = acquire(&one(&holder)).await;
    let waiters = [
        Waiter::join(&one(&holder)).await,
        Waiter::join(&one(&other)).await,
        Waiter::join(&one(&other)).await,
    ];
    server.restart_empty();

    assert_eq!(deadline(held.lost()).await, LossReason::Missing);
    held.check().unwrap_err();
    assert!(!release(held).await, "there was nothing to release");
    let semaphore = one(&other);
    let mut tasks = tokio::task::JoinSet::new();
    for waiter in waiters {
        tasks.spawn(async move { assert!(release(waiter.permit().await).await) });
    }
    deadline(tasks.join_all()).await;
    all_are_free(&semaphore).await;
}

#[tokio::test]
async fn a_server_that_comes_back_with_its_data_ends_nothing() {
    let server = RedisServer::start();
    let (holder, other) = (connect(&server.url()).await, connect(&server.url()).await);
    let held = acquire(&one(&holder)).await;
    let waiter = Waiter::join(&one(&other)).await;
    let fence = held.fence();
    server.restart();

    let looking = connect(&server.url()).await;
    assert_eq!(held_and_waiting(&one(&looking)).await, (1, 1));
    held.check().unwrap();
    assert!(release(held).await);
    let permit = waiter.permit().await;
    assert!(permit.fence() > fence);
    assert!(release(permit).await);
    all_are_free(&one(&looking)).await;
}

/// A client that reconnects closes its old connection by its id. A restarted server counts ids
/// anew, so that id may belong to another client's connection.
#[tokio::test]
async fn the_connections_of_others_outlive_a_restart() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    // So that the id is high enough for others to get it again.
    let others: Vec<_> = (0..5).map(|_| server.connection()).collect();
    let client = connect(&proxy.url()).await;
    let (before, _) = Keys::of(&server).connections().pop_first().unwrap();
    drop(others);
    proxy.refuse(true);
    server.restart_empty();

    let mut others = Vec::new();
    loop {
        let mut other = server.connection();
        let id: u64 = redis::cmd("CLIENT").arg("ID").query(&mut other).unwrap();
        assert!(id <= before, "{before} has been passed");
        others.push(other);
        if id == before {
            break;
        }
    }
    proxy.refuse(false);
    assert!(release(acquire(&one(&client)).await).await);
    for mut other in others {
        let alive: redis::RedisResult<String> = redis::cmd("PING").query(&mut other);
        assert!(alive.is_ok(), "another client's connection was closed");
    }
}

#[tokio::test]
async fn scripts_may_be_flushed_at_any_time() {
    let server = RedisServer::start();
    let (client, other) = (connect(&server.url()).await, connect(&server.url()).await);
    let tasks: Vec<_> = [&client, &client, &client, &other, &other, &other]
        .into_iter()
        .map(|client| {
            let semaphore = client.semaphore("x", 2).build().unwrap();
            tokio::spawn(async move {
                for _ in 0..50 {
                    assert!(semaphore.acquire().await.unwrap().release().await.unwrap());
                }
            })
        })
        .collect();
    let mut keys = Keys::of(&server);
    let mut flushed = 0;
    deadline(async {
        while tasks.iter().any(|task| !task.is_finished()) {
            let _: () = keys.ask("SCRIPT", &["FLUSH"]);
            flushed += 1;
            tokio::task::yield_now().await;
        }
    })
    .await;
    for task in tasks {
        deadline(task).await.unwrap();
    }
    assert!(flushed >= 20, "flushed only {flushed} times");
    all_are_free(&client.semaphore("x", 2).build().unwrap()).await;
}

#[tokio::test]
async fn a_connection_loads_only_the_scripts_that_are_missing() {
    let server = RedisServer::start();
    let mut keys = Keys::of(&server);
    let mut cached = || {
        let info: String = keys.ask("INFO", &["memory"]);
        let count = info.lines().find_map(|line| line.strip_prefix("number_of_cached_scripts:"));
        count.unwrap().parse::<usize>().unwrap()
    };
    let _first = connect(&server.url()).await;
    let all = cached();
    assert!(all > 0, "the first connection has loaded the scripts");
    let proxy = FaultProxy::start(server.port());
    let _second = connect(&proxy.url()).await;
    let sent = proxy.traffic().bytes_to_server;
    assert!(sent < 2048, "the second connection has sent {sent} bytes");
    let _: () = Keys::of(&server).ask("SCRIPT", &["FLUSH"]);
    let _third = connect(&proxy.url()).await;
    assert_eq!(cached(), all);
}

#[tokio::test]
async fn a_user_without_rights_on_our_channel_is_told_so_and_leaves_nothing() {
    let server = RedisServer::start_with(&["--user app on >secret ~* resetchannels +@all"]);
    let url = server.url_with("app", "secret");
    let begun = Instant::now();
    let error = deadline(super::Client::redis(&url)).await.unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(1), "a retry does not help");
    assert!(matches!(error, Error::Denied { .. }), "{error}");
    assert!(error.to_string().contains("adv-sem:wake:"), "{error}");
    assert!(!format!("{error} {error:?}").contains("secret"));
    eventually(async || server.connected_clients() == 0).await;
    assert_eq!(Keys::of(&server).ask::<u64>("DBSIZE", &[]), 0);
}

#[tokio::test]
async fn a_short_ttl_beside_others_shortens_nothing() {
    let server = RedisServer::start();
    let (holder, other) = (connect(&server.url()).await, connect(&server.url()).await);
    let held = acquire(&one(&holder)).await;
    let waiter = Waiter::join(&one(&holder)).await;
    let kinds = ["main", "info", "waiting", "waiting_heartbeat"];
    let mut keys = Keys::of(&server);
    let before = kinds.map(|kind| keys.expires_in(kind));

    let short = other.semaphore("x", 1).ttl(Duration::from_secs(1)).build().unwrap();
    let limit = Duration::from_millis(100);
    let error = deadline(short.acquire().within(limit)).await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    eventually(async || held_and_waiting(&short).await == (1, 1)).await;

    for (kind, before) in kinds.into_iter().zip(before) {
        let now = keys.expires_in(kind);
        assert!(before > 30_000, "{kind} would expire in {before} ms, within the heartbeat");
        assert!(now > before - 5000, "{kind} expires in {now} ms instead of {before}");
    }
    held.check().unwrap();
    assert!(release(held).await);
    assert!(release(waiter.permit().await).await);
}

/// A member that is renewed must not lose the keys in which it is stored.
#[tokio::test]
async fn keys_do_not_expire_while_their_members_are_renewed() {
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    let semaphore = one_beating(&client, LEASE);
    let held = acquire(&semaphore).await;
    let waiter = Waiter::join(&semaphore).await;
    let mut keys = Keys::of(&server);
    // As if only renewals had arrived for some seconds.
    let kinds = ["main", "info", "waiting", "waiting_heartbeat"];
    for kind in kinds {
        let _: u64 = keys.ask("PEXPIRE", &[&Keys::key(kind), "3000"]);
    }
    let begun = Instant::now();
    let short = |keys: &mut Keys| {
        kinds.into_iter().filter(|kind| keys.expires_in(kind) < 5000).collect::<Vec<_>>()
    };
    while !short(&mut keys).is_empty() {
        let late = begun.elapsed() > Duration::from_millis(2500);
        assert!(!late, "{:?} will expire while they have members", short(&mut keys));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    held.check().unwrap();
    let released = Instant::now();
    assert!(release(held).await);
    let (at, permit) = waiter.granted().await;
    assert!(at - released < AT_ONCE);
    assert!(release(permit).await);
}

/// The name with the wrong key gets the error. The other names in the same script are not affected.
#[tokio::test]
async fn a_key_of_another_type_spoils_one_name_alone() {
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    Keys::of(&server).ask::<String>("SET", &["adv-sem:semaphore_main:name-7", "not ours"]);
    let semaphores: Vec<_> =
        (0..200).map(|nth| client.semaphore(&format!("name-{nth}"), 1).build().unwrap()).collect();
    let acquires = semaphores.iter().cloned();
    let acquires: Vec<_> =
        acquires.map(|semaphore| tokio::spawn(async move { semaphore.acquire().await })).collect();
    for (nth, acquire) in acquires.into_iter().enumerate() {
        let permit = deadline(acquire).await.unwrap();
        assert_eq!(permit.is_ok(), nth != 7, "name-{nth}: {permit:?}");
    }
}

/// The primary became a replica, and keeps its connections open.
#[tokio::test]
async fn a_primary_that_became_a_replica_is_left() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::start(old.port());
    let client = connect(&proxy.url()).await;
    let semaphore = one(&client);
    release(acquire(&semaphore).await).await;
    proxy.redirect(new.port());
    let port = new.port().to_string();
    Keys::of(&old).ask::<String>("REPLICAOF", &["127.0.0.1", &port]);
    eventually(async || match deadline(semaphore.acquire()).await {
        Ok(permit) => release(permit).await,
        Err(error) => {
            assert!(error.to_string().contains("read-only replica"), "{error}");
            false
        }
    })
    .await;
}

/// The server sends the reason, and closes the connection.
#[tokio::test]
async fn a_server_that_is_full_says_so() {
    let server = RedisServer::start();
    let mut keeper = server.connection();
    let client = connect(&server.url()).await;
    let full = |keeper: &mut redis::Connection, limit: &str| {
        redis::cmd("CONFIG").arg("SET").arg("maxclients").arg(limit).exec(keeper).unwrap();
    };
    full(&mut keeper, "1");
    for _ in 0..10 {
        for url in [server.url(), server.unix_url()] {
            let error = deadline(builder(&url).open()).await.unwrap_err();
            assert!(matches!(error, Error::Unavailable { timed_out: false, .. }), "{error}");
            assert!(error.to_string().contains("max number of clients reached"), "{error}");
        }
    }
    // A client that loses its connection gets the same error, and continues once there is room.
    for kind in ["normal", "pubsub"] {
        redis::cmd("CLIENT").arg("KILL").arg("TYPE").arg(kind).exec(&mut keeper).unwrap();
    }
    let late = one(&client).acquire().within(AT_ONCE * 2);
    let error = deadline(late).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { timed_out: false, .. }), "{error}");
    assert!(error.to_string().contains("max number of clients reached"), "{error}");
    full(&mut keeper, "100");
    assert!(release(acquire(&one(&client)).await).await);
}

/// A server becomes a replica and keeps its connections. Its new primary grants a permit to the first waiter, which
/// does not listen there. Redis still replicates the message to the replica, where that waiter listens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_a_replica_passes_on_grants_nothing() {
    let options = ["--repl-diskless-sync-delay 0"];
    let (old, new) = (RedisServer::start_with(&options), RedisServer::start_with(&options));
    let mut follow = redis::cmd("REPLICAOF");
    follow.arg("127.0.0.1").arg(old.port());
    follow.exec(&mut new.connection()).unwrap();
    let follows = |server: &RedisServer| {
        let info: String =
            redis::cmd("INFO").arg("replication").query(&mut server.connection()).unwrap();
        info.contains("role:slave") && info.contains("master_link_status:up")
    };
    eventually(async || follows(&new)).await;

    let proxy = FaultProxy::start(old.port());
    let (holder, other) = (connect(&proxy.url()).await, connect(&proxy.url()).await);
    let held = acquire(&one(&holder)).await;
    // Far back in the queue, the waiter's client asks rarely, so it does not notice that its server became a replica.
    let ahead: Vec<_> = (0..60).map(|_| tokio::spawn(one(&holder).acquire())).collect();
    eventually(async || held_and_waiting(&one(&holder)).await == (1, 60)).await;
    let waiter = tokio::spawn(one(&other).acquire());
    eventually(async || held_and_waiting(&one(&holder)).await == (1, 61)).await;
    // The client of a new waiter asks once more after a second, and then rarely.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    for one in ahead {
        one.abort();
    }
    eventually(async || held_and_waiting(&one(&holder)).await == (1, 1)).await;
    redis::cmd("FAILOVER").exec(&mut old.connection()).unwrap();
    eventually(async || follows(&old)).await;
    proxy.redirect(new.port());

    let late = connect(&proxy.url()).await;
    let second = one(&late).acquire();
    let id = second.id();
    let second = tokio::spawn(second);
    eventually(async || one(&late).position(&id).await.unwrap() == Some(1)).await;
    assert!(deadline(one(&late).release(&held.id())).await.unwrap());
    // If the first waiter's client has found the new primary by now, the first waiter has the permit.
    eventually(async || second.is_finished() || waiter.is_finished()).await;
    let until = Instant::now() + Duration::from_millis(500);
    while Instant::now() < until {
        assert!(!(second.is_finished() && waiter.is_finished()), "two clients hold one permit");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
