//! Write permits, which prove that nothing else reads the blocks that an operation writes to.
//!
//! ```text
//!   MutableBlocks ──issues──► Permit ──stored in──► WriteSlots, WritePairs ──checked by──► Scatter, CopyBlocks, …
//!        │ first blocks shared or freed ──voids the permits for these blocks
//!        └ truncated, split, dropped ──voids every permit issued before
//! ```
//!
//! An owner numbers its blocks in order, and its *floor* is the number of its first block. A permit stores
//! the lowest number among the blocks that it allows writes to, and is valid while that number is not below
//! the floor. When blocks leave at the front, the floor rises by their count and the other blocks keep their
//! numbers. When blocks leave in any other way, the floor rises past all numbers in use, which renumbers the
//! remaining blocks.

use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::base::{BlockId, Error, Result, SlotMapping, same};

/// Issues the write permits of one block owner.
///
/// The floor is created with the first permit, so an owner without permits allocates nothing.
#[derive(Debug, Default)]
pub(crate) struct Permits(OnceLock<Arc<AtomicU64>>);

// Decision: docs/decisions/device.md#a-permit-is-a-number-above-a-floor
/// A permit that is valid until the issuer's floor rises above the number of the permit's lowest block.
#[derive(Debug, Clone)]
struct Permit {
    floor: Arc<AtomicU64>,
    lowest: u64,
}

/// A permit for slots. To identify the block of a slot, the block size must be known too.
#[derive(Debug, Clone)]
struct SlotPermit {
    permit: Permit,
    block_size: usize,
}

/// The permits of one or more owners, shared by the operations of all layers.
#[derive(Debug, Clone)]
struct PermitList<T> {
    one: Option<T>,
    more: Option<Arc<Vec<T>>>,
}

impl<T> Default for PermitList<T> {
    fn default() -> Self {
        Self { one: None, more: None }
    }
}

impl<T: Clone> PermitList<T> {
    fn one(permit: T) -> Self {
        Self { one: Some(permit), more: None }
    }

    fn several(permits: impl Iterator<Item = T>) -> Self {
        Self { one: None, more: Some(Arc::new(permits.collect())) }
    }

    fn iter(&self) -> impl Iterator<Item = &T> {
        self.one.iter().chain(self.more.iter().flat_map(|more| more.iter()))
    }

    /// Replaces the permits. Reuses the list's memory if no operation still holds it.
    fn refill(&mut self, permits: impl Iterator<Item = T>) {
        self.one = None;
        match self.more.as_mut().and_then(Arc::get_mut) {
            Some(more) => {
                more.clear();
                more.extend(permits);
            }
            None => *self = Self::several(permits),
        }
    }
}

impl Permits {
    fn issue(&self, first: usize) -> Permit {
        let floor = Arc::clone(self.0.get_or_init(Arc::default));
        Permit { lowest: floor.load(Ordering::Acquire) + first as u64, floor }
    }

    fn raise(&self, blocks: usize) {
        if let Some(floor) = self.0.get() {
            floor.fetch_add(blocks as u64, Ordering::Release);
        }
    }

    /// Voids every permit issued so far. The owner must have at most `blocks` blocks, including the blocks
    /// that are about to leave.
    pub(crate) fn void(&self, blocks: usize) {
        // A permit for no blocks stores the number after the last block.
        self.raise(blocks + 1);
    }

    /// Voids the permits for the owner's first `blocks` blocks, which must be about to leave the owner.
    pub(crate) fn void_first(&self, blocks: usize) {
        self.raise(blocks);
    }

    /// Returns `slots`, in blocks of `block_size` tokens, with a permit to write to them. All slots must be
    /// in the owner's blocks starting at index `first`.
    pub(crate) fn slots(&self, first: usize, block_size: usize, slots: impl Into<SlotMapping>) -> WriteSlots {
        let permit = SlotPermit { permit: self.issue(first), block_size };
        WriteSlots { slots: slots.into(), permits: PermitList::one(permit) }
    }

