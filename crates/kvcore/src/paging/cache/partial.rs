//! Prefixes that end inside a block: the common part of a known block is copied instead of computed.

use std::collections::HashMap;
use std::sync::Arc;

use super::{PagedKvCache, Result, SequenceId};
use crate::device::{CopyBlocks, Stream};
use crate::paging::{BlockKey, BlockPool};

// Decision: docs/decisions/paging.md#partial-reuse-remembers-tokens-beside-the-index
/// The tokens of the known blocks after each key.
///
/// An entry may outlive its block. Such an entry is dropped when a lookup notices it. All such entries are
/// dropped when there are more entries than twice the pool's blocks.
#[derive(Debug)]
pub(super) struct Continuations {
    /// Blocks by the key before the block and the block's first token.
    after: HashMap<(BlockKey, u32), Vec<Continuation>>,
    entries: usize,
    most: usize,
}

#[derive(Debug, Clone)]
struct Continuation {
    key: BlockKey,
    tokens: Arc<[u32]>,
}

impl Continuations {
    pub(super) fn new(blocks: usize) -> Self {
        Self { after: HashMap::new(), entries: 0, most: 2 * blocks }
    }

    /// Remembers a block that was stored after `parent`.
    pub(super) fn add(&mut self, parent: BlockKey, key: BlockKey, tokens: &[u32], pool: &BlockPool) {
        let Some(&first) = tokens.first() else { return };
        let known = self.after.entry((parent, first)).or_default();
        if known.iter().any(|c| c.key == key) {
            return;
        }
        known.push(Continuation { key, tokens: tokens.into() });
        self.entries += 1;
        if self.entries > self.most {
            self.after.retain(|_, known| {
                known.retain(|c| pool.cached_prefix(&[c.key]) == 1);
                !known.is_empty()
            });
            self.entries = self.after.values().map(Vec::len).sum();
        }
    }

    /// Returns the block after `parent` that has the most leading tokens in common with `tokens`, and their
    /// number.
    fn best(&self, parent: &BlockKey, tokens: &[u32]) -> Option<(BlockKey, usize)> {
        let common = |c: &Continuation| c.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let known = self.after.get(&(*parent, *tokens.first()?))?;
        known.iter().map(|c| (c.key, common(c))).max_by_key(|(_, n)| *n)
    }

    fn remove(&mut self, parent: &BlockKey, first: u32, key: &BlockKey) {
        if let Some(known) = self.after.get_mut(&(*parent, first)) {
            let before = known.len();
            known.retain(|c| c.key != *key);
            self.entries -= before - known.len();
        }
    }
}

impl PagedKvCache {
    /// Makes the cache remember the tokens of its shared blocks, for
    /// [`reuse_partial`](Self::reuse_partial).
    #[must_use]
    pub fn with_partial_reuse(mut self) -> Self {
        self.continuations = Some(Continuations::new(self.pool().range().len()));
        self
    }

    /// Copies the known block that continues the sequence's prefix with the most tokens of `rest`, on
    /// `stream`, into a block of the sequence's own. Call it after
    /// [`create_with_prefix`](Self::create_with_prefix), before the sequence grows. Returns the number of
    /// tokens of `rest` that are now cached, 0 if no block was copied. At least one token is left to
    /// compute.
    ///
    /// The copied block holds further tokens behind the common ones. These are overwritten as the sequence
    /// grows, and no segment covers them before. (`TensorRT-LLM` calls this partial reuse.)
    ///
    /// # Errors
    /// Returns [`crate::Error::UnknownSequence`] if there is no such sequence,
    /// [`crate::Error::OutOfBlocks`] if there is no block for the copy, and the errors of the stream. In
    /// these cases nothing has changed.
    pub fn reuse_partial(&mut self, id: SequenceId, rest: &[u32], stream: &dyn Stream) -> Result<usize> {
        let block_size = self.block_size();
        let sequence = self.get(id)?;
        let aligned = sequence.table.len() == sequence.table.keyed_blocks() * block_size;
        let (Some(chain), true) = (&sequence.chain, aligned) else { return Ok(0) };
        let parent = chain.last_key();
        let usable = &rest[..rest.len().saturating_sub(1).min(block_size - 1)];
        while let Some((key, tokens)) =
            self.continuations.as_ref().and_then(|known| known.best(&parent, usable))
        {
            let Some(source) = self.pool().lookup(&key) else {
                if let Some(known) = &mut self.continuations {
                    known.remove(&parent, usable[0], &key);
                }
                continue;
            };
            let arena = self.arena().clone();
            let sequence = self.get_mut(id)?;
            let before = sequence.table.len();
            sequence.table.grow(tokens)?;
            let pairs = sequence.table.write_pair(source.ids()[0], before)?;
            if let Err(error) = stream.copy_blocks(&CopyBlocks { arena, pairs }) {
                sequence.table.truncate(before)?;
                return Err(error);
            }
            if let Some(chain) = &mut sequence.chain {
                chain.pending.extend_from_slice(&rest[..tokens]);
            }
            return Ok(tokens);
        }
        Ok(0)
    }
}
