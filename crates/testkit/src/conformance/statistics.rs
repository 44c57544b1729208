//! Statistics of holders and waiters.

use std::time::{Duration, Instant};

use leasehold::{Client, Error, SemaphoreStats};

use super::{SHORT, Store, Waiter, acquire, declare, release, unique};
use crate::wait::deadline;

/// Ages are exact to a few milliseconds.
const ROUGHLY: Duration = Duration::from_millis(50);
/// More names than any store has while the suite runs on it.
const EVERY: usize = 100_000;

fn names(stats: &[SemaphoreStats]) -> Vec<&str> {
    stats.iter().map(|one| &*one.name).collect()
}

pub async fn statistics_of_one_name_list_holders_and_count_waiters(store: &impl Store) {
    let begun = Instant::now();
    let (client, name) = (store.client().await, unique("stats"));
    let semaphore = declare(&client, &name, 4);
    let stats = async || deadline(semaphore.stats()).await.unwrap();
    let empty = stats().await;
    assert_eq!((&*empty.name, empty.capacity, empty.held), (name.as_str(), 4, 0));
    assert_eq!((empty.waiting, empty.percent()), (0, 0.0));
    assert_eq!((empty.oldest_hold(), empty.oldest_wait), (None, None));

    let first = acquire(&semaphore).await;
    let timed = client.semaphore(&name, 4).ttl(SHORT * 10).build().unwrap();
    let second = acquire(&timed).await;
    let half = stats().await;
    assert_eq!((half.capacity, half.held, half.percent()), (4, 2, 50.0));
    let ids: Vec<_> = half.holders.iter().map(|holder| holder.id.clone()).collect();
    assert_eq!(ids, [first.id().to_string(), second.id().to_string()], "the longest first");
    let expires_in = half.holders[1].expires_in.expect("it has a TTL");
    assert!(expires_in <= SHORT * 10);

    let full = [acquire(&semaphore).await, acquire(&semaphore).await];
    let waiters = [Waiter::join(&semaphore).await, Waiter::join(&semaphore).await];
    let crowded = stats().await;
    assert_eq!((crowded.held, crowded.waiting, crowded.percent()), (4, 2, 100.0));
    let at_most = begun.elapsed() + ROUGHLY;
    assert!(crowded.oldest_hold().is_some_and(|age| age <= at_most));
    assert!(crowded.oldest_wait.is_some_and(|age| age <= at_most));
    assert_eq!(crowded.oldest_hold(), crowded.holders[0].age);

    for waiter in waiters {
        waiter.leave().await;
    }
    drop(full);
}

pub async fn holders_are_listed_in_the_order_of_their_grants(store: &impl Store) {
    let (client, name) = (store.client().await, unique("stats in order"));
    let plain = declare(&client, &name, 5);
    let timed = client.semaphore(&name, 5).ttl(SHORT * 10).build().unwrap();
    // A store may record times less precisely while no permit has a TTL.
    let ends_first = acquire(&timed).await;
    let mut held = vec![acquire(&plain).await, acquire(&plain).await];
    release(ends_first).await;
    held.extend([acquire(&plain).await, acquire(&plain).await, acquire(&timed).await]);

    let stats = deadline(plain.stats()).await.unwrap();
    let listed: Vec<_> = stats.holders.iter().map(|holder| holder.id.clone()).collect();
    let came: Vec<_> = held.iter().map(|permit| permit.id().to_string()).collect();
    assert_eq!(listed, came);
}

pub async fn labels_are_shown(store: &impl Store) {
    let (client, name) = (store.client().await, unique("labels"));
    let labelled = client.semaphore(&name, 3).label("worker 7").build().unwrap();
    let held = acquire(&labelled).await;
    let _plain = acquire(&declare(&client, &name, 3)).await;
    let full = acquire(&labelled).await;
    let waiter = Waiter::join(&labelled).await;
    release(full).await;
    let _waited = waiter.permit().await;

    let stats = deadline(labelled.stats()).await.unwrap();
    let labels: Vec<_> = stats.holders.iter().map(|one| one.label.as_deref()).collect();
    assert_eq!(labels, [Some("worker 7"), None, Some("worker 7")]);
    assert_eq!(stats.holders[0].id, held.id().to_string());
}

pub async fn waiters_are_listed_in_order_on_request(store: &impl Store) {
    let (client, name) = (store.client().await, unique("who waits"));
    let labelled = client.semaphore(&name, 1).label("worker 7").build().unwrap();
    let held = acquire(&labelled).await;
    let waiters = [Waiter::join(&labelled).await, Waiter::join(&declare(&client, &name, 1)).await];
    let stats =
        async |query: leasehold::Stats| deadline(query.names([&name])).await.unwrap().remove(0);
    let counted = stats(client.stats()).await;
    assert_eq!((counted.waiting, counted.waiters.len()), (2, 0), "only when asked for");

    let stats_of_all = stats(client.stats().waiters()).await;
    let labels: Vec<_> = stats_of_all.waiters.iter().map(|one| one.label.as_deref()).collect();
    assert_eq!(labels, [Some("worker 7"), None]);
    assert_eq!(stats_of_all.waiting, 2);
    assert_eq!(stats_of_all.oldest_wait, stats_of_all.waiters[0].age);
    assert!(stats_of_all.waiters[0].age >= stats_of_all.waiters[1].age);
    assert!(stats_of_all.waiters.iter().all(|waiter| waiter.fence.is_none()));
    assert_eq!(stats_of_all.holders[0].fence, Some(held.fence()));

    let [first, second] = waiters;
    first.leave().await;
    second.leave().await;
}

