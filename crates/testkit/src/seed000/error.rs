//! Errors of the foreign client.

use std::fmt;

use redis::RedisError;

/// Why nothing was acquired.
#[derive(Debug)]
pub enum AcquireError {
    /// `max_acquire_time` has passed.
    Timeout,
    /// The slot was removed between the notification and its confirmation.
    Stale,
    /// Redis failed, after all attempts.
    Redis(RedisError),
}

impl fmt::Display for AcquireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Timeout => "no slot within max_acquire_time",
            Self::Stale => "the slot was removed before it was confirmed",
            Self::Redis(_) => "redis failed",
        })
    }
}

impl std::error::Error for AcquireError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        if let Self::Redis(error) = self { Some(error) } else { None }
    }
}

impl From<RedisError> for AcquireError {
    fn from(error: RedisError) -> Self {
        Self::Redis(error)
    }
}
