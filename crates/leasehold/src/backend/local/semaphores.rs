//! The fair semaphore in SQL: the [machine](crate::machine) over the rows of one name, one batch per transaction.
//!
//! The row of a name holds its counters, so nothing is counted. Places in the queue are numbered, so its head is the
//! first entry of an index. A transition reads and writes only the rows that it affects, however long the queue is.
//!
//! There are no heartbeats, and no holder or waiter has a lease. Instead, when a client is found
//! [dead](super::lifeline), one transaction removes all its permits and waiters, under every name. Two kinds of clients
//! look for dead ones: a newcomer that would be the first waiter checks the holders, and clients that wait near the head
//! of the queue check the holders and each other every [`WATCH`].

use rusqlite::{Connection, OptionalExtension, Result, params};

use crate::clock::{Span, Time};
use crate::machine::{Circumstances, Command, Effects, Held, Machine, Outcome, Reach, Rows};
use crate::name::Name;
use crate::{AcquisitionId, ClientId};

mod rows;
#[cfg(test)]
mod tests;

pub(super) use rows::meter_of;
use rows::{Find, Label, SqlRows, columns, holder, holder_columns, micros};

/// How often a client that waits near the head looks for dead clients. The engine adds up to a tenth, so 250 ms in all.
pub(super) const WATCH: Span = Span::from_millis(225);

/// The clients near the head: the first `WATCHERS` distinct clients among the first `WATCHED_PLACES` waiters.
const WATCHERS: usize = 8;
const WATCHED_PLACES: u32 = 256;

/// The other clients of the store.
pub(super) trait Peers {
    fn reach(&self, client: ClientId) -> Reach;

    fn is_dead(&self, client: ClientId) -> bool;
}

/// The context of a batch.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    /// The sender. `None` if no client is the sender; then every grant has to be claimed.
    pub(super) from: Option<ClientId>,
    pub(super) now: Time,
    pub(super) confirm_within: Span,
    pub(super) peers: &'a dyn Peers,
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

/// Applies a batch in a transaction. If it `only_reads`, it fails with [`InvalidQuery`](rusqlite::Error::InvalidQuery)
/// when something has to be written.
pub(super) fn apply(
    tx: &Connection,
    name: &Name,
    commands: &[Command],
    call: &Call<'_>,
    only_reads: bool,
) -> Result<Applied> {
    let (mut applied, find) = (Applied::default(), Find::Name(name.as_str()));
    let releases = commands.iter().all(|command| matches!(command, Command::Release { .. }));
    let dead = run(tx, find, only_reads, call, &mut applied, |machine, call, applied| {
        for command in commands {
            applied.outcomes.push(machine.apply(command, call)?);
        }
        if machine.rows.row().waiting > 0 {
            applied.next_expiry = machine.rows.next_expiry()?;
            if let Some(from) = call.from.filter(|_| !releases) {
                applied.watches = machine.rows.near_the_head()?.contains(&from);
            }
        }
        Ok(())
    })?;
    remove_dead_clients(tx, dead, call, &mut applied)?;
    Ok(applied)
}

/// Runs `work` on the machine of one name, and writes the row of the name. Returns the clients that were found dead and
/// removed under this name.
fn run(
    tx: &Connection,
    find: Find<'_>,
    only_reads: bool,
    call: &Call<'_>,
    applied: &mut Applied,
    work: impl FnOnce(
        &mut Machine<SqlRows<'_>>,
        &mut Circumstances<'_, Label>,
        &mut Applied,
    ) -> Result<()>,
) -> Result<Vec<ClientId>> {
    let Call { from, now, confirm_within, peers } = *call;
    let rows = SqlRows::find(tx, find, only_reads, from, peers)?;
    let (mut machine, mut effects) = (Machine { rows }, Effects::default());
    let token_before = machine.awaited_token(now)?;
    let wake = &mut |id: AcquisitionId, _: &Held| peers.reach(id.client());
    let mut call = Circumstances { from, now, confirm_within, wake, effects: &mut effects };
    work(&mut machine, &mut call, applied)?;
    // If the first waiter waits only for a token, its client asks when the token comes. The reply tells the sender when
    // that is; another client is woken if the time has changed.
    let token = machine.awaited_token(now)?;
    match token {
        Some((at, client)) if from == Some(client) => applied.next_token = Some(at),
        Some((_, client)) if token != token_before => machine.rows.wake(client),
        _ => {}
    }
    machine.rows.save()?;
    applied.wake.append(&mut machine.rows.wake);
    applied.granted.extend(effects.granted.into_iter().map(|(id, held, _)| (id, held)));
    Ok(machine.rows.dead)
}

