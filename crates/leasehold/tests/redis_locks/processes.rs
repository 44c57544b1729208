//! Holders that die.

use std::future::pending;

use testkit::child::{self, Child};
use testkit::wait::eventually;

use super::{Duration, Instant, KEY, MINUTES, Server, Waiter, acquire, connect, lock, release};

const LEASE: Duration = Duration::from_secs(2);

/// In the child: holds the lock, and extends it while it lives.
pub(crate) fn play(part: &str, arguments: &[&str]) {
    assert_eq!(part, "holder");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let _told = child::lines_from_test();
        let client = connect(arguments[0]).await;
        let guard = acquire(&client.lock(KEY).lease(LEASE).build().unwrap()).await;
        child::say(&guard.fence().to_string());
        pending::<()>().await;
    });
}

/// Two of four in time are enough, because a busy machine may be late itself.
#[tokio::test]
async fn the_next_waiter_follows_a_killed_holder_when_its_ttl_ends() {
    let server = Server::start();
    let client = connect(&server.url()).await;
    let mut took = Vec::new();
    let in_time = |took: &Vec<Duration>| {
        took.iter().filter(|took| **took <= LEASE + Duration::from_millis(200)).count()
    };
    while in_time(&took) < 2 {
        assert!(took.len() < 4, "it took {took:?}");
        let mut holder = Child::start("holder", &[&server.url()]);
        let fence = holder.says().await;
        let waiter = Waiter::join(&server, &client, &lock(&client, MINUTES)).await;
        // The worst moment to die is just after an extension.
        let ends = || server.ends("syncguard:invoice:42");
        let before = ends();
        eventually(async || ends() > before).await;
        holder.kill();
        let killed = Instant::now();
        let (at, guard) = waiter.granted().await;
        assert!(
            at - killed >= LEASE / 2,
            "granted after {:?}, before its lease ended",
            at - killed
        );
        assert!(guard.fence().to_string() > fence);
        took.push(at - killed);
        assert!(release(guard).await);
    }
}
