//! A sequence's blocks in order, and the slots of its tokens.

use std::sync::Arc;

use super::{BlockId, MutableBlock, SharedBlock};
use crate::error::{Error, Result};
use crate::key::BlockKey;

/// The slot of a row that is padding: `scatter` and `gather` skip it.
pub const PADDING_SLOT: i64 = -1;

/// The blocks of one sequence: shared ones first, then those it fills itself.
///
/// # Drop behaviour
/// Blocks are let go last first, so that a pool evicts the end of a prefix before its beginning.
#[derive(Debug)]
pub struct BlockTable {
    block_size: usize,
    shared: Vec<SharedBlock>,
    own: Vec<MutableBlock>,
    ids: Arc<[BlockId]>,
    len: usize,
}

impl BlockTable {
    /// An empty table.
    ///
    /// # Errors
    /// [`Error::Zero`] for a block size of 0.
    pub fn new(block_size: usize) -> Result<Self> {
        if block_size == 0 {
            return Err(Error::Zero { what: "block_size" });
        }
        Ok(Self { block_size, shared: Vec::new(), own: Vec::new(), ids: Arc::default(), len: 0 })
    }

    /// A table that begins with full shared blocks.
    pub fn with_prefix(block_size: usize, shared: Vec<SharedBlock>) -> Result<Self> {
        let mut table = Self::new(block_size)?;
        table.len = shared.len() * block_size;
        table.shared = shared;
        table.refresh();
        Ok(table)
    }

    /// Declares that the last block, which is shared, holds tokens up to `len` only.
    pub(crate) fn shorten_last(&mut self, len: usize) -> Result<()> {
        if len > self.len || len + self.block_size <= self.len {
            return Err(Error::range("length within the last block", len, self.len + 1));
        }
        self.len = len;
        Ok(())
    }

    fn refresh(&mut self) {
        let shared = self.shared.iter().map(SharedBlock::id);
        self.ids = shared.chain(self.own.iter().map(MutableBlock::id)).collect();
    }

    /// Tokens stored.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token is stored.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that fit without another block.
    pub fn capacity(&self) -> usize {
        self.ids.len() * self.block_size
    }

    /// Blocks in order, shared with every segment made of them.
    pub fn ids(&self) -> &Arc<[BlockId]> {
        &self.ids
    }

    /// Blocks that must be added before `tokens` more fit.
    pub fn missing_blocks(&self, tokens: usize) -> usize {
        self.len.saturating_add(tokens).div_ceil(self.block_size).saturating_sub(self.ids.len())
    }

    /// Appends `tokens` tokens, using `blocks` for those that do not fit; returns their slots.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the number of blocks is not [`missing_blocks`](Self::missing_blocks),
    /// [`Error::SharedBlock`] if the tokens would go into a partial block that is shared.
    pub fn extend(&mut self, tokens: usize, blocks: Vec<MutableBlock>) -> Result<Vec<i64>> {
        crate::error::same("blocks added to a table", self.missing_blocks(tokens), blocks.len())?;
        if tokens > 0 && self.own.is_empty() && !self.len.is_multiple_of(self.block_size) {
            return Err(self.shared_at(self.len));
        }
        if !blocks.is_empty() {
            self.own.extend(blocks);
            self.refresh();
        }
        let start = self.len;
        self.len += tokens;
        Ok((start..self.len).map(|token| self.slot_unchecked(token)).collect())
    }

    /// The slot of a token: `block * block_size + offset`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] past the end.
    pub fn slot(&self, token: usize) -> Result<i64> {
        if token < self.len {
            Ok(self.slot_unchecked(token))
        } else {
            Err(Error::range("token", token, self.len))
        }
    }

    fn slot_unchecked(&self, token: usize) -> i64 {
        i64::from(self.ids[token / self.block_size].0) * self.block_size as i64
            + (token % self.block_size) as i64
    }

