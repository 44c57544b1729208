//! The settings of `asyncio-advanced-semaphores`, under its names.

use std::time::Duration;

use crate::SemaphoreBuilder;
use crate::guard::Sealed;

/// Adds the settings to a [`SemaphoreBuilder`].
///
/// ```
/// use leasehold::Client;
/// use leasehold::compat::asyncio_advanced_semaphores::Settings;
/// use std::time::Duration;
///
/// let api = Client::memory()
///     .semaphore("api", 5)
///     .heartbeat_max_interval(Duration::from_secs(180))
///     .max_acquire_time(Duration::from_secs(10))
///     .build()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
pub trait Settings: Sealed + Sized {
    /// Sets how long a holder or waiter may be silent: [`SemaphoreBuilder::lease`].
    #[must_use]
    fn heartbeat_max_interval(self, interval: Duration) -> Self;

    /// Sets the longest time that an acquire may wait: [`SemaphoreBuilder::within`].
    #[must_use]
    fn max_acquire_time(self, limit: Duration) -> Self;
}

impl Settings for SemaphoreBuilder {
    fn heartbeat_max_interval(self, interval: Duration) -> Self {
        self.lease(interval)
    }

    fn max_acquire_time(self, limit: Duration) -> Self {
        self.within(limit)
    }
}
