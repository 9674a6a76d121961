//! A sequence's block table: its blocks in order, and the slots of its tokens.

use std::ops::Range;
use std::sync::Arc;

use super::{BlockPool, MutableBlocks, SharedBlocks};
use crate::base::{BlockId, Error, Result, product};
use crate::device::{Permits, WritePairs, WriteSlots};
use crate::paging::BlockKey;

/// A sequence's block table: shared blocks first, followed by the blocks that the sequence fills itself.
///
/// ```
/// use kvcore::{BlockId, BlockPool, BlockTable};
/// let pool = BlockPool::new(0..8)?;
/// let mut beam = BlockTable::new(&pool, 4)?;
/// assert_eq!(beam.grow(6)?[..], [0, 1, 2, 3, 4, 5]);
/// let mut other = beam.fork()?;                        // both blocks are shared now
/// if let Some(copy) = other.unshare_tail()? {          // copy on write: block 1 goes to block 2
///     assert_eq!(copy.pairs()[..], [(BlockId(1), BlockId(2))]);
/// }
/// assert_eq!(other.grow(1)?[..], [2 * 4 + 2]);
/// assert!(beam.unshare_tail()?.is_none());             // no one else reads its last block now
/// assert_eq!(beam.grow(1)?[..], [4 + 2]);
/// beam.truncate(5)?;                                   // rolled back
/// # Ok::<(), kvcore::Error>(())
/// ```
///
/// # Drop behaviour
/// The blocks are released starting with the last, so that the pool evicts the end of a prefix before its
/// beginning.
#[derive(Debug)]
pub struct BlockTable {
    block_size: usize,
    // Fields are dropped in this order.
    own: MutableBlocks,
    shared: SharedBlocks,
    /// Number of blocks freed at the front of the table.
    gone: usize,
    /// Number of blocks with keys, including freed blocks. Blocks with keys always come before other blocks.
    keyed: usize,
    ids: Arc<[BlockId]>,
    len: usize,
}

/// A block copy that must be performed before the table may write to its new last block; see
/// [`BlockTable::unshare_tail`].
#[derive(Debug)]
#[must_use = "the copy must be made before the sequence grows"]
pub struct TailCopy {
    /// The shared block, held until the copy is enqueued.
    source: SharedBlocks,
    pairs: WritePairs,
    /// The table's `keyed` before the copy, needed to undo it.
    keyed: usize,
}

impl TailCopy {
    /// Returns the copy to perform, from the shared block to the sequence's own block.
    pub fn pairs(&self) -> &WritePairs {
        &self.pairs
    }
}

impl BlockTable {
    /// Creates an empty table over the blocks of `pool`.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if `block_size` is 0, and [`Error::Overflow`] if the pool's slots do not fit
    /// in the address space.
    pub fn new(pool: &BlockPool, block_size: usize) -> Result<Self> {
        Self::with_prefix(SharedBlocks::none(pool), block_size)
    }

    /// Creates a table that begins with full shared blocks, which were found by their keys.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new).
    pub fn with_prefix(shared: SharedBlocks, block_size: usize) -> Result<Self> {
        Self::after_freed(0, shared, block_size)
    }

    /// Creates a table like [`with_prefix`](Self::with_prefix), except that the sequence's first `gone`
    /// blocks are already freed, and `shared` holds the next blocks.
    pub(crate) fn after_freed(gone: usize, shared: SharedBlocks, block_size: usize) -> Result<Self> {
        if block_size == 0 {
            return Err(Error::Zero { what: "block_size" });
        }
        product("slots of a pool", &[shared.pool().range().end as usize, block_size])?;
        let keyed = gone + shared.len();
        let len = product("tokens of a prefix", &[keyed, block_size])?;
        let (own, ids) = (MutableBlocks::none(shared.pool()), shared.ids().into());
        Ok(Self { block_size, own, shared, gone, keyed, ids, len })
    }

