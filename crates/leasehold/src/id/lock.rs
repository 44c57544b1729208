//! The id of a held lock.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};

use crate::Error;

const LENGTH: usize = 22;

/// The id of one holder of a lock: 16 random bytes, as 22 characters of base64url.
///
/// A caller that knows the id can extend and release the lock, so keep it secret. [`LockInfo`](crate::LockInfo), errors
/// and the debug form of an id contain only a hash of it.
///
/// ```
/// use leasehold::LockId;
///
/// let id: LockId = "AAECAwQFBgcICQoLDA0ODw".parse()?;
/// assert_eq!(id.to_string(), "AAECAwQFBgcICQoLDA0ODw");
/// assert!("too short".parse::<LockId>().is_err());
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LockId([u8; LENGTH]);

impl LockId {
    /// Returns a new random id, for [`Locks::try_acquire_as`](crate::Locks::try_acquire_as).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::{Client, LockId};
    /// use std::time::Duration;
    ///
    /// let (locks, ttl) = (Client::memory().locks(), Duration::from_secs(30));
    /// let id = LockId::random();
    /// let held = locks.try_acquire_as("invoice:42", ttl, &id).await?.expect("it was free");
    /// // If that answer had been lost, the same call would return the same lock.
    /// let again = locks.try_acquire_as("invoice:42", ttl, &id).await?.expect("it is ours");
    /// assert_eq!(again.fence, held.fence);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    /// If the operating system's source of randomness fails.
    #[must_use]
    pub fn random() -> Self {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).expect("the operating system's source of randomness failed");
        let mut text = [0; LENGTH];
        let written = URL_SAFE_NO_PAD.encode_slice(bytes, &mut text);
        debug_assert_eq!(written.ok(), Some(LENGTH));
        Self(text)
    }

    pub(crate) fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl FromStr for LockId {
    type Err = Error;

    /// Parses a lock id.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the text is not 22 characters of base64url.
    fn from_str(text: &str) -> Result<Self, Error> {
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        let id = text.as_bytes().try_into().ok().map(Self);
        id.filter(|id| id.0.iter().copied().all(is_valid)).ok_or_else(|| {
            // The text may be a lock id with a line end, so the error does not repeat it.
            let problem = match text.len() {
                LENGTH => "it has other characters".to_owned(),
                length => format!("it has {length} bytes"),
            };
            let expected = "expected 22 characters of A-Z a-z 0-9 - _";
            Error::invalid("lock id", format!("{problem}: {expected}"))
        })
    }
}

impl fmt::Display for LockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Prints a hash of the id, because the debug form of a value often ends up in a log.
impl fmt::Debug for LockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LockId").field(&format_args!("{}", hash(self.as_str()))).finish()
    }
}

/// Returns the first 24 hexadecimal digits of the hash of a key or an id. They may be shown, and distinguish it from
/// others.
pub(crate) fn hash(text: &str) -> String {
    use fmt::Write;
    let mut hash = String::with_capacity(24);
    for byte in &Sha256::digest(text.as_bytes())[..12] {
        let _ = write!(hash, "{byte:02x}");
    }
    hash
}
