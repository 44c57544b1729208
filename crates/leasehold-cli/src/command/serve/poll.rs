//! The task that polls the store. There is one, however many browsers are connected.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::console::Console;
use crate::monitor::Monitor;

/// The pause between polls while no browser is connected. The chart of the last hour needs a sample every ten seconds.
const UNWATCHED: Duration = Duration::from_secs(10);
/// The longest pause.
const LONGEST: Duration = Duration::from_secs(60);

/// Polls forever.
pub(super) async fn run(console: Arc<Console>) {
    loop {
        let began = Instant::now();
        let (read, rest) = Monitor::read(&console.client).await;
        // Reads of queues for pages count as well, so that all reads together stay within the share of the server's time.
        let rest = (rest + console.details.debt()).min(LONGEST);
        console.record(read, began.elapsed(), rest);
        tokio::select! {
            () = pause(&console, rest) => {}
            // After an action, the operator waits for its effect.
            () = console.acted() => {}
        }
    }
}

async fn pause(console: &Console, rest: Duration) {
    tokio::time::sleep(rest).await;
    if !console.is_watched() {
        let longer = UNWATCHED.saturating_sub(rest);
        let _ = tokio::time::timeout(longer, console.view_opened()).await;
    }
}
