//! Blocks by number, for engines that keep block lists themselves.

use kvcore::{
    Backend, BlockId, BlockPool, KvArena, KvExtents, KvLayout, LayerViews, MemoryKind, MutableBlocks,
    PoolCounts, RankInfo, Scatter, Stream, TensorView,
};
use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{CoreError, too_large};
use crate::rows::read_rows;
use crate::{Error, Result};

/// The number and the size of a manager's blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockManagerConfig {
    /// Number of tokens per block, at least 1.
    pub block_size: usize,
    /// Number of blocks.
    pub num_blocks: usize,
}

impl Default for BlockManagerConfig {
    /// Returns 256 blocks of 16 tokens.
    fn default() -> Self {
        Self { block_size: 16, num_blocks: 256 }
    }
}

/// A manager of one device's blocks, which are allocated and freed by number, and read and written block by
/// block.
///
/// The typed guards of [`BlockPool`] make wrong frees impossible; in this manager, wrong frees are errors.
/// All layers share the block numbers. Rows move in the order of the caller's streams: a read sees rows
/// written before on its stream, or on a stream that its stream waits for.
///
/// ```
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{DType, KvExtents, RankInfo};
/// use kvmanager::{BlockManager, BlockManagerConfig, Error};
///
/// let extents = KvExtents {
///     num_layers: 2, k_heads: 2, v_heads: 2, k_dim: 8, v_dim: 8, max_positions: 128,
///     format: DType::F32.into(),
/// };
/// let config = BlockManagerConfig::default();
/// let mut manager = BlockManager::from_config(CpuBackend::new(), &extents, &RankInfo::default(), &config)?;
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
    /// Allocates the blocks of this rank's part of a model.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Zero`] if the number of blocks or the block size is 0, [`kvcore::Error::Uneven`] if the
    /// model does not divide evenly among the ranks, [`kvcore::Error::Overflow`] if a size does not fit the address
    /// space, and the errors of the backend.
    pub fn from_config(
        backend: Arc<dyn Backend>,
        extents: &KvExtents,
        rank: &RankInfo,
        config: &BlockManagerConfig,
    ) -> Result<Self> {
        let layout = KvLayout::new(extents.shape(rank, config.num_blocks, config.block_size)?)?;
        let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(layout))?;
        let pool = BlockPool::new(0..config.num_blocks as u32)?;
        Ok(Self { backend, arena, pool, held: BTreeMap::new() })
    }

    /// Takes `n` blocks, or none.
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

    /// Frees all of `blocks`, or none.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::ForeignBlock`] for a number that is not of this manager, and
    /// [`Error::NotAllocated`] for a block that is free already or given twice. In these cases nothing is
    /// freed.
    pub fn free(&mut self, blocks: &[BlockId]) -> Result<()> {
        let mut seen = std::collections::HashSet::new();
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

    /// Writes rows `[tokens, heads, dim]` of one layer into a block, starting at token `offset` of the
    /// block, in the order of `stream`.
    ///
    /// # Errors
    /// Returns an error if the block is not allocated, if the rows reach past the end of the block, or if
    /// the layer or a shape does not fit. In these cases nothing is written.
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

    /// Copies the first `len` tokens of a list of blocks: `([len, heads, k_dim], [len, heads, v_dim])`. The
    /// caller may use the result on `stream`, and on other streams that wait for an event of `stream`.
    ///
    /// # Errors
    /// Returns an error if a block is not allocated, if `len` exceeds the tokens of the blocks, or if the
    /// layer is out of range.
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

    /// Frees all blocks.
    pub fn reset(&mut self) {
        self.held.clear();
    }

    fn block_size(&self) -> usize {
        self.arena.layout().shape().block_size
    }

    /// Returns the number of blocks in each state.
    pub fn counts(&self) -> PoolCounts {
        self.pool.counts()
    }

    /// Returns the number of tokens of one layer that all blocks hold together.
    pub fn max_tokens_supported(&self) -> usize {
        self.arena.layout().num_slots()
    }

    /// Returns the number of bytes of K, V and their scales over all layers.
    pub fn memory_usage(&self) -> usize {
        self.arena.storages().map(|storage| storage.len()).sum()
    }

    /// Returns the arena of the keys and values, for kernels that read blocks in place.
    pub fn arena(&self) -> &KvArena {
        &self.arena
    }
}