    /// Returns `pairs` with a permit to write to the destinations, which must all be among the owner's blocks
    /// starting at index `first`.
    pub(crate) fn pairs(&self, first: usize, pairs: impl Into<Arc<[(BlockId, BlockId)]>>) -> WritePairs {
        WritePairs { pairs: pairs.into(), permits: PermitList::one(self.issue(first)) }
    }
}

impl Permit {
    // Decision: docs/decisions/device.md#a-permit-is-checked-when-the-operation-is-enqueued
    fn check(&self, what: &'static str) -> Result<()> {
        if self.lowest >= self.floor.load(Ordering::Acquire) {
            Ok(())
        } else {
            Err(Error::PermitVoid { what })
        }
    }
}

// Decision: docs/decisions/device.md#a-permit-vouches-for-blocks-the-caller-for-the-arena
// Decision: docs/decisions/device.md#only-guards-of-mutable-blocks-permit-writes
/// Writable slots: a slot mapping, together with the permits of the owners that fill its blocks.
///
/// Guards of mutable blocks and block tables create writable slots
/// ([`BlockTable::grow`](crate::BlockTable::grow),
/// [`MutableBlocks::write_slots`](crate::MutableBlocks::write_slots)). [`Scatter`](crate::Scatter) accepts no
/// other type of slots. The permit becomes void as soon as a block of these slots is shared, so old slots are
/// never used to write to a block that others read. It also becomes void if one of these blocks is freed, or
/// if the owner is truncated, split or dropped. The permit stays valid when only earlier blocks are shared or
/// freed, so slots for later tokens, for example of a draft or a prefill in progress, stay usable.
/// [`Scatter`](crate::Scatter) rejects an arena whose block size differs from the owner's. A permit refers
/// only to block IDs: the caller MUST use it with the arena that the pool's IDs belong to.
///
/// ```
/// use kvcore::{BlockPool, BlockTable, Error, KeyScope};
///
/// let pool = BlockPool::new(0..8)?;
/// let mut table = BlockTable::new(&pool, 4)?;
/// let (slots, ahead) = (table.grow(4)?, table.grow(2)?);
/// assert_eq!((&slots[..], &ahead[..]), (&[0, 1, 2, 3][..], &[4, 5][..]));
/// table.share_full(None, &[KeyScope::new("model", b"weights").root()])?;
/// assert_eq!(slots.check(), Err(Error::PermitVoid { what: "slots" }));
/// assert_eq!(ahead.check(), Ok(()));                           // the second block is the table's own
/// let twin = table.fork()?;                                    // from here on, both blocks are shared
/// assert_eq!(ahead.check(), Err(Error::PermitVoid { what: "slots" }));
/// # drop(twin);
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct WriteSlots {
    slots: SlotMapping,
    /// The permits for the slots. Empty for unchecked slots.
    permits: PermitList<SlotPermit>,
}

impl WriteSlots {
    // Decision: docs/decisions/device.md#unchecked-documents-what-it-trusts
    /// Creates writable slots without a permit, for an engine that manages its own blocks.
    ///
    /// The blocks of these slots must not be read while they are written, and no
    /// [`BlockPool`](crate::BlockPool) may have shared them.
    pub fn unchecked(slots: impl Into<SlotMapping>) -> Self {
        Self { slots: slots.into(), permits: PermitList::default() }
    }

    /// Returns the slot mapping, for reading.
    pub fn mapping(&self) -> &SlotMapping {
        &self.slots
    }

    /// Returns the slots of the given rows, with the same permits.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] if `rows` ends past the last row.
    pub fn part(&self, rows: Range<usize>) -> Result<Self> {
        let end = rows.end;
        let slots =
            self.slots.get(rows).ok_or_else(|| Error::range("row of slots", end, self.slots.len()))?;
        Ok(Self { slots: SlotMapping::from(slots.to_vec()), permits: self.permits.clone() })
    }

