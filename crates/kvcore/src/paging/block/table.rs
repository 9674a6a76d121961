//! A sequence's blocks in order, and the slots of its tokens.

use std::sync::Arc;

use super::{BlockPool, MutableBlocks, SharedBlocks};
use crate::base::{BlockId, Error, Result, product};
use crate::paging::BlockKey;

/// The blocks of one sequence: shared ones first, then those it fills itself.
///
/// ```
/// use kvcore::{BlockPool, BlockTable};
/// let pool = BlockPool::new(0..8)?;
/// let mut beam = BlockTable::new(&pool, 4)?;
/// assert_eq!(beam.grow(6)?, [0, 1, 2, 3, 4, 5]);
/// let mut other = beam.fork()?;                        // both blocks are shared now
/// if let Some(copy) = other.unshare_tail()? {          // copy on write: block 1 goes to block 2
///     assert_eq!((copy.source.ids()[0].0, copy.target.0), (1, 2));
/// }
/// assert_eq!(other.grow(1)?, [2 * 4 + 2]);
/// assert!(beam.unshare_tail()?.is_none());             // nobody else reads its last block any more
/// assert_eq!(beam.grow(1)?, [4 + 2]);
/// beam.truncate(5)?;                                   // rolled back
/// # Ok::<(), kvcore::Error>(())
/// ```
///
/// # Drop behaviour
/// Blocks are let go last first, so that a pool evicts the end of a prefix before its beginning.
#[derive(Debug)]
pub struct BlockTable {
    block_size: usize,
    // The order of fields is that of dropping.
    own: MutableBlocks,
    shared: SharedBlocks,
    /// How many of the shared blocks have keys; always the first ones.
    keyed: usize,
    ids: Arc<[BlockId]>,
    len: usize,
}

/// A block to be copied before a table may write to its copy; see [`BlockTable::unshare_tail`].
#[derive(Debug)]
#[must_use = "the copy must be made before the sequence grows"]
pub struct TailCopy {
    /// The shared block, held until the copy is enqueued.
    pub source: SharedBlocks,
    /// The sequence's own block.
    pub target: BlockId,
}

impl BlockTable {
    /// An empty table over the blocks of `pool`.
    ///
    /// # Errors
    /// [`Error::Zero`] for a block size of 0, [`Error::Overflow`] for one with which slots do not fit.
    pub fn new(pool: &BlockPool, block_size: usize) -> Result<Self> {
        Self::with_prefix(SharedBlocks::none(pool), block_size)
    }

    /// A table that begins with full shared blocks, found by their keys.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_prefix(shared: SharedBlocks, block_size: usize) -> Result<Self> {
        if block_size == 0 {
            return Err(Error::Zero { what: "block_size" });
        }
        product("slots of a pool", &[shared.pool().range().end as usize, block_size])?;
        product("tokens of a prefix", &[shared.len(), block_size])?;
        let own = MutableBlocks::none(shared.pool());
        let (keyed, ids) = (shared.len(), shared.ids().into());
        Ok(Self { block_size, own, keyed, ids, len: keyed * block_size, shared })
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
        self.ids = self.shared.ids().iter().chain(self.own.ids()).copied().collect();
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

    /// Appends `tokens` tokens, taking blocks from the pool as needed; returns their slots.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`], [`Error::SharedBlock`] if the tokens would go into a partial block that
    /// is shared ([`unshare_tail`](Self::unshare_tail) makes a copy of it), [`Error::Overflow`]. The
    /// table is as before then.
    pub fn grow(&mut self, tokens: usize) -> Result<Vec<i64>> {
        Ok(self.extend(tokens)?.collect())
    }

