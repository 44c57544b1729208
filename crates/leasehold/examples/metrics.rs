//! Exports the metrics of a client through the `metrics` facade, in the format of Prometheus.
//!
//! `cargo run --example metrics --features metrics`

use std::time::Duration;

use leasehold::Client;
use metrics_exporter_prometheus::PrometheusBuilder;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Install the recorder first: semaphores, locks and pools that are built before it record nothing.
    // `PrometheusBuilder::install` would also serve the metrics over HTTP.
    let buckets = [0.001, 0.01, 0.1, 1.0];
    let exporter = PrometheusBuilder::new().set_buckets(&buckets)?.install_recorder()?;

    let client = Client::memory();
    // There is only one API, so its name can be a label.
    let api = client.semaphore("api", 2).name_in_metrics().build()?;
    let requests = (0..10).map(|_| {
        let api = api.clone();
        tokio::spawn(async move {
            api.with(async |_| tokio::time::sleep(Duration::from_millis(50)).await).await
        })
    });
    for request in requests.collect::<Vec<_>>() {
        request.await??;
    }

    // There are many invoices, so their keys are not labels.
    let guard = client.lock("invoice:42").build()?.acquire().await?;
    assert!(client.lock("invoice:42").build()?.try_acquire().await?.is_none());
    let hung = client.semaphore("slow", 1).ttl(Duration::from_millis(20)).build()?;
    let lost = hung.with(async |_| std::future::pending::<()>().await).await;
    println!("# {}", lost.unwrap_err());

    println!("{}", exporter.render());
    drop(guard);
    Ok(())
}
