//! The values of options: durations, rates and addresses.

use std::net::SocketAddr;
use std::time::Duration;

pub(super) fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|_| "expected a number and a unit, as in 500ms, 30s or 5m".to_owned())
}

pub(super) fn socket_address(text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .map_err(|_| "expected an address and a port, as in 127.0.0.1:7878 or [::1]:0".to_owned())
}

pub(super) fn count(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(count @ 1..) => Ok(count),
        _ => Err(format!("expected a whole number from 1 to {}", u32::MAX)),
    }
}

pub(super) fn exit_code(text: &str) -> Result<u8, String> {
    text.parse().map_err(|_| format!("expected an exit code from 0 to {}", u8::MAX))
}

/// A number of starts in a period.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rate {
    pub(crate) starts: u64,
    pub(crate) period: Duration,
}

/// The change of a rate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RateChange {
    To(Rate),
    Removed,
}

/// "100/1m"; also "100/m".
pub(super) fn rate(text: &str) -> Result<Rate, String> {
    let bad = || "expected a number and a time, as in 100/1m or 5/s".to_owned();
    let (starts, period) = text.split_once('/').ok_or_else(bad)?;
    let starts = starts.trim().parse().map_err(|_| bad())?;
    let period = period.trim();
    let one = if period.starts_with(|c: char| c.is_ascii_digit()) { "" } else { "1" };
    let period = humantime::parse_duration(&format!("{one}{period}")).map_err(|_| bad())?;
    if starts == 0 || period.is_zero() {
        return Err(
            "it must be positive, as in 100/1m; to stop all starts, pause the name".to_owned()
        );
    }
    Ok(Rate { starts, period })
}

pub(super) fn rate_or_none(text: &str) -> Result<RateChange, String> {
    if text == "none" { Ok(RateChange::Removed) } else { rate(text).map(RateChange::To) }
}

/// Each of the measurements needs a moment in which something happens.
pub(super) fn measurable(text: &str) -> Result<Duration, String> {
    let duration = duration(text)?;
    if duration < Duration::from_millis(500) {
        return Err("too short to measure anything: give at least 500ms".to_owned());
    }
    Ok(duration)
}

pub(super) fn positive(text: &str) -> Result<Duration, String> {
    let duration = duration(text)?;
    if duration.is_zero() {
        return Err("it must be longer than 0, as in 500ms, 30s or 5m".to_owned());
    }
    Ok(duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_a_number_and_a_time() {
        let minute = Duration::from_secs(60);
        assert_eq!(rate("100/1m"), Ok(Rate { starts: 100, period: minute }));
        assert_eq!(rate("100/m"), rate("100/60s"));
        assert_eq!(rate_or_none("none"), Ok(RateChange::Removed));
        for bad in
            ["", "100", "/", "100/", "/1m", "0/1m", "100/0s", "-1/s", "1.5/s", "100/minute or so"]
        {
            assert!(rate(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn durations_have_units() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("5m"), Ok(Duration::from_secs(300)));
        assert_eq!(duration("1h30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(duration("0s"), Ok(Duration::ZERO));
        for bad in ["", "5", "-5s", "five", "5 parsecs", "99999999999999999999y"] {
            assert!(duration(bad).is_err(), "{bad:?}");
        }
        assert!(positive("0s").is_err());
    }
}
