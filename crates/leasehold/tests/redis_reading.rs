//! Statistics on Redis: read over their own connections, page by page, even by a user who may only read.

#![cfg(feature = "redis")]

use std::time::Duration;

use leasehold::{Client, Error};
use testkit::by_hand::ByHand;
use testkit::redis_cluster::RedisCluster;
use testkit::redis_server::RedisServer;
use testkit::users::{PASSWORD, add_users};
use testkit::wait::{deadline, eventually};

const MINUTE: Duration = Duration::from_secs(60);

/// More than two pages of replies.
const CROWD: usize = 1200;

async fn connect(url: &str) -> Client {
    deadline(Client::redis(url)).await.unwrap()
}

async fn connect_to_read(url: &str) -> Client {
    deadline(Client::redis_builder(url).read_only().open()).await.unwrap()
}

/// Sets up a holder, a waiter, a lock and a pool, and checks what a user who may only read sees of them.
async fn a_reader_sees_all(user: &str, reader: &str) {
    let client = connect(user).await;
    let semaphore = client.semaphore("api", 1).label("mails").build().unwrap();
    let held = deadline(semaphore.acquire()).await.unwrap();
    let mut waits = ByHand::new(semaphore.acquire());
    assert!(waits.poll().is_none());
    let lock = deadline(client.lock("invoice").lease(MINUTE).build().unwrap().acquire()).await;
    let pool = client.pool("encoders", 2).build().unwrap();
    let _id = deadline(pool.acquire("worker-1")).await.unwrap().detach();

    let reading = connect_to_read(reader).await;
    let stats = || reading.stats().names(["api"]).waiters();
    eventually(async || deadline(stats()).await.unwrap()[0].waiting == 1).await;
    let stats = deadline(stats()).await.unwrap().pop().unwrap();
    assert_eq!((stats.held, stats.waiting, stats.waiters.len()), (1, 1, 1));
    assert_eq!(stats.holders[0].label.as_deref(), Some("mails"));
    let all = deadline(reading.stats()).await.unwrap();
    assert_eq!(all.iter().map(|one| &*one.name).collect::<Vec<_>>(), ["api"]);
    let locks = deadline(reading.locks().list(10)).await.unwrap();
    assert_eq!(locks.iter().map(|lock| lock.key.as_str()).collect::<Vec<_>>(), ["invoice"]);
    let found = deadline(reading.locks().lookup("invoice")).await.unwrap();
    assert_eq!(found.map(|info| info.fence), Some(lock.as_ref().unwrap().fence()));
    assert!(deadline(reading.locks().is_locked("invoice")).await.unwrap());
    assert!(deadline(reading.locks().lookup("another")).await.unwrap().is_none());
    let pools = deadline(reading.pools().list(10)).await.unwrap();
    assert_eq!((pools.len(), pools[0].members[0].id.as_str()), (1, "worker-1"));
    let clients = async || deadline(reading.clients(10)).await.unwrap();
    eventually(async || clients().await.iter().any(|one| one.id == client.id().to_string())).await;
    assert_eq!(clients().await.len(), 1, "a client that only reads has no record");

    let refused =
        |what: Result<(), Error>| assert!(matches!(what, Err(Error::Denied { .. })), "{what:?}");
    let semaphore = reading.semaphore("api", 1).build().unwrap();
    refused(deadline(semaphore.acquire()).await.map(drop));
    refused(deadline(semaphore.try_acquire()).await.map(drop));
    refused(deadline(semaphore.pause().into_future()).await);
    refused(deadline(semaphore.set_capacity(5)).await);
    refused(deadline(semaphore.release(&held.id())).await.map(drop));
    refused(deadline(reading.lock("other").build().unwrap().try_acquire()).await.map(drop));
    refused(deadline(reading.pool("encoders", 2).build().unwrap().acquire("me")).await.map(drop));
    // The close reports the release that was refused.
    refused(deadline(reading.close()).await);
    assert!(held.check().is_ok());
}

