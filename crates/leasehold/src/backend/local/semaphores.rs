//! The fair semaphore in SQL: the same transitions as in [`crate::machine`], one batch per transaction.
//!
//! The row of a name holds its counters, so nothing is counted. Places in the queue are numbered, so its head is the
//! first entry of an index. A transition reads and writes only the rows that it affects, however long the queue is.
//!
//! Two things differ from the machine, and both concern clients that die.
//!
//! - There are no heartbeats. A holder's deadline is the end of its TTL, or, until it has claimed its permit, the
//!   deadline for claiming it. A waiter has no deadline.
//! - When a client is found [dead](super::lifeline), one transaction removes all its permits and waiters, under every
//!   name. Two kinds of clients look for dead ones: a newcomer that would be the first waiter checks the holders, and
//!   clients that wait near the head of the queue check the holders and each other every [`WATCH`].

use std::num::NonZeroU32;

use rusqlite::{Connection, OptionalExtension, Result, Row, params};

use super::lifeline::Reach;
use crate::clock::{Span, Time};
use crate::machine::{Command, Held, Outcome, Role, Steer, Steered};
use crate::name::Name;
use crate::{AcquisitionId, ClientId, Fence};

mod dead;
mod named;
#[cfg(test)]
mod tests;
mod transitions;

pub(super) use named::meter_of;
use named::{Named, columns, micros};

/// How often a client that waits near the head looks for dead clients. The engine adds up to a tenth, so 250 ms in all.
pub(super) const WATCH: Span = Span::from_millis(225);

/// The clients near the head: the first `WATCHERS` distinct clients among the first `WATCHED_PLACES` waiters.
const WATCHERS: usize = 8;
const WATCHED_PLACES: u32 = 256;

/// The most unreachable waiters that a batch passes over: see docs/guarantees.md.
const PASSED_OVER: u32 = 10_000;

/// The context of a batch: its sender, the time, and how to check other clients.
pub(super) struct Circumstances<'a> {
    /// The sender. `None` if no client is the sender; then every grant has to be claimed.
    pub(super) from: Option<ClientId>,
    pub(super) now: Time,
    pub(super) confirm_within: Span,
    pub(super) reach: &'a mut dyn FnMut(ClientId) -> Reach,
    pub(super) is_dead: &'a mut dyn FnMut(ClientId) -> bool,
}

/// The result of a batch.
#[derive(Debug, Default)]
pub(super) struct Applied {
    pub(super) outcomes: Vec<Outcome>,
    /// The sender's own waiters that became holders.
    pub(super) granted: Vec<(AcquisitionId, Held)>,
    /// When the first holder expires, if anybody waits.
    pub(super) next_expiry: Option<Time>,
    /// When the first waiter gets its token, if it belongs to the sender and waits for nothing else.
    pub(super) next_token: Option<Time>,
    /// Whether the sender is one of the clients that look for dead ones.
    pub(super) watches: bool,
    /// The clients to wake after the commit.
    pub(super) wake: Vec<ClientId>,
    /// The dead clients that were removed. Their files can be removed after the commit.
    pub(super) removed_clients: Vec<ClientId>,
}

/// Applies a batch. Call it in a transaction that may write.
pub(super) fn apply(
    tx: &Connection,
    name: &Name,
    commands: &[Command],
    call: &mut Circumstances<'_>,
) -> Result<Applied> {
    let declared = commands.iter().any(|command| match command {
        Command::Enqueue { .. } => true,
        Command::Steer { steer: Steer::Forget, .. } => false,
        Command::Steer { capacity, steer } => capacity.is_some() || steer.sets(),
        _ => false,
    });
    let Some(mut named) = Named::load(tx, name, declared)? else { return Ok(nobody(commands)) };
    named.token_before = named.next_token(call.now)?;
    let asks =
        commands.iter().any(|command| matches!(command, Command::Sweep | Command::Renew { .. }));
    if asks && named.state.waiting > 0 {
        named.remove_dead_clients(call)?;
    }
    for command in commands {
        let outcome = named.command(command, call)?;
        named.grant(call)?;
        named.applied.outcomes.push(outcome);
    }
    let releases = commands.iter().all(|command| matches!(command, Command::Release { .. }));
    named.look_ahead(call, !releases)?;
    let (mut applied, mut dead) = named.save()?;
    while let Some(client) = dead.pop() {
        if !applied.removed_clients.contains(&client) {
            dead.extend(remove_dead_client(tx, client, call, &mut applied)?);
        }
    }
    Ok(applied)
}

/// Answers a batch of queries without writing. Returns `None` if something has to be written.
pub(super) fn ask(
    tx: &Connection,
    name: &Name,
    commands: &[Command],
    call: &mut Circumstances<'_>,
) -> Result<Option<Applied>> {
    let Some(mut named) = Named::load(tx, name, false)? else { return Ok(Some(nobody(commands))) };
    named.token_before = named.next_token(call.now)?;
    let waiting = named.state.waiting > 0;
    let fits = waiting && named.fits(1, call.now);
    let meter = named.meter().copied();
    named.settle(call.now);
    let settled = meter == named.meter().copied();
    if !settled || named.is_due(call.now)? || fits || waiting && named.any_dead(call)? {
        return Ok(None);
    }
    for command in commands {
        let outcome = match command {
            Command::Renew { id, .. } => {
                if named.holder(*id)?.is_some_and(|holder| holder.claim_by.is_some()) {
                    return Ok(None);
                }
                named.question(*id, call.now)?
            }
            Command::Sweep => Outcome::Swept,
            _ => return Ok(None),
        };
        named.applied.outcomes.push(outcome);
    }
    named.look_ahead(call, true)?;
    Ok(Some(named.applied))
}

