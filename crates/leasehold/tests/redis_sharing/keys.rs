//! What both programs see of each other: keys, scores and statistics.

use std::time::Duration;

use testkit::wait::eventually;

use crate::both::{Both, NAME, key, notification};

#[tokio::test]
async fn keys_have_the_names_and_types_of_the_seed() {
    let both = Both::start().await;
    let semaphore = both.ours.semaphore(NAME, 1).ttl(Duration::from_secs(300)).build().unwrap();
    let permit = semaphore.acquire().await.unwrap();
    let theirs = both.they_queue().await;
    let _waiter = both.we_queue(&semaphore).await;
    permit.release().await.unwrap();
    both.they_confirm(&theirs, 1).await;

    let kinds = [
        ("main", "zset"),
        ("ttl", "zset"),
        ("max", "string"),
        ("waiting", "zset"),
        ("waiting_heartbeat", "zset"),
        // The keys that only we have:
        ("fence", "string"),
        ("info", "hash"),
        ("foreign", "string"),
    ];
    for (kind, expected) in kinds {
        assert_eq!(both.ask::<String>(&["TYPE", &key(kind)]), expected, "semaphore_{kind}");
    }
    assert_eq!(both.ask::<String>(&["TYPE", &notification(&theirs)]), "list");
    assert_eq!(both.ask::<String>(&["GET", &key("max")]), "1");

    let who = format!("adv-sem:client:{}", both.ours.id());
    eventually(async || both.exists(&who)).await;
    let mut all: Vec<String> = both.ask(&["KEYS", "*"]);
    all.retain(|found| !kinds.iter().any(|(kind, _)| *found == key(kind)));
    all.sort();
    assert_eq!(all, [notification(&theirs), who]);
}

#[tokio::test]
async fn scores_are_seconds_of_the_servers_clock_with_microseconds() {
    let both = Both::start().await;
    let ttl = Duration::from_secs(600);
    let semaphore = both.ours.semaphore(NAME, 1).ttl(ttl).build().unwrap();
    let before = both.now();
    let permit = semaphore.acquire().await.unwrap();
    let waiter = both.we_queue(&semaphore).await;
    let after = both.now();
    let holder = permit.id().to_string();
    for (kind, id, ahead) in [
        ("main", &holder, 30.0),
        ("ttl", &holder, 600.0),
        ("waiting", &waiter.id, 0.0),
        ("waiting_heartbeat", &waiter.id, 60.0),
    ] {
        let score = both.score(kind, id).unwrap() - ahead;
        // A score of this size is exact to half a microsecond.
        let expected = before - 1e-6..=after + 1e-6;
        assert!(expected.contains(&score), "semaphore_{kind}: {score} is not in {expected:?}");
    }
    // A score has whole microseconds: nothing was rounded away or added.
    let text: String = both.ask(&["ZSCORE", &key("waiting"), &waiter.id]);
    let micros = text.parse::<f64>().unwrap() * 1e6;
    assert!((micros - micros.round()).abs() < 0.3, "{text}");
    waiter.cancel();
    permit.release().await.unwrap();
    both.is_left_clean().await;
}

#[tokio::test]
async fn their_statistics_see_ours() {
    let both = Both::start().await;
    let semaphore = both.semaphore(4);
    let permits = [semaphore.acquire().await.unwrap(), semaphore.acquire().await.unwrap()];
    let _held = both.they_hold(4).await;
    let stats = both.theirs.stats(None).await.unwrap();
    assert_eq!(stats.keys().collect::<Vec<_>>(), [NAME]);
    assert_eq!((stats[NAME].acquired_slots, stats[NAME].max_slots), (3, Some(4)));
    assert_eq!(both.theirs.card(NAME).await.unwrap(), 3);
    for permit in permits {
        permit.release().await.unwrap();
    }
    assert_eq!(both.theirs.card(NAME).await.unwrap(), 1);
    assert_eq!(both.theirs.stats(Some(&[NAME])).await.unwrap()[NAME].acquired_slots, 1);
}

