//! How names are written in keys, and the slots of keys in a cluster.
//!
//! Redis hashes a key to one of 16384 slots. If the key has a *hash tag*, the text between its first `{` and the next
//! `}`, only the tag is hashed. A script serves keys of one slot, so in a cluster all keys of a name have the same tag:
//!
//! | prefix | name | key |
//! |---|---|---|
//! | `adv-sem` | `api` | `adv-sem:semaphore_main:{api}`: the name is the tag |
//! | `adv-sem` | `eu{api}` | `adv-sem:semaphore_main:eu{api}`: the name has its own tag |
//! | `{adv-sem}` | `api` | `{adv-sem}:semaphore_main:api`: everything under the prefix is in one slot |
//!
//! Two names never have the same keys: a name that consists of a tag only, such as `{api}`, is refused.

use std::borrow::Cow;
use std::sync::LazyLock;

use crate::Error;
use crate::backend::Slot;

/// The number of slots of a cluster.
pub(super) const SLOTS: u16 = 16384;

/// Returns the slot of a key.
pub(super) fn slot_of(key: &str) -> Slot {
    let hashed = tag(key).unwrap_or(key);
    Slot(crc16(hashed.as_bytes()) % SLOTS)
}

/// Returns the hash tag of a key, unless it has none or an empty one.
fn tag(key: &str) -> Option<&str> {
    let (_, rest) = key.split_once('{')?;
    let (tag, _) = rest.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    const TABLE: [u16; 256] = {
        let (mut table, mut byte) = ([0; 256], 0);
        while byte < 256 {
            #[allow(clippy::cast_possible_truncation)] // below 256
            let (mut crc, mut bit) = ((byte as u16) << 8, 0);
            while bit < 8 {
                crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
                bit += 1;
            }
            table[byte] = crc;
            byte += 1;
        }
        table
    };
    let step = |crc: u16, byte: &u8| (crc << 8) ^ TABLE[usize::from((crc >> 8) ^ u16::from(*byte))];
    bytes.iter().fold(0, step)
}

/// Returns the end of the names of wake-up channels of a slot: a hash tag that hashes to the slot.
pub(super) fn channel_end(slot: Slot) -> String {
    /// For each slot, the smallest number whose base-36 form hashes to it, in that form.
    static TAGS: LazyLock<Vec<String>> = LazyLock::new(|| {
        let mut tags = vec![String::new(); usize::from(SLOTS)];
        let mut missing = tags.len();
        for tag in (0..).map(base36) {
            let of_slot = &mut tags[usize::from(slot_of(&tag).0)];
            if of_slot.is_empty() {
                *of_slot = tag;
                missing -= 1;
            }
            if missing == 0 {
                break;
            }
        }
        tags
    });
    format!(":{{{}}}", TAGS[usize::from(slot.0)])
}

fn base36(number: u32) -> String {
    let shifted = |number: &u32| Some(number / 36).filter(|rest| *rest > 0);
    let digits = std::iter::successors(Some(number), shifted);
    let digits: Vec<_> = digits.filter_map(|rest| char::from_digit(rest % 36, 36)).collect();
    digits.into_iter().rev().collect()
}

/// How the names below one prefix are written in keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KeyTag {
    /// Unchanged: there is one server, or the prefix has a hash tag.
    Plain,
    /// With a hash tag.
    Tagged,
}

impl KeyTag {
    /// Returns how names below this prefix are written in a cluster.
    pub(super) fn below(what: &'static str, prefix: &str) -> Result<Self, Error> {
        if tag(prefix).is_some() {
            return Ok(Self::Plain);
        }
        if prefix.contains(['{', '}']) {
            let problem = format!("{prefix:?} has a brace that is not part of a hash tag");
            let advice =
                "in a cluster, leave the braces out, or use one hash tag, as in \"{adv-sem}\"";
            return Err(Error::invalid(what, format!("{problem}: {advice}")));
        }
        Ok(Self::Tagged)
    }

