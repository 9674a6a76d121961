//! The sleep store for one device arena. Pieces sleep in host memory, unchanged, compressed or quantised.
//!
//! ```text
//!   device arena ──► Plain:      swap_blocks ──► blocks of a host arena           exact
//!                ──► Quantised:  quantize    ──► blocks of a quantised one        approximate
//!                ──► Compressed: swap_blocks ──► byte planes ──► zstd ──► bytes   exact
//! ```

use std::sync::Arc;

use kvcore::{Backend, BlockId, KvArena, Stream};

use super::compressed::CompressedStore;
use super::form::SleepForm;
use super::host::HostStore;
use super::ledger::{Ledger, SleepUsage};
use super::store::{SleepStore, Sleeping};
use crate::error::Result;

/// A store in which the pieces of one device arena sleep, with a budget of host memory.
///
/// All copies are enqueued on one stream. This stream must be the stream that writes and reads the arena, or
/// be ordered with it by events.
///
/// With [`SleepForm::Plain`] and [`Quantised`](SleepForm::Quantised) the whole budget is allocated at once.
/// [`Compressed`](SleepForm::Compressed) allocates memory as pieces are put to sleep. Compression also needs
/// memory for a few staged blocks, which is not part of the budget and does not grow with the piece.
///
/// Every form has a digest or a checksum, so a damaged piece is detected and recomputed instead of woken.
/// Computing or comparing a digest reads the piece on the host and waits for the stream.
///
/// A piece that is quantised to eight-bit floats has its own scales, computed from its largest magnitudes.
/// The scales are not part of the budget. They use four bytes per layer, or per head of each layer, for each
/// of K and V.
///
/// ```
/// use std::sync::Arc;
/// use kvbackend_cpu::CpuBackend;
/// use kvchunk::{ArenaSleep, ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager, SleepForm};
/// use kvcore::{Backend, BlockOrder, DType, KvArena, KvLayout, KvShape, MemoryKind, SystemClock};
///
/// let backend = CpuBackend::new();
/// let stream = backend.stream()?;
/// let shape = KvShape {
///     num_layers: 2, num_blocks: 64, block_size: 16, k_heads: 2, v_heads: 2, k_dim: 32, v_dim: 32,
///     format: DType::BF16.into(), order: BlockOrder::TokenMajor,
/// };
/// let device =
///     KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(KvLayout::new(shape)?))?;
/// let sleep = Arc::new(ArenaSleep::new(backend, device, stream, SleepForm::Compressed, 1 << 20)?);
/// let cache = ChunkCacheManager::build(
///     ChunkCacheConfig::default(),
///     ChunkBlockPool::new(32..64, 16)?,
///     Some(sleep.clone()),
///     Arc::new(SystemClock::default()),
/// )?;
/// cache.sleep_cold_chunks(Default::default())?;
/// println!("{} bytes saved", sleep.usage().saved_bytes());
/// # Ok::<(), kvchunk::Error>(())
/// ```
#[derive(Debug)]
pub struct ArenaSleep {
    ledger: Arc<Ledger>,
    store: FormStore,
}

#[derive(Debug)]
enum FormStore {
    Host(Arc<HostStore>),
    Compressed(Arc<CompressedStore>),
}

impl ArenaSleep {
    /// Creates a store for pieces in blocks of `device`, with at most `budget` bytes of host memory.
    ///
    /// # Errors
    /// - Returns [`kvcore::Error::NotEnoughMemory`] if the budget is too small for one block.
    ///   [`SleepForm::Compressed`] has no such minimum.
    /// - Returns [`kvcore::Error::InvalidFormat`] for [`SleepForm::Quantised`] if the device arena is
    ///   quantised already, or if the form is not quantised.
    /// - Returns [`kvcore::Error::Unsupported`] for [`SleepForm::Quantised`] if the backend lacks the format
    ///   or the kernels.
    /// - Returns the errors of the backend.
    pub fn new(
        backend: Arc<dyn Backend>,
        device: KvArena,
        stream: Arc<dyn Stream>,
        form: SleepForm,
        budget: usize,
    ) -> Result<Self> {
        let ledger = Arc::new(Ledger::new(budget));
        let store = match form {
            SleepForm::Plain => {
                FormStore::Host(Arc::new(HostStore::plain(backend, device, stream, &ledger)?))
            }
            SleepForm::Quantised(format) => {
                FormStore::Host(Arc::new(HostStore::quantised(backend, device, stream, format, &ledger)?))
            }
            SleepForm::Compressed => {
                let store = CompressedStore::new(backend, device, stream, Arc::clone(&ledger));
                FormStore::Compressed(Arc::new(store))
            }
        };
        Ok(Self { ledger, store })
    }

    /// Returns the number of sleeping pieces, their total size on the device and on the host, and the limit
    /// on host memory.
    pub fn usage(&self) -> SleepUsage {
        self.ledger.usage()
    }

    /// Returns the host arena, or `None` if pieces are compressed. For eight-bit floats the arena holds only
    /// the codes, since every piece has its own scales.
    pub fn host_arena(&self) -> Option<&KvArena> {
        match &self.store {
            FormStore::Host(store) => Some(store.arena()),
            FormStore::Compressed(_) => None,
        }
    }
}

impl SleepStore for ArenaSleep {
    fn save(&self, blocks: &[BlockId]) -> Result<Box<dyn Sleeping>> {
        match &self.store {
            FormStore::Host(store) => Ok(Box::new(store.save(blocks)?)),
            FormStore::Compressed(store) => Ok(Box::new(store.save(blocks)?)),
        }
    }
}
