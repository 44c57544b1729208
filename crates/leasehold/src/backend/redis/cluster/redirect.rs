//! The answers `MOVED` and `ASK`, which name another node.

use super::{Address, host_or};
use crate::backend::Slot;
use crate::backend::redis::connection::{Connection, Target};
use crate::backend::redis::errors::ServerError;
use crate::backend::redis::slots::SLOTS;

/// Returns the slot and the node that an error with the code `MOVED` or `ASK` names. `from` is the node that answered.
pub(in crate::backend::redis) fn redirect(
    error: &ServerError,
    from: &Connection,
) -> Option<(Slot, Address)> {
    let (slot, address) = error.code_and_detail().1.split_once(' ')?;
    let (host, port) = address.rsplit_once(':')?;
    let slot = slot.parse().ok().filter(|slot| *slot < SLOTS)?;
    let Target::Node(info) = &from.target else { return None };
    Some((Slot(slot), (host_or(host, &info.host_and_port().0), port.parse().ok()?)))
}
