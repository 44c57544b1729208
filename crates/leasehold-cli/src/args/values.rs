//! The values of options: durations, rates and addresses.

use std::net::SocketAddr;
use std::time::Duration;

use leasehold::RateLimit;

use crate::failure::Failure;

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

/// The value of `--rate`: a number of starts in a period, or `none`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RateArgument {
    Rate { starts: u64, period: Duration },
    None,
}

/// The change of a rate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RateChange {
    To(RateLimit),
    Removed,
}

impl RateArgument {
    /// Returns the change that `--rate` and `--burst` ask for.
    pub(crate) fn with_burst(self, burst: Option<u32>) -> Result<RateChange, Failure> {
        match (self, burst) {
            (Self::Rate { starts, period }, burst) => {
                Ok(RateChange::To(RateLimit::new(starts, period, burst.unwrap_or(1))?))
            }
            (Self::None, None) => Ok(RateChange::Removed),
            (Self::None, Some(burst)) => {
                let problem = format!("--burst {burst} needs a rate, and --rate none removes it");
                Err(Failure::usage(format!("{problem}: leave out --burst, or give a rate")))
            }
        }
    }
}

/// "100/1m"; also "100/m".
fn rate(text: &str) -> Result<RateArgument, String> {
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
    Ok(RateArgument::Rate { starts, period })
}

pub(super) fn rate_or_none(text: &str) -> Result<RateArgument, String> {
    if text == "none" { Ok(RateArgument::None) } else { rate(text) }
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

/// The longest period of `--once-per`: a hundred years of 365 days. A store cannot keep a lock for much longer.
const LONGEST_PERIOD: Duration = Duration::from_secs(100 * 365 * 86_400);

pub(super) fn period(text: &str) -> Result<Duration, String> {
    let period = positive(text)?;
    if period > LONGEST_PERIOD {
        return Err("the limit is 36500 days".to_owned());
    }
    Ok(period)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_a_number_and_a_time() {
        let minute = Duration::from_secs(60);
        assert_eq!(rate("100/1m"), Ok(RateArgument::Rate { starts: 100, period: minute }));
        assert_eq!(rate("100/m"), rate("100/60s"));
        assert_eq!(rate_or_none("none"), Ok(RateArgument::None));
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
