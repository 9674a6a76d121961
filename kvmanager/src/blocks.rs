//! A manager of blocks with IDs, for engines that keep their own block lists.

use kvcore::{
    Backend, BlockId, BlockPool, KvArena, KvLayout, KvShape, LayerViews, MemoryKind, MutableBlocks,
    PoolCounts, Scatter, Stream, TensorView,
};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use crate::error::{CoreError, too_large};
use crate::rows::read_rows;
use crate::{Error, Result};

/// A manager for the blocks of one device, which are allocated and freed by ID, written one at a time, and
/// read as lists.
///
/// The typed guards of [`BlockPool`] make incorrect frees impossible, but this manager can only report them
/// as errors. A block ID is valid in all layers. Copies of rows run in the order of the caller's streams: a
/// read sees rows that were written earlier on its stream, or on a stream that its stream waits for.
///
/// ```
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{BlockOrder, DType, KvShape};
/// use kvmanager::{BlockManager, Error};
///
/// let shape = KvShape {
///     num_layers: 2, num_blocks: 256, block_size: 16, k_heads: 2, v_heads: 2, k_dim: 8, v_dim: 8,
///     format: DType::F32.into(), order: BlockOrder::HeadMajor,
/// };
/// let mut manager = BlockManager::new(CpuBackend::new(), shape)?;
/// let blocks = manager.allocate(3)?;
/// assert_eq!((manager.counts().free, manager.max_tokens_supported()), (253, 256 * 16));
/// manager.free(&blocks)?;
/// assert_eq!(manager.free(&blocks[..1]), Err(Error::NotAllocated { block: blocks[0] }));
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct BlockManager {
    backend: Arc<dyn Backend>,
    arena: KvArena,
    pool: BlockPool,
    held: BTreeMap<BlockId, MutableBlocks>,
}

impl BlockManager {
    /// Creates a manager, and allocates the memory of all blocks.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Zero`] if an extent is 0, [`kvcore::Error::Overflow`] if a size exceeds the
    /// address space, and the errors of the backend.
    pub fn new(backend: Arc<dyn Backend>, shape: KvShape) -> Result<Self> {
        let blocks = u32::try_from(shape.num_blocks);
        let blocks = blocks.map_err(|_| CoreError::Overflow { what: "number of blocks" })?;
        let layout = Arc::new(KvLayout::new(shape)?);
        let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, layout)?;
        Ok(Self { backend, arena, pool: BlockPool::new(0..blocks)?, held: BTreeMap::new() })
    }

    /// Allocates `n` blocks, and returns their IDs. Allocates none if there are fewer than `n` free blocks.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfBlocks`] if there are fewer than `n` free blocks.
    pub fn allocate(&mut self, n: usize) -> Result<Vec<BlockId>> {
        let mut blocks = self.pool.allocate(n)?;
        let ids = blocks.ids().to_vec();
        for &id in ids.iter().rev() {
            let last = blocks.split_off(blocks.len() - 1)?;
            self.held.insert(id, last);
        }
        Ok(ids)
    }

    /// Frees all of `blocks`. If any of them cannot be freed, frees none.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::ForeignBlock`] for an ID past the last block, and [`Error::NotAllocated`] for
    /// a block that is already free, occurs twice in `blocks`, or belongs to a sequence. Nothing is freed in
    /// these cases.
    pub fn free(&mut self, blocks: &[BlockId]) -> Result<()> {
        let mut seen = HashSet::new();
        for &block in blocks {
            self.check_held(block)?;
            if !seen.insert(block) {
                return Err(Error::NotAllocated { block });
            }
        }
        for block in blocks {
            self.held.remove(block);
        }
        Ok(())
    }

    fn check_held(&self, block: BlockId) -> Result<()> {
        self.held(block).map(drop)
    }

    fn held(&self, block: BlockId) -> Result<&MutableBlocks> {
        let range = self.pool.range();
        if !range.contains(&block.0) {
            return Err(Error::Core(CoreError::ForeignBlock { block, start: range.start, end: range.end }));
        }
        self.held.get(&block).ok_or(Error::NotAllocated { block })
    }

    /// Enqueues a write of rows `[tokens, heads, dim]` to one layer of a block, starting at token `offset` of
    /// the block.
    ///
    /// # Errors
    /// Returns an error if the block is not allocated, if the rows reach past the end of the block, or if the
    /// layer or a shape does not fit. Nothing is written in these cases.
    pub fn write(
        &self,
        stream: &dyn Stream,
        layer: usize,
        block: BlockId,
        offset: usize,
        k: &TensorView,
        v: &TensorView,
    ) -> Result<()> {
        self.check_held(block)?;
        let size = self.block_size();
        let tokens = k.shape().first().copied().unwrap_or(0);
        let end = offset.saturating_add(tokens);
        if end > size {
            return Err(too_large("end of the rows in the block", end, size));
        }
        let first = block.index() * size + offset;
        let slots: Arc<[i64]> = (first as i64..(first + tokens) as i64).collect();
        let slots = self.held(block)?.write_slots(size, slots)?;
        Ok(stream.scatter(&Scatter::new(&self.arena, layer, k.clone(), v.clone(), &slots))?)
    }

    /// Copies the keys and values of the first `len` tokens in a list of blocks, and returns the copies as
    /// `([len, k_heads, k_dim], [len, v_heads, v_dim])`. Use the copies on `stream`, or on a stream that
    /// waits for an event of `stream`.
    ///
    /// # Errors
    /// Returns an error if a block is not allocated, if `len` exceeds the number of tokens in the blocks, or
    /// if the layer is out of range.
    pub fn read(
        &self,
        stream: &dyn Stream,
        layer: usize,
        blocks: &[BlockId],
        len: usize,
    ) -> Result<LayerViews> {
        blocks.iter().try_for_each(|&block| self.check_held(block))?;
        let size = self.block_size();
        if len > blocks.len() * size {
            return Err(too_large("tokens to read", len, blocks.len() * size));
        }
        let slot = |token: usize| (blocks[token / size].index() * size + token % size) as i64;
        read_rows(self.backend.as_ref(), stream, &self.arena, layer, &(0..len).map(slot).collect())
    }

    /// Frees all blocks that [`allocate`](Self::allocate) returned. Sequences keep their blocks.
    pub fn reset(&mut self) {
        self.held.clear();
    }

    fn block_size(&self) -> usize {
        self.arena.layout().shape().block_size
    }

    /// Returns the number of blocks in each state, including the blocks of sequences.
    pub fn counts(&self) -> PoolCounts {
        self.pool.counts()
    }

    /// Returns the number of tokens that fit in all blocks together.
    pub fn max_tokens_supported(&self) -> usize {
        self.arena.layout().num_slots()
    }

    /// Returns the total size of K, V and their scales in all layers, in bytes.
    pub fn memory_usage(&self) -> usize {
        self.arena.storages().map(|storage| storage.len()).sum()
    }

    /// Returns the arena that stores the keys and values.
    pub fn arena(&self) -> &KvArena {
        &self.arena
    }

    /// Returns the backend and the pool, for sequences that allocate their own blocks.
    pub(crate) fn parts(&self) -> (&Arc<dyn Backend>, &BlockPool) {
        (&self.backend, &self.pool)
    }
}
