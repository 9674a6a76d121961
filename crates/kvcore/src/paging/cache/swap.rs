//! Sequences that wait in another memory: swapped out to make room, swapped in to go on.

use std::sync::Arc;

use super::paged::{Chain, Sequence};
use super::{PagedKvCache, Result, SequenceId, SequenceStart};
use crate::base::BlockId;
use crate::device::{Event, KvArena, Stream, SwapBlocks};
use crate::paging::{BlockPool, BlockTable, MutableBlocks, Rejected};

/// A sequence whose tokens lie in blocks of another arena.
///
/// # Drop behaviour
/// Its blocks there are free; the sequence is gone.
#[derive(Debug)]
#[must_use = "dropping it forgets the sequence"]
pub struct SwappedSequence {
    arena: KvArena,
    blocks: MutableBlocks,
    /// After the copy out.
    copied: Arc<dyn Event>,
    len: usize,
    start: SequenceStart,
    chain: Option<Chain>,
}

impl SwappedSequence {
    /// Tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Blocks it takes where it lies.
    pub fn blocks(&self) -> &[BlockId] {
        self.blocks.ids()
    }
}

impl PagedKvCache {
    /// Copies a sequence to blocks of `pool` in `arena`, another memory, and frees it here; what it shares
    /// stays with its other holders, or cached.
    ///
    /// The copy is enqueued on `stream`; what else uses the blocks of either arena follows the
    /// [order](PagedKvCache#order) of this cache.
    ///
    /// # Errors
    /// [`crate::Error::OutOfBlocks`] of the other pool, arenas of different blocks, what the stream refuses; the
    /// sequence is as before then.
    pub fn swap_out(
        &mut self,
        id: SequenceId,
        stream: &dyn Stream,
        arena: &KvArena,
        pool: &BlockPool,
    ) -> Result<SwappedSequence> {
        let Sequence { table, start, chain } = self.get(id)?;
        let used = table.len().div_ceil(self.block_size());
        let blocks = pool.allocate(used)?;
        let pairs = table.ids().iter().copied().zip(blocks.ids().iter().copied()).collect();
        stream.swap_blocks(&SwapBlocks { src: self.arena().clone(), dst: arena.clone(), pairs })?;
        let copied = stream.record()?;
        let swapped = SwappedSequence {
            arena: arena.clone(),
            blocks,
            copied,
            len: table.len(),
            start: *start,
            chain: chain.clone(),
        };
        self.free(id)?;
        Ok(swapped)
    }

    /// Brings a sequence back under a new id. Blocks of its prefix that are still known here are shared
    /// again, the others copied on `stream`, which waits for the copy out if that was made on another one.
    ///
    /// # Errors
    /// [`crate::Error::OutOfBlocks`], arenas of different blocks, what the stream refuses; the swapped sequence
    /// is given back then.
    pub fn swap_in(
        &mut self,
        swapped: SwappedSequence,
        stream: &dyn Stream,
    ) -> Result<SequenceId, Box<Rejected<SwappedSequence>>> {
        match self.restore(&swapped, stream) {
            Ok(sequence) => Ok(self.insert(sequence)),
            Err(error) => Err(Box::new(Rejected { error, blocks: swapped })),
        }
    }

    fn restore(&self, swapped: &SwappedSequence, stream: &dyn Stream) -> Result<Sequence> {
        let block_size = self.block_size();
        let keys = swapped.chain.as_ref().map_or(&[][..], |chain| &chain.keys);
        let (shared, fresh) = self.pool().admit_prefix(keys, swapped.blocks.len(), 0)?;
        let known = shared.len();
        let pairs = swapped.blocks.ids()[known..].iter().copied().zip(fresh.ids().iter().copied());
        let pairs: Arc<[(BlockId, BlockId)]> = pairs.collect();
        if !pairs.is_empty() {
            stream.wait_for(&swapped.copied)?;
            stream.swap_blocks(&SwapBlocks {
                src: swapped.arena.clone(),
                dst: self.arena().clone(),
                pairs,
            })?;
        }
        let mut table = BlockTable::with_prefix(shared, block_size)?;
        table.supply(fresh)?;
        table.grow(swapped.len - table.len())?;
        if let Some(chain) = &swapped.chain {
            let parent = known.checked_sub(1).map_or_else(|| chain.scheme.root(), |last| chain.keys[last]);
            table.share_full(Some(parent), &keys[known..])?;
        }
        Ok(Sequence { table, start: swapped.start, chain: swapped.chain.clone() })
    }
}
