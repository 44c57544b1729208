//! Fences in JSON.

#![cfg(feature = "serde")]

use leasehold::Fence;

#[test]
fn a_fence_is_a_text_of_19_digits() {
    for (number, text) in [
        (7, "\"0000000000000000007\""),
        ((1 << 53) + 1, "\"0009007199254740993\""),
        (i64::MAX.unsigned_abs(), "\"9223372036854775807\""),
    ] {
        let json = serde_json::to_string(&Fence::new(number)).unwrap();
        assert_eq!(json, text);
        assert_eq!(serde_json::from_str::<Fence>(&json).unwrap(), Fence::new(number));
    }
}

/// A JSON number may have been rounded on its way, so it is not accepted as a fence.
#[test]
fn what_is_not_such_a_text_is_refused() {
    for json in ["7", "\"\"", "\"-1\"", "\"1e3\"", "\" 7\"", "\"99999999999999999999\"", "null"] {
        assert!(serde_json::from_str::<Fence>(json).is_err(), "{json}");
    }
    let error = serde_json::from_str::<Fence>("\"seven\"").unwrap_err().to_string();
    assert!(error.starts_with("invalid fence: \"seven\" is not a fence"), "{error}");
}
