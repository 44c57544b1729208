//! Fences: numbers that only grow.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// A number that only grows, minted when a permit or a lock is granted.
///
/// Send it along with every write to the thing you protect, and let that thing refuse a fence that is
/// older than the newest it has seen. It then refuses a holder that was paused past its lease, which
/// no lease can do by itself.
///
/// A fence is shown with 19 digits, so that comparing the text and comparing the numbers agree.
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
    /// The fence with this number.
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
    /// [`Error::InvalidArgument`] if the text is anything but digits, or a number beyond 2^64 - 1.
    fn from_str(text: &str) -> Result<Self, Error> {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse().ok()).flatten().map(Self).ok_or_else(|| {
            Error::invalid("fence", format!("{text:?} is not a fence: expected up to 19 digits"))
        })
    }
}
