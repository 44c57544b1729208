//! Processes of both programs share a queue, and one of them is killed every second.

use std::time::{Duration, Instant};

use leasehold::Client;
use testkit::child::{self, Child};
use testkit::redis_server::RedisServer;
use testkit::seed000::Seed000;

use crate::both::{NAME, NAMESPACE};

/// The heartbeat interval of every process, whichever program it runs.
const HEARTBEAT: Duration = Duration::from_secs(3);
/// With a TTL, the other program sets an expiry on its keys, including the capacity.
const TTL: Duration = Duration::from_secs(6);
const CAPACITY: u32 = 3;
const PROCESSES: usize = 8;
const LASTS: Duration = Duration::from_secs(40);
const BETWEEN_KILLS: Duration = Duration::from_secs(1);
const HELD: Duration = Duration::from_millis(30);

/// In the child: acquires and releases until it is killed, and reports each grant.
pub(crate) fn play(part: &str, arguments: &[&str]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let _told = child::lines_from_test();
        match part {
            "ours" => our_program(arguments[0]).await,
            "theirs" => their_program(arguments[0]).await,
            _ => unreachable!("unknown part {part:?}"),
        }
    });
}

async fn our_program(url: &str) {
    let client = Client::redis(url).await.unwrap();
    let semaphore = client.semaphore(NAME, CAPACITY).lease(HEARTBEAT).ttl(TTL).build().unwrap();
    loop {
        let Ok(permit) = semaphore.acquire().await else { continue };
        child::say("ours");
        tokio::time::sleep(HELD).await;
        permit.release().await.unwrap();
    }
}

async fn their_program(url: &str) {
    let client = Seed000::connect(url, NAMESPACE).await.unwrap();
    loop {
        let acquire = client.acquire(NAME, u64::from(CAPACITY), HEARTBEAT, Some(TTL), None);
        // The slot was considered dead. The document says to start again.
        let Ok(acquired) = acquire.await else { continue };
        child::say("theirs");
        tokio::time::sleep(HELD).await;
        client.release(NAME, &acquired.id).await.unwrap();
    }
}

fn start(part: &'static str, server: &RedisServer) -> (Child, &'static str) {
    (Child::start(part, &[&server.url()]), part)
}

#[tokio::test]
async fn killed_processes_of_either_program_stop_the_queue_for_no_longer_than_two_heartbeats() {
    let server = RedisServer::start();
    let parts = ["ours", "theirs"].into_iter().cycle();
    let mut processes: Vec<_> = parts.take(PROCESSES).map(|part| start(part, &server)).collect();
    let mut rng = fastrand::Rng::with_seed(15);
    let (begun, mut killed, mut granted) = (Instant::now(), Instant::now(), Instant::now());
    let (mut grants, mut longest) = ([0, 0], Duration::ZERO);
    while begun.elapsed() < LASTS {
        tokio::time::sleep(Duration::from_millis(10)).await;
        for (process, part) in &mut processes {
            while process.try_line().is_some() {
                granted = Instant::now();
                grants[usize::from(*part == "theirs")] += 1;
            }
        }
        longest = longest.max(granted.elapsed());
        if killed.elapsed() > BETWEEN_KILLS {
            killed = Instant::now();
            let (process, part) = &mut processes[rng.usize(..PROCESSES)];
            process.kill();
            *process = start(part, &server).0;
        }
    }
    println!(
        "{} grants of ours, {} of theirs, longest time without a grant {longest:?}",
        grants[0], grants[1]
    );
    assert!(grants.iter().all(|grants| *grants > 20), "{grants:?}");
    assert!(longest <= 2 * HEARTBEAT, "no permit was granted for {longest:?}");
}