#[tokio::test]
async fn a_user_who_may_only_read_sees_all_and_changes_nothing() {
    let server = RedisServer::start();
    add_users(&mut server.connection());
    let (user, reader) = ("leasehold", "leasehold-reader");
    let url = |user| server.url_with(user, PASSWORD);
    a_reader_sees_all(&url(user), &url(reader)).await;

    let reader = redis::Client::open(url(reader)).unwrap();
    let mut connection = reader.get_connection().unwrap();
    for forbidden in [
        &["SET", "adv-sem:x", "1"][..],
        &["EVAL", "return 1", "0"],
        &["GET", "another key"],
        &["SUBSCRIBE", "adv-sem:wake:x"],
        &["FLUSHALL"],
        &["KEYS", "*"],
    ] {
        let done = redis::cmd(forbidden[0]).arg(&forbidden[1..]).exec(&mut connection);
        assert_eq!(done.unwrap_err().code(), Some("NOPERM"), "{forbidden:?}");
    }
    let user = redis::Client::open(url(user)).unwrap();
    let mut connection = user.get_connection().unwrap();
    for forbidden in [&["SET", "another key", "1"][..], &["FLUSHALL"], &["CONFIG", "GET", "*"]] {
        let done = redis::cmd(forbidden[0]).arg(&forbidden[1..]).exec(&mut connection);
        assert_eq!(done.unwrap_err().code(), Some("NOPERM"), "{forbidden:?}");
    }
}

#[tokio::test]
async fn so_they_do_in_a_cluster() {
    let cluster = RedisCluster::start();
    let (user, reader) = cluster
        .blocking(|cluster| {
            for node in cluster.nodes() {
                add_users(&mut node.connection());
            }
            let url = |user| cluster.url_with(user, PASSWORD);
            (url("leasehold"), url("leasehold-reader"))
        })
        .await;
    a_reader_sees_all(&user, &reader).await;
}

#[tokio::test]
async fn statistics_have_a_connection_and_a_thread_of_their_own() {
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    let held = deadline(client.semaphore("api", 1).build().unwrap().acquire()).await.unwrap();
    let before = server.client_list();
    deadline(client.stats()).await.unwrap();
    deadline(client.locks().list(10)).await.unwrap();
    deadline(client.pools().list(10)).await.unwrap();
    let after = server.client_list();
    assert_eq!(after.len(), before.len() + 1, "{after:?}");
    let id = |line: &String| line.split(' ').next().map(str::to_owned);
    let old: Vec<_> = before.iter().map(id).collect();
    let asks = |line: &&String| {
        ["zrange", "scan", "time", "get"].iter().any(|own| line.contains(&format!("cmd={own} ")))
    };
    let asked: Vec<_> = after.iter().filter(asks).map(id).collect();
    assert!(asked.iter().all(|id| !old.contains(id)), "{after:?}");
    #[cfg(target_os = "linux")]
    assert!(threads().contains(&"leasehold-stats".to_owned()), "{:?}", threads());
    // Both end with their client.
    drop((held, client));
    eventually(async || server.client_list().len() < before.len()).await;
}

#[cfg(target_os = "linux")]
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
    tasks.filter_map(|task| name(task.ok()?).ok()).map(|name| name.trim().to_owned()).collect()
}

#[tokio::test]
async fn a_long_queue_is_read_in_pages() {
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    let semaphore = client.semaphore("api", 1).build().unwrap();
    let held = deadline(semaphore.acquire()).await.unwrap();
    let mut waiters: Vec<_> = (0..CROWD).map(|_| ByHand::new(semaphore.acquire())).collect();
    assert!(waiters.iter_mut().all(|waiter| waiter.poll().is_none()));
    let asked = || client.stats().names(["api"]);
    eventually(async || deadline(asked()).await.unwrap()[0].waiting == CROWD).await;
    let ids = async |places| {
        let stats = deadline(asked().waiters_in(places)).await.unwrap().pop().unwrap();
        stats.waiters.iter().map(|waiter| waiter.id.clone()).collect::<Vec<_>>()
    };
    let all = ids(0..usize::MAX).await;
    assert_eq!(all.len(), CROWD);
    assert_eq!(ids(490..1010).await, all[490..1010]);
    assert_eq!(ids(CROWD - 1..CROWD + 5).await, all[CROWD - 1..]);
    drop((waiters, held));
}

