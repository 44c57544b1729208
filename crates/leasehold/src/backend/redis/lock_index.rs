//! The index of lock ids in a cluster. It is in another slot than the lock, so the client writes it.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::cluster::Cluster;
use super::command::RedisCommand;
use super::locks::{IndexChange, LockScripts};
use super::slots::slot_of;
use super::topology;
use crate::backend::{Answer, Answers, Destination, Part, Slot};
use crate::callbacks::event;

/// How long an answer waits for the index to be written. A guard does not need the index.
const INDEX_WITHIN: Duration = Duration::from_millis(200);

/// Writes the indexes of locks that were acquired or extended, and removes those of released locks. A guard does not
/// need the index, so an answer waits for it only briefly.
///
/// The engine's runtime does the work, because this future may be polled on a thread without a runtime: if the answer
/// arrives early, the thread that sent the request polls it.
pub(super) async fn keep(
    cluster: &Arc<Cluster>,
    locks: &LockScripts,
    request: &[Part],
    answers: &Answers,
) {
    let (mut write, mut remove) = (BTreeMap::<Destination, Vec<_>>::new(), Vec::new());
    for (part, answer) in request.iter().zip(answers) {
        let (Part::Lock(command), Ok(Answer::Lock(outcome))) = (part, answer) else { continue };
        match locks.index_after(command, outcome) {
            Some(IndexChange::Write(command)) => {
                let to = topology::key_of(&command).map_or(Slot::ONLY, slot_of);
                write.entry(cluster.destination(to)).or_default().push(command);
            }
            Some(IndexChange::Remove(command)) => remove.push(command),
            None => {}
        }
    }
    if !remove.is_empty() {
        let shared = cluster.clone();
        cluster.spawn(async move { drop(topology::query(&shared, Slot::ONLY, remove).await) });
    }
    let writing = write.into_iter().map(|(to, write)| write_at(cluster, to, write));
    for written in writing.collect::<Vec<_>>() {
        // This returns an error, because the sender is dropped and never sends.
        let _ = written.await;
    }
}

/// Writes indexes to one node. The channel closes when they are written, or when they are late. After a late index, no
/// answer waits for this node until it has written one again.
fn write_at(
    cluster: &Arc<Cluster>,
    to: Destination,
    write: Vec<RedisCommand>,
) -> oneshot::Receiver<Infallible> {
    let (shared, (done, written)) = (cluster.clone(), oneshot::channel());
    cluster.spawn(async move {
        let mut writing = pin!(topology::query(&shared, Slot::ONLY, write));
        let limit = if shared.is_index_late(to) { Duration::ZERO } else { INDEX_WITHIN };
        let in_time = tokio::time::timeout(limit, &mut writing).await;
        shared.set_index_late(to, in_time.is_err());
        drop(done);
        let result = match in_time {
            Ok(result) => result,
            Err(_) => writing.await,
        };
        shared.set_index_late(to, result.is_err());
        if let Err(error) = result {
            event!(debug, %error, "the index of a lock was not written: the lock cannot be found by its id");
        }
    });
    written
}
