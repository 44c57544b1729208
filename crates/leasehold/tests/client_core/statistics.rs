//! Statistics of long queues do not delay other work of the client.

use std::time::{Duration, Instant};

use testkit::redis_server::RedisServer;
use testkit::wait::deadline;

use super::{NAME, PROMPT, acquire, ask, connect, one, release};

const WAITERS: usize = 100_000;

/// Adds `WAITERS` waiters of another client to the queue.
fn queue_up(server: &RedisServer) {
    let mut connection = server.connection();
    let (seconds, _): (u64, u64) = redis::cmd("TIME").query(&mut connection).unwrap();
    for (kind, score) in [("waiting", seconds), ("waiting_heartbeat", seconds + 3600)] {
        let key = format!("adv-sem:semaphore_{kind}:{NAME}");
        for first in (0..WAITERS).step_by(10_000) {
            let mut add = redis::cmd("ZADD");
            add.arg(&key);
            for nth in first..first + 10_000 {
                add.arg(score).arg(format!("{:011}-{nth}", 7));
            }
            let _: usize = add.query(&mut connection).unwrap();
        }
    }
}

fn connections(server: &RedisServer) -> Vec<String> {
    let list: String = ask(server, &["CLIENT", "LIST"]);
    let users = list.lines().filter(|line| !line.contains("user=fixture"));
    users.filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

#[tokio::test]
async fn listing_a_hundred_thousand_waiters_holds_up_nobody() {
    let server = RedisServer::start();
    let client = connect(&server.url()).await;
    let held = acquire(&one(&client)).await;
    queue_up(&server);
    // Statistics have their own connection.
    deadline(client.stats().names([NAME])).await.unwrap();
    let before = connections(&server);

    let stats = client.stats().names([NAME]).waiters();
    let mut stats = tokio::spawn(async move { stats.await });
    let elsewhere = client.semaphore("elsewhere", 1).build().unwrap();
    let (mut slowest, mut asked) = (Duration::ZERO, 0);
    let fetched = loop {
        let begun = Instant::now();
        assert!(release(acquire(&elsewhere).await).await);
        slowest = slowest.max(begun.elapsed());
        asked += 1;
        if let Ok(fetched) = tokio::time::timeout(Duration::from_millis(1), &mut stats).await {
            break fetched;
        }
    };
    let stats = deadline(async { fetched.unwrap() }).await.unwrap();
    assert_eq!((stats[0].waiting, stats[0].waiters.len()), (WAITERS, WAITERS));
    assert_eq!(connections(&server), before, "the client has reconnected");
    assert!(slowest < PROMPT, "one of {asked} acquires took {slowest:?}");
    drop(held);
}