    /// Checks that the permits are still valid.
    ///
    /// # Errors
    /// Returns [`Error::PermitVoid`] if a permit is void.
    pub fn check(&self) -> Result<()> {
        self.permits.iter().try_for_each(|slots| slots.permit.check("slots"))
    }

    /// Checks that the permits were issued for blocks of `block_size` tokens. With a different block size,
    /// the same slots would be in other blocks, which the owners may not be filling.
    pub(crate) fn check_block_size(&self, block_size: usize) -> Result<()> {
        let what = "block_size of the arena that the slots address";
        self.permits.iter().try_for_each(|slots| same(what, slots.block_size, block_size))
    }

    /// Concatenates the slots of several sequences. If there is only one sequence, its slots are shared, not
    /// copied.
    pub fn concat<'a>(parts: impl Iterator<Item = &'a Self> + Clone) -> Self {
        let mut rest = parts.clone();
        if let (Some(only), None) = (rest.next(), rest.next()) {
            return only.clone();
        }
        let permits = PermitList::several(parts.clone().flat_map(|part| part.permits.iter().cloned()));
        Self { slots: SlotMapping::concat(parts.map(|part| &part.slots)), permits }
    }

    /// Replaces the slots with the slots of several owners. Each owner is given with the index of its first
    /// block, and must meet the conditions of [`Permits::slots`]. Reuses the memory if no operation still
    /// holds it.
    pub(crate) fn refill_batch<'a>(
        &mut self,
        block_size: usize,
        slots: impl ExactSizeIterator<Item = i64>,
        owners: impl Iterator<Item = (&'a Permits, usize)>,
    ) {
        self.slots.refill(slots);
        let issue = |(owner, first): (&Permits, usize)| SlotPermit { permit: owner.issue(first), block_size };
        self.permits.refill(owners.map(issue));
    }
}

impl PartialEq for WriteSlots {
    /// Compares the slots and ignores the permits.
    fn eq(&self, other: &Self) -> bool {
        self.slots == other.slots
    }
}

impl Deref for WriteSlots {
    type Target = [i64];

    fn deref(&self) -> &[i64] {
        &self.slots
    }
}

/// `(source, destination)` pairs of blocks, with permits to write to the destinations.
///
/// [`MutableBlocks::write_pairs`](crate::MutableBlocks::write_pairs) issues them. Operations that copy blocks
/// accept only this type. The permit becomes void under the conditions stated at [`WriteSlots`].
#[derive(Debug, Clone, Default)]
pub struct WritePairs {
    pairs: Arc<[(BlockId, BlockId)]>,
    /// The permits for the destinations. Empty for unchecked pairs.
    permits: PermitList<Permit>,
}

impl WritePairs {
    /// Creates pairs without a permit, for an arena without a pool, such as a caller's staging buffer.
    ///
    /// The destinations must not be read while they are written, and no [`BlockPool`](crate::BlockPool) may
    /// have shared them.
    pub fn unchecked(pairs: impl Into<Arc<[(BlockId, BlockId)]>>) -> Self {
        Self { pairs: pairs.into(), permits: PermitList::default() }
    }

    /// Concatenates the pairs of several owners, so that one operation can copy them.
    pub fn concat<'a>(parts: impl Iterator<Item = &'a Self> + Clone) -> Self {
        let permits = PermitList::several(parts.clone().flat_map(|part| part.permits.iter().cloned()));
        Self { pairs: parts.flat_map(|part| part.pairs.iter().copied()).collect(), permits }
    }

    /// Checks that the permit is still valid.
    ///
    /// # Errors
    /// Returns [`Error::PermitVoid`] if the permit is void.
    pub fn check(&self) -> Result<()> {
        self.permits.iter().try_for_each(|permit| permit.check("blocks"))
    }
}

impl Deref for WritePairs {
    type Target = [(BlockId, BlockId)];

    fn deref(&self) -> &[(BlockId, BlockId)] {
        &self.pairs
    }
}
