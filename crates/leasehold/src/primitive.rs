//! The kinds of objects that are acquired.

use std::fmt;

/// A kind of object that is acquired: see [`Primitive::grant`] for what is granted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Primitive {
    /// A [`Semaphore`](crate::Semaphore), which grants permits.
    Semaphore,
    /// A [`Lock`](crate::Lock).
    Lock,
    /// A [`Pool`](crate::Pool), which grants pool leases.
    Pool,
}

impl Primitive {
    /// Returns `semaphore`, `lock` or `pool`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Semaphore => "semaphore",
            Self::Lock => "lock",
            Self::Pool => "pool",
        }
    }

    /// Returns what is granted: `permit`, `lock` or `pool lease`.
    #[must_use]
    pub fn grant(self) -> &'static str {
        match self {
            Self::Semaphore => "permit",
            Self::Lock => "lock",
            Self::Pool => "pool lease",
        }
    }
}

impl fmt::Display for Primitive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
