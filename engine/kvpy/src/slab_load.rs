//! A record that a disk reads while Python does something else.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier::{Loading, Slab};
use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// The largest copy that keeps Python's lock. A thread that has released the lock waits for up to 5 ms (Python's switch
/// interval) to get it back while another thread computes, for each of a prompt's records.
const KEEPS_LOCK: usize = 4 << 20;

/// Copies this many bytes, without Python's lock if that takes long.
pub(crate) fn copy<T: Send>(py: Python<'_>, bytes: usize, copy: impl FnOnce() -> T + Send) -> T {
    if bytes <= KEEPS_LOCK { copy() } else { py.detach(copy) }
}

/// A record that is being loaded. If it is dropped, nobody waits for it any more.
#[pyclass(frozen, subclass, module = "kvcache._native")]
pub(crate) struct SlabLoad {
    own: Mutex<Option<Loading>>,
    /// Takes the memory of the record back.
    pub(crate) slab: Arc<Slab>,
}

impl SlabLoad {
    pub(crate) fn new(own: Loading, slab: Arc<Slab>) -> Self {
        Self { own: Mutex::new(Some(own)), slab }
    }

    /// Returns the load, so that the caller ends it.
    pub(crate) fn take(&self) -> PyResult<Loading> {
        self.own.lock().take().ok_or_else(|| PyRuntimeError::new_err("the load was already ended"))
    }
}

#[pymethods]
impl SlabLoad {
    /// True if the load has ended.
    #[getter]
    fn is_over(&self) -> bool {
        self.own.lock().as_ref().is_none_or(Loading::is_over)
    }

    /// The part of the record that the disk has read so far, from 0 to 1.
    #[getter]
    fn progress(&self) -> f64 {
        self.own.lock().as_ref().map_or(1.0, Loading::progress)
    }

    /// Waits until the load has ended, for at most this many seconds. Returns whether it has.
    fn wait(&self, py: Python<'_>, seconds: f64) -> bool {
        let limit = Duration::try_from_secs_f64(seconds).unwrap_or_default().min(Duration::from_secs(60));
        let wait = || self.own.lock().as_ref().is_none_or(|own| own.wait_until(Instant::now() + limit));
        py.detach(wait)
    }

    /// Ends the load, and drops what has arrived. A load that has not ended is counted as late.
    fn give_up(&self) {
        drop(self.own.lock().take().map(Loading::end));
    }
}