#[tokio::test]
async fn our_statistics_see_theirs() {
    let both = Both::start().await;
    let semaphore = both.ours.semaphore(NAME, 2).label("nightly").build().unwrap();
    let permit = semaphore.acquire().await.unwrap();
    let held = both.they_hold(2).await;
    let _waiting = both.they_queue().await;
    let waiter = both.we_queue(&semaphore).await;

    let all = both.ours.stats().await.unwrap();
    let [one] = &all[..] else { panic!("{all:?}") };
    assert_eq!((&*one.name, one.capacity, one.held, one.waiting), (NAME, 2, 2, 2));
    assert!(one.oldest_wait.is_some());
    let of = |id: &str| one.holders.iter().find(|member| member.id == id).unwrap();
    let (ours, theirs) = (of(&permit.id().to_string()), of(&held));
    assert_eq!((ours.label.as_deref(), ours.pid), (Some("nightly"), Some(std::process::id())));
    assert!(ours.host.is_some() && ours.age.is_some());
    assert!(theirs.id.len() == 32 && theirs.id.bytes().all(|b| b.is_ascii_hexdigit()));
    assert_eq!((theirs.label.as_deref(), theirs.host.as_deref(), theirs.pid), (None, None, None));
    let expires_in = theirs.expires_in.unwrap();
    assert!(
        expires_in > Duration::from_secs(40) && expires_in <= Duration::from_secs(60),
        "{expires_in:?}"
    );
    drop(waiter);
}

/// Any program may have written the record of a client. Unusable values are reported as unknown; the rest is shown.
#[tokio::test]
async fn a_client_that_cannot_be_described_is_unknown() {
    let both = Both::start().await;
    let semaphore = both.ours.semaphore(NAME, 1).label("nightly").build().unwrap();
    let permit = semaphore.acquire().await.unwrap();
    let client = format!("adv-sem:client:{}", both.ours.id());
    let mut connection = both.server.connection();
    // The client writes its record in the background, and would overwrite ours.
    let recorded = redis::cmd("HEXISTS").arg(&client).arg("since").clone();
    eventually(async || recorded.query(&mut connection).unwrap()).await;
    for (host, pid) in [(&b"web-1"[..], &b"none"[..]), (b"caf\xe9", b"-7"), (b"x", b"4294967296")] {
        let set = redis::cmd("HSET").arg(&client).arg("host").arg(host).arg("pid").arg(pid).clone();
        let _: u32 = set.query(&mut connection).unwrap();
        let stats = semaphore.stats().await.unwrap();
        let holder = &stats.holders[0];
        let expected = String::from_utf8_lossy(host);
        assert_eq!((holder.host.as_deref(), holder.pid), (Some(&*expected), None));
        assert_eq!(
            (&*holder.id, holder.label.as_deref()),
            (&*permit.id().to_string(), Some("nightly"))
        );
    }
}

#[tokio::test]
async fn a_semaphore_of_theirs_alone_is_in_our_statistics() {
    let both = Both::start().await;
    let held = both.they_hold(7).await;
    let all = both.ours.stats().await.unwrap();
    let [one] = &all[..] else { panic!("{all:?}") };
    assert_eq!((&*one.name, one.capacity, one.held, one.waiting), (NAME, 7, 1, 0));
    assert_eq!(one.holders[0].id, held);
}

/// They declare a capacity only when they confirm; until then it is unknown.
#[tokio::test]
async fn a_semaphore_whose_capacity_they_have_not_declared_is_in_our_statistics() {
    let both = Both::start().await;
    let id = both.they_queue().await;
    let all = both.ours.stats().await.unwrap();
    let [one] = &all[..] else { panic!("{all:?}") };
    assert_eq!((&*one.name, one.capacity, one.held, one.waiting), (NAME, 0, 0, 1));

    both.they_wake(3).await;
    let all = both.ours.stats().await.unwrap();
    let [one] = &all[..] else { panic!("{all:?}") };
    assert_eq!((&*one.name, one.capacity, one.held, one.waiting), (NAME, 0, 1, 0));
    assert_eq!(one.holders[0].id, id);

    // It is listed once, although several of their keys contain its name.
    let _waiting = both.they_queue().await;
    both.they_confirm(&id, 3).await;
    let all = both.ours.stats().await.unwrap();
    let [one] = &all[..] else { panic!("{all:?}") };
    assert_eq!((&*one.name, one.capacity, one.held, one.waiting), (NAME, 3, 1, 1));
}

/// The newest declaration wins, whichever program makes it; they declare when they confirm.
#[tokio::test]
async fn the_capacity_that_they_declare_is_the_capacity_by_which_we_grant() {
    let both = Both::start().await;
    let semaphore = both.semaphore(1);
    let permit = semaphore.acquire().await.unwrap();
    let waiter = both.we_queue(&semaphore).await;
    let theirs = both.they_queue().await;
    // They grant two permits, by their limit of three: the first to our waiter, which came before theirs.
    assert_eq!(both.they_wake(3).await, 2);
    both.they_were_notified(&theirs).await;
    both.they_confirm(&theirs, 3).await;
    let second = waiter.permit().await;
    assert_eq!(both.theirs.card(NAME).await.unwrap(), 3);
    assert_eq!(semaphore.stats().await.unwrap().capacity, 3);
    permit.release().await.unwrap();
    second.release().await.unwrap();
    both.theirs.release(NAME, &theirs).await.unwrap();
    both.is_left_clean().await;
}