    /// Declares that the last block holds only the tokens before index `len`. A table whose last block is
    /// shared and partial cannot grow.
    ///
    /// # Errors
    /// Returns [`Error::TooLarge`] if `len` exceeds the length of the table, or if the last block would hold
    /// no tokens.
    pub fn shorten_last(&mut self, len: usize) -> Result<()> {
        if len > self.len || len + self.block_size <= self.len {
            return Err(Error::too_large("length within the last block", len, self.len));
        }
        self.len = len;
        Ok(())
    }

    fn refresh(&mut self) {
        self.ids = self.shared.ids().iter().chain(self.own.ids()).copied().collect();
    }

    /// Frees the blocks whose tokens all come before `token`, such as blocks that have left a sliding window,
    /// and returns the number of freed blocks. Their tokens still count towards the length, but no longer
    /// have slots. Blocks with keys stay cached.
    pub fn free_before(&mut self, token: usize) -> usize {
        let blocks = (token.min(self.len) / self.block_size).saturating_sub(self.gone);
        if blocks == 0 {
            return 0;
        }
        let of_shared = blocks.min(self.shared.len());
        self.shared.drop_first(of_shared);
        drop(self.own.take_first(blocks - of_shared));
        self.gone += blocks;
        self.refresh();
        blocks
    }

    /// Returns the index of the first token that has a slot.
    pub fn first(&self) -> usize {
        self.gone * self.block_size
    }

    /// Returns the index of a token's block in [`ids`](Self::ids).
    fn at(&self, token: usize) -> usize {
        (token / self.block_size).saturating_sub(self.gone)
    }

    /// Returns the number of tokens in the sequence, including tokens whose blocks were freed.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the length, in tokens, that the table can reach without more blocks.
    pub fn capacity(&self) -> usize {
        (self.gone + self.ids.len()) * self.block_size
    }

    /// Returns the blocks in order, starting with the block of the [`first`](Self::first) token. Segments
    /// created from the table share this list.
    pub fn ids(&self) -> &Arc<[BlockId]> {
        &self.ids
    }

    /// Returns the number of blocks that must be added before `tokens` more tokens fit.
    pub fn missing_blocks(&self, tokens: usize) -> usize {
        self.len.saturating_add(tokens).div_ceil(self.block_size).saturating_sub(self.gone + self.ids.len())
    }

    /// Appends `tokens` tokens, allocating blocks from the pool as needed. Returns the slots of the new
    /// tokens.
    ///
    /// # Errors
    /// Returns [`Error::OutOfBlocks`] if there are not enough blocks, [`Error::Overflow`] if the length
    /// overflows, and [`Error::SharedBlock`] if the tokens would go into a partial block that is shared
    /// ([`unshare_tail`](Self::unshare_tail) replaces it with a copy). The table is unchanged in these cases.
    pub fn grow(&mut self, tokens: usize) -> Result<WriteSlots> {
        let tokens = self.reserve(tokens)?;
        let first = self.place_of(tokens.start);
        let slots: Arc<[i64]> = tokens.map(|token| self.slot_unchecked(token)).collect();
        Ok(self.own.permits.slots(first, self.block_size, slots))
    }

    /// Returns the number of blocks to add for `tokens` more tokens, or an error if the table cannot grow.
    pub(crate) fn check_growth(&self, tokens: usize) -> Result<usize> {
        self.len.checked_add(tokens).ok_or(Error::Overflow { what: "length of a sequence" })?;
        match self.shared_tail() {
            Some(block) if tokens > 0 => Err(Error::SharedBlock { block, token: self.len }),
            _ => Ok(self.missing_blocks(tokens)),
        }
    }

    /// Appends tokens like [`grow`](Self::grow), and adds their slots to `slots`. [`issuer`](Self::issuer)
    /// issues the permit.
    pub(crate) fn grow_onto(&mut self, tokens: usize, slots: &mut Vec<i64>) -> Result<()> {
        let tokens = self.reserve(tokens)?;
        slots.extend(tokens.map(|token| self.slot_unchecked(token)));
        Ok(())
    }

    /// Returns the issuer of permits for the tokens starting at `first`, and the index of the first token's
    /// block.
    pub(crate) fn issuer(&self, first: usize) -> (&Permits, usize) {
        (&self.own.permits, self.place_of(first))
    }

