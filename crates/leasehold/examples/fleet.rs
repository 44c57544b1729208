//! Runs at most two deploys at a time in a whole fleet. Run this in several terminals, with the URL of one Redis
//! server.

use std::time::Duration;

use leasehold::{Client, Error};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "redis://localhost:6379".into());
    let client = Client::redis(&url).await?;
    let lease = Duration::from_secs(10);
    let deploys = client.semaphore("deploys", 2).lease(lease).numbered().build()?;

    for round in 1..=5 {
        let permit = deploys.acquire().await?;
        let (slot, waited) =
            (permit.slot_number().unwrap_or_default(), permit.waited().as_millis());
        println!(
            "round {round} runs in slot {slot} of 2, after {waited} ms, with fence {}",
            permit.fence()
        );
        tokio::time::sleep(Duration::from_millis(500)).await;
        permit.release().await?;
    }
    client.close().await
}
