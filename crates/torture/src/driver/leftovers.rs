//! What is in the store when everybody has gone: nothing but fences and capacities.

use std::time::{Duration, Instant};

use leasehold::Client;

use super::stage::{Redis, Stage};
use super::{LifeEnd, Log};
use crate::plan::{self, THINGS};

/// What died keeps its lease until it is over, and what was written for it lives ten seconds longer.
const PATIENCE: Duration = Duration::from_secs(25);

pub(super) fn look(stage: &Stage, log: &Log) -> Result<Vec<String>, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| error.to_string())?.block_on(async {
        let client = Client::open(&stage.direct_url()).await.map_err(|error| error.to_string())?;
        let begun = Instant::now();
        loop {
            let mut left = sweep(&client).await.map_err(|error| error.to_string())?;
            if let Stage::Redis(redis) = stage {
                left.extend(keys(redis, log));
            }
            if left.is_empty() || begun.elapsed() > PATIENCE {
                client.close().await.map_err(|error| error.to_string())?;
                return Ok(left);
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    })
}

/// Takes every permit and gives it back, so that whatever is over is removed. Says which cannot be had.
async fn sweep(client: &Client) -> Result<Vec<String>, leasehold::Error> {
    let mut missing = Vec::new();
    for thing in &THINGS {
        match thing.kind {
            plan::Kind::Semaphore => {
                let semaphore = client.semaphore(thing.name, thing.capacity).build()?;
                let mut permits = Vec::new();
                for _ in 0..thing.capacity {
                    permits.extend(semaphore.try_acquire().await?);
                }
                if permits.len() < thing.capacity as usize {
                    let had = permits.len();
                    missing.push(format!("{}: {had} of {} permits", thing.name, thing.capacity));
                }
                for permit in permits {
                    permit.release().await?;
                }
            }
            plan::Kind::Lock => {
                if client.locks().is_locked(thing.name).await? {
                    missing.push(format!("{}: the lock", thing.name));
                }
            }
            plan::Kind::Pool => {
                let pool =
                    client.pool(thing.name, thing.capacity).ttl(thing.lease_time()).build()?;
                let held = pool.count().await?.current_count;
                if held > 0 {
                    missing.push(format!("{}: {held} leases are held", thing.name));
                }
            }
        }
    }
    Ok(missing)
}

/// Keys that ought not to be there.
fn keys(redis: &Redis, log: &Log) -> Vec<String> {
    let mut connection = redis.primary().connection();
    let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut connection).unwrap_or_default();
    let killed = log.lives.iter().any(|life| matches!(life.end, LifeEnd::Killed(_)));
    let stays = |key: &String| {
        let kept = ["adv-sem:semaphore_fence:", "adv-sem:semaphore_max:", "syncguard:fence:"];
        // Who a client is, for statistics: it says so again every minute, and it is forgotten soon after.
        let who = key.starts_with("adv-sem:client:");
        // Another program's notification of somebody who died before he read it. It expires.
        let unread = killed && key.starts_with("adv-sem:acquisition_notification:");
        kept.iter().any(|prefix| key.starts_with(prefix)) || who || unread
    };
    keys.into_iter().filter(|key| !stays(key)).map(|key| format!("the key {key}")).collect()
}
