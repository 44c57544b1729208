//! Several values of one measure, reported as their median and range.

/// One value per repetition.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sample(pub(crate) Vec<f64>);

impl Sample {
    pub(crate) fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    pub(crate) fn min(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }

    pub(crate) fn max(&self) -> f64 {
        self.0.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }

    /// Returns the value below which this share of the values lies; NaN if there are no values.
    pub(crate) fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // an index
        let index = (count(sorted.len()) * share) as usize;
        sorted.get(index.min(sorted.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
    }

    /// Divides this sample by another, repetition by repetition. What disturbed both in one round cancels out.
    pub(crate) fn over(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(ours, theirs)| ours / theirs).collect())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Converts a count to a number for calculations.
#[allow(clippy::cast_precision_loss)] // nothing that is counted here comes near 2^52
pub(crate) fn count(many: impl TryInto<u64>) -> f64 {
    many.try_into().unwrap_or(u64::MAX) as f64
}

/// Formats a value with three significant digits and its unit.
pub(crate) fn formatted(value: f64, unit: &str) -> String {
    let (value, unit) = match unit {
        "ns" if value >= 1e9 => (value / 1e9, "s"),
        "ns" if value >= 1e6 => (value / 1e6, "ms"),
        "ns" if value >= 1e3 => (value / 1e3, "µs"),
        "bytes" if value >= 1024.0 * 1024.0 => (value / 1024.0 / 1024.0, "MiB"),
        "bytes" if value >= 1024.0 => (value / 1024.0, "KiB"),
        _ => (value, unit),
    };
    let digits = digits(value);
    match unit {
        "" => digits,
        "/s" | "%" => format!("{digits}{unit}"),
        _ => format!("{digits} {unit}"),
    }
}

/// Formats a value with three significant digits, and commas between thousands.
pub(crate) fn digits(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        return "–".to_owned();
    }
    if size >= 1000.0 {
        let whole = format!("{value:.0}");
        let mut apart = String::new();
        for (at, digit) in whole.chars().enumerate() {
            if at > 0 && (whole.len() - at).is_multiple_of(3) {
                apart.push(',');
            }
            apart.push(digit);
        }
        return apart;
    }
    let decimals = match size {
        _ if value == 0.0 || size >= 100.0 => 0,
        _ if size >= 10.0 => 1,
        _ if size >= 0.1 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}
