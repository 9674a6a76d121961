//! Activation memory that is borrowed and returned without calling the device.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::base::{MemoryKind, Result};
use crate::device::Storage;

/// Larger sizes are rounded up to a multiple of this number of bytes, and smaller sizes to a power of two.
const STEP: usize = 1 << 20;

/// The minimum size of a loan, in bytes.
const LEAST: usize = 4096;

/// Free activation memory, by size. A step borrows memory, which is returned when its last view is dropped,
/// and later steps reuse it.
///
/// Work enqueued on the steps' stream may still use memory that has been returned. Only later work on that
/// stream borrows the memory again, so the memory is overwritten only after the earlier use. Other streams
/// hold the storages of their own work.
#[derive(Debug)]
pub struct LoanMemory<S>(Mutex<BTreeMap<usize, Vec<S>>>);

/// A memory block on loan.
#[derive(Debug)]
struct Loan<S: Storage> {
    /// The memory, or `None` after `drop` has returned it.
    storage: Option<S>,
    home: Weak<LoanMemory<S>>,
    len: usize,
}

impl<S> Default for LoanMemory<S> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<S: Storage + 'static> LoanMemory<S> {
    /// Borrows at least `bytes` bytes with arbitrary contents. Calls `allocate` if there is no free block of
    /// that size. [`Storage::as_any`] of the loan returns the storage inside the loan.
    ///
    /// # Errors
    /// Returns the errors of `allocate`, whose argument is the number of bytes.
    pub fn take(
        self: &Arc<Self>,
        bytes: usize,
        allocate: impl FnOnce(usize) -> Result<S>,
    ) -> Result<Arc<dyn Storage>> {
        let len =
            if bytes < STEP { bytes.max(LEAST).next_power_of_two() } else { bytes.next_multiple_of(STEP) };
        let known = self.0.lock().get_mut(&len).and_then(Vec::pop);
        let storage = known.map_or_else(|| allocate(len), Ok)?;
        Ok(Arc::new(Loan { storage: Some(storage), home: Arc::downgrade(self), len }))
    }

    /// Frees the memory that is not on loan. The caller must have waited for the steps' stream.
    pub fn clear(&self) {
        self.0.lock().clear();
    }
}

impl<S: Storage> Drop for Loan<S> {
    fn drop(&mut self) {
        if let (Some(storage), Some(home)) = (self.storage.take(), self.home.upgrade()) {
            home.0.lock().entry(self.len).or_default().push(storage);
        }
    }
}

impl<S: Storage + 'static> Storage for Loan<S> {
    fn len(&self) -> usize {
        self.len
    }

    fn address(&self) -> u64 {
        self.storage.as_ref().map_or(0, Storage::address)
    }

    fn kind(&self) -> MemoryKind {
        self.storage.as_ref().map_or(MemoryKind::Device, Storage::kind)
    }

    fn as_any(&self) -> &dyn Any {
        self.storage.as_ref().map_or(&(), Storage::as_any)
    }
}
