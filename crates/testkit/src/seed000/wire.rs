//! How the foreign client connects to Redis: its settings, its connections, its retries.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, FromRedisValue, RedisResult};
use tokio::sync::Mutex;

/// Document 001's socket timeouts.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Document 001's exponential backoff.
const RETRY_MULTIPLIER: Duration = Duration::from_secs(2);
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// What a test may change of the documents' defaults.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Seconds by which this client's wall clock is ahead of the machine's; negative for behind.
    pub clock_skew: f64,
    /// How long an acquire waits with `BLPOP` before it falls back to one `LPOP` per second.
    pub long_polling: Duration,
    /// How often an operation is tried before its error is returned.
    pub attempts: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { clock_skew: 0.0, long_polling: Duration::from_secs(100), attempts: 3 }
    }
}

/// A connection that is made on first use, and again after it broke.
#[derive(Default)]
pub(super) struct Connection(Mutex<Option<MultiplexedConnection>>);

impl Connection {
    /// Sends a command, and sends it again after *any* error, as document 001 prescribes.
    pub(super) async fn call<T: FromRedisValue>(
        &self,
        client: &Client,
        attempts: u32,
        command: &Cmd,
    ) -> RedisResult<T> {
        let mut attempt = 1;
        loop {
            match self.call_once(client, command).await {
                Err(_) if attempt < attempts => {
                    let delay = RETRY_MULTIPLIER.saturating_mul(1 << (attempt - 1).min(16));
                    tokio::time::sleep(delay.clamp(RETRY_MIN, RETRY_MAX)).await;
                    attempt += 1;
                }
                outcome => return outcome,
            }
        }
    }

    async fn call_once<T: FromRedisValue>(&self, client: &Client, command: &Cmd) -> RedisResult<T> {
        let mut slot = self.0.lock().await;
        let mut connection = match slot.take() {
            Some(connection) => connection,
            None => connect(client).await?,
        };
        // Stored before the reply arrives, so that other calls can use the connection meanwhile.
        *slot = Some(connection.clone());
        drop(slot);
        let outcome = command.query_async(&mut connection).await;
        if outcome.as_ref().is_err_and(redis::RedisError::is_unrecoverable_error) {
            *self.0.lock().await = None;
        }
        outcome
    }
}

async fn connect(client: &Client) -> RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new()
        .set_response_timeout(Some(RESPONSE_TIMEOUT))
        .set_connection_timeout(Some(CONNECT_TIMEOUT));
    client.get_multiplexed_async_connection_with_config(&config).await
}