    /// Returns the index of a token's block in the table's own blocks.
    fn place_of(&self, token: usize) -> usize {
        self.at(token).saturating_sub(self.shared.len())
    }

    /// Appends tokens, allocating blocks as needed. Returns the range of the new tokens in the sequence.
    fn reserve(&mut self, tokens: usize) -> Result<Range<usize>> {
        let missing = self.check_growth(tokens)?;
        if missing > 0 {
            self.own.allocate(missing)?;
            self.refresh();
        }
        let end = self.len + tokens;
        Ok(std::mem::replace(&mut self.len, end)..end)
    }

    /// Adds empty blocks for later calls to [`grow`](Self::grow). [`BlockPool::admit_prefix`] returns such
    /// blocks.
    ///
    /// # Errors
    /// Returns [`Error::ForeignBlock`] if the blocks belong to another pool.
    pub fn supply(&mut self, blocks: MutableBlocks) -> Result<()> {
        self.own.append(blocks)?;
        self.refresh();
        Ok(())
    }

    /// Returns the last block if it is both partial and shared, and therefore must not be written to.
    pub(crate) fn shared_tail(&self) -> Option<BlockId> {
        let partial = !self.len.is_multiple_of(self.block_size);
        self.shared.ids().get(self.at(self.len)).copied().filter(|_| partial)
    }

    /// If the last block is partial and shared, replaces it with a new block that only this table holds (copy
    /// on write). The caller must then perform the returned copy. Returns `None` if the next token may be
    /// written without a copy, for example because all other holders have released the block.
    ///
    /// # Errors
    /// Returns [`Error::OutOfBlocks`] if there is no block for the copy. Nothing changes in that case.
    pub fn unshare_tail(&mut self) -> Result<Option<TailCopy>> {
        if self.shared_tail().is_none() {
            return Ok(None);
        }
        if let Some(mut own) = self.shared.reclaim_last() {
            own.append(std::mem::replace(&mut self.own, MutableBlocks::none(self.shared.pool())))?;
            self.own = own;
            return Ok(None);
        }
        let mut own = self.own.pool().allocate(1)?;
        let target = own.ids()[0];
        let source = self.shared.split_off(self.at(self.len))?;
        own.append(std::mem::replace(&mut self.own, MutableBlocks::none(source.pool())))?;
        self.own = own;
        let keyed = self.keyed;
        self.keyed = keyed.min(self.len / self.block_size);
        self.refresh();
        let pairs = self.own.permits.pairs(0, [(source.ids()[0], target)]);
        Ok(Some(TailCopy { source, pairs, keyed }))
    }

    /// Undoes an [`unshare_tail`](Self::unshare_tail) whose copy could not be performed. The table must be
    /// unchanged since then. Restores the earlier blocks and keys, but keeps blocks that were supplied in
    /// advance.
    pub(crate) fn reshare_tail(&mut self, copy: TailCopy) -> Result<()> {
        drop(self.own.take_first(1)?);
        self.shared.append(copy.source)?;
        self.keyed = copy.keyed;
        self.refresh();
        Ok(())
    }

    /// Creates a second table over the same tokens. Both tables then share all blocks that hold tokens. If
    /// the last block is partial, the first table to grow must copy it first
    /// ([`unshare_tail`](Self::unshare_tail)).
    ///
    /// # Errors
    /// Returns an error only if the table is inconsistent, which no caller can cause.
    pub fn fork(&mut self) -> Result<Self> {
        let used = self.len.div_ceil(self.block_size).saturating_sub(self.gone + self.shared.len());
        self.shared.append(self.own.take_first(used)?.share())?;
        let shared = self.shared.clone();
        Ok(Self {
            block_size: self.block_size,
            own: MutableBlocks::none(shared.pool()),
            gone: self.gone,
            keyed: self.keyed,
            ids: shared.ids().into(),
            len: self.len,
            shared,
        })
    }

