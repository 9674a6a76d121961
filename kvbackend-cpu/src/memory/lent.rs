//! Storages over memory that its owner lends for reading, such as another library's tensors. Nothing is
//! copied.

use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::sync::Arc;

use kvcore::{Error, MemoryKind, Result};

use super::{CpuStorage, MemoryOwner, OwnedMemory};
use crate::NAME;

/// Memory that its owner lends for reading. Operations hold the owner's own lock while they read the memory.
///
/// ```
/// use std::sync::{Arc, RwLock};
/// use kvbackend_cpu::{CpuBackend, CpuStorage, LentBytes, LentMemory};
/// use kvcore::{Backend, DType, Storage, TensorView};
///
/// struct Shared(Arc<RwLock<Vec<u8>>>);
///
/// impl LentMemory for Shared {
///     fn lock(&self) -> LentBytes<'_> {
///         struct Guard<'a>(std::sync::RwLockReadGuard<'a, Vec<u8>>);
///         impl std::ops::Deref for Guard<'_> {
///             type Target = [u8];
///             fn deref(&self) -> &[u8] {
///                 &self.0
///             }
///         }
///         LentBytes::new(Guard(self.0.read().unwrap()))
///     }
/// }
///
/// let bytes = Arc::new(RwLock::new(vec![1, 2, 3]));
/// let view = TensorView::new(Arc::new(CpuStorage::lent(Shared(bytes.clone()))?), DType::U8, &[3])?;
/// let stream = CpuBackend::new().stream()?;
/// bytes.write().unwrap()[1] = 9;
/// let mut read = [0; 3];
/// stream.read(&view, &mut read)?;
/// assert_eq!(read, [1, 9, 3]);
/// assert!(stream.write(&view, &read).is_err());
/// # Ok::<(), kvcore::Error>(())
/// ```
pub trait LentMemory: Send + Sync {
    /// Waits until the bytes may be read, and locks them against writes for as long as the result lives.
    ///
    /// The bytes must not move while the storage lives. An operation fails if it finds them at another
    /// address.
    fn lock(&self) -> LentBytes<'_>;
}

/// Bytes locked for reading, by a guard of any type. The guard is stored inline, so locking does not
/// allocate.
pub struct LentBytes<'a> {
    guard: MaybeUninit<[usize; WORDS]>,
    bytes: unsafe fn(*const [usize; WORDS]) -> *const [u8],
    drop: unsafe fn(*mut [usize; WORDS]),
    /// Makes the type `!Send`, because some guards must stay in the thread that created them.
    life: PhantomData<(&'a (), *const ())>,
}

/// Maximum size of a guard, in words.
const WORDS: usize = 4;

impl<'a> LentBytes<'a> {
    /// Wraps a guard of at most four words.
    pub fn new<G: Deref<Target = [u8]> + 'a>(guard: G) -> Self {
        const {
            assert!(size_of::<G>() <= size_of::<[usize; WORDS]>() && align_of::<G>() <= align_of::<usize>());
        }
        let mut place = MaybeUninit::<[usize; WORDS]>::uninit();
        // SAFETY: the assertions above check that the guard is no larger than the place and needs no larger
        // alignment.
        unsafe { place.as_mut_ptr().cast::<G>().write(guard) };
        Self {
            guard: place,
            bytes: |place| {
                // SAFETY: `deref` passes the place, which holds a `G` until `self` is dropped.
                let bytes: &[u8] = unsafe { &*place.cast::<G>() };
                std::ptr::from_ref(bytes)
            },
            // SAFETY: `Drop` passes the place, which holds a `G`, and calls this closure only once.
            drop: |place| unsafe { place.cast::<G>().drop_in_place() },
            life: PhantomData,
        }
    }
}

impl Deref for LentBytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `bytes` is the function for the guard in the place. The slice is borrowed from the guard,
        // which is borrowed with `self`.
        unsafe { &*(self.bytes)(self.guard.as_ptr()) }
    }
}

impl Drop for LentBytes<'_> {
    fn drop(&mut self) {
        // SAFETY: `drop` is the function for the guard in the place, which is dropped only here.
        unsafe { (self.drop)(self.guard.as_mut_ptr()) }
    }
}

impl fmt::Debug for LentBytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LentBytes({} bytes)", self.len())
    }
}

impl CpuStorage {
    /// Creates a storage over memory that operations may only read. The owner is dropped with the storage.
    /// For an example, see [`LentMemory`].
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if there are no bytes.
    pub fn lent(owner: impl LentMemory + 'static) -> Result<Self> {
        let bytes = owner.lock();
        let (ptr, len) = (std::ptr::NonNull::from(&*bytes).cast(), bytes.len());
        drop(bytes);
        if len == 0 {
            return Err(Error::Zero { what: "bytes of a lent memory" });
        }
        Ok(Self::new(
            OwnedMemory { ptr, owner: MemoryOwner::Lender(Arc::new(owner)) },
            len,
            MemoryKind::System,
        ))
    }

    /// Returns whether the memory is lent for reading, under its owner's lock.
    pub(super) fn has_lender(&self) -> bool {
        matches!(self.memory.owner, MemoryOwner::Lender(_))
    }

    /// Acquires the owner's lock and returns the locked bytes, or `None` if the storage has no lender.
    pub(super) fn lock_lent(&self) -> Result<Option<LentBytes<'_>>> {
        let MemoryOwner::Lender(owner) = &self.memory.owner else { return Ok(None) };
        let bytes = owner.lock();
        // Bytes inside the guard itself would move together with the guard.
        let guard = std::ptr::from_ref(&bytes).addr();
        let inline = (guard..guard + size_of_val(&bytes)).contains(&bytes.as_ptr().addr());
        if bytes.as_ptr() as u64 != self.address || bytes.len() != self.len || inline {
            let reason = "the owner of lent memory has moved it".to_owned();
            return Err(Error::Device { backend: NAME, reason });
        }
        Ok(Some(bytes))
    }

    /// Checks that operations may write to the storage.
    pub(crate) fn check_writable(&self) -> Result<()> {
        match self.memory.owner {
            MemoryOwner::Lender(_) => {
                let what = "writing to memory that is lent for reading".to_owned();
                Err(Error::Unsupported { backend: NAME, what })
            }
            _ => Ok(()),
        }
    }
}
