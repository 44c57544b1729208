//! Fences: numbers that only grow.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Error;

/// The first number that has more than 19 digits.
const BEYOND: u64 = 10_000_000_000_000_000_000;

/// A number that only grows, minted when a permit or a lock is granted.
///
/// Send it along with every write to the thing you protect, and let that thing refuse a fence that is
/// older than the newest it has seen. It then refuses a holder that was paused past its lease, which
/// no lease can do by itself.
///
/// A fence is shown with 19 digits, so that comparing the text and comparing the numbers agree. With the feature
/// `serde` it is serialised as that text: a number would not survive every JSON library past 2^53.
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
    /// The fence with this number, which has at most 19 digits: those that are minted do.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number itself.
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

    /// Takes decimal digits, padded or not.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the text is anything but digits, or a number that has more than 19.
    fn from_str(text: &str) -> Result<Self, Error> {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = digits.then(|| text.parse().ok()).flatten();
        number.filter(|number| *number < BEYOND).map(Self).ok_or_else(|| {
            Error::invalid("fence", format!("{text:?} is not a fence: expected up to 19 digits"))
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

/// What stands before a resource in Rust and lets nobody through who is too late.
///
/// It lets a fence through that is not older than the newest it has let through. A holder that was paused past its
/// lease comes with an older one, and is refused, whatever it believes.
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
///     "fence 0000000000000000041 is too old: 0000000000000000042 was here before",
/// );
/// # Ok::<(), leasehold::StaleFence>(())
/// ```
///
/// The gate remembers for as long as it lives. If the resource outlives the process, the newest fence has to be kept
/// where the resource is: docs/fencing.md has recipes for an SQL row and for a Redis value. And whoever is let through
/// has to write before the next one is: hold the resource's own mutex around `admit` and the write, or use
/// [`with`](Self::with), which does.
#[derive(Debug, Default)]
pub struct FenceGate {
    newest: AtomicU64,
    turn: std::sync::Mutex<()>,
}

impl FenceGate {
    /// A gate that has seen nobody.
    #[must_use]
    pub const fn new() -> Self {
        Self { newest: AtomicU64::new(0), turn: std::sync::Mutex::new(()) }
    }

    /// A gate that has seen this fence, for example the one that was stored with the resource.
    #[must_use]
    pub const fn after(fence: Fence) -> Self {
        Self { newest: AtomicU64::new(fence.0), turn: std::sync::Mutex::new(()) }
    }

    /// Lets this fence through, and none that is older from now on.
    ///
    /// # Errors
    /// [`StaleFence`] if a newer one was let through before.
    pub fn admit(&self, fence: Fence) -> Result<(), StaleFence> {
        let newest = self.newest.fetch_max(fence.0, Ordering::AcqRel);
        if newest > fence.0 { Err(StaleFence { fence, newest: Fence(newest) }) } else { Ok(()) }
    }

    /// Lets this fence through and does the write while nobody else is let through here.
    ///
    /// # Errors
    /// [`StaleFence`] if a newer one was let through before. Then nothing is written.
    pub fn with<T>(&self, fence: Fence, write: impl FnOnce() -> T) -> Result<T, StaleFence> {
        let _turn = self.turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.admit(fence)?;
        Ok(write())
    }

    /// The newest fence that was let through.
    #[must_use]
    pub fn newest(&self) -> Option<Fence> {
        Some(self.newest.load(Ordering::Acquire)).filter(|newest| *newest > 0).map(Fence)
    }
}

/// Somebody came too late: see [`FenceGate`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StaleFence {
    /// The fence that was refused.
    pub fence: Fence,
    /// The newest that was let through before.
    pub newest: Fence,
}

impl fmt::Display for StaleFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fence {} is too old: {} was here before", self.fence, self.newest)
    }
}

impl std::error::Error for StaleFence {}
