//! The fair semaphore in SQL: the [machine](crate::machine) over the rows of one name, one batch per transaction.
//!
//! The row of a name holds its counters, so nothing is counted. Places in the queue are numbered, so its head is the
//! first entry of an index. A transition reads and writes only the rows that it affects, however long the queue is.
//!
//! There are no heartbeats, and no holder or waiter has a lease. Instead, when a client is found
//! [dead](super::lifeline), one transaction removes all its permits and waiters, under every name. Two kinds of clients
//! look for dead ones: a newcomer that would be the first waiter checks the holders, and clients that wait near the head
//! of the queue check the holders and each other every [`WATCH`].

use rusqlite::{Result, params};

use super::columns::{Bits, Column, acquisition_id};
use super::database::Transaction;
use crate::clock::{Span, Time};
use crate::machine::{Circumstances, Command, Effects, Held, Machine, Reply, Rows};
use crate::name::Name;
use crate::stats::SemaphoreLimits;
use crate::{AcquisitionId, ClientId};

mod rows;
#[cfg(test)]
mod tests;

use rows::{Label, SqlRows};
pub(super) use rows::{
    holder, holder_columns, semaphore, semaphore_columns, waiter, waiter_columns,
};

/// How often a client that waits near the head looks for dead clients. The engine adds up to a tenth, so 250 ms in all.
const WATCH: Span = Span::from_millis(225);

/// The clients near the head: the first `WATCHERS` distinct clients among the first `WATCHED_PLACES` waiters.
const WATCHERS: usize = 8;
const WATCHED_PLACES: u32 = 256;

/// Applies a batch. If no client is the sender, every grant has to be claimed.
pub(super) fn apply(
    tx: &Transaction<'_>,
    from: Option<ClientId>,
    name: &Name,
    commands: &[Command],
) -> Result<Reply> {
    let releases = commands.iter().all(|command| matches!(command, Command::Release { .. }));
    let (reply, dead) = run(tx, from, name, |machine, call| {
        let mut reply = Reply::default();
        for command in commands {
            reply.outcomes.push(machine.apply(command, call)?);
        }
        if machine.rows.row().waiting > 0 {
            reply.next_expiry = machine.rows.next_expiry()?.map(|at| at - call.now);
            if let Some(from) = from.filter(|_| !releases)
                && machine.rows.near_the_head()?.contains(&from)
            {
                reply.next_expiry = reply.next_expiry.into_iter().chain([WATCH]).min();
            }
        }
        Ok(reply)
    })?;
    remove_dead_clients(tx, dead)?;
    Ok(reply)
}

/// Runs `work` on the machine of one name, and writes the row of the name. Completes the reply. Also returns the clients
/// that were found dead and removed under this name.
fn run(
    tx: &Transaction<'_>,
    from: Option<ClientId>,
    name: &Name,
    work: impl FnOnce(&mut Machine<SqlRows<'_>>, &mut Circumstances<'_, Label>) -> Result<Reply>,
) -> Result<(Reply, Vec<ClientId>)> {
    let Transaction { now, confirm_within, peers, .. } = *tx;
    let (mut machine, mut effects) =
        (Machine { rows: SqlRows::find(tx, name, from)? }, Effects::default());
    let token_before = machine.awaited_token(now)?;
    let wake = &mut |id: AcquisitionId, _: &Held| peers.reach(id.client());
    let mut call = Circumstances { from, now, confirm_within, wake, effects: &mut effects };
    let mut reply = work(&mut machine, &mut call)?;
    // If the first waiter waits only for a token, its client asks when the token comes. The reply tells the sender when
    // that is; another client is woken if the time has changed.
    let token = machine.awaited_token(now)?;
    match token {
        Some((at, client)) if from == Some(client) => reply.next_token = Some(at - now),
        Some((_, client)) if token != token_before => tx.wake(client),
        _ => {}
    }
    machine.rows.save()?;
    let granted = effects.granted.into_iter();
    reply.effects.granted = granted.map(|(id, held, _label)| (id, held, ())).collect();
    Ok((reply, machine.rows.dead))
}