    /// Returns [`Error::InvalidArgument`] if this name cannot be written in a key.
    pub(super) fn check(self, what: &'static str, name: &str) -> Result<(), Error> {
        if self == Self::Plain || !name.contains(['{', '}']) {
            return Ok(());
        }
        let Some(tag) = tag(name) else {
            let problem = format!("{name:?} has a brace that is not part of a hash tag");
            let advice =
                "in a cluster, leave the braces out, or put one part in braces, as in \"eu{api}\"";
            return Err(Error::invalid(what, format!("{problem}: {advice}")));
        };
        if name.len() == tag.len() + 2 {
            let problem =
                format!("{name:?} is only a hash tag, which is how {tag:?} is stored in a cluster");
            return Err(Error::invalid(what, format!("{problem}: use {tag:?}")));
        }
        Ok(())
    }

    /// Returns the name as it is written in a key.
    pub(super) fn write(self, name: &str) -> Cow<'_, str> {
        match self {
            Self::Tagged if !name.contains(['{', '}']) => format!("{{{name}}}").into(),
            _ => name.into(),
        }
    }

    /// Returns the name, given how it is written in a key.
    pub(super) fn read(self, written: &str) -> &str {
        let bare = written.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
        match (self, bare) {
            (Self::Tagged, Some(name)) if !name.is_empty() && !name.contains(['{', '}']) => name,
            _ => written,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first value is the check value of the algorithm. The others are answers of a server to `CLUSTER KEYSLOT`.
    #[test]
    fn slots_are_those_of_redis() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        let cases = [
            ("foo", 12182),
            ("bar", 5061),
            ("adv-sem:semaphore_main:{foo}", 12182),
            ("{user1000}.following", 3443),
            ("foo{}{bar}", 8363),
            ("foo{{bar}}zap", 4015),
            ("foo{bar}{zap}", 5061),
            ("", 0),
        ];
        for (key, slot) in cases {
            assert_eq!(slot_of(key), Slot(slot), "{key}");
        }
    }

    #[test]
    fn every_slot_has_channels() {
        for slot in (0..SLOTS).map(Slot) {
            let channel = format!("adv-sem:wake:00000000001{}", channel_end(slot));
            assert_eq!(slot_of(&channel), slot, "{channel}");
        }
    }

    #[test]
    fn every_kind_of_key_of_a_name_is_in_one_slot() {
        for name in ["api", "eu{api}", "a name with spaces", "{a}{b}", "x{y}z{"] {
            KeyTag::Tagged.check("name", name).unwrap();
            let written = KeyTag::Tagged.write(name);
            let slot = slot_of(&format!("adv-sem:semaphore_main:{written}"));
            for kind in ["adv-sem:semaphore_waiting_heartbeat:", "adv-sem:wake:00000000001:", ""] {
                assert_eq!(slot_of(&format!("{kind}{written}")), slot, "{kind}{written}");
            }
            assert_eq!(KeyTag::Tagged.read(&written), name);
        }
    }

    #[test]
    fn names_that_cannot_be_written_are_refused() {
        let error = |name| KeyTag::Tagged.check("name", name).unwrap_err().to_string();
        assert_eq!(
            error("{api}"),
            "invalid name: \"{api}\" is only a hash tag, which is how \"api\" is stored in a cluster: use \"api\""
        );
        for name in ["{", "}", "a{", "}{", "{}", "a{}b", "{}{b}"] {
            assert!(error(name).contains("leave the braces out"), "{name}");
        }
        assert!(KeyTag::Plain.check("name", "{").is_ok());
        assert_eq!(KeyTag::below("namespace", "adv-sem").unwrap(), KeyTag::Tagged);
        assert_eq!(KeyTag::below("namespace", "{adv-sem}").unwrap(), KeyTag::Plain);
        assert!(KeyTag::below("namespace", "adv{sem").is_err());
    }
}
