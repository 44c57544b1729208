//! The words of `SyncGuard`, whose locks on Redis have the same keys.

use crate::{Event, LossReason, Outcome};

/// Returns why an operation on a lock did not succeed: `locked`, `expired` or `not-found`.
///
/// Returns `None` if the operation succeeded or failed with an error.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::{Client, Observer, compat::sync_guard};
/// use std::sync::{Arc, Mutex};
/// use std::time::Duration;
///
/// let reasons = Arc::new(Mutex::new(Vec::new()));
/// let list = reasons.clone();
/// let observer = Observer::new(move |event| list.lock().unwrap().push(sync_guard::reason(event)));
/// let locks = Client::memory().locks().observer(observer);
/// let held = locks.acquire("invoice:42", Duration::from_secs(30)).await?.expect("it was free");
/// locks.acquire("invoice:42", Duration::from_secs(30)).await?;
/// locks.release(&held.id).await?;
/// locks.release(&held.id).await?;
/// assert_eq!(*reasons.lock().unwrap(), [None, Some("locked"), None, Some("not-found")]);
/// # Ok(())
/// # }
/// ```
#[must_use]
pub fn reason(event: &Event) -> Option<&'static str> {
    match event.outcome {
        Outcome::Full => Some("locked"),
        Outcome::Lost(LossReason::LeaseEnded) => Some("expired"),
        Outcome::NotHeld => Some("not-found"),
        _ => None,
    }
}
