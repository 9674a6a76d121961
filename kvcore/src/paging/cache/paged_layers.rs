//! The implementation of [`KvCache`] for the paged cache.

use super::{CacheKind, KvCache, PagedKvCache, Result, SequenceId, SequenceStart};
use crate::device::{KvArena, Segment, WriteSlots};
use crate::paging::PromptKeys;

impl KvCache for PagedKvCache {
    fn kind(&self) -> CacheKind {
        CacheKind::Paged
    }

    fn arena(&self) -> &KvArena {
        self.arena()
    }

    fn max_len(&self) -> usize {
        self.pool().range().len() * self.block_size()
    }

    fn num_sequences(&self) -> usize {
        self.num_sequences()
    }

    fn create(&mut self, start: SequenceStart) -> Result<SequenceId> {
        self.create(start)
    }

    fn create_with_prefix(&mut self, prompt: &PromptKeys) -> Result<(SequenceId, usize)> {
        self.create_with_prefix(prompt)
    }

    fn grow(&mut self, id: SequenceId, tokens: usize) -> Result<WriteSlots> {
        self.grow(id, tokens)
    }

    fn grow_batch(&mut self, batch: &[(SequenceId, usize)], slots: &mut WriteSlots) -> Result<()> {
        self.grow_batch(batch, slots)
    }

    fn missing_blocks(&self, id: SequenceId, tokens: usize) -> Result<usize> {
        Ok(self.get(id)?.table.missing_blocks(tokens))
    }

    fn free_before(&mut self, id: SequenceId, token: usize) -> Result<usize> {
        self.free_before(id, token)
    }

    fn commit(&mut self, id: SequenceId, tokens: &[u32]) -> Result<()> {
        self.commit(id, tokens)
    }

    fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()> {
        self.truncate(id, len)
    }

    fn free(&mut self, id: SequenceId) -> Result<()> {
        self.free(id)
    }

    fn len(&self, id: SequenceId) -> Result<usize> {
        self.len(id)
    }

    fn segment(&self, id: SequenceId) -> Result<Segment> {
        self.segment(id)
    }

    fn reset(&mut self) {
        self.sequences.clear();
        self.pool().clear_cached();
    }

    fn as_paged(&self) -> Option<&PagedKvCache> {
        Some(self)
    }

    fn as_paged_mut(&mut self) -> Option<&mut PagedKvCache> {
        Some(self)
    }
}
