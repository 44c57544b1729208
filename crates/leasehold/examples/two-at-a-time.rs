//! Runs six jobs, two at a time, first come, first served.

use std::time::Duration;

use leasehold::{Client, Error};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let deploys = Client::memory().semaphore("deploys", 2).numbered().build()?;

    let mut jobs = Vec::new();
    for job in 1..=6 {
        let deploys = deploys.clone();
        jobs.push(tokio::spawn(async move {
            let permit = deploys.acquire().await?;
            let (slot, waited) =
                (permit.slot_number().unwrap_or_default(), permit.waited().as_millis());
            println!("job {job} runs in slot {slot} of 2, after {waited} ms");
            tokio::time::sleep(Duration::from_millis(300)).await;
            permit.release().await
        }));
    }
    for job in jobs {
        job.await.expect("a job panicked")?;
    }
    Ok(())
}
