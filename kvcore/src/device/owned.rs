//! A handle that owns memory from any source and creates typed views of that memory.

use std::ops::Deref;
use std::sync::Arc;

use crate::base::{DType, Error, MemoryKind, Result};
use crate::device::{Backend, Dims, Storage, TensorView};

/// Owned memory of any kind, from any source. Clones share the memory, and the last clone frees it.
///
/// Compared with the `Arc<dyn Storage>` inside, an `OwnedStorage` gives two additional guarantees: it is
/// never empty, and each typed view of it is checked. It dereferences to [`Storage`] for `len`, `address` and
/// `kind`. The idea is taken from the `OwnedStorage` of NVIDIA Dynamo.
///
/// ```
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{DType, MemoryKind, OwnedStorage};
///
/// let staging = OwnedStorage::create(CpuBackend::new().as_ref(), MemoryKind::Pinned, 4096)?;
/// let k = staging.view(DType::F16, &[16, 2, 32])?;                   // the first 2048 bytes
/// let v = staging.view_at(2048, DType::BF16, &[16, 2, 32])?;         // the rest
/// assert_eq!((staging.kind(), staging.len()), (MemoryKind::Pinned, 4096));
/// drop(staging);
/// assert!(!k.overlaps(&v)?);                                         // both views keep it alive
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct OwnedStorage(Arc<dyn Storage>);

impl OwnedStorage {
    /// Allocates `bytes` zeroed bytes.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if `bytes` is 0, for every backend, and the errors of [`Backend::allocate`].
    pub fn create(backend: &dyn Backend, kind: MemoryKind, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::Zero { what: "bytes of a storage" });
        }
        backend.allocate(kind, bytes).map(Self)
    }

    /// Wraps memory that the caller provides. Any [`Storage`] that keeps its owner alive is accepted, such as
    /// a backend's wrapper around a foreign pointer (`CpuStorage::from_raw`).
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if the storage is empty.
    pub fn from_arc(storage: Arc<dyn Storage>) -> Result<Self> {
        if storage.is_empty() {
            return Err(Error::Zero { what: "bytes of a storage" });
        }
        Ok(Self(storage))
    }

    /// Returns a dense row-major view with shape `shape` at the start of the memory.
    ///
    /// # Errors
    /// Returns the errors of [`TensorView::new`].
    pub fn view(&self, dtype: DType, shape: &[usize]) -> Result<TensorView> {
        self.view_at(0, dtype, shape)
    }

    /// Returns a dense row-major view with shape `shape` that begins at byte `start`.
    ///
    /// # Errors
    /// Returns [`Error::Misaligned`] if `start` is not aligned for `dtype`, and the errors of
    /// [`TensorView::with_strides`].
    pub fn view_at(&self, start: usize, dtype: DType, shape: &[usize]) -> Result<TensorView> {
        let align = dtype.align();
        if !start.is_multiple_of(align) {
            let address = self.address().wrapping_add(start as u64);
            return Err(Error::Misaligned { what: "a view of a storage", address, align });
        }
        let overflow = Error::Overflow { what: "offset of a view" };
        let offset = start.checked_mul(8).ok_or(overflow)? / dtype.bits();
        let shape = Dims::new(shape)?;
        TensorView::with_strides(Arc::clone(&self.0), dtype, shape, shape.dense_strides()?, offset)
    }
}

impl Deref for OwnedStorage {
    type Target = dyn Storage;

    fn deref(&self) -> &Self::Target {
        self.0.as_ref()
    }
}

impl From<OwnedStorage> for Arc<dyn Storage> {
    /// Unwraps the handle, for code that expects a storage, such as
    /// [`KvArena::from_storage`](crate::KvArena::from_storage).
    fn from(owned: OwnedStorage) -> Self {
        owned.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes provided by the caller, which are valid as long as `owner` is alive.
    #[derive(Debug)]
    struct Lent {
        len: usize,
        owner: Arc<()>,
    }

    impl Storage for Lent {
        fn len(&self) -> usize {
            self.len
        }
        fn address(&self) -> u64 {
            4096
        }
        fn kind(&self) -> MemoryKind {
            MemoryKind::System
        }
        fn as_any(&self) -> &dyn std::any::Any {
            &self.owner
        }
    }

    fn lent(len: usize) -> (Arc<()>, Result<OwnedStorage>) {
        let owner = Arc::new(());
        let storage = OwnedStorage::from_arc(Arc::new(Lent { len, owner: Arc::clone(&owner) }));
        (owner, storage)
    }

    #[test]
    fn the_owner_lives_as_long_as_the_last_view() {
        let (owner, storage) = lent(64);
        let storage = storage.unwrap();
        let other = storage.clone();
        let view = other.view(DType::F32, &[4, 4]).unwrap();
        drop((storage, other));
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(view);
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    #[test]
    fn views_begin_at_bytes_and_stay_inside() {
        let storage = lent(64).1.unwrap();
        let at = |start, dtype, n| storage.view_at(start, dtype, &[n]);
        assert_eq!(at(20, DType::F32, 11).unwrap().address(&[0]).unwrap(), 4096 + 20);
        assert_eq!(at(3, DType::I4, 122).unwrap().address(&[0]).unwrap(), 4096 + 3);
        assert!(matches!(at(20, DType::F32, 12), Err(Error::TooLarge { value: 68, most: 64, .. })));
        assert!(matches!(at(3, DType::I4, 123), Err(Error::TooLarge { value: 65, most: 64, .. })));
        assert!(matches!(at(2, DType::F32, 1), Err(Error::Misaligned { address: 4098, align: 4, .. })));
        assert!(matches!(at(usize::MAX, DType::U8, 1), Err(Error::Overflow { .. })));
        assert!(matches!(
            storage.view(DType::U8, &[1; 7]),
            Err(Error::TooLarge { what: "rank", value: 7, most: 6 })
        ));
        assert_eq!((storage.len(), storage.kind(), storage.address()), (64, MemoryKind::System, 4096));
        assert_eq!(Arc::<dyn Storage>::from(storage).len(), 64);
    }

    #[test]
    fn no_bytes_are_no_storage() {
        let (owner, storage) = lent(0);
        assert!(matches!(storage, Err(Error::Zero { .. })));
        assert_eq!(Arc::strong_count(&owner), 1, "nothing is held");
    }
}
