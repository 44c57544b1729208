//! Semaphores, locks and pools as they were declared. Each is built when its client is open, and again in a forked child.

use std::sync::{Arc, Mutex};

use leasehold::Client as Engine;

use crate::client::Shared;
use crate::failure::Failure;
use crate::pending::{Outcome, Pending};
use crate::process::PerProcess;
use crate::wake::lock;

/// How a semaphore, a lock or a pool was declared.
pub(crate) trait Options: Send + Sync + 'static {
    /// The engine's semaphore, lock or pool.
    type Built: Clone + Send;

    fn build(&self, engine: &Engine, name: &str) -> Result<Self::Built, Failure>;
}

pub(crate) struct Declared<O: Options> {
    client: Arc<Shared>,
    name: String,
    options: O,
    /// Only locked with the GIL held.
    built: Mutex<Option<PerProcess<O::Built>>>,
}

impl<O: Options> Declared<O> {
    pub(crate) fn new(client: Arc<Shared>, name: String, options: O) -> Result<Arc<Self>, Failure> {
        let declared = Arc::new(Self { client, name, options, built: Mutex::new(None) });
        if declared.now()?.is_none() {
            // What does not depend on the store is checked at once.
            declared.options.build(&Engine::memory(), &declared.name)?;
        }
        Ok(declared)
    }

    pub(crate) fn client(&self) -> &Arc<Shared> {
        &self.client
    }

    /// The name of the semaphore or pool, or the key of the lock.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn options(&self) -> &O {
        &self.options
    }

    /// Returns None while the client is not open.
    pub(crate) fn now(&self) -> Result<Option<O::Built>, Failure> {
        if let Some(built) = lock(&self.built).as_ref().and_then(PerProcess::get) {
            return Ok(Some(built.clone()));
        }
        match self.client.now()?.map(|engine| self.keep(&engine)).transpose() {
            Err(failure) if failure.is_the_end() => Ok(None),
            built => built,
        }
    }

    /// Opens the client if need be.
    pub(crate) async fn opened(&self) -> Result<O::Built, Failure> {
        if let Some(built) = self.now()? {
            return Ok(built);
        }
        let engine = self.client.opened().await?;
        self.keep(&engine)
    }

    fn keep(&self, engine: &Engine) -> Result<O::Built, Failure> {
        let built = self.options.build(engine, &self.name)?;
        let before = lock(&self.built).replace(PerProcess::new(built.clone()));
        drop(before);
        Ok(built)
    }

    /// An operation, which opens the client if need be.
    pub(crate) fn operation<F: Future<Output = Outcome> + Send + 'static>(
        self: &Arc<Self>,
        name: &'static str,
        work: impl FnOnce(O::Built) -> F + Send + 'static,
    ) -> Pending {
        let declared = self.clone();
        Pending::of(name, async move { work(declared.opened().await?).await })
    }
}
