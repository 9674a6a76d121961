//! Swapping: sequences are swapped out to other memory to make room, and swapped in again to continue.

use std::sync::Arc;

use super::paged::{KeyChain, Sequence};
use super::{PagedKvCache, Result, SequenceId, SequenceStart};
use crate::base::BlockId;
use crate::device::{Event, KvArena, Stream, SwapBlocks};
use crate::paging::{BlockKey, BlockPool, BlockTable, MutableBlocks};

/// A sequence whose tokens were copied to blocks of another arena.
///
/// # Drop behaviour
/// The blocks in the other arena become free, and the sequence is lost.
#[derive(Debug)]
#[must_use = "dropping it forgets the sequence"]
pub struct SwappedSequence {
    arena: KvArena,
    blocks: MutableBlocks,
    /// Event recorded after the copy to the other memory.
    copied: Arc<dyn Event>,
    len: usize,
    /// Index of the first token that is still held.
    first: usize,
    start: SequenceStart,
    chain: Option<KeyChain>,
}

impl SwappedSequence {
    /// Returns the number of tokens of the sequence.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the sequence has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the blocks of the sequence in the other arena.
    pub fn blocks(&self) -> &[BlockId] {
        self.blocks.ids()
    }

    /// Returns the keys of the shared blocks, starting with the first block that is still held.
    pub(super) fn keys(&self, block_size: usize) -> &[BlockKey] {
        let gone = self.first / block_size;
        self.chain.as_ref().and_then(|chain| chain.keys.get(gone..)).unwrap_or_default()
    }
}

impl PagedKvCache {
    /// Copies a sequence to blocks of `pool` in another arena, `arena`, and frees the sequence in this cache.
    /// Its shared blocks stay with their other holders, or stay cached.
    ///
    /// The copy is enqueued on `stream`. Other work on the blocks of either arena MUST follow the
    /// [order](PagedKvCache#order) of this cache.
    ///
    /// # Errors
    /// Returns [`crate::Error::UnknownSequence`] if there is no such sequence, [`crate::Error::OutOfBlocks`]
    /// if `pool` does not have enough blocks, and the stream's errors, for example if the arenas' blocks
    /// differ. The sequence is unchanged in these cases.
    pub fn swap_out(
        &mut self,
        id: SequenceId,
        stream: &dyn Stream,
        arena: &KvArena,
        pool: &BlockPool,
    ) -> Result<SwappedSequence> {
        let swapped = self.copy_out(id, stream, arena, pool)?;
        self.free(id)?;
        Ok(swapped)
    }

    /// Copies a sequence to blocks of `pool` in `arena`, without freeing it in this cache.
    pub(super) fn copy_out(
        &self,
        id: SequenceId,
        stream: &dyn Stream,
        arena: &KvArena,
        pool: &BlockPool,
    ) -> Result<SwappedSequence> {
        let Sequence { table, start, chain, .. } = self.get(id)?;
        let used = (table.len() - table.first()).div_ceil(self.block_size());
        let blocks = pool.allocate(used)?;
        let pairs: Arc<[_]> = table.ids().iter().copied().zip(blocks.ids().iter().copied()).collect();
        let pairs = blocks.write_pairs(pairs)?;
        stream.swap_blocks(&SwapBlocks { src: self.arena().clone(), dst: arena.clone(), pairs })?;
        // If recording fails, the copy may still run, so its blocks must not become free before it ends.
        let copied = stream.record().inspect_err(|_| drop(stream.synchronize()))?;
        Ok(SwappedSequence {
            arena: arena.clone(),
            blocks,
            copied,
            len: table.len(),
            first: table.first(),
            start: *start,
            chain: chain.clone(),
        })
    }

    // Decision: docs/decisions/paging.md#swap_in-borrows-the-swapped-sequence
    /// Restores a swapped sequence under a new ID. Blocks of its prefix that this cache still has are shared
    /// again. The other blocks are copied on `stream`, which first waits for the copy made by
    /// [`swap_out`](Self::swap_out) if that copy ran on another stream. The caller should then drop
    /// `swapped`, following the [order](PagedKvCache#order) of this cache.
    ///
    /// # Errors
    /// Returns [`crate::Error::OutOfBlocks`] if there are not enough blocks, and the stream's errors, for
    /// example if the arenas' blocks differ. Nothing changes in these cases, and `swapped` stays valid.
    pub fn swap_in(&mut self, swapped: &SwappedSequence, stream: &dyn Stream) -> Result<SequenceId> {
        let sequence = self.restore(swapped, stream)?;
        Ok(self.insert(sequence))
    }

    /// Restores a swapped sequence in blocks of this cache.
    pub(super) fn restore(&self, swapped: &SwappedSequence, stream: &dyn Stream) -> Result<Sequence> {
        let block_size = self.block_size();
        let gone = swapped.first / block_size;
        let keys = swapped.keys(block_size);
        let (shared, fresh) = self.pool().admit_prefix(keys, swapped.blocks.len(), 0)?;
        let known = shared.len();
        let pairs = swapped.blocks.ids()[known..].iter().copied().zip(fresh.ids().iter().copied());
        let pairs: Arc<[(BlockId, BlockId)]> = pairs.collect();
        if !pairs.is_empty() {
            stream.wait_for(&swapped.copied)?;
            let pairs = fresh.write_pairs(pairs)?;
            stream.swap_blocks(&SwapBlocks {
                src: swapped.arena.clone(),
                dst: self.arena().clone(),
                pairs,
            })?;
        }
        let mut table = BlockTable::after_freed(gone, shared, block_size)?;
        table.supply(fresh)?;
        table.grow(swapped.len - table.len())?;
        if let Some(chain) = &swapped.chain {
            let before = (gone + known).checked_sub(1).and_then(|last| chain.keys.get(last).copied());
            let parent = before.unwrap_or_else(|| chain.prompt.scheme().root());
            table.share_full(Some(parent), &keys[known..])?;
        }
        Ok(Sequence { table, start: swapped.start, chain: swapped.chain.clone(), batch: 0 })
    }
}
