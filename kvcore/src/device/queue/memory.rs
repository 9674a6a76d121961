//! Memory of activations, taken and given back without the device.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::base::{MemoryKind, Result};
use crate::device::Storage;

/// Sizes above this one are rounded up to multiples of it, smaller ones to powers of two.
const STEP: usize = 1 << 20;

/// Least bytes of a loan.
const LEAST: usize = 4096;

/// Memory of activations, by size: taken by a step, given back when its last view is dropped, used again by
/// later steps.
///
/// Work that is enqueued on the stream of the steps may still use memory that is given back. Only later work
/// of that stream takes it again, and writes it after the earlier use. Other streams hold the storages of
/// their own work.
#[derive(Debug)]
pub struct LoanMemory<S>(Mutex<BTreeMap<usize, Vec<S>>>);

/// A block of memory on loan.
#[derive(Debug)]
struct Loan<S: Storage> {
    /// The memory; none after `drop` has given it back.
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
    /// Takes at least `bytes` bytes with any contents, from `allocate` if none of that size wait for use. The
    /// loan is found as the storage in it by [`Storage::as_any`].
    ///
    /// # Errors
    /// Returns the errors of `allocate`, which gets the number of bytes.
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

    /// Frees the memory that waits for use. The caller has waited for the stream of the steps.
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