    /// The same, as an iterator: nothing is allocated unless blocks are added.
    ///
    /// # Errors
    /// As [`grow`](Self::grow).
    pub fn extend(&mut self, tokens: usize) -> Result<impl ExactSizeIterator<Item = i64>> {
        let end = self.len.checked_add(tokens).ok_or(Error::Overflow { what: "length of a sequence" })?;
        if tokens > 0 && self.tail_is_shared() {
            return Err(self.shared_at(self.len));
        }
        let missing = self.missing_blocks(tokens);
        if missing > 0 {
            self.own.allocate(missing)?;
            self.refresh();
        }
        let start = std::mem::replace(&mut self.len, end);
        Ok((start..end).map(|token| self.slot_unchecked(token)))
    }

    /// As [`grow`](Self::grow) for a new sequence, with blocks that [`BlockPool::admit`] gave.
    ///
    /// # Errors
    /// [`Error::ForeignBlock`] for blocks of another pool.
    pub fn supply(&mut self, blocks: MutableBlocks) -> Result<()> {
        self.own.append(blocks)?;
        self.refresh();
        Ok(())
    }

    /// Whether the last block is partial and may not be written.
    fn tail_is_shared(&self) -> bool {
        !self.len.is_multiple_of(self.block_size) && self.len.div_ceil(self.block_size) <= self.shared.len()
    }

    /// Copy on write: exchanges a partial shared last block for one of the table's own, of which the
    /// caller makes a copy. `None` if the next token may be written as it is; so it is when all others have
    /// let the block go meanwhile.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`]; nothing has changed then.
    pub fn unshare_tail(&mut self) -> Result<Option<TailCopy>> {
        if !self.tail_is_shared() {
            return Ok(None);
        }
        if let Some(mut own) = self.shared.reclaim_last() {
            own.append(std::mem::replace(&mut self.own, MutableBlocks::none(self.shared.pool())))?;
            self.own = own;
            return Ok(None);
        }
        let mut own = self.own.pool().allocate(1)?;
        let target = own.ids()[0];
        let tail = self.len / self.block_size;
        let source = self.shared.split_off(tail)?;
        own.append(std::mem::replace(&mut self.own, MutableBlocks::none(source.pool())))?;
        self.own = own;
        self.keyed = self.keyed.min(tail);
        self.refresh();
        Ok(Some(TailCopy { source, target }))
    }

    /// Takes [`unshare_tail`](Self::unshare_tail) back, for a copy that could not be made.
    pub(crate) fn reshare_tail(&mut self, copy: TailCopy) -> Result<()> {
        drop(self.own.split_off(0)?);
        self.shared.append(copy.source)?;
        self.refresh();
        Ok(())
    }

