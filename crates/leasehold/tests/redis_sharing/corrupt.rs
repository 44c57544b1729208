//! Values that no program should write: errors name them, no holder of ours loses its permit, and
//! no other name is affected.

use std::time::Duration;

use leasehold::{Client, Error};
use testkit::wait::{deadline, eventually};

use crate::both::{Both, NAME, key};

const SHORT: Duration = Duration::from_secs(2);

fn foreign<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    match result {
        Err(error @ Error::ForeignData { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

/// Returns the number of names in the statistics.
async fn listed(client: &Client) -> usize {
    deadline(client.stats()).await.unwrap().len()
}

#[tokio::test]
async fn a_score_that_is_no_time_hinders_nobody() {
    for score in ["+inf", "9e15", "1e300", "-inf"] {
        let both = Both::start().await;
        let semaphore = both.ours.semaphore(NAME, 3).lease(SHORT).build().unwrap();
        let permit = semaphore.acquire().await.unwrap();
        for kind in ["main", "waiting", "waiting_heartbeat", "ttl"] {
            both.ask::<()>(&["ZADD", &key(kind), score, "alien"]);
        }
        let before = permit.valid_until();
        eventually(async || permit.valid_until() > before).await;
        permit.check().unwrap();
        let second = deadline(semaphore.acquire()).await.unwrap();
        assert_eq!(listed(&both.ours).await, 1, "{score}");
        assert!(deadline(second.release()).await.unwrap(), "{score}");
        assert!(deadline(permit.release()).await.unwrap(), "{score}");
    }
}

#[tokio::test]
async fn text_that_is_not_utf_8_is_left_out_or_shown_as_well_as_can_be() {
    let both = Both::start().await;
    let _permit = both.semaphore(2).acquire().await.unwrap();
    let mut redis = both.server.connection();
    let alien = |key: &str| [key.as_bytes(), b"\xff\xfe"].concat();
    for call in [
        redis::cmd("SET").arg(alien("adv-sem:semaphore_max:")).arg(1),
        redis::cmd("ZADD").arg(key("main")).arg("9e9").arg(alien("id")),
        redis::cmd("ZADD").arg(key("waiting")).arg("9e9").arg(alien("id")),
        redis::cmd("HSET").arg(key("info")).arg(alien("id")).arg(alien("info")),
        redis::cmd("SET").arg(alien("syncguard:")).arg("x"),
    ] {
        call.exec(&mut redis).unwrap();
    }
    let stats = deadline(both.ours.stats().waiters()).await.unwrap();
    assert_eq!((stats.len(), stats[0].held, stats[0].waiting), (1, 2, 1));
    assert!(deadline(both.ours.locks().list(10)).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_fence_that_cannot_be_counted_is_named() {
    for fence in ["9007199254740992", "9223372036854775807", "nan", "inf", "-5", "1.5", "many"] {
        let both = Both::start().await;
        let semaphore = both.ours.semaphore(NAME, 3).lease(SHORT).build().unwrap();
        let permit = semaphore.acquire().await.unwrap();
        both.ask::<()>(&["SET", &key("fence"), fence]);
        let error = foreign(deadline(semaphore.acquire()).await);
        assert!(error.contains(&key("fence")), "{fence}: {error}");
        assert_eq!(both.ask::<String>(&["GET", &key("fence")]), fence, "it is not overwritten");
        // The holder is still renewed.
        let before = permit.valid_until();
        eventually(async || permit.valid_until() > before).await;
        assert!(deadline(permit.release()).await.unwrap(), "{fence}");
    }
}

/// As `leasehold show`, and `run` without `-n`, read them.
#[tokio::test]
async fn the_statistics_name_the_key_that_they_cannot_read() {
    let both = Both::start().await;
    let stats = async || foreign(deadline(both.ours.stats().names([NAME])).await);
    both.ask::<()>(&["SET", &key("max"), "many"]);
    let error = stats().await;
    assert!(error.contains(&key("max")) && error.contains("many"), "{error}");
    both.ask::<()>(&["DEL", &key("max")]);
    both.ask::<()>(&["RPUSH", &key("main"), "x"]);
    let error = stats().await;
    assert!(error.contains(&key("main")), "{error}");
}

#[tokio::test]
async fn a_holder_of_whom_nothing_is_known_any_more_goes_on() {
    let both = Both::start().await;
    let semaphore = both.ours.semaphore(NAME, 1).lease(SHORT).build().unwrap();
    let permit = semaphore.acquire().await.unwrap();
    let waiter = both.we_queue(&semaphore).await;
    both.ask::<()>(&["DEL", &key("info")]);
    // For longer than its lease.
    let first = permit.valid_until().unwrap();
    eventually(async || permit.valid_until().unwrap() > first + SHORT).await;
    permit.check().unwrap();
    let fence = permit.fence();
    assert!(deadline(permit.release()).await.unwrap());
    let next = waiter.permit().await;
    assert!(next.fence() > fence);
}

#[tokio::test]
async fn a_lock_that_ends_at_no_time_is_named() {
    let both = Both::start().await;
    for ends in ["1e300", "-1e300", "1e15"] {
        let record = format!(
            r#"{{"lockId":"AAAAAAAAAAAAAAAAAAAAAA","expiresAtMs":{ends},"acquiredAtMs":1,"key":"k","fence":"0000000000000000001"}}"#
        );
        both.ask::<()>(&["SET", "syncguard:k", &record]);
        let error = foreign(deadline(both.ours.locks().lookup("k")).await);
        assert!(error.contains("syncguard:k"), "{ends}: {error}");
        let lock = both.ours.lock("k").build().unwrap();
        let error = foreign(deadline(lock.try_acquire()).await);
        assert!(error.contains("syncguard:k"), "{ends}: {error}");
        assert!(deadline(both.ours.locks().list(10)).await.unwrap().is_empty(), "{ends}");
    }
}

/// Writes random values of every type into the keys of a name while it is in use. Another name is
/// not affected, and the name works again after its keys are removed.
#[tokio::test]
async fn whatever_is_written_into_its_keys_a_name_recovers_and_no_other_is_hit() {
    let both = Both::start().await;
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let calm = both.ours.semaphore("calm", 1).lease(SHORT).build().unwrap();
    let unharmed = calm.acquire().await.unwrap();
    let semaphore = both.ours.semaphore(NAME, 2).lease(SHORT).build().unwrap();
    let workers: Vec<_> = (0..3)
        .map(|_| {
            let semaphore = semaphore.clone();
            tokio::spawn(async move {
                for _ in 0..20 {
                    let within = Duration::from_millis(300);
                    if let Ok(permit) = semaphore.acquire().within(within).await {
                        let _ = permit.release().await;
                    }
                }
            })
        })
        .collect();
    let kinds = ["main", "ttl", "max", "waiting", "waiting_heartbeat", "fence", "info", "limits"];
    let values = [
        "",
        "0",
        "-1",
        "nan",
        "inf",
        "1e300",
        "9007199254740993",
        "text",
        "\u{202e}",
        "5 5 5",
        "0 1.5 inf\nsomebody\nno reason",
        "4 0 -\n\n",
    ];
    let mut redis = both.server.connection();
    for _ in 0..400 {
        let key = key(kinds[random.usize(..kinds.len())]);
        let value = values[random.usize(..values.len())];
        let other = values[random.usize(..values.len())];
        let damage = match random.usize(..7) {
            0 => redis::cmd("SET").arg(&key).arg(value).to_owned(),
            1 => redis::cmd("ZADD").arg(&key).arg(random.f64() * 1e17).arg(value).to_owned(),
            2 => redis::cmd("ZADD").arg(&key).arg("+inf").arg(value).to_owned(),
            3 => redis::cmd("HSET").arg(&key).arg(value).arg(other).to_owned(),
            4 => redis::cmd("RPUSH").arg(&key).arg(value).to_owned(),
            5 => redis::cmd("PEXPIRE").arg(&key).arg(random.u32(1..50)).to_owned(),
            _ => redis::cmd("DEL").arg(&key).to_owned(),
        };
        // A key of another type makes this fail.
        let _ = damage.query::<redis::Value>(&mut redis);
        if random.bool() {
            let _ = deadline(both.ours.stats().waiters()).await;
        }
        tokio::task::yield_now().await;
    }
    for worker in workers {
        deadline(worker).await.expect("no worker panics");
    }
    let before = unharmed.valid_until();
    eventually(async || unharmed.valid_until() > before).await;
    unharmed.check().unwrap();
    for kind in kinds {
        both.ask::<redis::Value>(&["DEL", &key(kind)]);
    }
    let permit = deadline(semaphore.acquire()).await.unwrap();
    assert!(deadline(permit.release()).await.unwrap());
    assert!(deadline(unharmed.release()).await.unwrap());
}
