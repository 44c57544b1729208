//! The loss of what a block holds.
//!
//! The engine wakes a [`Watch`] when a lease is lost. The event loop of the body then cancels the body's task, and
//! leaving the block turns exactly that cancellation into `leasehold.Lost`, as `asyncio.timeout` does for
//! `TimeoutError`. A body is always suspended while the event loop does this, so that it does not run a step further
//! than the one during which the lease was lost.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context as TaskContext, Poll, Wake};

use leasehold::{LossReason, Lost};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use crate::guard::Grant;
use crate::interpreter::{current_task, minor_version, running_loop, weak_reference};
use crate::process::PerProcess;
use crate::wake::{Queue, lock, queue_of};

/// What tells our cancellation from others before Python 3.11, which has no other means.
const MESSAGE: &str = "leasehold: the lease of this block was lost";

static CANCELLED: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// Cancels a task when a permit, a lock or a pool lease is lost.
pub(crate) struct Watch {
    queue: Arc<Queue>,
    state: Mutex<Watching>,
    queued: AtomicBool,
}

struct Watching {
    /// None once the loss was seen, or the block was left.
    lost: Option<PerProcess<Lost>>,
    /// A weak reference: the task refers to the block.
    task: Option<Py<PyAny>>,
    /// How often the task was asked to cancel when the block was entered.
    cancelling: Option<usize>,
    /// Set when this has cancelled the task.
    reason: Option<LossReason>,
}

/// A cancellation that a [`Watch`] has asked for.
pub(crate) struct Cancelled {
    task: Option<Py<PyAny>>,
    cancelling: Option<usize>,
    reason: LossReason,
}

impl Watch {
    /// None outside of a task: then there is nothing to cancel.
    pub(crate) fn begin(py: Python<'_>, grant: &Grant) -> PyResult<Option<Arc<Self>>> {
        let event_loop = running_loop(py)?;
        if event_loop.is_none() {
            return Ok(None);
        }
        let task = current_task(&event_loop)?;
        if task.is_none() {
            return Ok(None);
        }
        let cancelling = if minor_version(py) >= 11 {
            Some(task.call_method0(intern!(py, "cancelling"))?.extract()?)
        } else {
            None
        };
        let state = Watching {
            lost: Some(PerProcess::new(grant.lost())),
            task: Some(weak_reference(&task)?),
            cancelling,
            reason: None,
        };
        let watch = Arc::new(Self {
            queue: queue_of(&event_loop)?,
            state: Mutex::new(state),
            queued: AtomicBool::new(false),
        });
        // If it is lost already, the body is cancelled at its first await.
        if watch.poll().is_some() {
            watch.clone().wake();
        }
        Ok(Some(watch))
    }

    /// Why it was lost, if it was.
    fn poll(self: &Arc<Self>) -> Option<LossReason> {
        let waker = self.clone().into();
        let mut state = lock(&self.state);
        let lost = state.lost.as_mut().and_then(PerProcess::get_mut)?;
        match Pin::new(lost).poll(&mut TaskContext::from_waker(&waker)) {
            Poll::Ready(reason) => Some(reason),
            Poll::Pending => None,
        }
    }

    /// On the loop's thread: cancels the task if it is lost.
    pub(crate) fn check_loss(self: &Arc<Self>, py: Python<'_>) {
        self.queued.store(false, Ordering::Release);
        let Some(why) = self.poll() else { return };
        let mut state = lock(&self.state);
        let lost = state.lost.take();
        let task = state.task.as_ref().map(|task| task.clone_ref(py));
        drop(state);
        drop(lost);
        let cancel = || -> PyResult<bool> {
            let Some(task) = task else { return Ok(false) };
            let task = task.bind(py).call0()?;
            if task.is_none() {
                return Ok(false);
            }
            task.call_method1(intern!(py, "cancel"), (MESSAGE,))?.is_truthy()
        };
        match cancel() {
            Ok(true) => lock(&self.state).reason = Some(why),
            // The task has ended, and another one is inside of the block: nothing was cancelled.
            Ok(false) => {}
            Err(error) => error.write_unraisable(py, None),
        }
    }

    /// Stops watching: a later loss has no effect.
    pub(crate) fn stop(&self) {
        let lost = lock(&self.state).lost.take();
        drop(lost);
    }

    /// Ends the block. Returns the cancellation that this has asked for, if any.
    pub(crate) fn end(&self) -> Option<Cancelled> {
        let mut state = lock(&self.state);
        let (lost, task) = (state.lost.take(), state.task.take());
        let (reason, cancelling) = (state.reason.take(), state.cancelling);
        drop(state);
        drop(lost);
        reason.map(|reason| Cancelled { task, cancelling, reason })
    }
}

impl Cancelled {
    /// Why the lease was lost.
    pub(crate) fn reason(&self) -> LossReason {
        self.reason
    }

    /// Whether the block ends by the cancellation that the watch has asked for, and no other. Must be called once.
    pub(crate) fn ends(
        &self,
        py: Python<'_>,
        exception: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        let class = CANCELLED.import(py, "asyncio", "CancelledError")?;
        let by_cancellation = match exception {
            Some(exception) => exception.is_instance(class)?,
            None => false,
        };
        let task = match &self.task {
            Some(task) => task.bind(py).call0()?,
            None => return Ok(by_cancellation),
        };
        match self.cancelling {
            Some(before) if !task.is_none() => {
                let now: usize = task.call_method0(intern!(py, "uncancel"))?.extract()?;
                Ok(by_cancellation && now <= before)
            }
            _ => {
                let Some(exception) = exception.filter(|_| by_cancellation) else {
                    return Ok(false);
                };
                let first = exception.getattr(intern!(py, "args"))?.get_item(0);
                Ok(first.is_ok_and(|first| first.eq(MESSAGE).unwrap_or(false)))
            }
        }
    }
}

impl Wake for Watch {
    fn wake(self: Arc<Self>) {
        if !self.queued.swap(true, Ordering::AcqRel) {
            self.queue.clone().push_loss(self);
        }
    }
}
