//! Listings of all locks and all pools.

use std::time::Duration;

use leasehold::Error;

use super::{Store, unique};
use crate::wait::deadline;

pub async fn locks_that_are_held_are_listed(store: &impl Store) {
    let client = store.client().await;
    let names = [unique("listed b"), unique("listed a"), unique("listed c")];
    let mut guards = Vec::new();
    for name in &names {
        let lock = client.lock(name).build().unwrap();
        guards.push(deadline(lock.try_acquire()).await.unwrap().unwrap());
    }
    assert!(deadline(guards.pop().unwrap().release()).await.unwrap());
    let locks = store.client().await.locks();
    let listed = deadline(locks.list(1000)).await.unwrap();
    let ours: Vec<_> = listed.iter().filter(|lock| lock.key.starts_with("listed")).collect();
    assert_eq!([&ours[0].key, &ours[1].key], [&names[1], &names[0]], "by key: {ours:?}");
    assert_eq!(ours.len(), 2);
    let expected = deadline(locks.lookup(&names[0])).await.unwrap().unwrap();
    assert_eq!(*ours[1], expected);
    assert_eq!(deadline(locks.list(1)).await.unwrap().len(), 1);
}

pub async fn pools_that_have_members_are_listed(store: &impl Store) {
    let client = store.client().await;
    let names = [unique("listed b"), unique("listed a"), unique("listed c")];
    for name in &names {
        let pool = client.pool(name, 2).lease(Duration::from_secs(60)).build().unwrap();
        for instance in ["first", "second"] {
            let _id = deadline(pool.acquire(instance)).await.unwrap().detach();
        }
    }
    let last = client.pool(&names[2], 2).build().unwrap();
    for instance in ["first", "second"] {
        deadline(last.release(instance)).await.unwrap();
    }
    let listed = deadline(store.client().await.pools().list(1000)).await.unwrap();
    let ours: Vec<_> = listed.iter().filter(|pool| pool.name.starts_with("listed")).collect();
    assert_eq!([&ours[0].name, &ours[1].name], [&names[1], &names[0]], "by name: {ours:?}");
    assert_eq!(ours.len(), 2);
    let members: Vec<_> = ours[0].members.iter().map(|one| one.id.as_str()).collect();
    assert_eq!(members, ["first", "second"], "the longest silent first");
    // A lookup by name returns the same as the listing, except for the time that has passed.
    let pools = store.client().await.pools();
    let found = deadline(pools.lookup(&names[0])).await.unwrap().expect("it has members");
    assert_eq!(found.name, names[0]);
    let members: Vec<_> = found.members.iter().map(|one| one.id.as_str()).collect();
    assert_eq!(members, ["first", "second"]);
    assert_eq!(deadline(pools.lookup(&names[2])).await.unwrap(), None, "it has no members");
    for name in ["", "holders:a", "a\nb"] {
        let error = deadline(pools.lookup(name)).await.unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { argument: "name", .. }),
            "{name:?}: {error}"
        );
    }
    for member in &ours[0].members {
        assert!(member.silent_for < Duration::from_secs(30), "{member:?}");
        let expires_in = member.expires_in.expect("it has not expired");
        assert!(expires_in > Duration::from_secs(30) && expires_in <= Duration::from_secs(60));
    }
}