    /// Returns the slot of a token: `block * block_size + offset`.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] if the token is past the end of the table, and [`Error::TokenFreed`] if
    /// its block was freed.
    pub fn slot(&self, token: usize) -> Result<i64> {
        if token >= self.len {
            return Err(Error::range("token", token, self.len));
        }
        self.check_held(token)?;
        Ok(self.slot_unchecked(token))
    }

    fn check_held(&self, token: usize) -> Result<()> {
        let first = self.first();
        if token < first { Err(Error::TokenFreed { token, first }) } else { Ok(()) }
    }

    fn slot_unchecked(&self, token: usize) -> i64 {
        i64::from(self.ids[self.at(token)].0) * self.block_size as i64 + (token % self.block_size) as i64
    }

    /// Removes the tokens past `len`, and releases the blocks that are no longer needed. All permits for
    /// slots in the table's own blocks become void, even for the tokens that stay;
    /// [`write_slots`](Self::write_slots) issues new ones.
    ///
    /// # Errors
    /// Returns [`Error::TooLarge`] if `len` exceeds the length of the table, [`Error::SharedBlock`] if `len`
    /// is inside a block that others can find by its key, and [`Error::TokenFreed`] if it is in a freed
    /// block.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        self.check_truncate(len)?;
        let keep = len.div_ceil(self.block_size);
        if len < self.len {
            self.own.lose();
        }
        let held = keep - self.gone;
        drop(self.own.split_off(held.saturating_sub(self.shared.len()).min(self.own.len()))?);
        self.shared.truncate(held);
        self.keyed = self.keyed.min(keep);
        self.len = len;
        self.refresh();
        Ok(())
    }

    /// Checks that the table can be truncated.
    pub(crate) fn check_truncate(&self, len: usize) -> Result<()> {
        if len > self.len {
            return Err(Error::too_large("length to truncate to", len, self.len));
        }
        self.check_held(len)?;
        let keep = len.div_ceil(self.block_size);
        if keep <= self.keyed && !len.is_multiple_of(self.block_size) && len < self.len {
            return Err(self.shared_at(len));
        }
        Ok(())
    }

    /// Shares the next full blocks under `keys`, in order. If the pool already has a block under a key, the
    /// table uses that block and frees its own, unless the pool keeps [duplicates](super::Duplicates::Keep).
    /// Permits for slots in these blocks become void, and permits for slots that are only in later blocks
    /// stay valid.
    ///
    /// # Errors
    /// Returns [`Error::TooLarge`] if there are fewer full blocks than keys. Nothing is shared in that case.
    pub fn share_full(&mut self, parent: Option<BlockKey>, keys: &[BlockKey]) -> Result<()> {
        let end = (self.keyed + keys.len()) * self.block_size;
        if end > self.len {
            return Err(Error::too_large("end of the blocks to share", end, self.len));
        }
        self.seal(parent, keys)
    }

    /// Shares the next blocks under `keys` like [`share_full`](Self::share_full), including the last block
    /// even if it is partial. The table cannot grow into a shared partial block.
    ///
    /// # Errors
    /// Returns [`Error::TooLarge`] if there are fewer blocks than keys. Nothing is shared in that case.
    pub fn seal(&mut self, parent: Option<BlockKey>, keys: &[BlockKey]) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        self.check_held(self.keyed * self.block_size)?;
        let unshared = (self.keyed + keys.len()).saturating_sub(self.gone + self.shared.len());
        if unshared > 0 {
            self.shared.append(self.own.take_first(unshared)?.share())?;
        }
        self.shared.register(self.keyed - self.gone, parent, keys)?;
        self.keyed += keys.len();
        self.refresh();
        Ok(())
    }

    /// Returns the slots of the given tokens, with a new permit to write to them.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] if a token is past the end of the table, and [`Error::NotOwned`] if a
    /// token is in a shared block.
    pub fn write_slots(&self, tokens: Range<usize>) -> Result<WriteSlots> {
        let slots: Arc<[i64]> = tokens.map(|token| self.slot(token)).collect::<Result<_>>()?;
        self.own.write_slots(self.block_size, slots)
    }

    fn shared_at(&self, token: usize) -> Error {
        let block = self.ids.get(self.at(token)).copied().unwrap_or(BlockId(0));
        Error::SharedBlock { block, token }
    }

    /// Returns the shared blocks: blocks found by key, and blocks shared by a fork.
    pub fn shared(&self) -> &SharedBlocks {
        &self.shared
    }

    /// Returns the number of blocks that others can find by key, including freed blocks.
    pub fn keyed_blocks(&self) -> usize {
        self.keyed
    }

    /// Returns the number of tokens per block.
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
        assert_eq!(table.grow(3).unwrap()[..], [40, 41, 42]);
        let _gap = pool.allocate(1).unwrap();
        assert_eq!(table.grow(3).unwrap()[..], [43, 48, 49]);
        assert_eq!(table.slot(5), Ok(49));
        assert!(matches!(table.slot(6), Err(Error::OutOfRange { .. })));
        let longer = table.truncate(7).unwrap_err();
        assert_eq!(longer.to_string(), "length to truncate to 7 is too large; the maximum is 6");
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
        assert!(table.own.write_slots(4, [4, 7, -1]).is_ok());
        let shared = table.own.write_slots(4, [4, 3]).unwrap_err();
        assert_eq!(shared, Error::NotOwned { block: BlockId(0) }, "slot 3 is in the shared block");
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
        assert!(a.own.write_slots(4, [5]).is_err(), "the parent shares it as well");
        let copy = b.unshare_tail().unwrap().unwrap();
        assert_eq!(copy.pairs()[..], [(a.ids()[1], b.ids()[1])]);
        drop(copy);
        assert_ne!(a.ids()[1], b.ids()[1]);
        assert!(b.grow(1).unwrap().check().is_ok() && b.unshare_tail().unwrap().is_none());
        // the full block that both tables share gets its key from the first table that commits
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
        assert!(a.unshare_tail().unwrap().is_none(), "no one else reads it");
        let slots = a.grow(2).unwrap();
        assert!(slots.check().is_ok());
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
        assert_ne!(x[..], y[..], "each has a block of its own");
        assert!(x.check().is_ok() && y.check().is_ok());
        drop((a, b));
        assert_eq!(pool.counts().free, 6);
    }

    #[test]
    fn a_copy_that_is_undone_leaves_spare_blocks_and_keys_as_they_were() {
        let pool = BlockPool::new(0..8).unwrap();
        let root = KeyScope::new("m", b"").root();
        let keys = [root, root.child(&[1])];
        let mut sealed = BlockTable::new(&pool, 4).unwrap();
        sealed.grow(6).unwrap();
        sealed.seal(None, &keys).unwrap();
        let mut table = BlockTable::with_prefix(pool.lookup_chain(&keys), 4).unwrap();
        table.shorten_last(6).unwrap();
        table.supply(pool.allocate(2).unwrap()).unwrap();
        let state = |table: &BlockTable| (Arc::clone(table.ids()), table.keyed_blocks(), pool.counts());
        let before = state(&table);
        let copy = table.unshare_tail().unwrap().unwrap();
        let pairs = copy.pairs().clone();
        assert_eq!((table.keyed_blocks(), pairs.check()), (1, Ok(())));
        table.reshare_tail(copy).unwrap();
        assert_eq!(state(&table), before);
        assert_eq!(pairs.check(), Err(Error::PermitVoid { what: "blocks" }), "the target is free again");
        assert!(matches!(table.truncate(5), Err(Error::SharedBlock { token: 5, .. })), "others find it");
        assert!(matches!(table.grow(1), Err(Error::SharedBlock { token: 6, .. })));
        drop(table.unshare_tail().unwrap().unwrap());
        let spare = before.0[2];
        assert_eq!(table.grow(3).unwrap()[2], i64::from(spare.0) * 4, "the ninth token is in a spare block");
        drop((table, sealed));
        assert_eq!((pool.counts().cached, pool.counts().free), (2, 6));
        pool.check_invariants().unwrap();
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
