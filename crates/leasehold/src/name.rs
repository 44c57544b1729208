//! What users call things, checked once.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use crate::Error;
use crate::clock::Span;

/// The longest name or key, in bytes after normalisation.
pub(crate) const MAX_NAME_BYTES: usize = 512;

/// The longest TTL of a lock or a lease: some 300 years. What is stored keeps 14 digits of a millisecond timestamp.
const MAX_TTL_MS: u64 = 10_000_000_000_000;

/// A name that has been checked and brought to NFC, so that equal text is one semaphore.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Name(Arc<str>);

impl Name {
    /// `what` is how the error calls it: a name, a key.
    pub(crate) fn new(what: &'static str, text: &str) -> Result<Self, Error> {
        let name: Arc<str> = match is_nfc_quick(text.chars()) {
            IsNormalized::Yes => text.into(),
            _ => text.nfc().collect::<String>().into(),
        };
        if name.is_empty() {
            return Err(Error::invalid(what, "it is empty: give it at least one character"));
        }
        if name.len() > MAX_NAME_BYTES {
            let length = name.len();
            return Err(Error::invalid(
                what,
                format!("it has {length} bytes: at most {MAX_NAME_BYTES} after NFC"),
            ));
        }
        if let Some(control) = name.chars().find(|c| c.is_control()) {
            return Err(Error::invalid(
                what,
                format!("{text:?} contains the control character {control:?}"),
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

/// A duration that has to be longer than nothing.
pub(crate) fn positive(what: &'static str, duration: Duration) -> Result<Span, Error> {
    if duration.is_zero() {
        return Err(Error::invalid(what, "0s is not a duration to wait for: give more than zero"));
    }
    Ok(Span::from_duration(duration))
}

/// A TTL in whole milliseconds, within what a store can keep.
pub(crate) fn millis(what: &'static str, ttl: Duration) -> Result<u64, Error> {
    positive(what, ttl)?;
    if !ttl.as_nanos().is_multiple_of(1_000_000) {
        return Err(Error::invalid(what, format!("{ttl:?} is not in whole milliseconds")));
    }
    let millis = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
    if millis > MAX_TTL_MS {
        let most = Duration::from_millis(MAX_TTL_MS);
        return Err(Error::invalid(what, format!("{ttl:?} is too long: at most {most:?}")));
    }
    Ok(millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_text_is_one_name() {
        let composed = Name::new("name", "caf\u{e9}").unwrap();
        let decomposed = Name::new("name", "cafe\u{301}").unwrap();
        assert_eq!(composed, decomposed);
    }

    #[test]
    fn the_bound_holds_after_normalisation() {
        // Three bytes decomposed, two composed: 768 bytes in, 512 to keep.
        assert!(Name::new("name", &"e\u{301}".repeat(256)).is_ok());
        let error = Name::new("name", &"x".repeat(513)).unwrap_err().to_string();
        assert_eq!(error, "invalid name: it has 513 bytes: at most 512 after NFC");
    }

    #[test]
    fn names_that_nobody_could_see_are_refused() {
        assert!(Name::new("name", "").is_err());
        let error = Name::new("key", "a\nb").unwrap_err().to_string();
        assert_eq!(error, r#"invalid key: "a\nb" contains the control character '\n'"#);
    }
}