/// The result for a name that has never been used.
fn nobody(commands: &[Command]) -> Applied {
    let outcomes = commands.iter().map(|command| match command {
        Command::Release { .. } => Outcome::Removed(Role::Nobody),
        Command::Steer { .. } => Outcome::Steered(Steered::Unknown),
        Command::Sweep => Outcome::Swept,
        _ => Outcome::Gone,
    });
    Applied { outcomes: outcomes.collect(), ..Applied::default() }
}

/// Removes a dead client under every name, and grants the permits that this frees. Returns other clients that it found
/// dead.
pub(super) fn remove_dead_client(
    tx: &Connection,
    client: ClientId,
    call: &mut Circumstances<'_>,
    applied: &mut Applied,
) -> Result<Vec<ClientId>> {
    let number = client.number().cast_signed();
    let rows: Vec<i64> = tx
        .prepare_cached(
            "SELECT semaphore FROM holders WHERE client = ?1 UNION SELECT semaphore FROM waiters WHERE client = ?1",
        )?
        .query_map([number], |row| row.get(0))?
        .collect::<Result<_>>()?;
    let mut dead = Vec::new();
    // The reply informs the sender only about its own name. For all other names it must be woken, like every client.
    let from = call.from.take();
    for row in rows {
        let Some(mut named) = Named::load_by_row(tx, row)? else { continue };
        named.token_before = named.next_token(call.now)?;
        named.expire(call)?;
        named.remove_client(client)?;
        named.grant(call)?;
        named.notify_first_waiter(call)?;
        let (more, also) = named.save()?;
        applied.wake.extend(more.wake);
        dead.extend(also);
    }
    call.from = from;
    tx.prepare_cached("DELETE FROM evicted WHERE client = ?1")?.execute([number])?;
    tx.prepare_cached("DELETE FROM lock_waiters WHERE client = ?1")?.execute([number])?;
    tx.prepare_cached("DELETE FROM clients WHERE client = ?1")?.execute([number])?;
    applied.removed_clients.push(client);
    Ok(dead)
}

/// Claims the permits that other clients have granted to this one and that have not expired. Returns what it now holds.
pub(super) fn claim(
    tx: &Connection,
    client: ClientId,
    now: Time,
) -> Result<Vec<(String, AcquisitionId, Held)>> {
    let mut update = tx.prepare_cached(
        "UPDATE holders SET unclaimed = 0, ends = hold_until, hold_until = NULL
         WHERE client = ?1 AND unclaimed AND ends > ?2
         RETURNING sequence, fence, ends, (SELECT name FROM semaphores WHERE id = semaphore), slot",
    )?;
    let read = |row: &Row<'_>| {
        let (sequence, fence): (i64, i64) = (row.get(0)?, row.get(1)?);
        let ends: Option<i64> = row.get(2)?;
        let held = Held {
            slot_number: NonZeroU32::new(row.get::<_, Option<u32>>(4)?.unwrap_or(0)),
            fence: Fence::new(fence.cast_unsigned()),
            valid_for: ends.map(|ends| Time::from_micros(ends.cast_unsigned()) - now),
        };
        Ok((row.get(3)?, AcquisitionId::new(client, sequence.cast_unsigned()), held))
    };
    update.query_map(params![client.number().cast_signed(), micros(now)], read)?.collect()
}

/// Returns the names whose first waiter belongs to this client and waits for a token, each with the time when the token
/// comes.
pub(super) fn tokens(tx: &Connection, client: ClientId, now: Time) -> Result<Vec<(String, Time)>> {
    let mut select = tx.prepare_cached(
        "SELECT s.id, s.name FROM semaphores s
         WHERE s.rate_count > 0 AND s.id IN (SELECT semaphore FROM waiters WHERE client = ?1)",
    )?;
    let rows = select
        .query_map([client.number().cast_signed()], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<Result<Vec<(i64, String)>>>()?;
    let mut tokens = Vec::new();
    for (row, name) in rows {
        let Some(named) = Named::load_by_row(tx, row)? else { continue };
        // If the token is already available, the waiter gets it with its next request.
        let (at, first) = match named.next_token(now)? {
            Some(token) => token,
            None => match named.first_waiter_from(0)? {
                Some(first) if named.fits(first.share.weight, now) => (now, first.id.client()),
                _ => continue,
            },
        };
        if first == client {
            tokens.push((name, at));
        }
    }
    Ok(tokens)
}

/// Returns the ids of this client that another client has released. Each id is returned once.
pub(super) fn take_evicted(
    tx: &Connection,
    client: ClientId,
) -> Result<Vec<(String, AcquisitionId)>> {
    let mut delete = tx.prepare_cached(
        "DELETE FROM evicted WHERE client = ?1
         RETURNING (SELECT name FROM semaphores WHERE id = evicted.semaphore), sequence",
    )?;
    let rows = delete.query_map([client.number().cast_signed()], |row| {
        let sequence: i64 = row.get(1)?;
        Ok((row.get(0)?, AcquisitionId::new(client, sequence.cast_unsigned())))
    })?;
    rows.collect()
}

/// Returns the number of waiters ahead of `id`.
pub(super) fn position(tx: &Connection, name: &Name, id: AcquisitionId) -> Result<Option<usize>> {
    let (client, sequence) = columns(id);
    let count = tx
        .prepare_cached(
            "SELECT (SELECT count(*) FROM waiters w WHERE w.semaphore = s.id AND w.place < own.place)
             FROM semaphores s JOIN waiters own ON own.semaphore = s.id
             WHERE s.name = ?1 AND own.client = ?2 AND own.sequence = ?3",
        )?
        .query_row(params![name.as_str(), client, sequence], |row| row.get::<_, i64>(0))
        .optional()?;
    Ok(count.and_then(|count| usize::try_from(count).ok()))
}
