//! The ids of clients, and of the acquisitions that each client makes.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::num::NonZeroU64;
use std::str::FromStr;

use crate::Error;

mod lock;

pub use lock::LockId;
pub(crate) use lock::hash;

const ALPHABET: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// The length of a client id as text. 62^11 is just above 2^64.
const CLIENT_ID_LEN: usize = 11;

/// The id of a client, drawn at random when the client is created.
///
/// It is displayed as 11 letters and digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(NonZeroU64);

impl ClientId {
    /// # Panics
    /// If the operating system's source of randomness fails.
    pub(crate) fn random() -> Self {
        let random =
            || getrandom::u64().expect("the operating system's source of randomness failed");
        loop {
            if let Some(bits) = NonZeroU64::new(random()) {
                return Self(bits);
            }
        }
    }

    #[cfg(test)]
    pub(crate) const fn from_bits(bits: u64) -> Self {
        Self(NonZeroU64::new(bits).expect("a test's client id is not zero"))
    }

    /// The 64 bits of the id.
    #[cfg(any(test, all(feature = "local", target_os = "linux")))]
    pub(crate) const fn number(self) -> u64 {
        self.0.get()
    }

    #[cfg(all(feature = "local", target_os = "linux"))]
    pub(crate) fn from_number(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self)
    }

    fn digits(self) -> [u8; CLIENT_ID_LEN] {
        let mut rest = self.0.get();
        let mut digits = [b'0'; CLIENT_ID_LEN];
        for digit in digits.iter_mut().rev() {
            // The remainder is below 62, so the conversion cannot fail.
            *digit = ALPHABET[usize::try_from(rest % 62).unwrap_or_default()];
            rest /= 62;
        }
        digits
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        if text.len() != CLIENT_ID_LEN {
            return None;
        }
        text.bytes()
            .try_fold(0_u64, |sum, byte| {
                let digit = ALPHABET.iter().position(|&letter| letter == byte)?;
                sum.checked_mul(62)?.checked_add(digit as u64)
            })
            .and_then(NonZeroU64::new)
            .map(Self)
    }
}

impl fmt::Display for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::str::from_utf8(&self.digits()).map_err(|_| fmt::Error)?)
    }
}

impl fmt::Debug for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The id of one acquisition: `{client id}-{sequence}`.
///
/// The client makes the id before it sends the first request, so that a request whose answer was lost can be repeated
/// or cancelled. After [`Permit::detach`](crate::Permit::detach), the permit is released by this id.
///
/// ```
/// use leasehold::AcquisitionId;
///
/// let id: AcquisitionId = "7Vd3kQ0aZx1-42".parse()?;
/// assert_eq!(id.to_string(), "7Vd3kQ0aZx1-42");
/// assert!("not an id".parse::<AcquisitionId>().is_err());
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct AcquisitionId {
    client: ClientId,
    sequence: u64,
}

impl AcquisitionId {
    pub(crate) const fn new(client: ClientId, sequence: u64) -> Self {
        Self { client, sequence }
    }

    /// Returns the client that made this acquisition.
    #[must_use]
    pub const fn client(self) -> ClientId {
        self.client
    }

    pub(crate) const fn sequence(self) -> u64 {
        self.sequence
    }

    /// Returns a number to hash. The numbers of one client's ids are as far apart as their sequences.
    #[inline]
    pub(crate) const fn number(self) -> u64 {
        self.client.0.get().wrapping_add(self.sequence)
    }
}

impl Hash for AcquisitionId {
    /// Hashes in one step.
    ///
    /// The client id is random and the sequence is unique within the client, so XOR loses nothing.
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.client.0.get() ^ self.sequence);
    }
}

/// A map by acquisition id.
pub(crate) type IdMap<K, V> = HashMap<K, V, BuildHasherDefault<IdHasher>>;

/// A hasher that places ids side by side in a map if they were made one after the other, because they are mostly used
/// one after the other, too. A queue of a hundred thousand ids then does not cost a cache miss per step. The topmost
/// bits are mixed, because the map uses them to distinguish neighbours.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 << 8) ^ self.0 ^ u64::from(*byte);
        }
    }

    fn finish(&self) -> u64 {
        const TAG: u64 = 0x7f << 57;
        let mixed = self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (self.0 & !TAG) | (mixed & TAG)
    }
}

impl fmt::Display for AcquisitionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.client, self.sequence)
    }
}

impl fmt::Debug for AcquisitionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for AcquisitionId {
    type Err = Error;

    /// Parses an id as [`Display`](fmt::Display) shows it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the text has another form.
    fn from_str(text: &str) -> Result<Self, Error> {
        let parse = || {
            let (client, sequence) = text.split_once('-')?;
            let client = ClientId::parse(client)?;
            let sequence: u64 = sequence.parse().ok()?;
            // Each id has one spelling: no plus sign, no leading zeros.
            let id = Self { client, sequence };
            (id.to_string() == text).then_some(id)
        };
        parse().ok_or_else(|| {
            let expected = "expected 11 letters or digits, a hyphen and a number";
            Error::invalid("id", format!("{text:?} is not an acquisition id: {expected}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_is_read_back() {
        for bits in [1, 61, 62, u64::MAX - 1, u64::MAX] {
            for sequence in [0, 7, u64::MAX] {
                let id = AcquisitionId::new(ClientId::from_bits(bits), sequence);
                assert_eq!(id.to_string().parse::<AcquisitionId>().unwrap(), id);
            }
        }
    }

    #[test]
    fn other_spellings_are_refused() {
        let foreign = "0123456789abcdef0123456789abcdef";
        for text in ["", "-", "00000000001-", "00000000001-+1", "00000000001-01", foreign] {
            assert!(text.parse::<AcquisitionId>().is_err(), "{text:?}");
        }
        assert!("zzzzzzzzzzz-1".parse::<AcquisitionId>().is_err(), "beyond 64 bits");
        assert!("00000000000-1".parse::<AcquisitionId>().is_err(), "nobody");
    }
}
