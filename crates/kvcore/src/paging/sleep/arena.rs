//! An arena whose blocks can sleep: their memory is released, their ids and addresses stay.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::SleepingBlocks;
use crate::base::{BlockId, Error, KvLayout, KvShape, MemoryKind, Result};
use crate::device::{Backend, KvArena, ReservedStorage, Storage, Stream, SwapBlocks, whole_granules};

/// K, V and their scales in reserved memory; clones share it.
///
/// A range of blocks [sleeps](Self::sleep): what is worth keeping is copied to host memory, and every
/// granule that holds nothing but blocks of the range is released, in every layer of K, V and the scales
/// that go with blocks. Views and clones of the [`arena`](Self::arena) stay valid all the time, and no
/// address changes.
///
/// ```
/// use std::sync::Arc;
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{
///     Backend, BlockId, BlockOrder, DType, KvLayout, KvShape, MemoryKind, ReservedArena,
/// };
///
/// let backend = CpuBackend::new();
/// # if backend.capabilities().missing.contains(&"reserve") { return Ok(()) }
/// let stream = backend.stream()?;
/// let shape = KvShape {
///     num_layers: 2, num_blocks: 64, block_size: 16, k_heads: 4, v_heads: 4, k_dim: 64, v_dim: 64,
///     format: DType::BF16.into(), order: BlockOrder::TokenMajor,
/// };
/// let reserved = ReservedArena::create(backend, MemoryKind::Device, Arc::new(KvLayout::new(shape)?))?;
/// let all = reserved.mapped_bytes();
/// // blocks 32..64 sleep; of them only block 40 holds something
/// let asleep = reserved.sleep("chunk_cache", 32..64, &[BlockId(40)], stream.as_ref())?;
/// assert_eq!(reserved.mapped_bytes(), all - asleep.released_bytes());
/// assert_eq!(asleep.released_bytes(), 32 * reserved.arena().layout().block_bytes());
/// asleep.wake(stream.as_ref()).map_err(|rejected| rejected.error)?;
/// assert_eq!(reserved.mapped_bytes(), all);
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ReservedArena(Arc<Memory>);

#[derive(Debug)]
pub(super) struct Memory {
    backend: Arc<dyn Backend>,
    pub(super) arena: KvArena,
    /// K, V, and scales that go with blocks, as [`KvLayout::runs`] has them.
    parts: Vec<Arc<dyn ReservedStorage>>,
    /// What sleeps.
    asleep: Mutex<Vec<(String, Range<u32>)>>,
}

/// Whole granules of a part, by its number.
pub(super) type Granules = (usize, Range<usize>);

impl ReservedArena {
    /// Reserves memory for `layout`. Static scales belong to no block; they lie in ordinary memory.
    ///
    /// # Errors
    /// What the backend refuses: [`Error::Unsupported`] where it cannot reserve, [`Error::Allocation`].
    pub fn create(backend: Arc<dyn Backend>, kind: MemoryKind, layout: Arc<KvLayout>) -> Result<Self> {
        let mut parts = Vec::new();
        let arena = KvArena::allocate_with(backend.as_ref(), layout, |bytes, static_scales| {
            if static_scales {
                return backend.allocate(kind, bytes);
            }
            let part = backend.reserve(kind, bytes)?;
            parts.push(Arc::clone(&part));
            Ok(part as Arc<dyn Storage>)
        })?;
        Ok(Self(Arc::new(Memory { backend, arena, parts, asleep: Mutex::default() })))
    }

    /// The arena that kernels and caches use.
    pub fn arena(&self) -> &KvArena {
        &self.0.arena
    }

    /// Bytes of K, V and scales behind which there is memory.
    pub fn mapped_bytes(&self) -> usize {
        self.0.parts.iter().map(|part| part.mapped_bytes()).sum()
    }

    /// What sleeps: tags and blocks, in the order in which they fell asleep.
    pub fn asleep(&self) -> Vec<(String, Range<u32>)> {
        self.0.asleep.lock().clone()
    }

    /// Puts `blocks` to sleep under the name `tag`, which is for people. The contents of the blocks in
    /// `keep` are copied to host memory on `stream` and come back with [`SleepingBlocks::wake`]; those of
    /// the others are lost. Blocks outside of the range keep every bit.
    ///
    /// It waits for `stream`. Work on other streams that touches the range must be done before; until the
    /// blocks are awake nothing may be enqueued that touches them.
    ///
    /// Only granules with nothing but blocks of the range in them are released. A range too small to hold
    /// one sleeps, too, and [`released_bytes`](SleepingBlocks::released_bytes) says 0.
    ///
    /// # Errors
    /// [`Error::Zero`] for no blocks, [`Error::OutOfRange`] for blocks past the arena,
    /// [`Error::ForeignBlock`] for a block to keep outside of the range, [`Error::Asleep`] for blocks that
    /// sleep, [`Error::Allocation`] where host memory is refused, and what the stream refuses. The blocks are
    /// as before then: the kept ones hold what they held.
    pub fn sleep(
        &self,
        tag: &str,
        blocks: Range<u32>,
        keep: &[BlockId],
        stream: &dyn Stream,
    ) -> Result<SleepingBlocks> {
        let limit = self.0.arena.layout().shape().num_blocks;
        if blocks.is_empty() {
            return Err(Error::Zero { what: "blocks to put to sleep" });
        }
        if blocks.end as usize > limit {
            return Err(Error::range("block", blocks.end - 1, limit));
        }
        if let Some(&block) = keep.iter().find(|block| !blocks.contains(&block.0)) {
            return Err(Error::ForeignBlock { block, start: blocks.start, end: blocks.end });
        }
        let mut keep = keep.to_vec();
        keep.sort_unstable();
        keep.dedup();
        self.0.claim(tag, &blocks)?;
        SleepingBlocks::fall(Arc::clone(&self.0), tag, blocks, keep, stream)
    }
}

impl Memory {
    /// Marks blocks as asleep, unless some are.
    fn claim(&self, tag: &str, blocks: &Range<u32>) -> Result<()> {
        let mut asleep = self.asleep.lock();
        let meets = |other: &Range<u32>| other.start < blocks.end && blocks.start < other.end;
        if let Some((tag, other)) = asleep.iter().find(|(_, other)| meets(other)) {
            return Err(Error::Asleep { tag: tag.clone(), start: other.start, end: other.end });
        }
        asleep.push((tag.to_owned(), blocks.clone()));
        Ok(())
    }

    /// Takes the mark back.
    pub(super) fn unclaim(&self, blocks: &Range<u32>) {
        self.asleep.lock().retain(|(_, other)| other != blocks);
    }

    /// A host arena with the contents of `keep`, or `None` for no blocks. Waits for the stream.
    pub(super) fn save(&self, keep: &[BlockId], stream: &dyn Stream) -> Result<Option<KvArena>> {
        if keep.is_empty() {
            stream.synchronize()?;
            return Ok(None);
        }
        let shape = KvShape { num_blocks: keep.len(), ..self.arena.layout().shape().clone() };
        let layout = Arc::new(KvLayout::new(shape)?);
        let saved = KvArena::allocate(self.backend.as_ref(), MemoryKind::System, layout)?;
        let pairs = keep.iter().zip(0..).map(|(&block, at)| (block, BlockId(at))).collect();
        stream.swap_blocks(&SwapBlocks { src: self.arena.clone(), dst: saved.clone(), pairs })?;
        stream.synchronize()?;
        Ok(Some(saved))
    }

    /// Writes what was saved back. Waits for the stream.
    pub(super) fn restore(&self, saved: &KvArena, keep: &[BlockId], stream: &dyn Stream) -> Result<()> {
        let pairs = keep.iter().zip(0..).map(|(&block, at)| (BlockId(at), block)).collect();
        stream.swap_blocks(&SwapBlocks { src: saved.clone(), dst: self.arena.clone(), pairs })?;
        stream.synchronize()
    }

    /// The granules that lie wholly in `blocks`.
    pub(super) fn granules(&self, blocks: &Range<u32>) -> Vec<Granules> {
        let mut granules = Vec::new();
        for (number, (part, runs)) in self.parts.iter().zip(self.arena.layout().runs(blocks)).enumerate() {
            let inside =
                |run: Range<usize>| whole_granules(run.start..run.end.min(part.len()), part.granularity());
            let whole = runs.into_iter().map(inside).filter(|range| !range.is_empty());
            granules.extend(whole.map(|range| (number, range)));
        }
        granules
    }

    /// Releases granules, all or none of them; what they held is lost either way.
    pub(super) fn unmap(&self, granules: &[Granules]) -> Result<()> {
        self.all_or_none(granules, |part, range| part.unmap(range), |part, range| part.map(range))
    }

    /// Brings granules back, all or none of them.
    pub(super) fn map(&self, granules: &[Granules]) -> Result<()> {
        self.all_or_none(granules, |part, range| part.map(range), |part, range| part.unmap(range))
    }

    fn all_or_none(
        &self,
        granules: &[Granules],
        step: impl Fn(&dyn ReservedStorage, Range<usize>) -> Result<()>,
        back: impl Fn(&dyn ReservedStorage, Range<usize>) -> Result<()>,
    ) -> Result<()> {
        for (done, (part, range)) in granules.iter().enumerate() {
            if let Err(error) = step(self.parts[*part].as_ref(), range.clone()) {
                for (part, range) in &granules[..done] {
                    back(self.parts[*part].as_ref(), range.clone())?;
                }
                return Err(error);
            }
        }
        Ok(())
    }
}
