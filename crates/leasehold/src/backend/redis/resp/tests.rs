//! Replies as real servers send them, and as hostile servers may send them.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::backend::redis::tests::by_crate::value;

const EACH: [&str; 26] = [
    ":-12\r\n",
    "$5\r\na\r\nbc\r\n",
    "$0\r\n\r\n",
    "$-1\r\n",
    "*-1\r\n",
    "*0\r\n",
    "+OK\r\n",
    "+queued\r\n",
    "_\r\n",
    "*3\r\n*2\r\n+held\r\n:3\r\n$2\r\nid\r\n-NOTOURS some key\r\n",
    "-NOSCRIPT No matching script\r\n",
    ">3\r\n$7\r\nmessage\r\n$4\r\nwake\r\n$2\r\nid\r\n",
    ">3\r\n$9\r\nsubscribe\r\n$4\r\nwake\r\n:1\r\n",
    ">3\r\n$8\r\nsmessage\r\n$4\r\nwake\r\n$2\r\nid\r\n",
    ">3\r\n$10\r\nssubscribe\r\n$4\r\nwake\r\n:1\r\n",
    ">3\r\n$12\r\nsunsubscribe\r\n$4\r\nwake\r\n:0\r\n",
    "~1\r\n:1\r\n",
    "%1\r\n$1\r\na\r\n:1\r\n",
    "|1\r\n$1\r\na\r\n:1\r\n:5\r\n",
    "=8\r\ntxt:text\r\n",
    "!9\r\nERR wrong\r\n",
    ",1.5\r\n",
    ",-inf\r\n",
    "#t\r\n",
    "#f\r\n",
    "(3492890328409238509324850943850943825024385\r\n",
];

/// Decodes a whole stream that arrives in chunks of this size.
fn decode(stream: &[u8], chunk: usize) -> Result<Vec<Value>, RedisError> {
    let (mut decoder, mut values) = (Decoder::default(), Vec::new());
    let (mut start, mut end) = (0, 0);
    while end < stream.len() {
        end = (end + chunk).min(stream.len());
        loop {
            let (length, value) = decoder.read(&stream[start..end])?;
            start += length;
            match value {
                Some((value, size)) => {
                    assert!(size <= LARGEST_REPLY);
                    values.push(value);
                }
                None => break,
            }
        }
    }
    Ok(values)
}

#[test]
fn every_type_is_read_as_the_redis_crate_reads_it() {
    let stream = EACH.concat();
    let expected = EACH.map(|bytes| value(redis::parse_redis_value(bytes.as_bytes()).unwrap()));
    for chunk in [1, 2, 3, 7, 100, stream.len()] {
        assert_eq!(decode(stream.as_bytes(), chunk).unwrap(), expected, "in chunks of {chunk}");
    }
}

#[test]
fn a_value_that_is_not_complete_is_waited_for() {
    for bytes in EACH.map(str::as_bytes) {
        for end in 0..bytes.len() {
            let read = decode(&bytes[..end], 1).unwrap();
            assert!(read.is_empty(), "{} of {}", end, bytes.escape_ascii());
        }
    }
}

#[test]
fn invalid_resp_is_refused() {
    let invalid = [
        "HTTP/1.1 400\r\n",
        ":x\r\n",
        "$1\r\nab\r\n",
        "\r\n",
        ">0\r\n",
        ">1\r\n:1\r\n",
        "*-2\r\n",
        "$-2\r\n",
        "~-1\r\n",
        "$?\r\n",
        "+ab\rc",
        "#x\r\n",
        ",x\r\n",
        "=3\r\ntxt\r\n",
    ];
    for bytes in invalid {
        for chunk in [1, bytes.len()] {
            let error = decode(bytes.as_bytes(), chunk).unwrap_err();
            assert!(matches!(error, RedisError::NotResp), "{bytes:?}");
        }
    }
}

