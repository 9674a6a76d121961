//! Memory of activations: taken by size, returned when its last view is dropped, and taken again by later steps.
//!
//! Work that is enqueued on the stream of the steps may still use returned memory. Only later work of that stream takes
//! it again, so it is unused when that work writes it. Other streams hold the storages of their own work.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use kvcore::{MemoryKind, Result, Storage};
use parking_lot::Mutex;

use crate::device::Npu;
use crate::memory::AscendStorage;

/// Sizes from this one on are rounded up to its multiples, smaller ones to powers of two.
const STEP: usize = 1 << 20;

/// Least bytes of a block.
const LEAST: usize = 4096;

/// Unused memory of activations, by size.
#[derive(Debug, Default)]
pub(crate) struct ActivationPool(Mutex<BTreeMap<usize, Vec<AscendStorage>>>);

/// A block of memory that returns to its pool when it is dropped.
#[derive(Debug)]
struct LentActivation {
    /// The memory; none after `drop` has returned it.
    storage: Option<AscendStorage>,
    home: Weak<ActivationPool>,
    len: usize,
}

impl ActivationPool {
    /// Takes at least `bytes` bytes, with arbitrary contents.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Allocation`] if the device is out of memory.
    pub(crate) fn take(self: &Arc<Self>, npu: &Arc<Npu>, bytes: usize) -> Result<Arc<dyn Storage>> {
        let len =
            if bytes < STEP { bytes.max(LEAST).next_power_of_two() } else { bytes.next_multiple_of(STEP) };
        let unused = self.0.lock().get_mut(&len).and_then(Vec::pop);
        let storage = match unused {
            Some(storage) => storage,
            None => AscendStorage::uninitialised(npu, MemoryKind::Device, len)?.for_activations(),
        };
        Ok(Arc::new(LentActivation { storage: Some(storage), home: Arc::downgrade(self), len }))
    }

    /// Frees the unused memory. The caller has waited for the stream of the steps.
    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }
}

impl Drop for LentActivation {
    fn drop(&mut self) {
        if let (Some(storage), Some(home)) = (self.storage.take(), self.home.upgrade()) {
            home.0.lock().entry(self.len).or_default().push(storage);
        }
    }
}

impl Storage for LentActivation {
    fn len(&self) -> usize {
        self.len
    }

    fn address(&self) -> u64 {
        self.storage.as_ref().map_or(0, Storage::address)
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Device
    }

    /// Returns the inner [`AscendStorage`], which operations look for.
    fn as_any(&self) -> &dyn Any {
        match &self.storage {
            Some(storage) => storage,
            None => &(),
        }
    }
}
