//! An arena whose blocks can sleep, which releases their memory but keeps their IDs and addresses.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::SleepingBlocks;
use crate::base::{BlockId, Error, KvLayout, KvShape, MemoryKind, Result};
use crate::device::{
    Backend, KvArena, ReservedStorage, Storage, Stream, SwapBlocks, WritePairs, whole_granules,
};

/// An arena in reserved memory. Clones share the memory.
///
/// A range of blocks can [sleep](Self::sleep): the contents of selected blocks are copied to host memory, and
/// every granule that contains only blocks of the range is released, in every layer of K, V and the per-block
/// scales. Views and clones of the [`arena`](Self::arena) stay valid throughout, and no address changes.
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
/// // blocks 32..64 sleep; only block 40 of them has contents to keep
/// let asleep = reserved.sleep("chunk_cache", 32..64, &[BlockId(40)], stream.as_ref())?;
/// assert_eq!(reserved.mapped_bytes(), all - asleep.released_bytes());
/// assert_eq!(asleep.released_bytes(), 32 * reserved.arena().layout().block_bytes());
/// asleep.wake(stream.as_ref()).map_err(|rejected| rejected.error)?;
/// assert_eq!(reserved.mapped_bytes(), all);
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ReservedArena(Arc<ReservedMemory>);

#[derive(Debug)]
pub(super) struct ReservedMemory {
    backend: Arc<dyn Backend>,
    pub(super) arena: KvArena,
    /// K, V and the per-block scales, in the order of [`KvLayout::runs`].
    parts: Vec<Arc<dyn ReservedStorage>>,
    /// Tags and ranges of the sleeping blocks.
    asleep: Mutex<Vec<(String, Range<u32>)>>,
    /// A lock held while granules are mapped or released, so that no other call changes the number of
    /// resident bytes between a call's two readings of it.
    mapping: Mutex<()>,
}

/// The index of a part, and a byte range of whole granules in the part.
pub(super) type PartGranules = (usize, Range<usize>);

impl ReservedArena {
    /// Reserves memory for `layout`. Static scales do not belong to a block, so they are in ordinary memory.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the backend cannot reserve memory, and [`Error::Allocation`] if
    /// there is not enough memory.
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
        Ok(Self(Arc::new(ReservedMemory {
            backend,
            arena,
            parts,
            asleep: Mutex::default(),
            mapping: Mutex::default(),
        })))
    }

    /// Returns the arena that kernels and caches use.
    pub fn arena(&self) -> &KvArena {
        &self.0.arena
    }

    /// Returns the number of bytes of K, V and per-block scales that are mapped.
    pub fn mapped_bytes(&self) -> usize {
        self.0.parts.iter().map(|part| part.mapped_bytes()).sum()
    }

    /// Returns the tags and ranges of the sleeping blocks, in the order in which they were put to sleep.
    pub fn asleep(&self) -> Vec<(String, Range<u32>)> {
        self.0.asleep.lock().clone()
    }

    /// Puts `blocks` to sleep. `tag` is a name for display only. The contents of the blocks in `keep` are
    /// copied to host memory on `stream` and restored by [`SleepingBlocks::wake`]; the contents of the other
    /// blocks are lost. Blocks outside the range are unchanged.
    ///
    /// The call waits for `stream`. Work on other streams that touches the range MUST be complete before
    /// the call. Until the blocks are awake, the caller MUST NOT enqueue work that touches them.
    ///
    /// Only granules that contain no blocks outside the range are released. A range that contains no such
    /// granule can also sleep, but then [`released_bytes`](SleepingBlocks::released_bytes) is 0.
    ///
    /// # Errors
    /// - Returns [`Error::Zero`] if `blocks` is empty.
    /// - Returns [`Error::OutOfRange`] if the range reaches past the arena.
    /// - Returns [`Error::ForeignBlock`] if a block of `keep` is outside the range.
    /// - Returns [`Error::Asleep`] if some of the blocks are already asleep.
    /// - Returns [`Error::Allocation`] if there is not enough host memory.
    /// - Returns the stream's errors.
    ///
    /// In these cases no block is put to sleep, and the blocks in `keep` keep their contents.
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