#[tokio::test]
async fn more_holders_than_a_page_are_all_counted() {
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    let semaphore = client.semaphore("api", 2000).build().unwrap();
    let mut held = Vec::new();
    for acquire in (0..CROWD).map(|_| semaphore.acquire()).collect::<Vec<_>>() {
        held.push(deadline(acquire).await.unwrap());
    }
    let stats = deadline(semaphore.stats()).await.unwrap();
    assert_eq!((stats.held as usize, stats.held_units as usize), (CROWD, CROWD));
}

/// After an outage the same client reads again.
#[tokio::test]
async fn statistics_are_read_again_after_an_outage() {
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    deadline(client.stats()).await.unwrap();
    server.kill();
    let builder = Client::redis_builder(&server.url()).read_only();
    let error = deadline(builder.open()).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    server.restart_empty();
    eventually(async || deadline(client.stats()).await.is_ok()).await;
}

/// Keys of other programs neither hide ours nor make a listing fail.
#[tokio::test]
async fn keys_of_other_programs_do_not_end_a_listing() {
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    let held = deadline(client.semaphore("api", 1).build().unwrap().acquire()).await.unwrap();
    let pool = client.pool("encoders", 2).build().unwrap();
    let _id = deadline(pool.acquire("worker-1")).await.unwrap().detach();
    let introduced = format!("adv-sem:client:{}", client.id());
    let mut connection = server.connection();
    let mut run = |command: &str, arguments: &[&[u8]]| {
        redis::cmd(command).arg(arguments).exec(&mut connection).unwrap();
    };
    run("ZADD", &[b"semaphores:foreign", b"1", b"\xff\xfe"]);
    run("SET", &[b"semaphores:text", b"x"]);
    run("DEL", &[introduced.as_bytes()]);
    run("SET", &[introduced.as_bytes(), b"x"]);
    let all = deadline(client.stats()).await.unwrap();
    assert_eq!(all.iter().map(|one| (&*one.name, one.held)).collect::<Vec<_>>(), [("api", 1)]);
    let pools = deadline(client.pools().list(10)).await.unwrap();
    assert_eq!(pools.iter().map(|one| &*one.name).collect::<Vec<_>>(), ["encoders", "foreign"]);
    assert_eq!(pools[1].members[0].id, "\u{fffd}\u{fffd}");
    drop(held);
}

/// What a user may not read is refused, and not reported as empty.
#[tokio::test]
async fn a_listing_without_permission_is_refused() {
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    let pool = client.pool("encoders", 2).build().unwrap();
    let _id = deadline(pool.acquire("worker-1")).await.unwrap().detach();
    let rules = ["on", ">secret", "~other:*", "+@read", "+@connection", "+info", "+time"];
    let mut user = redis::cmd("ACL");
    user.arg("SETUSER").arg("narrow").arg(&rules).exec(&mut server.connection()).unwrap();
    let reading = connect_to_read(&server.url_with("narrow", "secret")).await;
    let pools = deadline(reading.pools().list(10)).await;
    assert!(matches!(pools, Err(Error::Denied { .. })), "{pools:?}");
    let clients = async || deadline(reading.clients(10)).await;
    eventually(async || matches!(clients().await, Err(Error::Denied { .. }))).await;
}

/// Renewed holders move to the end, and the others move up meanwhile.
#[tokio::test]
async fn holders_that_are_renewed_between_two_pages_are_all_counted() {
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    let (key, far) = ("adv-sem:semaphore_main:api", 9_000_000_000_usize);
    let renew = move |holder: usize, score: usize| {
        redis::cmd("ZADD").arg(key).arg(score).arg(format!("other{holder}")).to_owned()
    };
    let mut connection = server.connection();
    for holder in 0..CROWD {
        renew(holder, far + holder).exec(&mut connection).unwrap();
    }
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let renewing = std::thread::spawn(move || {
        let mut at = CROWD;
        while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            renew(at % CROWD, far + at).exec(&mut connection).unwrap();
            at += 1;
        }
    });
    for _ in 0..10 {
        let stats = deadline(client.stats().names(["api"])).await.unwrap();
        assert_eq!(stats[0].held as usize, CROWD);
    }
    drop(stop);
    renewing.join().unwrap();
}

