//! Checks the names, keys and durations that users pass.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use crate::Error;
use crate::clock::Span;

/// The longest name or key, in bytes. The key of a lock is measured after normalisation.
pub(crate) const MAX_NAME_BYTES: usize = 512;

/// The longest TTL of a lock or a pool lease: about 317 years. The stores keep 14 digits of a timestamp in
/// milliseconds.
const MAX_TTL_MS: u64 = 10_000_000_000_000;

/// A name that has been checked.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Name(Arc<str>);

impl Name {
    /// Checks the name of a semaphore or a pool. It is not normalised, because other programs that use the same name do
    /// not normalise it. `what` is the name of the argument in the error.
    pub(crate) fn new(what: &'static str, text: &str) -> Result<Self, Error> {
        Self::checked(what, text, text.into())
    }

    /// Checks the key of a lock, and normalises it to NFC, as the specification that other programs follow requires.
    pub(crate) fn normalised(what: &'static str, text: &str) -> Result<Self, Error> {
        let name = match is_nfc_quick(text.chars()) {
            IsNormalized::Yes => text.into(),
            _ => text.nfc().collect::<String>().into(),
        };
        Self::checked(what, text, name)
    }

    fn checked(what: &'static str, text: &str, name: Arc<str>) -> Result<Self, Error> {
        if name.is_empty() {
            return Err(Error::invalid(what, "it is empty; the minimum is one character"));
        }
        if name.len() > MAX_NAME_BYTES {
            let length = name.len();
            return Err(Error::invalid(
                what,
                format!("it is {length} bytes; the limit is {MAX_NAME_BYTES}"),
            ));
        }
        if let Some(control) = name.chars().find(|c| c.is_control()) {
            return Err(Error::invalid(
                what,
                format!("{text:?} contains the control character {control:?}: remove it"),
            ));
        }
        Ok(Self(name))
    }

    pub(crate) fn into_text(self) -> Arc<str> {
        self.0
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Returns the duration as a span. Fails if it is zero.
pub(crate) fn positive(what: &'static str, duration: Duration) -> Result<Span, Error> {
    if duration.is_zero() {
        return Err(Error::invalid(what, "it is 0s; it must be longer than zero"));
    }
    Ok(Span::from_duration(duration))
}

/// The shortest time that a client may give the waiters of other clients to claim a permit.
const MIN_CLAIM: Duration = Duration::from_secs(1);

/// Returns the time in which another client must claim a permit. Fails if it is too short: it is imposed on clients
/// that are slower or farther away, and a client that has not claimed its permit in time loses it.
pub(crate) fn claim_time(what: &'static str, limit: Duration) -> Result<Span, Error> {
    if limit < MIN_CLAIM {
        let problem = format!("it is {limit:?}; the minimum is {MIN_CLAIM:?}");
        return Err(Error::invalid(what, problem + ", because other clients must keep to it"));
    }
    Ok(Span::from_duration(limit))
}

/// Returns a TTL in whole milliseconds. Fails if a store cannot represent it.
pub(crate) fn millis(what: &'static str, ttl: Duration) -> Result<u64, Error> {
    positive(what, ttl)?;
    if !ttl.as_nanos().is_multiple_of(1_000_000) {
        return Err(Error::invalid(
            what,
            format!("it is {ttl:?}; it must be a whole number of milliseconds"),
        ));
    }
    let millis = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
    if millis > MAX_TTL_MS {
        let most = Duration::from_millis(MAX_TTL_MS);
        return Err(Error::invalid(what, format!("it is {ttl:?}; the limit is {most:?}")));
    }
    Ok(millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_text_is_one_key_of_a_lock_and_two_names_of_semaphores() {
        let (composed, decomposed) = ("caf\u{e9}", "cafe\u{301}");
        let key = |text| Name::normalised("key", text).unwrap();
        assert_eq!(key(composed), key(decomposed));
        let name = |text| Name::new("name", text).unwrap();
        assert_ne!(name(composed), name(decomposed));
    }

    #[test]
    fn the_bound_holds_after_normalisation() {
        // Each character has three bytes decomposed and two composed: 768 bytes become 512.
        assert!(Name::normalised("key", &"e\u{301}".repeat(256)).is_ok());
        let error = Name::new("name", &"x".repeat(513)).unwrap_err().to_string();
        assert_eq!(error, "invalid name: it is 513 bytes; the limit is 512");
    }

    #[test]
    fn empty_names_and_control_characters_are_refused() {
        assert!(Name::new("name", "").is_err());
        let error = Name::new("key", "a\nb").unwrap_err().to_string();
        assert_eq!(error, r#"invalid key: "a\nb" contains the control character '\n': remove it"#);
    }
}