    /// A second table over the same tokens. Both share all blocks that hold tokens from now on; whoever
    /// writes first copies the last one ([`unshare_tail`](Self::unshare_tail)).
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn fork(&mut self) -> Result<Self> {
        let used = self.len.div_ceil(self.block_size).saturating_sub(self.shared.len());
        let spare = self.own.split_off(used)?;
        let own = std::mem::replace(&mut self.own, spare);
        self.shared.append(own.share())?;
        let shared = self.shared.clone();
        Ok(Self {
            block_size: self.block_size,
            own: MutableBlocks::none(shared.pool()),
            keyed: self.keyed,
            ids: shared.ids().into(),
            len: self.len,
            shared,
        })
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

    /// Forgets tokens past `len`; whole blocks that nothing needs any more are let go.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if `len` lies past the end, [`Error::SharedBlock`] if it lies inside a
    /// block that others find by its key.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        if len > self.len {
            return Err(Error::range("length to truncate to", len, self.len + 1));
        }
        let keep = len.div_ceil(self.block_size);
        if keep <= self.keyed && !len.is_multiple_of(self.block_size) && len < self.len {
            return Err(self.shared_at(len));
        }
        drop(self.own.split_off(keep.saturating_sub(self.shared.len()).min(self.own.len()))?);
        self.shared.truncate(keep);
        self.keyed = self.keyed.min(keep);
        self.len = len;
        self.refresh();
        Ok(())
    }

    /// Shares the next full blocks under `keys`, in order. Where the pool knows a key already, the table
    /// takes the known block and its own is freed.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if not so many blocks are full; nothing is shared then.
    pub fn share_full(&mut self, parent: Option<BlockKey>, keys: &[BlockKey]) -> Result<()> {
        let end = (self.keyed + keys.len()) * self.block_size;
        if end > self.len {
            return Err(Error::range("end of the blocks to share", end, self.len + 1));
        }
        self.seal(parent, keys)
    }

    /// Shares blocks, full or not: a table with a partial shared block cannot grow.
    pub(crate) fn seal(&mut self, parent: Option<BlockKey>, keys: &[BlockKey]) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        let unshared = (self.keyed + keys.len()).saturating_sub(self.shared.len());
        let rest = self.own.split_off(unshared)?;
        let own = std::mem::replace(&mut self.own, rest);
        self.shared.append(own.share())?;
        self.shared.register(self.keyed, parent, keys)?;
        self.keyed += keys.len();
        self.refresh();
        Ok(())
    }

    /// Whether every slot is in a block that this table fills itself.
    pub(crate) fn may_write(&self, slots: &[i64]) -> std::result::Result<(), i64> {
        let own = self.own.ids();
        // Slots come in the table's order, mostly: the next block is where the last was, or behind it.
        let mut at = own.len().saturating_sub(1);
        for &slot in slots.iter().filter(|&&slot| slot >= 0) {
            let block = u32::try_from(slot / self.block_size as i64).map_err(|_| slot)?;
            let (before, from) = own.split_at(at);
            let ahead = from.iter().chain(before).position(|id| id.0 == block).ok_or(slot)?;
            at = (at + ahead) % own.len();
        }
        Ok(())
    }

    fn shared_at(&self, token: usize) -> Error {
        let block = self.ids.get(token / self.block_size).copied().unwrap_or(BlockId(0));
        Error::SharedBlock { block, token }
    }

    /// The shared blocks: those found by key, and those shared by a fork.
    pub fn shared(&self) -> &SharedBlocks {
        &self.shared
    }

    /// Blocks that others find by key.
    pub fn keyed_blocks(&self) -> usize {
        self.keyed
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paging::KeyScope;

    #[test]
    fn slots_follow_blocks_that_are_not_neighbours() {
        let pool = BlockPool::new(10..20).unwrap();
        let mut table = BlockTable::new(&pool, 4).unwrap();
        assert_eq!(table.grow(3).unwrap(), [40, 41, 42]);
        let _gap = pool.allocate(1).unwrap();
        assert_eq!(table.grow(3).unwrap(), [43, 48, 49]);
        assert_eq!(table.slot(5), Ok(49));
        assert!(matches!(table.slot(6), Err(Error::OutOfRange { .. })));
        table.truncate(4).unwrap();
        assert_eq!((table.ids().len(), pool.counts().free), (1, 8));
        assert!(matches!(table.grow(usize::MAX), Err(Error::Overflow { .. })));
        assert!(matches!(table.grow(1000), Err(Error::OutOfBlocks { .. })));
        assert_eq!((table.len(), table.ids().len(), pool.counts().free), (4, 1, 8));
    }

    #[test]
    fn a_shared_block_is_never_opened_again() {
        let pool = BlockPool::new(0..4).unwrap();
        let mut table = BlockTable::new(&pool, 4).unwrap();
        table.grow(6).unwrap();
        let key = KeyScope::new("m", b"").root();
        assert!(table.share_full(None, &[key, key.child(&[1])]).is_err(), "the second block is not full");
        table.share_full(None, &[key]).unwrap();
        assert!(table.may_write(&[4, 7, -1]).is_ok());
        assert_eq!(table.may_write(&[4, 3]), Err(3), "slot 3 is in the shared block");
        assert!(matches!(table.truncate(3), Err(Error::SharedBlock { token: 3, .. })));
        assert_eq!(table.len(), 6);
        table.truncate(4).unwrap();
        table.truncate(0).unwrap();
        assert_eq!(pool.counts().cached, 1);
        pool.check_invariants().unwrap();
    }

    #[test]
    fn forks_share_all_and_copy_the_last_block_before_they_write() {
        let pool = BlockPool::new(0..6).unwrap();
        let mut a = BlockTable::new(&pool, 4).unwrap();
        a.grow(6).unwrap();
        let mut b = a.fork().unwrap();
        assert_eq!((b.len(), b.ids(), pool.counts().shared), (6, a.ids(), 2));
        assert!(matches!(b.grow(1), Err(Error::SharedBlock { token: 6, .. })));
        assert!(a.may_write(&[5]).is_err(), "the parent shares it as well");
        let copy = b.unshare_tail().unwrap().unwrap();
        assert_eq!((copy.source.ids()[0], copy.target), (a.ids()[1], b.ids()[1]));
        drop(copy);
        assert_ne!(a.ids()[1], b.ids()[1]);
        let slot = b.grow(1).unwrap()[0];
        assert!(b.may_write(&[slot]).is_ok() && b.unshare_tail().unwrap().is_none());
        // the full block that both share gets its key from whoever commits first
        let key = KeyScope::new("m", b"").root();
        a.share_full(None, &[key]).unwrap();
        b.share_full(None, &[key]).unwrap();
        assert_eq!((a.ids()[0], a.keyed_blocks()), (b.ids()[0], 1));
        a.truncate(5).unwrap();
        assert!(a.truncate(3).is_err());
        drop((a, b));
        assert_eq!((pool.counts().cached, pool.counts().free), (1, 5));
        pool.check_invariants().unwrap();
    }

    #[test]
    fn the_last_of_several_forks_takes_its_block_back() {
        let pool = BlockPool::new(0..3).unwrap();
        let mut a = BlockTable::new(&pool, 4).unwrap();
        a.grow(6).unwrap();
        let b = a.fork().unwrap();
        let ids = Arc::clone(a.ids());
        drop(b);
        let _rest = pool.allocate(1).unwrap();
        assert!(a.unshare_tail().unwrap().is_none(), "nobody else reads it");
        let slots = a.grow(2).unwrap();
        assert!(a.may_write(&slots).is_ok());
        assert_eq!((a.ids(), pool.counts().shared, pool.counts().mutable), (&ids, 1, 2));
        pool.check_invariants().unwrap();
    }

    #[test]
    fn forks_do_not_share_blocks_without_tokens() {
        let pool = BlockPool::new(0..6).unwrap();
        let mut a = BlockTable::new(&pool, 4).unwrap();
        a.supply(pool.allocate(2).unwrap()).unwrap();
        a.grow(4).unwrap();
        let mut b = a.fork().unwrap();
        let (x, y) = (a.grow(1).unwrap(), b.grow(1).unwrap());
        assert_ne!(x, y, "each has a block of its own");
        assert!(a.may_write(&x).is_ok() && b.may_write(&y).is_ok());
        drop((a, b));
        assert_eq!(pool.counts().free, 6);
    }

    #[test]
    fn sizes_with_which_slots_do_not_fit_are_errors() {
        let pool = BlockPool::new(0..4).unwrap();
        for size in [usize::MAX, usize::MAX / 4, 1 << 62] {
            assert!(matches!(BlockTable::new(&pool, size), Err(Error::Overflow { .. })), "{size}");
        }
        assert_eq!(BlockTable::new(&pool, 0).unwrap_err(), Error::Zero { what: "block_size" });
    }

    #[test]
    fn a_copy_that_finds_no_block_changes_nothing() {
        let pool = BlockPool::new(0..2).unwrap();
        let mut a = BlockTable::new(&pool, 4).unwrap();
        a.grow(6).unwrap();
        let mut b = a.fork().unwrap();
        assert!(matches!(b.unshare_tail(), Err(Error::OutOfBlocks { asked: 1, .. })));
        assert_eq!((b.len(), b.ids(), pool.counts().shared), (6, a.ids(), 2));
    }
}
