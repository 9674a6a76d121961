//! Memory of activations: taken by size, given back when the last view of it goes, used again by later steps.
//!
//! Work that is enqueued on the stream of the steps may still use memory that is given back. Only later work of that stream
//! takes it again, so that it is free when it is written. Other streams hold the storages of their own work.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use kvcore::{MemoryKind, Result, Storage};
use parking_lot::Mutex;

use crate::device::Device;
use crate::memory::AscendStorage;

/// Sizes above this one are rounded up to multiples of it, smaller ones to powers of two.
const STEP: usize = 1 << 20;

/// Least bytes of a block.
const LEAST: usize = 4096;

/// Memory that waits for use, by size.
#[derive(Debug, Default)]
pub(crate) struct ActivationMemory(Mutex<BTreeMap<usize, Vec<AscendStorage>>>);

/// A block of memory on loan.
#[derive(Debug)]
struct Loan {
    /// The memory; none after `drop` has given it back.
    storage: Option<AscendStorage>,
    home: Weak<ActivationMemory>,
    len: usize,
}

impl ActivationMemory {
    /// Takes at least `bytes` bytes, with any contents.
    pub(super) fn take(self: &Arc<Self>, device: &Arc<Device>, bytes: usize) -> Result<Arc<dyn Storage>> {
        let len =
            if bytes < STEP { bytes.max(LEAST).next_power_of_two() } else { bytes.next_multiple_of(STEP) };
        let known = self.0.lock().get_mut(&len).and_then(Vec::pop);
        let storage = match known {
            Some(storage) => storage,
            None => AscendStorage::uninitialised(device, MemoryKind::Device, len)?.for_activations(),
        };
        Ok(Arc::new(Loan { storage: Some(storage), home: Arc::downgrade(self), len }))
    }

    /// Frees what waits for use. The caller has waited for the stream of the steps.
    pub(super) fn clear(&self) {
        self.0.lock().clear();
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

    /// Returns the inner [`AscendStorage`], which operations look for.
    fn as_any(&self) -> &dyn Any {
        match &self.storage {
            Some(storage) => storage,
            None => &(),
        }
    }
}
