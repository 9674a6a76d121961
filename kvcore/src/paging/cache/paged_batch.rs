//! Steps of several sequences of a paged cache at once: forks that write, and growth.

use super::{Error, PagedKvCache, Result, SequenceId};
use crate::base::BlockId;
use crate::device::{CopyBlocks, Stream, WritePairs, WriteSlots};
use crate::paging::MutableBlocks;
use crate::paging::block::TailCopy;

use super::paged::Sequence;

impl PagedKvCache {
    /// Creates a second sequence over the tokens of sequence `id` (beam search, parallel sampling). Both
    /// sequences share all blocks. Before a sequence grows, call [`copy_on_write`](Self::copy_on_write) to
    /// give it a last block of its own.
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

    /// Makes the next token's slot of each sequence writable. Where a last block is partial and shared, the
    /// sequence gets a copy of its own; the last sequence that shares the block takes it back, if it is the
    /// only holder. One operation on `stream` makes the copies, and a second one copies blocks that have
    /// further holders. Returns the number of copies, which is 0 without a fork.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence, [`Error::OutOfBlocks`] if there is no
    /// block for a copy, and the errors of the stream. A sequence that already has its copy keeps it; the
    /// others are unchanged.
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

    /// Returns the last block of a sequence, if the sequence may not write the next token into it.
    fn shared_tail(&self, id: SequenceId) -> Result<Option<BlockId>> {
        Ok(self.get(id)?.table.shared_tail())
    }

    /// Gives each sequence a last block of its own, all by one copy, or leaves all as they were.
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

    /// Reserves slots for more tokens of several sequences, in one step that succeeds for all or changes
    /// nothing, and replaces the contents of `slots` by the slots of the whole batch, in its order. Takes the
    /// blocks of all in one go. Reuses the memory of `slots` if no operation holds it: a decode step that
    /// takes no block allocates nothing.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence, [`Error::Twice`] for a sequence that
    /// is given twice, [`Error::SharedBlock`] for one that shares its last block with a fork
    /// ([`copy_on_write`](Self::copy_on_write) gives it its own), and [`Error::OutOfBlocks`] if there are not
    /// enough blocks for all. In these cases nothing has changed, including `slots`.
    pub fn grow_batch(&mut self, batch: &[(SequenceId, usize)], slots: &mut WriteSlots) -> Result<()> {
        let missing = self.missing_of(batch)?;
        let fresh = self.pool().allocate(missing)?;
        self.supply_batch(batch, fresh, slots)
    }

    /// Returns the number of blocks that more tokens of several sequences need, or the reason why one cannot
    /// have them.
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

    /// Grows several sequences onto the blocks that they need, as [`grow_batch`](Self::grow_batch) does.
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
