//! Valid names, labels and numbers, and those that are refused.

use std::time::Duration;

use leasehold::{Client, Error, Semaphore, SemaphoreBuilder};

use super::{Store, acquire, all_are_free, declare, release, semaphore, try_acquire, unique};
use crate::wait::deadline;

/// The longest name, and the longest label.
const MAX_BYTES: usize = 512;

async fn check_name(client: &Client, name: &str) {
    let semaphore = declare(client, name, 1);
    assert_eq!(semaphore.name(), name);
    let held = acquire(&semaphore).await;
    assert!(try_acquire(&semaphore).await.is_none(), "{name}");
    let stats = deadline(client.stats().names([name])).await.unwrap();
    assert_eq!((stats.len(), &*stats[0].name), (1, name));
    assert!(release(held).await, "{name}");
    all_are_free(&semaphore).await;
}

pub async fn names_may_be_written_in_any_script(store: &impl Store) {
    let client = store.client().await;
    let suffix = unique("any");
    for odd in [
        "gr\u{fc}\u{df}e",
        "\u{65e5}\u{672c}\u{8a9e}",
        "\u{1f512}",
        "{braces}{}",
        "'single' \"double\" `back`",
        "  spaces  ",
        "back\\slash%s*?[a-z]",
        "a:b/c;DROP TABLE names--",
    ] {
        check_name(&client, &format!("{odd} {suffix} {odd}")).await;
    }
    let longest = format!("{suffix:x<MAX_BYTES$}");
    assert_eq!(longest.len(), MAX_BYTES);
    check_name(&client, &longest).await;
}

/// Other programs that share a semaphore do not normalise its name.
pub async fn names_are_used_as_they_are(store: &impl Store) {
    let (client, suffix) = (store.client().await, unique("nfc"));
    let composed = declare(&client, &format!("caf\u{e9} {suffix}"), 1);
    let decomposed = declare(&client, &format!("cafe\u{301} {suffix}"), 1);
    assert_ne!(composed.name(), decomposed.name());
    let _held = acquire(&composed).await;
    let _too = try_acquire(&decomposed).await.expect("a semaphore of its own");
    for semaphore in [&composed, &decomposed] {
        let stats = deadline(client.stats().names([semaphore.name()])).await.unwrap();
        assert_eq!((stats.len(), &*stats[0].name), (1, semaphore.name()));
    }
}

pub async fn names_that_differ_are_two_semaphores(store: &impl Store) {
    let (client, suffix) = (store.client().await, unique("alike"));
    let mut held = Vec::new();
    for alike in ["a", "A", " a", "a ", "a:", "\u{430}", "\u{ff41}"] {
        held.push(acquire(&declare(&client, &format!("{suffix}{alike}"), 1)).await);
    }
    for permit in held {
        assert!(release(permit).await);
    }
}

/// Fails unless the error names `argument` and contains these words.
#[track_caller]
fn assert_refused(built: Result<Semaphore, Error>, argument: &str, words: &[&str]) {
    let error = built.expect_err("it is refused");
    let Error::InvalidArgument { argument: found, problem, .. } = error else { panic!("{error}") };
    assert_eq!(found, argument, "{problem}");
    for word in words {
        assert!(problem.contains(word), "{word:?} is not in {problem:?}");
    }
}

pub async fn names_that_cannot_be_are_refused(store: &impl Store) {
    let client = store.client().await;
    let named = |name: &str| client.semaphore(name, 1).build();
    assert_refused(named(""), "name", &["empty"]);
    assert_refused(named(&"x".repeat(MAX_BYTES + 1)), "name", &["513", "512"]);
    assert_refused(named(&"\u{fc}".repeat(MAX_BYTES / 2 + 1)), "name", &["514", "512"]);
    assert_refused(named("two\nlines"), "name", &[r"two\nlines", r"'\n'"]);
    assert_refused(named("nothing\0"), "name", &[r"nothing\0", r"'\0'"]);
    assert_refused(named("\u{85}"), "name", &[r"\u{85}"]);
}

pub async fn numbers_that_cannot_be_are_refused(store: &impl Store) {
    let (client, name) = (store.client().await, unique("numbers"));
    let with = |change: fn(SemaphoreBuilder) -> SemaphoreBuilder| {
        change(client.semaphore(&name, 1)).build()
    };
    assert_refused(client.semaphore(&name, 0).build(), "capacity", &["it is 0", "minimum is 1"]);
    assert_refused(with(|b| b.ttl(Duration::ZERO)), "ttl", &["0s", "longer than zero"]);
    let zero = with(|b| b.within(Duration::ZERO));
    assert_refused(zero, "within", &["0s", "longer than zero"]);
    let zero = with(|b| b.lease(Duration::ZERO));
    assert_refused(zero, "lease", &["0ns", "300ms"]);
    let short = with(|b| b.lease(Duration::from_millis(299)));
    assert_refused(short, "lease", &["299ms", "300ms"]);

    // Refused values leave nothing behind, and the limits themselves are accepted.
    let semaphore = with(|b| b.lease(Duration::from_millis(300))).unwrap();
    assert_eq!(semaphore.capacity(), 1);
    all_are_free(&semaphore).await;
    let longest = with(|b| b.ttl(Duration::MAX).within(Duration::MAX)).unwrap();
    drop(acquire(&longest).await);
    all_are_free(&longest).await;
}

pub async fn labels_that_cannot_be_are_refused(store: &impl Store) {
    let other = semaphore(store, "labelled", 1).await;
    let (client, name) = (store.client().await, other.name());
    let labelled = |label: &str| client.semaphore(name, 1).label(label).build();
    assert_refused(labelled(""), "label", &["empty"]);
    assert_refused(labelled("bell\u{7}"), "label", &[r"bell\u{7}"]);
    assert_refused(labelled(&"x".repeat(MAX_BYTES + 1)), "label", &["513", "512"]);
    drop(acquire(&labelled("fine").unwrap()).await);
    all_are_free(&other).await;
}