impl ReservedMemory {
    /// Marks blocks as asleep, or returns an error if some of them already are.
    fn claim(&self, tag: &str, blocks: &Range<u32>) -> Result<()> {
        let mut asleep = self.asleep.lock();
        let meets = |other: &Range<u32>| other.start < blocks.end && blocks.start < other.end;
        if let Some((tag, other)) = asleep.iter().find(|(_, other)| meets(other)) {
            return Err(Error::Asleep { tag: tag.clone(), start: other.start, end: other.end });
        }
        asleep.push((tag.to_owned(), blocks.clone()));
        Ok(())
    }

    /// Removes the sleep mark from `blocks`.
    pub(super) fn unclaim(&self, blocks: &Range<u32>) {
        self.asleep.lock().retain(|(_, other)| other != blocks);
    }

    /// Copies the contents of `keep` to a new host arena, and waits for the stream. Returns `None` if `keep`
    /// is empty.
    pub(super) fn save(&self, keep: &[BlockId], stream: &dyn Stream) -> Result<Option<KvArena>> {
        if keep.is_empty() {
            stream.synchronize()?;
            return Ok(None);
        }
        let shape = KvShape { num_blocks: keep.len(), ..self.arena.layout().shape().clone() };
        let layout = Arc::new(KvLayout::new(shape)?);
        let saved = KvArena::allocate(self.backend.as_ref(), MemoryKind::System, layout)?;
        let pairs: Arc<[_]> = keep.iter().zip(0..).map(|(&block, at)| (block, BlockId(at))).collect();
        // No other code can access the new arena, so the pairs need no permit.
        let pairs = WritePairs::unchecked(pairs);
        stream.swap_blocks(&SwapBlocks { src: self.arena.clone(), dst: saved.clone(), pairs })?;
        stream.synchronize()?;
        Ok(Some(saved))
    }

    /// Writes the saved contents back, and waits for the stream.
    pub(super) fn restore(&self, saved: &KvArena, keep: &[BlockId], stream: &dyn Stream) -> Result<()> {
        let pairs: Arc<[_]> = keep.iter().zip(0..).map(|(&block, at)| (BlockId(at), block)).collect();
        // The blocks are asleep and get their old contents back, so nothing changes for their holders.
        let pairs = WritePairs::unchecked(pairs);
        stream.swap_blocks(&SwapBlocks { src: saved.clone(), dst: self.arena.clone(), pairs })?;
        stream.synchronize()
    }

    /// Returns the granules that are completely inside `blocks`.
    pub(super) fn granules(&self, blocks: &Range<u32>) -> Vec<PartGranules> {
        let mut granules = Vec::new();
        for (number, (part, runs)) in self.parts.iter().zip(self.arena.layout().runs(blocks)).enumerate() {
            let inside =
                |run: Range<usize>| whole_granules(run.start..run.end.min(part.len()), part.granularity());
            let whole = runs.into_iter().map(inside).filter(|range| !range.is_empty());
            granules.extend(whole.map(|range| (number, range)));
        }
        granules
    }

    /// Returns the total size of the physical memory of all parts, in bytes.
    fn resident_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.resident_bytes()).sum()
    }

    /// Releases the memory of all given granules, or of none. Their contents are lost in either case. Returns
    /// the number of bytes that became free.
    pub(super) fn unmap(&self, granules: &[PartGranules]) -> Result<usize> {
        let _turn = self.mapping.lock();
        let before = self.resident_bytes();
        self.all_or_none(granules, |part, range| part.unmap(range), |part, range| part.map(range))?;
        Ok(before.saturating_sub(self.resident_bytes()))
    }

    /// Maps all given granules again, or none.
    pub(super) fn map(&self, granules: &[PartGranules]) -> Result<()> {
        let _turn = self.mapping.lock();
        self.all_or_none(granules, |part, range| part.map(range), |part, range| part.unmap(range))
    }

    fn all_or_none(
        &self,
        granules: &[PartGranules],
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
