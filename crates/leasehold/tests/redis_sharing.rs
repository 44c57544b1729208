//! One semaphore on Redis, shared with a program that follows seed document 000.
//!
//! Theirs is [`testkit::seed000`]: written from the documents alone, with none of our code. What each of its
//! scripts does, and what ours does in its place:
//!
//! | theirs | ours | alike | different |
//! |---|---|---|---|
//! | `queue` | `enqueue` | joins `semaphore_waiting` and `semaphore_waiting_heartbeat` | ours is granted at once if there is room, takes the server's clock, and declares the capacity |
//! | `wake_up_nexts` | `grant`, in every script | the dead go, the head of the queue becomes a holder and is notified | our own waiters are told in the reply or by a push; theirs by a `1` in their list, as the seed says |
//! | `acquire` | `confirm` | only for an id that still has its permit; sets when its TTL ends | ours mints a fence, and deletes the list if theirs granted it |
//! | `release` | `release` | removes the id wherever it is | ours hands the permit on; theirs leaves that to the next who asks |
//! | `ping` | `renew` | never moves a waiter; tells who is gone | theirs sets the keys' expiry to its own TTL, ours only ever lengthens it |
//! | `card` | `stats` | counts the holders | theirs removes the dead as it counts, ours only looks |

#![cfg(feature = "redis")]

#[path = "redis_sharing/both.rs"]
mod both;
#[path = "redis_sharing/chaos.rs"]
mod chaos;
#[path = "redis_sharing/corrupt.rs"]
mod corrupt;
#[path = "redis_sharing/death.rs"]
mod death;
#[path = "redis_sharing/expiry.rs"]
mod expiry;
#[path = "redis_sharing/handing_over.rs"]
mod handing_over;
#[path = "redis_sharing/keys.rs"]
mod keys;
#[path = "redis_sharing/limit.rs"]
mod limit;
#[path = "redis_sharing/limits.rs"]
mod limits;
#[path = "redis_sharing/order.rs"]
mod order;
#[path = "redis_sharing/skew.rs"]
mod skew;

/// The way into the processes that [`chaos`] starts.
#[test]
fn child() {
    testkit::child::play(chaos::play);
}