    /// Forgets tokens past `len`; whole blocks that nothing needs any more are freed.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if `len` lies past the end, [`Error::SharedBlock`] if it lies inside a
    /// shared block, which must not be written again.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        if len > self.len {
            return Err(Error::range("length to truncate to", len, self.len + 1));
        }
        let keep = len.div_ceil(self.block_size);
        if keep <= self.shared.len() && !len.is_multiple_of(self.block_size) && len < self.len {
            return Err(self.shared_at(len));
        }
        while self.own.len() + self.shared.len() > keep {
            if self.own.pop().is_none() {
                self.shared.pop();
            }
        }
        self.len = len;
        self.refresh();
        Ok(())
    }

    /// Shares the first own blocks, one for each key, in order. Where the pool knows a key already, the
    /// table takes the known block and its own is freed.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if not so many blocks are full; nothing is shared then.
    pub fn share_full(&mut self, keys: &[BlockKey]) -> Result<()> {
        let end = (self.shared.len() + keys.len()) * self.block_size;
        if end > self.len {
            return Err(Error::range("end of the blocks to share", end, self.len + 1));
        }
        self.seal(keys);
        Ok(())
    }

    /// Shares own blocks, full or not: a table with a partial shared block cannot grow.
    pub(crate) fn seal(&mut self, keys: &[BlockKey]) {
        for (&key, block) in keys.iter().zip(self.own.drain(..keys.len().min(self.own.len()))) {
            self.shared.push(block.complete().register(key));
        }
        self.refresh();
    }

    /// Whether `slot` is in a block that this table fills itself, and inside its tokens.
    pub(crate) fn may_write(&self, slots: &[i64]) -> std::result::Result<(), i64> {
        let mut own: Vec<u32> = self.own.iter().map(|block| block.id().0).collect();
        own.sort_unstable();
        let allowed = |slot: i64| {
            let block = u32::try_from(slot / self.block_size as i64);
            slot < 0 || block.is_ok_and(|block| own.binary_search(&block).is_ok())
        };
        slots.iter().find(|&&slot| !allowed(slot)).map_or(Ok(()), |&slot| Err(slot))
    }

    fn shared_at(&self, token: usize) -> Error {
        let block = self.ids.get(token / self.block_size).copied().unwrap_or(BlockId(0));
        Error::SharedBlock { block, token }
    }

    /// Blocks that are shared already.
    pub fn shared_blocks(&self) -> usize {
        self.shared.len()
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        while self.own.pop().is_some() {}
        while self.shared.pop().is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::BlockPool;
    use crate::key::KeyScope;

    #[test]
    fn slots_follow_blocks_that_are_not_neighbours() {
        let pool = BlockPool::new(10..20).unwrap();
        let mut table = BlockTable::new(4).unwrap();
        let first = pool.allocate(1).unwrap();
        let _gap = pool.allocate(1).unwrap();
        let second = pool.allocate(1).unwrap();
        assert_eq!(table.extend(3, first).unwrap(), [40, 41, 42]);
        assert_eq!(table.extend(3, second).unwrap(), [43, 48, 49]);
        assert_eq!(table.slot(5), Ok(49));
        assert!(matches!(table.slot(6), Err(Error::OutOfRange { .. })));
        table.truncate(4).unwrap();
        assert_eq!((table.ids().len(), pool.counts().free), (1, 8));
    }

    #[test]
    fn a_shared_block_is_never_opened_again() {
        let pool = BlockPool::new(0..4).unwrap();
        let mut table = BlockTable::new(4).unwrap();
        table.extend(6, pool.allocate(2).unwrap()).unwrap();
        let key = KeyScope::new("m", b"").root();
        assert!(table.share_full(&[key, key.child(&[1])]).is_err(), "the second block is not full");
        table.share_full(&[key]).unwrap();
        assert!(table.may_write(&[4, 7, -1]).is_ok());
        assert_eq!(table.may_write(&[4, 3]), Err(3), "slot 3 is in the shared block");
        assert!(matches!(table.truncate(3), Err(Error::SharedBlock { token: 3, .. })));
        assert_eq!(table.len(), 6);
        table.truncate(4).unwrap();
        table.truncate(0).unwrap();
        assert_eq!(pool.counts().cached, 1);
        pool.check_invariants().unwrap();
    }
}
