//! Fences, which are numbers that only grow, and a gate that rejects old ones.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Error;

/// The smallest number with more than 19 digits.
const BEYOND: u64 = 10_000_000_000_000_000_000;

/// A number that only grows, issued with every grant of a permit or a lock.
///
/// Send the fence with every write to the resource that you protect. Let the resource reject a fence that is older than
/// the newest one it has seen. It then rejects a holder that was paused for longer than its lease, which no lease can
/// do by itself.
///
/// A fence is displayed with 19 digits, so that fences have the same order as text and as numbers. With the feature
/// `serde` it is serialised as that text, because not every JSON library keeps numbers above 2^53 exact.
///
/// ```
/// use leasehold::Fence;
///
/// let older: Fence = "0000000000000000041".parse()?;
/// let newer = Fence::new(42);
/// assert!(newer > older);
/// assert_eq!(newer.to_string(), "0000000000000000042");
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Fence(u64);

impl Fence {
    /// Returns the fence with this number, which should have at most 19 digits, like every fence that a store issues.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:019}", self.0)
    }
}

impl FromStr for Fence {
    type Err = Error;

    /// Parses decimal digits, with or without leading zeros.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the text is empty, contains anything but digits, or is a number with more than 19
    /// digits.
    fn from_str(text: &str) -> Result<Self, Error> {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = digits.then(|| text.parse().ok()).flatten();
        number.filter(|number| *number < BEYOND).map(Self).ok_or_else(|| {
            Error::invalid("fence", format!("{text:?} is not a fence: expected 1 to 19 digits"))
        })
    }
}

#[cfg(feature = "serde")]
mod as_text {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    use super::Fence;

    impl Serialize for Fence {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.collect_str(self)
        }
    }

    impl<'de> Deserialize<'de> for Fence {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            let text = String::deserialize(deserializer)?;
            text.parse().map_err(de::Error::custom)
        }
    }
}

/// A gate in front of a resource in this process, which rejects fences that are too old.
///
/// The gate admits a fence unless it has admitted a newer one before. A holder that was paused for longer than its
/// lease presents an older fence and is rejected, whatever it believes.
///
/// ```
/// use leasehold::{Fence, FenceGate};
///
/// let gate = FenceGate::new();
/// let (paused, next) = (Fence::new(41), Fence::new(42));
/// gate.admit(next)?; // the next holder has written
/// let error = gate.admit(paused).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "fence 0000000000000000041 is too old: fence 0000000000000000042 was admitted before",
/// );
/// # Ok::<(), leasehold::StaleFence>(())
/// ```
///
/// The gate remembers the newest fence for as long as the gate exists. If the resource outlives the process, store the
/// newest fence with the resource: docs/fencing.md has recipes for an SQL row and for a Redis value.
///
/// An admitted holder must finish its write before the next holder is admitted. Hold the resource's own mutex around
/// `admit` and the write, or use [`with`](Self::with), which does that.
#[derive(Debug, Default)]
pub struct FenceGate {
    newest: AtomicU64,
    turn: std::sync::Mutex<()>,
}

impl FenceGate {
    /// Creates a gate that has not admitted any fence.
    #[must_use]
    pub const fn new() -> Self {
        Self { newest: AtomicU64::new(0), turn: std::sync::Mutex::new(()) }
    }

    /// Creates a gate that rejects every fence older than this one, for example the fence that was stored with the
    /// resource.
    #[must_use]
    pub const fn after(fence: Fence) -> Self {
        Self { newest: AtomicU64::new(fence.0), turn: std::sync::Mutex::new(()) }
    }

    /// Admits this fence. From then on, the gate rejects older fences.
    ///
    /// # Errors
    /// [`StaleFence`] if a newer fence was admitted before.
    pub fn admit(&self, fence: Fence) -> Result<(), StaleFence> {
        let newest = self.newest.fetch_max(fence.0, Ordering::AcqRel);
        if newest > fence.0 { Err(StaleFence { fence, newest: Fence(newest) }) } else { Ok(()) }
    }

    /// Admits this fence and runs `write`. Until `write` returns, every other call of `with` on this gate waits.
    ///
    /// # Errors
    /// [`StaleFence`] if a newer fence was admitted before. Then `write` does not run.
    pub fn with<T>(&self, fence: Fence, write: impl FnOnce() -> T) -> Result<T, StaleFence> {
        let _turn = self.turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.admit(fence)?;
        Ok(write())
    }

    /// Returns the newest fence that was admitted, or `None` if there was none.
    #[must_use]
    pub fn newest(&self) -> Option<Fence> {
        Some(self.newest.load(Ordering::Acquire)).filter(|newest| *newest > 0).map(Fence)
    }
}

/// The error of a fence that is too old: see [`FenceGate`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StaleFence {
    /// The fence that was rejected.
    pub fence: Fence,
    /// The newest fence that was admitted before.
    pub newest: Fence,
}

impl fmt::Display for StaleFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fence {} is too old: fence {} was admitted before", self.fence, self.newest)
    }
}

impl std::error::Error for StaleFence {}
