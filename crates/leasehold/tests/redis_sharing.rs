//! One semaphore on Redis, shared with a program that follows seed document 000.
//!
//! Theirs is [`testkit::seed000`], which is written from the documents alone and shares none of our
//! code. Its scripts, and ours in their place:
//!
//! | theirs | ours | alike | different |
//! |---|---|---|---|
//! | `queue` | `enqueue` | joins `semaphore_waiting` and `semaphore_waiting_heartbeat` | ours grants at once if there is room, uses the server's clock, and declares the capacity |
//! | `wake_up_nexts` | `grant`, in every script | dead members are removed, the head of the queue becomes a holder and is notified | our waiters are notified in the reply or by a push; theirs by a `1` in their list, as the document says |
//! | `acquire` | `confirm` | only for an id that still has its permit; sets when its TTL ends | ours mints a fence, and deletes the list if theirs granted it |
//! | `release` | `release` | removes the id wherever it is | ours hands the permit on; theirs leaves that to the next caller |
//! | `ping` | `renew` | never moves a waiter; reports members that are gone | theirs sets the keys' expiry to its own TTL, ours only ever lengthens it |
//! | `card` | `stats` | counts the holders | theirs removes dead members as it counts, ours only reads |

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

/// The entry point of the processes that [`chaos`] starts.
#[test]
fn child() {
    testkit::child::play(chaos::play);
}
