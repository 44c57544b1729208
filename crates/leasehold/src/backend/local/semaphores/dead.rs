//! Dead clients, and the clients that look for them.

use rusqlite::{OptionalExtension, Result, params};

use super::named::{Named, client};
use super::{Circumstances, WATCHED_PLACES, WATCHERS};
use crate::ClientId;
use crate::clock::Time;

impl Named<'_> {
    /// Sets the next expiry and the next token, and whether the sender waits near the head.
    pub(super) fn look_ahead(&mut self, call: &Circumstances<'_>, asked: bool) -> Result<()> {
        if self.state.waiting == 0 {
            return Ok(());
        }
        let next: Option<i64> = self
            .tx
            .prepare_cached(
                "SELECT ends FROM holders WHERE semaphore = ?1 AND ends IS NOT NULL ORDER BY ends LIMIT 1",
            )?
            .query_row([self.row], |row| row.get(0))
            .optional()?;
        self.applied.next_expiry = next.map(|next| Time::from_micros(next.cast_unsigned()));
        self.notify_first_waiter(call)?;
        if let Some(from) = call.from.filter(|_| asked) {
            self.applied.watches = self.first_in_line()?.contains(&from);
        }
        Ok(())
    }

    /// Notifies the client of the first waiter, if that waiter waits only for a token. The client then asks when the
    /// token comes. The reply notifies the sender of this batch; another client is woken if the time has changed.
    pub(super) fn notify_first_waiter(&mut self, call: &Circumstances<'_>) -> Result<()> {
        let token = self.next_token(call.now)?;
        match token {
            Some((at, client)) if call.from == Some(client) => self.applied.next_token = Some(at),
            Some((_, client)) if token != self.token_before => self.wake(client),
            _ => {}
        }
        Ok(())
    }

    fn first_in_line(&self) -> Result<Vec<ClientId>> {
        let mut select = self.tx.prepare_cached(
            "SELECT client FROM waiters WHERE semaphore = ?1 ORDER BY place LIMIT ?2",
        )?;
        let mut rows = select.query(params![self.row, WATCHED_PLACES])?;
        let mut first = Vec::new();
        while first.len() < WATCHERS
            && let Some(row) = rows.next()?
        {
            let client = client(row, 0)?;
            if !first.contains(&client) {
                first.push(client);
            }
        }
        Ok(first)
    }

    /// The clients whose death would let another waiter in: the holders, and the clients near the head. The sender is
    /// left out.
    fn in_front(&self, call: &Circumstances<'_>) -> Result<Vec<ClientId>> {
        let mut select =
            self.tx.prepare_cached("SELECT DISTINCT client FROM holders WHERE semaphore = ?1")?;
        let holders = select.query_map([self.row], |row| client(row, 0))?;
        let mut clients: Vec<_> = holders.collect::<Result<_>>()?;
        clients.extend(self.first_in_line()?);
        clients.retain(|client| call.from != Some(*client));
        Ok(clients)
    }

    pub(super) fn any_dead(&self, call: &mut Circumstances<'_>) -> Result<bool> {
        Ok(self.in_front(call)?.into_iter().any(|client| (call.is_dead)(client)))
    }

    /// Looks for dead clients and removes them, at most once per batch.
    pub(super) fn remove_dead_clients(&mut self, call: &mut Circumstances<'_>) -> Result<()> {
        if !std::mem::replace(&mut self.looked_for_dead, true) {
            for client in self.in_front(call)? {
                if !self.dead.contains(&client) && (call.is_dead)(client) {
                    self.remove_dead_client_here(client)?;
                }
            }
        }
        Ok(())
    }

    /// Removes a dead client under this name. It is removed under its other names after this name is written.
    pub(super) fn remove_dead_client_here(&mut self, client: ClientId) -> Result<()> {
        self.remove_client(client)?;
        self.dead.push(client);
        Ok(())
    }

    pub(super) fn remove_client(&mut self, client: ClientId) -> Result<()> {
        let held = self.tx.prepare_cached(
            "DELETE FROM holders WHERE semaphore = ?1 AND client = ?2 RETURNING weight, fence, unclaimed",
        )?;
        self.remove_holders(held, client.number().cast_signed())?;
        self.remove_waiters(client)
    }

    pub(super) fn remove_waiters(&mut self, client: ClientId) -> Result<()> {
        let waited = self
            .tx
            .prepare_cached("DELETE FROM waiters WHERE client = ?2 AND semaphore = ?1")?
            .execute(params![self.row, client.number().cast_signed()])?;
        self.state.waiting -= waited as u64;
        Ok(())
    }
}
