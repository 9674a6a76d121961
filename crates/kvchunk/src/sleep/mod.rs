//! Where pieces sleep: in host memory, plain, compressed or quantised.
//!
//! ```text
//!   device arena ──► Plain:      swap_blocks ──► blocks of a host arena           exact
//!                ──► Quantised:  quantize    ──► blocks of a quantised one        approximate
//!                ──► Compressed: swap_blocks ──► byte planes ──► zstd ──► bytes   exact
//! ```

use std::sync::Arc;

use kvcore::{Backend, BlockId, KvArena, Stream};

use crate::cache::{SleepStore, Sleeping};
use crate::error::Result;

mod compressed;
mod form;
mod host;
mod ledger;
mod planes;
mod scales;

pub use form::SleepForm;
pub use ledger::SleepUsage;

use compressed::CompressedStore;
use host::HostStore;
use ledger::Ledger;

/// A place for pieces of one device arena to sleep in, within a budget of host memory.
///
/// All copies are enqueued on one stream, which must be the one that computes into the arena and reads it,
/// or be ordered with it by events. Compressing takes memory for a few blocks beside the budget, however long the
/// piece. With [`SleepForm::Plain`] and [`Quantised`](SleepForm::Quantised) the
/// budget is allocated at once. What sleeps has a digest, in every form: what is damaged is not woken but computed
/// anew; taking and comparing it reads the piece on the host and waits for the stream. A piece that sleeps in eight-bit
/// floats is looked at before, for its largest magnitudes; its scales, four bytes for each layer or head of K and of V,
/// come on top.
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
    store: Store,
}

#[derive(Debug)]
enum Store {
    Host(Arc<HostStore>),
    Compressed(Arc<CompressedStore>),
}

impl ArenaSleep {
    /// A place for blocks of `device` with at most `budget` bytes of host memory.
    ///
    /// # Errors
    /// [`kvcore::Error::NotEnoughMemory`] for a budget that does not hold a block in this form, and what the
    /// backend refuses. For [`SleepForm::Quantised`] also [`kvcore::Error::InvalidFormat`] where the device
    /// arena is quantised or the form is not, and [`kvcore::Error::Unsupported`] where the backend lacks the
    /// format or the kernels.
    pub fn new(
        backend: Arc<dyn Backend>,
        device: KvArena,
        stream: Arc<dyn Stream>,
        form: SleepForm,
        budget: usize,
    ) -> Result<Self> {
        let ledger = Arc::new(Ledger::new(budget));
        let store = match form {
            SleepForm::Plain => Store::Host(Arc::new(HostStore::plain(backend, device, stream, &ledger)?)),
            SleepForm::Quantised(format) => {
                Store::Host(Arc::new(HostStore::quantised(backend, device, stream, format, &ledger)?))
            }
            SleepForm::Compressed => {
                let store = CompressedStore::new(backend, device, stream, Arc::clone(&ledger));
                Store::Compressed(Arc::new(store))
            }
        };
        Ok(Self { ledger, store })
    }

    /// What sleeps here, and what it takes.
    pub fn usage(&self) -> SleepUsage {
        self.ledger.usage()
    }

    /// The host arena; none where pieces are compressed. Of eight-bit floats it has the codes: every piece has scales of
    /// its own.
    pub fn host_arena(&self) -> Option<&KvArena> {
        match &self.store {
            Store::Host(store) => Some(store.arena()),
            Store::Compressed(_) => None,
        }
    }
}

impl SleepStore for ArenaSleep {
    fn save(&self, blocks: &[BlockId]) -> Result<Box<dyn Sleeping>> {
        match &self.store {
            Store::Host(store) => Ok(Box::new(store.save(blocks)?)),
            Store::Compressed(store) => Ok(Box::new(store.save(blocks)?)),
        }
    }
}
