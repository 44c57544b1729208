//! The answers `MOVED` and `ASK`, which name another node.

use super::Address;
use crate::backend::Slot;
use crate::backend::redis::connection::{Connection, Target};
use crate::backend::redis::errors::ServerError;
use crate::backend::redis::slots::SLOTS;

/// The answer of a node about a slot that it does not serve.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::backend::redis) enum Redirect {
    /// The slot belongs to the node at this address.
    Moved(Slot, Address),
    /// The slot is being moved to the node at this address, which serves the keys that have arrived.
    Ask(Slot, Address),
}

impl Redirect {
    /// Reads a redirect from the error of a command, if it is one. `from` is the node that answered.
    pub(in crate::backend::redis) fn of(error: &ServerError, from: &Connection) -> Option<Self> {
        let (code, detail) = error.code_and_detail();
        let redirect = match code {
            "MOVED" => Self::Moved,
            "ASK" => Self::Ask,
            _ => return None,
        };
        let (slot, address) = detail.split_once(' ')?;
        let (host, port) = address.rsplit_once(':')?;
        let slot = slot.parse().ok().filter(|slot| *slot < SLOTS)?;
        Some(redirect(Slot(slot), (host_or(host, from), port.parse().ok()?)))
    }
}

/// Returns the host of a redirect. A node that does not know its own address leaves it out; then it is the host of the
/// node that answered.
fn host_or(host: &str, from: &Connection) -> String {
    match &from.target {
        Target::Node(info) if matches!(host, "" | "?") => info.host_and_port().0,
        _ => host.to_owned(),
    }
}
