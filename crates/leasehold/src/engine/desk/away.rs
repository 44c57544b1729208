//! What a store that is away says, and what becomes of the tickets.

use std::sync::Arc;

use super::{BACKSTOP, Chore, Desk, Entry, scatter};
use crate::backend::Reply;
use crate::clock::{Moment, Span};
use crate::engine::ticket::{After, Grant, Ticket};
use crate::machine::{Command, Held, Outcome, Role};
use crate::{AcquisitionId, Error, LossReason};

impl Desk {
    /// What a store that is away answered to a batch that was sent at `sent`.
    pub(in crate::engine) fn settle_away(
        &mut self,
        batch: &[Command],
        reply: Reply,
        sent: Moment,
        after: &mut After,
    ) {
        for (command, outcome) in batch.iter().zip(reply.outcomes) {
            let Some(id) = command.id() else { continue };
            let stays = matches!(outcome, Outcome::Held(_) | Outcome::Queued { .. });
            let asked = !matches!(command, Command::Renew { .. });
            if asked && stays && self.ticket(id).is_none() {
                // Nobody here waits for it any more, and what said so may have come before.
                self.outbox.push(Command::Release { id, confirmed: false });
            }
            if matches!(command, Command::Release { .. }) && self.doubtful.is_empty() {
                // Whatever could not be given back has been by now.
                self.failed_release = None;
            }
            self.told(id, outcome, sent, after);
        }
        for (id, held, ()) in reply.effects.granted {
            if self.ticket(id).is_none() {
                // Nobody here waits for it any more.
                self.outbox.push(Command::Release { id, confirmed: false });
            }
            self.told(id, Outcome::Held(held), sent, after);
        }
        if let Some(delay) = reply.next_expiry
            && !self.waiting.is_empty()
        {
            self.sweep_in(jittered(delay), Moment::now());
        }
    }

    /// No store has answered, and the attempts are used up.
    pub(in crate::engine) fn give_up_on(
        &mut self,
        batch: &[Command],
        error: &Error,
        after: &mut After,
    ) {
        for command in batch {
            match command {
                Command::Enqueue { id, .. } | Command::Confirm { id, .. } => {
                    match self.ticket(*id) {
                        // It was asked twice, and has its permit from the other answer.
                        Some(ticket) if !ticket.is_waiting() => continue,
                        _ => {}
                    }
                    if let Some(ticket) = self.forget(*id) {
                        ticket.fail(error.clone(), after);
                    }
                    self.doubt(*id);
                }
                Command::Release { id, .. } => {
                    if let Some(ticket) = self.forget(*id) {
                        ticket.finish_release(Err(error.clone()), after);
                    } else {
                        self.failed_release = Some(error.clone());
                    }
                    self.doubt(*id);
                }
                // Not knowing is not losing: asked again, until the validity ends.
                Command::Renew { id, .. } => self.renew_soon(*id),
                Command::Sweep => {}
            }
        }
    }

    /// What the store says of one id.
    pub(super) fn told(
        &mut self,
        id: AcquisitionId,
        outcome: Outcome,
        sent: Moment,
        after: &mut After,
    ) {
        let Some(ticket) = self.ticket(id).cloned() else { return };
        if ticket.is_releasing() && !matches!(outcome, Outcome::Removed(_)) {
            // A sign of life that was overtaken by the release.
            return;
        }
        match outcome {
            Outcome::Held(held @ Held { fence: Some(fence), .. }) => {
                let terms = ticket.semaphore.terms;
                let valid_until = held.valid_until(terms, sent);
                if held.valid_for < terms.heartbeat {
                    ticket.limited_by_ttl();
                }
                if valid_until <= Moment::now() && ticket.is_waiting() {
                    // The answer took longer than it is good for. Nobody has seen the permit: claim it anew. Who only tries
                    // asks anew, and is told if somebody else has it by now.
                    if ticket.queues {
                        self.claim(id);
                    } else {
                        self.outbox.push(enqueue(&ticket));
                    }
                    return;
                }
                if ticket.is_waiting() {
                    self.leave_line(id);
                    ticket.grant(Grant::new(&held, fence), valid_until, after);
                } else {
                    ticket.extend(valid_until);
                }
                self.schedule_end(id, ticket.valid_until());
                self.schedule_renewal(id, sent);
            }
            Outcome::Held(_) => {
                // Granted by somebody else, and the wake-up was lost. Perhaps not the only one.
                self.claim(id);
                let place = self.tickets.get(&id).and_then(|entry| entry.place);
                self.ask_oldest_from(place.map_or(0, |place| place + 1));
            }
            Outcome::Queued { .. } | Outcome::Waiting => {
                self.stand_in_line(id);
                self.schedule_renewal(id, sent);
            }
            // The same, said before.
            Outcome::Full if !ticket.is_waiting() => {}
            Outcome::Full => {
                self.forget(id);
                ticket.full(after);
            }
            // Its enqueue is still on its way, or on its way again, and will be answered.
            Outcome::Gone if ticket.is_waiting() && !ticket.queues => {}
            Outcome::Gone if ticket.is_waiting() => {
                // Passed over as dead, or the store lost its data: back to the end of the queue.
                self.leave_line(id);
                self.outbox.push(enqueue(&ticket));
            }
            Outcome::Gone => {
                self.forget(id);
                ticket.lose(LossReason::Gone, after);
            }
            Outcome::Removed(role) => {
                self.forget(id);
                ticket.finish_release(Ok(role == Role::Holder), after);
            }
            Outcome::Swept => {}
        }
    }

    /// The engine no longer sees to this ticket.
    pub(super) fn forget(&mut self, id: AcquisitionId) -> Option<Arc<Ticket>> {
        self.ticket(id)?;
        self.leave_line(id);
        let Entry { ticket, renew_at, ends_at, .. } = self.tickets.remove(&id)?;
        self.strike(renew_at, Chore::Renew(id));
        self.strike(ends_at, Chore::End(id));
        self.strike(ticket.gives_up_at, Chore::GiveUp(id));
        Some(ticket)
    }

    /// The store says that it waits. If it did not before, it stands behind everyone else of ours.
    fn stand_in_line(&mut self, id: AcquisitionId) {
        let Some(entry) = self.tickets.get_mut(&id) else { return };
        if entry.place.is_none() {
            self.last_place += 1;
            entry.place = Some(self.last_place);
            self.waiting.insert(self.last_place, id);
        }
        if !std::mem::replace(&mut self.backstopped, true) {
            self.agenda.insert((Moment::now() + BACKSTOP, Chore::Backstop));
        }
    }

    fn leave_line(&mut self, id: AcquisitionId) {
        let entry = self.tickets.get_mut(&id);
        if let Some(place) = entry.and_then(|entry| entry.place.take()) {
            self.waiting.remove(&place);
        }
    }
}

fn enqueue(ticket: &Ticket) -> Command {
    let semaphore = &ticket.semaphore;
    Command::Enqueue {
        id: ticket.id,
        capacity: semaphore.named.capacity(),
        wait: ticket.queues,
        terms: semaphore.terms,
        label: semaphore.label.clone(),
    }
}

/// A little later, by up to a tenth but at most 100 ms, so that not all clients sweep at once.
fn jittered(delay: Span) -> Span {
    let most = (delay.micros() / 10).clamp(1, 100_000);
    Span::from_micros(delay.micros() + scatter(Moment::now().micros()) % most + 1)
}