/// Removes dead clients under every name, and grants the permits that this frees. Removes other clients that it finds
/// dead, too.
pub(super) fn remove_dead_clients(tx: &Transaction<'_>, mut dead: Vec<ClientId>) -> Result<()> {
    while let Some(client) = dead.pop() {
        if tx.follow_up.borrow().removed_clients.contains(&client) {
            continue;
        }
        let names = "SELECT name FROM semaphores WHERE id IN (
             SELECT semaphore FROM holders WHERE client = ?1 UNION SELECT semaphore FROM waiters WHERE client = ?1)";
        for name in tx.all(names, [Column(client)], |row| row.get(0))? {
            // The reply informs the sender only about the name of its commands. For all other names it must be woken,
            // like every client.
            let (_, also_dead) = run(tx, None, &name, |machine, call| {
                machine.expire(call)?;
                machine.remove_client(client, true)?;
                machine.grant(call)?;
                Ok(Reply::default())
            })?;
            dead.extend(also_dead);
        }
        for delete in [
            "DELETE FROM evicted WHERE client = ?1",
            "DELETE FROM lock_waiters WHERE client = ?1",
            "DELETE FROM clients WHERE client = ?1",
        ] {
            tx.execute(delete, [Column(client)])?;
        }
        tx.follow_up.borrow_mut().removed_clients.push(client);
    }
    Ok(())
}

/// Claims the permits that other clients have granted to this one and that have not expired. Returns what it now holds.
pub(super) fn claim(
    tx: &Transaction<'_>,
    client: ClientId,
) -> Result<Vec<(Name, AcquisitionId, Held)>> {
    let update = concat!(
        "UPDATE holders SET unclaimed = 0, ends = hold_until, hold_until = NULL
         WHERE client = ?1 AND unclaimed AND ends > ?2 RETURNING ",
        holder_columns!(),
        ", (SELECT name FROM semaphores WHERE id = semaphore)"
    );
    let claimed = tx.all(update, params![Column(client), tx.now], |row| {
        let (id, member) = holder(row)?;
        Ok((row.get(9)?, id, member.held(tx.now)))
    })?;
    Ok(claimed.into_iter().filter_map(|(name, id, held)| Some((name, id, held?))).collect())
}

/// Returns the names whose first waiter belongs to this client and waits for a token, each with the time when the token
/// comes.
pub(super) fn tokens(tx: &Transaction<'_>, client: ClientId) -> Result<Vec<(Name, Time)>> {
    let select = "SELECT name FROM semaphores
                  WHERE rate_count > 0 AND id IN (SELECT semaphore FROM waiters WHERE client = ?1)";
    let mut tokens = Vec::new();
    for name in tx.all(select, [Column(client)], |row| row.get(0))? {
        let machine = Machine { rows: SqlRows::find(tx, &name, None)? };
        // If the token is already available, the waiter gets it with its next request.
        let (at, first) = match machine.awaited_token(tx.now)? {
            Some(token) => token,
            None => match machine.rows.first_waiter(0)? {
                Some((id, first)) if machine.fits(first.weight(), tx.now) => (tx.now, id.client()),
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
    tx: &Transaction<'_>,
    client: ClientId,
) -> Result<Vec<(Name, AcquisitionId)>> {
    let delete = "DELETE FROM evicted WHERE client = ?1
         RETURNING client, sequence, (SELECT name FROM semaphores WHERE id = evicted.semaphore)";
    tx.all(delete, [Column(client)], |row| Ok((row.get(2)?, acquisition_id(row, 0)?)))
}

/// Returns the limits of the name.
pub(super) fn limits(tx: &Transaction<'_>, name: &Name) -> Result<SemaphoreLimits> {
    let rows = SqlRows::find(tx, name, None)?;
    Ok(SemaphoreLimits::of(&rows.row().limits, tx.now))
}

/// Returns the number of waiters ahead of `id`.
pub(super) fn position(
    tx: &Transaction<'_>,
    name: &Name,
    id: AcquisitionId,
) -> Result<Option<usize>> {
    let select =
        "SELECT (SELECT count(*) FROM waiters a WHERE a.semaphore = s.id AND a.place < w.place)
                  FROM semaphores s JOIN waiters w ON w.semaphore = s.id
                  WHERE s.name = ?1 AND w.client = ?2 AND w.sequence = ?3";
    let which = params![name, Column(id.client()), Bits(id.sequence())];
    let count = tx.first(select, which, |row| row.get::<_, u32>(0))?;
    Ok(count.map(|count| count as usize))
}