/// Other programs may have written anything. Neither the server's scripts nor the client read a value that is much longer
/// than ours can be.
#[tokio::test]
async fn long_values_of_other_programs_are_not_read() {
    const LONGEST: usize = 100_000_000;
    const LONG: usize = 5_000_000;
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    let semaphore = client.semaphore("api", 2).label("mails").build().unwrap();
    let held = deadline(semaphore.acquire()).await.unwrap();
    let other = deadline(semaphore.acquire()).await.unwrap();
    let mut db = server.connection();
    let record = "adv-sem:client:another";
    let mut set = |key: &str, bytes: usize| {
        redis::cmd("SETRANGE").arg(key).arg(bytes - 1).arg("7").exec(&mut db).unwrap();
    };
    let id = testkit::seed003::new_lock_id();
    set("syncguard:invoice", LONGEST);
    for key in [&*format!("syncguard:id:{id}"), "adv-sem:semaphore_max:long"] {
        set(key, LONG);
    }
    set("adv-sem:semaphore_limits:long", LONG);
    let mut set_field = |key: &str, field: &str, bytes: usize| {
        // A thousand at once, because that is faster.
        let script = "redis.call('HSET', KEYS[1], ARGV[1], string.rep(string.rep('7', 1000), ARGV[2] / 1000))";
        let script = redis::Script::new(script);
        script.key(key).arg(field).arg(bytes).invoke::<()>(&mut db).unwrap();
    };
    set_field("adv-sem:semaphore_info:api", &held.id().to_string(), LONGEST);
    for field in ["host", "pid", "program", "since"] {
        set_field(record, field, LONG);
    }

    let output = |db: &mut redis::Connection| -> u64 {
        let info: String = redis::cmd("INFO").arg("stats").query(db).unwrap();
        let line = info.lines().find_map(|line| line.strip_prefix("total_net_output_bytes:"));
        line.unwrap().trim().parse().unwrap()
    };
    let before = output(&mut db);
    for reading in [&client, &connect_to_read(&server.url()).await] {
        let stats = deadline(reading.stats().names(["api"])).await.unwrap().pop().unwrap();
        let label = |id: &str| {
            let member = stats.holders.iter().find(|member| member.id == id).unwrap();
            member.label.clone()
        };
        assert_eq!(label(&held.id().to_string()), None);
        assert_eq!(label(&other.id().to_string()), Some("mails".to_owned()));
        let all = deadline(reading.stats()).await.unwrap();
        assert_eq!(all.iter().map(|one| &*one.name).collect::<Vec<_>>(), ["api"]);
        let clients = deadline(reading.clients(10)).await.unwrap();
        let found = clients.iter().find(|one| one.id == "another").unwrap();
        assert_eq!((&found.host, found.pid, &found.program), (&None, None, &None));
        assert!(deadline(reading.locks().list(10)).await.unwrap().is_empty());
        let named = |error: Error| {
            let text = error.to_string();
            assert!(text.contains("syncguard:") && text.len() < 1000, "{} bytes", text.len());
        };
        named(deadline(reading.locks().lookup("invoice")).await.unwrap_err());
        named(deadline(reading.locks().is_locked("invoice")).await.unwrap_err());
    }
    let locks = client.locks();
    let lock = client.lock("invoice").build().unwrap();
    assert!(deadline(lock.try_acquire()).await.is_err());
    assert!(deadline(locks.release(&id.parse().unwrap())).await.is_err());
    assert!(output(&mut db) - before < 1_000_000, "{} bytes", output(&mut db) - before);
    drop((held, other));
}
