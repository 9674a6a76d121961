//! RoPE tables on the device.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use kvcore::{MemoryKind, Result, Rope, RopeTable, Storage};
use parking_lot::Mutex;

use crate::device::CudaDevice;
use crate::memory::CudaStorage;

/// A weak reference to the host's table, and the table's copy on the device.
type Copied = (Weak<RopeTable>, Arc<dyn Storage>);

/// A backend's RoPE tables on the device, keyed by the addresses of the host tables that they copy. For each
/// position, a table contains `(cos, sin)` for each pair of elements, without the attention factor.
#[derive(Debug, Default)]
pub(crate) struct AngleTables(Mutex<HashMap<usize, Copied>>);

impl AngleTables {
    /// Returns a RoPE's table on the device. Copies the host's table again if it has grown.
    pub(crate) fn angles(&self, device: &Arc<CudaDevice>, rope: &Rope) -> Result<Arc<dyn Storage>> {
        let table = rope.table([])?;
        let key = Arc::as_ptr(&table) as usize;
        let mut tables = self.0.lock();
        if let Some((known, angles)) = tables.get(&key)
            && known.upgrade().is_some_and(|known| Arc::ptr_eq(&known, &table))
        {
            return Ok(Arc::clone(angles));
        }
        tables.retain(|_, (known, _)| known.strong_count() > 0);
        let pairs: Vec<f32> = table.cos().iter().zip(table.sin()).flat_map(|(&c, &s)| [c, s]).collect();
        let bytes: &[u8] = bytemuck::cast_slice(&pairs);
        let storage = CudaStorage::allocate(device, MemoryKind::Device, bytes.len().max(1))?;
        storage.fill(bytes)?;
        let angles: Arc<dyn Storage> = Arc::new(storage);
        tables.insert(key, (Arc::downgrade(&table), Arc::clone(&angles)));
        Ok(angles)
    }
}