/// Removes dead clients under every name, and grants the permits that this frees. Removes other clients that it finds
/// dead, too.
pub(super) fn remove_dead_clients(
    tx: &Connection,
    mut dead: Vec<ClientId>,
    call: &Call<'_>,
    applied: &mut Applied,
) -> Result<()> {
    // The reply informs the sender only about its own name. For all other names it must be woken, like every client.
    let call = &Call { from: None, ..*call };
    while let Some(client) = dead.pop() {
        if applied.removed_clients.contains(&client) {
            continue;
        }
        let number = client.number().cast_signed();
        let names: Vec<i64> = tx
            .prepare_cached(
                "SELECT semaphore FROM holders WHERE client = ?1 UNION SELECT semaphore FROM waiters WHERE client = ?1",
            )?
            .query_map([number], |row| row.get(0))?
            .collect::<Result<_>>()?;
        for id in names {
            dead.extend(run(tx, Find::Id(id), false, call, applied, |machine, call, _| {
                machine.expire(call)?;
                machine.remove_client(client, true)?;
                machine.grant(call).map(drop)
            })?);
        }
        for delete in [
            "DELETE FROM evicted WHERE client = ?1",
            "DELETE FROM lock_waiters WHERE client = ?1",
            "DELETE FROM clients WHERE client = ?1",
        ] {
            tx.prepare_cached(delete)?.execute([number])?;
        }
        applied.removed_clients.push(client);
    }
    Ok(())
}

/// Claims the permits that other clients have granted to this one and that have not expired. Returns what it now holds.
pub(super) fn claim(
    tx: &Connection,
    client: ClientId,
    now: Time,
) -> Result<Vec<(String, AcquisitionId, Held)>> {
    let mut update = tx.prepare_cached(concat!(
        "UPDATE holders SET unclaimed = 0, ends = hold_until, hold_until = NULL
         WHERE client = ?1 AND unclaimed AND ends > ?2 RETURNING ",
        holder_columns!(),
        ", (SELECT name FROM semaphores WHERE id = semaphore)"
    ))?;
    let claimed = update.query_map(params![client.number().cast_signed(), micros(now)], |row| {
        let (id, member) = holder(row)?;
        Ok((row.get(9)?, id, member.held(now)))
    })?;
    let held = |(name, id, held): (_, _, Option<Held>)| Some((name, id, held?));
    claimed.filter_map(|claimed| claimed.map(held).transpose()).collect()
}

/// Returns the names whose first waiter belongs to this client and waits for a token, each with the time when the token
/// comes.
pub(super) fn tokens(
    tx: &Connection,
    client: ClientId,
    now: Time,
    peers: &dyn Peers,
) -> Result<Vec<(String, Time)>> {
    let mut select = tx.prepare_cached(
        "SELECT s.id, s.name FROM semaphores s
         WHERE s.rate_count > 0 AND s.id IN (SELECT semaphore FROM waiters WHERE client = ?1)",
    )?;
    let names = select
        .query_map([client.number().cast_signed()], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<Result<Vec<(i64, String)>>>()?;
    let mut tokens = Vec::new();
    for (id, name) in names {
        let machine = Machine { rows: SqlRows::find(tx, Find::Id(id), true, None, peers)? };
        // If the token is already available, the waiter gets it with its next request.
        let (at, first) = match machine.awaited_token(now)? {
            Some(token) => token,
            None => match machine.rows.first_waiter(0)? {
                Some((id, first)) if machine.fits(first.weight(), now) => (now, id.client()),
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
