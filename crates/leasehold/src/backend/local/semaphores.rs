//! The machine of the fair semaphore in SQL: the same transitions as in [`crate::machine`], a batch in one transaction.
//!
//! The row of a name has its counters, so that nothing is counted; the queue is numbered, so that its head is the first of
//! an index. A transition reads and writes the rows that it is about, however long the queue is.
//!
//! Two things differ from the machine, and both are about clients that die. There are no heartbeats: a holder's deadline is
//! that of its TTL, or, until it has claimed its permit, the one to claim it by; a waiter has none. Instead a client that is
//! found [dead](super::lifeline) is *buried*: all that it held and waited for goes, under every name, in one transaction.
//! Looked for are the clients of those who hold, when a newcomer would be the first to wait, and by whoever waits near the
//! head of the queue, every [`WATCH`].

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

/// How often a client that waits near the head looks for dead clients. The engine adds up to a tenth: 250 ms in all.
pub(super) const WATCH: Span = Span::from_millis(225);

/// Who is near the head: the first so many clients, as far as they are among the first so many waiters.
const WATCHERS: usize = 8;
const WATCHED_PLACES: u32 = 256;

/// How many waiters that cannot be reached are passed over, at most: see docs/guarantees.md.
const PASSED_OVER: u32 = 10_000;

/// The circumstances of a batch.
pub(super) struct Circumstances<'a> {
    /// None if it is nobody in particular: then every grant has to be claimed.
    pub(super) from: Option<ClientId>,
    pub(super) now: Time,
    pub(super) confirm_within: Span,
    pub(super) reach: &'a mut dyn FnMut(ClientId) -> Reach,
    pub(super) is_dead: &'a mut dyn FnMut(ClientId) -> bool,
}

/// What came of a batch.
#[derive(Debug, Default)]
pub(super) struct Applied {
    pub(super) outcomes: Vec<Outcome>,
    /// The sender's own waiters that became holders.
    pub(super) granted: Vec<(AcquisitionId, Held)>,
    /// When the first of those who hold ends, if anybody waits.
    pub(super) next_expiry: Option<Time>,
    /// When the first in the queue is granted a permit without anybody's doing, if it is the sender's.
    pub(super) next_token: Option<Time>,
    /// Whether the sender is one of those who look for the dead.
    pub(super) watches: bool,
    /// Who is to be woken once all of this is written.
    pub(super) wake: Vec<ClientId>,
    /// Who was buried. Their files can go, once all of this is written.
    pub(super) buried: Vec<ClientId>,
}

/// Applies a batch. In a transaction that may write.
pub(super) fn apply(
    tx: &Connection,
    name: &Name,
    commands: &[Command],
    call: &mut Circumstances<'_>,
) -> Result<Applied> {
    let declared = commands.iter().any(|command| match command {
        Command::Enqueue { .. } => true,
        Command::Steer { capacity, steer } => capacity.is_some() && *steer != Steer::Forget,
        _ => false,
    });
    let Some(mut named) = Named::load(tx, name, declared)? else { return Ok(nobody(commands)) };
    named.token_before = named.next_token(call.now)?;
    let asks =
        commands.iter().any(|command| matches!(command, Command::Sweep | Command::Renew { .. }));
    if asks && named.state.waiting > 0 {
        named.bury_the_dead(call)?;
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
        if !applied.buried.contains(&client) {
            dead.extend(bury(tx, client, call, &mut applied)?);
        }
    }
    Ok(applied)
}

/// The same for a batch that only asks, if there is nothing to be done: then there is nothing to write.
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

/// What is said of a name that nobody has ever used.
fn nobody(commands: &[Command]) -> Applied {
    let outcomes = commands.iter().map(|command| match command {
        Command::Release { .. } => Outcome::Removed(Role::Nobody),
        Command::Steer { .. } => Outcome::Steered(Steered::Unknown),
        Command::Sweep => Outcome::Swept,
        _ => Outcome::Gone,
    });
    Applied { outcomes: outcomes.collect(), ..Applied::default() }
}

/// Removes a dead client everywhere, and hands on what that sets free. Answers whom else it found dead.
pub(super) fn bury(
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
    // Who sent the command is told of its own name alone. Of others he has to be woken, like everybody.
    let from = call.from.take();
    for row in rows {
        let Some(mut named) = Named::load_by_row(tx, row)? else { continue };
        named.token_before = named.next_token(call.now)?;
        named.expire(call)?;
        named.remove_client(client)?;
        named.grant(call)?;
        named.tell_the_first(call)?;
        let (more, also) = named.save()?;
        applied.wake.extend(more.wake);
        dead.extend(also);
    }
    call.from = from;
    tx.prepare_cached("DELETE FROM evicted WHERE client = ?1")?.execute([number])?;
    tx.prepare_cached("DELETE FROM lock_waiters WHERE client = ?1")?.execute([number])?;
    tx.prepare_cached("DELETE FROM clients WHERE client = ?1")?.execute([number])?;
    applied.buried.push(client);
    Ok(dead)
}

/// Claims the permits that others have granted to a client, as far as it is in time, and answers what it holds then.
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

/// Where a client has the first in the queue, and that waits for a token: the names, and when it comes.
pub(super) fn tokens(tx: &Connection, client: ClientId, now: Time) -> Result<Vec<(String, Time)>> {
    let mut select = tx.prepare_cached(
        "SELECT s.id, s.name FROM semaphores s
         WHERE s.rate_interval > 0 AND s.id IN (SELECT semaphore FROM waiters WHERE client = ?1)",
    )?;
    let rows = select
        .query_map([client.number().cast_signed()], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<Result<Vec<(i64, String)>>>()?;
    let mut tokens = Vec::new();
    for (row, name) in rows {
        let Some(named) = Named::load_by_row(tx, row)? else { continue };
        // One that is there already is found when it is asked for.
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

/// The ids of a client that somebody else has released. It is told of each once.
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

/// How many waiters come before this one.
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