/// Each limit is checked before what exceeds it has arrived.
#[test]
fn what_exceeds_a_limit_is_refused_by_its_header() {
    let cases = [
        (format!("${LARGEST_REPLY}\r\n"), "a reply is larger than 32 MiB"),
        (format!("={}\r\n", u64::MAX / 2), "a reply is larger than 32 MiB"),
        (format!("*{}\r\n", i64::MAX), "a reply is larger than 32 MiB"),
        (format!("%{}\r\n", i64::MAX), "a reply is larger than 32 MiB"),
        (format!("|{}\r\n", i64::MAX), "a reply is larger than 32 MiB"),
        (format!("*1\r\n*{}\r\n", LARGEST_REPLY / VALUE), "a reply is larger than 32 MiB"),
        (format!(">2\r\n$7\r\nmessage\r\n${LARGEST_PUSH}\r\n"), "a message is larger than 16 KiB"),
        ("*1\r\n".repeat(DEEPEST + 1), "a reply has more than 32 levels of arrays"),
        (format!("-{}", "x".repeat(LONGEST_LINE)), "a line of a reply is longer than 64 KiB"),
    ];
    for (bytes, expected) in cases {
        for chunk in [1, 4096] {
            let error = decode(bytes.as_bytes(), chunk).unwrap_err();
            assert_eq!(error.violation(), Some(expected), "{}", &bytes[..bytes.len().min(80)]);
        }
    }
    // An array whose header fits, but not its values.
    let stream =
        format!("*{}\r\n{}", LARGEST_REPLY / VALUE - 1, "_\r\n".repeat(LARGEST_REPLY / VALUE));
    let error = decode(stream.as_bytes(), stream.len()).unwrap_err();
    assert_eq!(error.violation(), Some("a reply is larger than 32 MiB"));
}

/// Without the state between two reads, this took minutes.
#[test]
fn a_large_reply_in_small_pieces_is_not_scanned_again() {
    let bulk = format!("$1000\r\n{}\r\n", "x".repeat(1000));
    let stream = format!("*10000\r\n{}", bulk.repeat(10_000));
    let began = std::time::Instant::now();
    assert_eq!(decode(stream.as_bytes(), 16).unwrap().len(), 1);
    let took = began.elapsed();
    assert!(took < std::time::Duration::from_secs(30), "it took {took:?}");
}

/// Something that a server may send: a reply, parts of one, a header with any length, or anything.
fn sent() -> impl Strategy<Value = Vec<u8>> {
    let real =
        || proptest::sample::select(EACH.as_slice()).prop_map(|reply| reply.as_bytes().to_vec());
    let header = ("[$*%>~|=!:+,#(_-]", any::<i64>())
        .prop_map(|(kind, length)| format!("{kind}{length}\r\n").into_bytes());
    let small = ("[$*%>~|=!]", -2_i64..9)
        .prop_map(|(kind, length)| format!("{kind}{length}\r\n").into_bytes());
    let mutated =
        (real(), any::<prop::sample::Index>(), any::<u8>()).prop_map(|(mut reply, at, byte)| {
            let at = at.index(reply.len());
            reply[at] = byte;
            reply
        });
    let nested = (1..40_usize).prop_map(|depth| b"*1\r\n".repeat(depth));
    prop_oneof![4 => real(), 2 => mutated, 2 => small, 1 => header, 1 => nested, 1 => vec(any::<u8>(), 0..40)]
}

proptest! {
    /// Whatever a server sends, decoding ends, stays within the limits, and does not depend on how the stream is cut.
    #[test]
    fn any_stream_is_decoded_within_limits(parts in vec(sent(), 0..30), chunk in 1..50_usize) {
        let stream = parts.concat();
        let describe = |result: Result<Vec<Value>, RedisError>| {
            result.map_err(|error| error.violation().map(str::to_owned))
        };
        let whole = describe(decode(&stream, stream.len().max(1)));
        prop_assert_eq!(describe(decode(&stream, 1)), whole.clone());
        prop_assert_eq!(describe(decode(&stream, chunk)), whole);
    }

    /// A complete reply is decoded as the `redis` crate decodes it, even if other replies precede it.
    #[test]
    fn real_replies_are_read_as_the_redis_crate_reads_them(
        replies in vec(proptest::sample::select(EACH.as_slice()), 0..20),
        chunk in 1..50_usize,
    ) {
        let expected = replies.iter().map(|reply| redis::parse_redis_value(reply.as_bytes()));
        let expected: Vec<_> = expected.map(|reply| value(reply.unwrap())).collect();
        prop_assert_eq!(decode(replies.concat().as_bytes(), chunk).unwrap(), expected);
    }
}
