//! Turns vectors into storages and back without copying.

use std::alloc::Layout;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use bytemuck::Pod;
use kvcore::{Error, MemoryKind, Result};

use super::{CpuStorage, MemoryOwner, OwnedMemory};

impl CpuStorage {
    /// Creates a storage from the elements of a vector, without copying them.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use kvbackend_cpu::{CpuBackend, CpuStorage};
    /// use kvcore::{Backend, CopyTensor, DType, TensorView};
    ///
    /// let stream = CpuBackend::new().stream()?;
    /// let view = |storage: &Arc<CpuStorage>| TensorView::new(storage.clone(), DType::F32, &[3]);
    /// let from = Arc::new(CpuStorage::from_vec(vec![1.0f32, 2.0, 3.0])?);
    /// let to = Arc::new(CpuStorage::from_vec(vec![0.0f32; 3])?);
    /// stream.copy_tensor(&CopyTensor { src: view(&from)?, dst: view(&to)? })?;
    /// stream.synchronize()?;
    /// assert_eq!(to.try_into_vec::<f32>().unwrap(), [1.0, 2.0, 3.0]);
    /// # Ok::<(), kvcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if the vector has no bytes.
    pub fn from_vec<T: Pod>(values: Vec<T>) -> Result<Self> {
        let bytes = size_of_val(&values[..]);
        if bytes == 0 {
            return Err(Error::Zero { what: "bytes of a vector" });
        }
        let layout = Layout::array::<T>(values.capacity());
        let layout = layout.map_err(|_| Error::Overflow { what: "bytes of a vector" })?;
        let mut values = ManuallyDrop::new(values);
        let ptr = NonNull::from(values.as_mut_slice()).cast();
        // The vector's memory came from the global allocator with this layout, and no other code frees it.
        Ok(Self::new(OwnedMemory { ptr, owner: MemoryOwner::Allocated(layout) }, bytes, MemoryKind::System))
    }

    /// Turns a storage created by [`from_vec`](Self::from_vec) back into a vector, without copying its
    /// elements. `T` may differ from the vector's original element type, but must have the same alignment,
    /// and its size must divide the vector's length and capacity in bytes.
    ///
    /// # Errors
    /// Returns the storage if there are other handles to it (views, or operations that a stream has not run
    /// yet), if it was created in another way, or if `T` does not meet these conditions.
    pub fn try_into_vec<T: Pod>(self: Arc<Self>) -> std::result::Result<Vec<T>, Arc<Self>> {
        let MemoryOwner::Allocated(layout) = self.memory.owner else { return Err(self) };
        let whole = |bytes: usize| bytes.checked_rem(size_of::<T>()) == Some(0);
        if layout.align() != align_of::<T>() || !whole(layout.size()) || !whole(self.len) {
            return Err(self);
        }
        let storage = Arc::try_unwrap(self)?;
        let (memory, size) = (ManuallyDrop::new(storage.memory), size_of::<T>());
        let (len, capacity) = (storage.len / size, layout.size() / size);
        // SAFETY: `memory` was allocated by the global allocator with `layout`, the layout of `capacity`
        // elements of `T`, and is not freed here. Its first `len` elements are initialised, and any bytes are
        // a valid `T`. No other handle to the storage is left, and hence no lock.
        Ok(unsafe { Vec::from_raw_parts(memory.ptr.cast().as_ptr(), len, capacity) })
    }
}

#[cfg(test)]
mod tests {
    use kvcore::Storage;

    use super::*;

    #[test]
    fn a_vector_comes_back_with_its_memory_and_its_capacity() {
        let mut values = Vec::with_capacity(10);
        values.extend([1.5f32, 2.5]);
        let address = values.as_ptr();
        let storage = Arc::new(CpuStorage::from_vec(values).unwrap());
        assert_eq!((storage.len(), storage.address()), (8, address as u64));
        let values = storage.try_into_vec::<f32>().unwrap();
        assert_eq!((values.as_ptr(), values.capacity(), values), (address, 10, vec![1.5, 2.5]));
    }

    #[test]
    fn shared_storages_and_other_kinds_stay_storages() {
        let storage = Arc::new(CpuStorage::from_vec(vec![7u32; 4]).unwrap());
        let other = Arc::clone(&storage);
        let storage = storage.try_into_vec::<u32>().unwrap_err();
        drop(other);
        let storage = storage.try_into_vec::<u8>().unwrap_err();
        let storage = storage.try_into_vec::<()>().unwrap_err();
        assert_eq!(storage.try_into_vec::<i32>().unwrap(), [7; 4]);
        let aligned = Arc::new(CpuStorage::allocate(MemoryKind::System, 16).unwrap());
        assert!(aligned.try_into_vec::<u32>().is_err());
        for empty in [CpuStorage::from_vec::<f32>(vec![]), CpuStorage::from_vec(vec![(); 3])] {
            assert!(matches!(empty, Err(Error::Zero { .. })));
        }
    }

    #[test]
    fn a_vector_that_stays_a_storage_is_freed_with_it() {
        let mut values = Vec::with_capacity(1000);
        values.push(1u64);
        drop(CpuStorage::from_vec(values).unwrap());
    }
}
