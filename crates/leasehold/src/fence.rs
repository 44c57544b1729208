//! Fences, which are numbers that only grow, and a gate that rejects old ones.

use std::hash::{Hash, Hasher};
use std::str::FromStr;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::{cmp, fmt};

use crate::Error;

/// The smallest number with more than 19 digits.
const BEYOND: u64 = 10_000_000_000_000_000_000;

/// How many digits a fence is displayed with.
const DIGITS: u8 = 19;
/// The same for a lock of the layout `LockLayout::SyncGuard2`.
const DIGITS_OF_SYNCGUARD_2: u8 = 15;

/// A number that only grows, issued with every grant of a permit or a lock.
///
/// Send the fence with every write to the resource that you protect. Let the resource reject a fence that is older than
/// the newest one it has seen. It then rejects a holder that was paused for longer than its lease, which no lease can
/// do by itself.
///
/// A fence is displayed with leading zeros: with 19 digits, or with 15 if it belongs to a lock of the layout
/// `LockLayout::SyncGuard2`, as `SyncGuard` 2 writes it. So the fences of one name or key have the
/// same order as text and as numbers, whichever program prints them. Two fences are equal if their numbers are equal.
/// With the feature `serde` a fence is serialised as that text, because not every JSON library keeps numbers above 2^53
/// exact.
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
#[derive(Clone, Copy)]
pub struct Fence {
    number: u64,
    /// How many digits are displayed at least.
    digits: u8,
}

impl Fence {
    /// Returns the fence with this number, which should have at most 19 digits, like every fence
    /// that a store issues.
    ///
    /// It is displayed with 19 digits.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self { number, digits: DIGITS }
    }

    /// Returns the number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.number
    }
}

impl PartialEq for Fence {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Fence {}

impl PartialOrd for Fence {
    fn partial_cmp(&self, other: &Self) -> Option<cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Fence {
    fn cmp(&self, other: &Self) -> cmp::Ordering {
        self.number.cmp(&other.number)
    }
}

impl Hash for Fence {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.number.hash(state);
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Fence").field(&self.number).finish()
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:0digits$}", self.number, digits = usize::from(self.digits))
    }
}

impl FromStr for Fence {
    type Err = Error;

    /// Parses decimal digits, with or without leading zeros.
    ///
    /// A text of exactly 15 digits is displayed with 15 digits again; every other text is displayed
    /// with 19.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the text is empty, contains anything but digits, or is a number with more than 19
    /// digits.
    fn from_str(text: &str) -> Result<Self, Error> {
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = is_number.then(|| text.parse().ok()).flatten();
        let digits = if text.len() == usize::from(DIGITS_OF_SYNCGUARD_2) {
            DIGITS_OF_SYNCGUARD_2
        } else {
            DIGITS
        };
        let number = number.filter(|number| *number < BEYOND);
        number.map(|number| Self { number, digits }).ok_or_else(|| {
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
#[derive(Debug)]
pub struct FenceGate {
    newest: AtomicU64,
    /// How many digits the newest fence is displayed with. All fences of one resource have the same number of them.
    digits: AtomicU8,
    turn: std::sync::Mutex<()>,
}

impl Default for FenceGate {
    fn default() -> Self {
        Self::new()
    }
}

impl FenceGate {
    /// Creates a gate that has not admitted any fence.
    #[must_use]
    pub const fn new() -> Self {
        Self::after(Fence::new(0))
    }

    /// Creates a gate that rejects every fence older than this one, for example the fence that was stored with the
    /// resource.
    #[must_use]
    pub const fn after(fence: Fence) -> Self {
        Self {
            newest: AtomicU64::new(fence.number),
            digits: AtomicU8::new(fence.digits),
            turn: std::sync::Mutex::new(()),
        }
    }

    /// Admits this fence.
    ///
    /// From then on, the gate rejects older fences.
    ///
    /// # Errors
    /// [`StaleFence`] if a newer fence was admitted before.
    pub fn admit(&self, fence: Fence) -> Result<(), StaleFence> {
        let newest = self.newest.fetch_max(fence.number, Ordering::AcqRel);
        if newest > fence.number {
            return Err(StaleFence { fence, newest: Fence { number: newest, ..fence } });
        }
        self.digits.store(fence.digits, Ordering::Release);
        Ok(())
    }

    /// Admits this fence and runs `write`.
    ///
    /// Until `write` returns, every other call of `with` on this gate waits.
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
        let digits = self.digits.load(Ordering::Acquire);
        let newest = Some(self.newest.load(Ordering::Acquire)).filter(|newest| *newest > 0);
        newest.map(|number| Fence { number, digits })
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
