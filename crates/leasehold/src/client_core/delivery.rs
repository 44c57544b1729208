//! How far a command has come: `Unsent → Sent → Answered`, or `Unknown`.
//!
//! A command is *unsent* until the sender packs it into a request. If the connection is lost before the answer arrives,
//! the outcome is *unknown*: the store may have applied the command, or may still apply it. An unknown command that is
//! still wanted is sent again with the same id, which is harmless (invariant 5).
//!
//! The delivery of an id's commands decides what dropping the id costs. The store cannot know an id that was never
//! sent, so dropping it costs nothing. Every other id ends in a release.

/// How far the commands of one id have come.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Delivery {
    Unsent,
    Sent,
    Answered,
    Unknown,
}

impl Delivery {
    /// Whether the store may know the id, so that it has to be released.
    pub(crate) fn needs_release(self) -> bool {
        if crate::broken::is("lost-cancel") {
            return self == Self::Answered;
        }
        self != Self::Unsent
    }
}
