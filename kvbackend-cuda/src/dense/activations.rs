//! Memory of activations: taken by size, given back when the last view of it goes, used again by later steps.
//!
//! A block of memory that is given back may still be read by work that is enqueued on the stream of the steps. Only later
//! work of that stream takes it again, so that it is free when it is written. Other streams hold the storages of their
//! own work.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Weak};

use kvcore::{MemoryKind, Result, Storage};
use parking_lot::Mutex;

use crate::device::Device;
use crate::memory::CudaStorage;

/// Sizes above this one are rounded up to multiples of it, smaller ones to powers of two.
const STEP: usize = 1 << 20;

/// Memory that waits for use, by size.
#[derive(Debug, Default)]
pub(crate) struct ActivationMemory(Mutex<BTreeMap<usize, Vec<CudaStorage>>>);

/// A block of memory on loan.
struct Loan {
    /// The memory; none after `drop` has given it back.
    storage: Option<CudaStorage>,
    home: Weak<ActivationMemory>,
    len: usize,
}

impl ActivationMemory {
    /// Takes at least `bytes` bytes.
    pub(super) fn take(self: &Arc<Self>, device: &Arc<Device>, bytes: usize) -> Result<Arc<dyn Storage>> {
        let size =
            if bytes < STEP { bytes.max(4096).next_power_of_two() } else { bytes.next_multiple_of(STEP) };
        let known = self.0.lock().get_mut(&size).and_then(Vec::pop);
        let storage = match known {
            Some(storage) => storage,
            None => CudaStorage::allocate(device, MemoryKind::Device, size)?.lent_by(self.id()),
        };
        Ok(Arc::new(Loan { storage: Some(storage), home: Arc::downgrade(self), len: size }))
    }

    /// Frees what waits for use. The caller has waited for the stream of the steps.
    pub(super) fn clear(&self) {
        self.0.lock().clear();
    }

    /// Returns whether a storage is on loan from here.
    pub(super) fn owns(self: &Arc<Self>, storage: &Arc<dyn Storage>) -> bool {
        let known = storage.as_any().downcast_ref::<CudaStorage>();
        known.is_some_and(|known| known.lender() == Some(self.id()))
    }

    fn id(self: &Arc<Self>) -> usize {
        Arc::as_ptr(self) as usize
    }
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loan({:?})", self.storage)
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let (Some(storage), Some(home)) = (self.storage.take(), self.home.upgrade()) {
            home.0.lock().entry(self.len).or_default().push(storage);
        }
    }
}

impl Storage for Loan {
    fn len(&self) -> usize {
        self.len
    }

    fn address(&self) -> u64 {
        self.storage.as_ref().map_or(0, Storage::address)
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Device
    }

    /// Returns the inner [`CudaStorage`], which kernels look for.
    fn as_any(&self) -> &dyn Any {
        match &self.storage {
            Some(storage) => storage,
            None => &(),
        }
    }
}