pub async fn statistics_of_given_names_list_no_others(store: &impl Store) {
    let client = store.client().await;
    let (one, two, three) = (unique("asked"), unique("asked"), unique("not asked"));
    let mut held = Vec::new();
    for name in [&one, &two, &three] {
        held.push(acquire(&declare(&client, name, 1)).await);
    }
    let only = async |wanted: &[&str]| {
        let query = client.stats().names(wanted.iter().copied());
        let stats = deadline(query).await.unwrap();
        names(&stats).into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(only(&[&two]).await, [two.as_str()]);
    assert_eq!(only(&[&two, &one]).await, [one.as_str(), two.as_str()]);
    assert_eq!(only(&[&unique("nobody's")]).await, [""; 0]);
    assert_eq!(only(&[]).await, [""; 0]);

    let error = deadline(client.stats().names([""])).await.unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { argument: "name", .. }), "{error}");
}

pub async fn statistics_list_all_names_in_use(store: &impl Store) {
    let (client, other) = (store.client().await, store.client().await);
    let (mine, theirs, unused) = (unique("all"), unique("all"), unique("all, unused"));
    let _held = acquire(&declare(&client, &mine, 2)).await;
    let _also = acquire(&declare(&other, &theirs, 2)).await;
    release(acquire(&declare(&client, &unused, 2)).await).await;

    let stats = deadline(client.stats().limit(EVERY)).await.unwrap();
    let listed = names(&stats);
    assert!(listed.contains(&mine.as_str()) && listed.contains(&theirs.as_str()), "{listed:?}");
    assert!(!listed.contains(&unused.as_str()), "{listed:?}");
}

pub async fn unused_names_are_listed_on_request(store: &impl Store) {
    let (client, name) = (store.client().await, unique("unused"));
    release(acquire(&declare(&client, &name, 3)).await).await;
    let query = || client.stats().names([&name]);
    assert_eq!(names(&deadline(query()).await.unwrap()), [""; 0]);
    let stats = deadline(query().unused()).await.unwrap();
    assert_eq!(names(&stats), [&name]);
    assert_eq!((stats[0].capacity, stats[0].held, stats[0].waiting), (3, 0, 0));

    let all = deadline(client.stats().unused().limit(EVERY)).await.unwrap();
    assert!(names(&all).contains(&name.as_str()));
}

/// Returns three names, the least used first, and the permits and waiters that use them.
async fn three_names(client: &Client) -> ([String; 3], impl Sized) {
    let names = ["half", "full", "crowded"].map(unique);
    let half = acquire(&declare(client, &names[0], 2)).await;
    let full = acquire(&declare(client, &names[1], 1)).await;
    let semaphore = declare(client, &names[2], 1);
    let crowded = (acquire(&semaphore).await, Waiter::join(&semaphore).await);
    (names, (half, full, crowded))
}

pub async fn names_are_sorted_by_use(store: &impl Store) {
    let client = store.client().await;
    let ([half, full, crowded], _used) = three_names(&client).await;
    let query = client.stats().names([&half, &full, &crowded]);
    let stats = deadline(query).await.unwrap();
    assert_eq!(names(&stats), [&crowded, &full, &half]);
}

pub async fn listings_respect_the_limit(store: &impl Store) {
    let client = store.client().await;
    let ([half, full, crowded], _used) = three_names(&client).await;
    let query = client.stats().names([&half, &full, &crowded]);
    let stats = deadline(query.limit(2)).await.unwrap();
    assert_eq!(names(&stats), [&crowded, &full], "the most used of them");
    assert_eq!(deadline(client.stats().limit(1)).await.unwrap().len(), 1);

    // The default limit is a hundred.
    let crowd = unique("one of many");
    let mut held = Vec::new();
    for number in 0..101 {
        held.push(acquire(&declare(&client, &format!("{crowd} {number}"), 1)).await);
    }
    assert_eq!(deadline(client.stats()).await.unwrap().len(), 100);
}

pub async fn waiters_are_listed_by_their_places(store: &impl Store) {
    let (client, name) = (store.client().await, unique("places"));
    let semaphore = declare(&client, &name, 1);
    let held = acquire(&semaphore).await;
    let mut waiters = Vec::new();
    for _ in 0..5 {
        waiters.push(Waiter::join(&semaphore).await);
    }
    let places = async |places| {
        let query = client.stats().names([name.as_str()]).waiters_in(places);
        let stats = deadline(query).await.unwrap().pop().unwrap();
        assert_eq!(stats.waiting, 5, "all are counted");
        stats.waiters.iter().map(|waiter| waiter.id.clone()).collect::<Vec<_>>()
    };
    let all = places(0..usize::MAX).await;
    assert_eq!(all.len(), 5);
    assert_eq!(places(0..2).await, all[..2]);
    assert_eq!(places(1..4).await, all[1..4]);
    assert_eq!(places(4..100).await, all[4..]);
    assert_eq!(places(5..9).await, [""; 0]);
    assert_eq!(places(0..0).await, [""; 0]);
    for waiter in waiters {
        waiter.leave().await;
    }
    release(held).await;
}

pub async fn a_client_is_listed_with_its_process(store: &impl Store) {
    let client = store.client().await;
    let id = client.id().to_string();
    let listed = async || deadline(client.clients(EVERY)).await.unwrap();
    let is_it = |one: &leasehold::ClientInfo| one.id == id;
    crate::wait::eventually(async || listed().await.iter().any(is_it)).await;
    let found = listed().await.into_iter().find(is_it).unwrap();
    assert_eq!(found.pid, Some(std::process::id()));
    assert!(found.program.is_some_and(|program| !program.is_empty()));
    assert_eq!(deadline(client.clients(0)).await.unwrap(), []);
}
