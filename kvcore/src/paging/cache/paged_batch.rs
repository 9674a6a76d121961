//! Copy-on-write and growth for several sequences of a paged cache at once.

use super::{Error, PagedKvCache, Result, SequenceId};
use crate::base::BlockId;
use crate::device::{CopyBlocks, Stream, WritePairs, WriteSlots};
use crate::paging::MutableBlocks;
use crate::paging::block::TailCopy;

use super::paged::Sequence;

impl PagedKvCache {
    /// Creates a second sequence over the tokens of sequence `id` (beam search, parallel sampling). Both
    /// sequences share all blocks. Before a sequence grows, call [`copy_on_write`](Self::copy_on_write) so
    /// that it gets its own last block.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        let twin = self.twin(id)?;
        Ok(self.insert(twin))
    }

    /// Returns a second sequence over the tokens of a sequence.
    pub(super) fn twin(&mut self, id: SequenceId) -> Result<Sequence> {
        let Sequence { table, start, chain, .. } = self.get_mut(id)?;
        Ok(Sequence { table: table.fork()?, start: *start, chain: chain.clone(), batch: 0 })
    }

    /// Makes the slot of each sequence's next token writable. A sequence whose last block is partial and
    /// shared gets its own copy of the block. The last of the given sequences that share a block keeps the
    /// block without a copy, unless the block still has another holder. At most two copy operations are
    /// enqueued on `stream`. Returns the number of copies, which is 0 if no block is shared with a fork.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence, [`Error::OutOfBlocks`] if there is no
    /// block for a copy, and the stream's errors. Sequences whose copy was already enqueued keep it, and the
    /// other sequences are unchanged.
    pub fn copy_on_write(&mut self, ids: &[SequenceId], stream: &dyn Stream) -> Result<usize> {
        let mut later = Vec::new();
        let mut now = Vec::new();
        for (at, &id) in ids.iter().enumerate() {
            let Some(tail) = self.shared_tail(id)? else { continue };
            let is_last = !ids[at + 1..]
                .iter()
                .any(|&other| matches!(self.shared_tail(other), Ok(Some(block)) if block == tail));
            if is_last { later.push(id) } else { now.push(id) }
        }
        Ok(self.copy_tails(&now, stream)? + self.copy_tails(&later, stream)?)
    }

    /// Returns a sequence's last block if the sequence may not write the next token into it.
    fn shared_tail(&self, id: SequenceId) -> Result<Option<BlockId>> {
        Ok(self.get(id)?.table.shared_tail())
    }

    /// Gives each sequence its own last block with a single copy operation, or leaves all sequences
    /// unchanged.
    fn copy_tails(&mut self, ids: &[SequenceId], stream: &dyn Stream) -> Result<usize> {
        let mut copies: Vec<(SequenceId, TailCopy)> = Vec::new();
        let mut made = Ok(());
        for &id in ids {
            match self.get_mut(id).and_then(|sequence| sequence.table.unshare_tail()) {
                Ok(copy) => copies.extend(copy.map(|copy| (id, copy))),
                Err(error) => {
                    made = Err(error);
                    break;
                }
            }
        }
        if made.is_ok() && !copies.is_empty() {
            let pairs = WritePairs::concat(copies.iter().map(|(_, copy)| copy.pairs()));
            made = stream.copy_blocks(&CopyBlocks { arena: self.arena().clone(), pairs });
        }
        let count = copies.len();
        if made.is_err() {
            for (id, copy) in copies.into_iter().rev() {
                self.get_mut(id)?.table.reshare_tail(copy)?;
            }
        }
        made.map(|()| count)
    }

    /// Reserves slots for more tokens of several sequences, in one step that either succeeds for all or
    /// changes nothing. Replaces the contents of `slots` with the slots of the whole batch, in batch order.
    /// Allocates all blocks at once. Reuses the memory of `slots` if no operation still holds it, so a decode
    /// step that needs no new blocks does not allocate memory.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence, [`Error::Twice`] if a sequence is
    /// given twice, [`Error::SharedBlock`] if a sequence shares its last block with a fork (call
    /// [`copy_on_write`](Self::copy_on_write) first), and [`Error::OutOfBlocks`] if there are not enough
    /// blocks for the whole batch. Nothing changes in these cases, including `slots`.
    pub fn grow_batch(&mut self, batch: &[(SequenceId, usize)], slots: &mut WriteSlots) -> Result<()> {
        let missing = self.missing_of(batch)?;
        let fresh = self.pool().allocate(missing)?;
        self.supply_batch(batch, fresh, slots)
    }

    /// Returns the number of blocks that the sequences of a batch need for more tokens, or an error if a
    /// sequence cannot grow.
    pub(super) fn missing_of(&mut self, batch: &[(SequenceId, usize)]) -> Result<usize> {
        self.batches += 1;
        let number = self.batches;
        let mut missing = 0;
        for &(id, tokens) in batch {
            let sequence = self.get_mut(id)?;
            if std::mem::replace(&mut sequence.batch, number) == number {
                return Err(Error::Twice { what: "sequence of a batch", number: id.0 });
            }
            missing += sequence.table.check_growth(tokens)?;
        }
        Ok(missing)
    }

    /// Grows several sequences like [`grow_batch`](Self::grow_batch), with blocks that were allocated before.
    pub(super) fn supply_batch(
        &mut self,
        batch: &[(SequenceId, usize)],
        mut fresh: MutableBlocks,
        slots: &mut WriteSlots,
    ) -> Result<()> {
        let block_size = self.block_size();
        let mut minted = std::mem::take(&mut self.minted);
        minted.clear();
        for &(id, tokens) in batch {
            let table = &mut self.get_mut(id)?.table;
            let blocks = table.missing_blocks(tokens);
            if blocks > 0 {
                table.supply(fresh.split_off(fresh.len() - blocks)?)?;
            }
            table.grow_onto(tokens, &mut minted)?;
        }
        let owners = batch.iter().filter_map(|&(id, tokens)| {
            let table = &self.sequences.get(&id)?.table;
            Some(table.issuer(table.len() - tokens))
        });
        slots.refill_batch(block_size, minted.iter().copied(), owners);
        self.minted = minted;
        Ok(())
    }
}
