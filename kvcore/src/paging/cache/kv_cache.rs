//! The interface of all caches, which lets an engine choose one at run time.

use std::fmt;

use super::{PagedKvCache, SequenceId, SequenceStart, StaticKvCache};
use crate::base::Result;
use crate::device::{KvArena, Segment, TensorView, WriteSlots};
use crate::paging::PromptKeys;

/// The kind of a cache, which determines how the cache manages memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheKind {
    /// [`StaticKvCache`]: one run of slots for each batch entry, long enough for the longest sequence.
    Static,
    /// [`PagedKvCache`]: blocks allocated as needed, and shared between equal prefixes.
    Paged,
    /// [`GroupedKvCache`](crate::GroupedKvCache): a paged cache for each group of layers that attend to the
    /// same tokens.
    Grouped,
}

impl fmt::Display for CacheKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Static => "static",
            Self::Paged => "paged",
            Self::Grouped => "grouped",
        })
    }
}

/// Views of one layer's K and V in the cache's own memory, for reading. No elements are copied. Code that
/// writes through a view must follow the rule stated at [`KvArena::views`](crate::KvArena::views).
///
/// For a static cache: `([batch, len, k_heads, k_dim], [batch, len, v_heads, v_dim])`, where `len` is the
/// length of the longest entry. For a paged cache: the whole layer,
/// `([num_blocks, block_size, k_heads, k_dim], …)`.
pub type LayerViews = (TensorView, TensorView);

// Decision: docs/decisions/paging.md#caches-issue-slots-streams-write-rows
/// A cache of keys and values. It holds sequences, and each token of a sequence has a slot in every layer.
///
/// A step has four parts: [`grow`](Self::grow), which returns the slots of the new tokens; a
/// [`Scatter`](crate::Scatter) in every layer; an [`Attend`](crate::Attend) over [`segment`](Self::segment);
/// and [`commit`](Self::commit).
///
/// ```
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{
///     BlockPool, DType, KvArena, KvCache, KvExtents, MemoryKind, PagedCacheConfig, PagedKvCache, RankInfo,
///     SequenceStart, StaticCacheConfig, StaticKvCache,
/// };
///
/// let extents = KvExtents {
///     num_layers: 2, k_heads: 4, v_heads: 4, k_dim: 16, v_dim: 16, max_positions: 128,
///     format: DType::F16.into(),
/// };
/// let (backend, rank) = (CpuBackend::new(), RankInfo::default());
/// let arena = |layout| KvArena::allocate(backend.as_ref(), MemoryKind::Device, std::sync::Arc::new(layout));
/// let fixed = StaticKvCache::new(arena(StaticCacheConfig::default().layout(&extents, &rank)?)?)?;
/// let layout = PagedCacheConfig { max_memory: 1 << 20, ..Default::default() }.layout(&extents, &rank)?;
/// let pool = BlockPool::new(0..layout.shape().num_blocks as u32)?;
/// let paged = PagedKvCache::new(arena(layout)?, pool)?;
/// let caches: [Box<dyn KvCache>; 2] = [Box::new(fixed), Box::new(paged)];
/// for mut cache in caches {
///     let sequence = cache.create(SequenceStart::default())?;
///     assert_eq!(cache.grow(sequence, 20)?.len(), 20);
///     assert_eq!(cache.segment(sequence)?.len, 20);
///     cache.free(sequence)?;
/// }
/// # Ok::<(), kvcore::Error>(())
/// ```
pub trait KvCache: Send + fmt::Debug {
    /// Returns the kind of the cache.
    fn kind(&self) -> CacheKind;

    /// Returns the arena of the keys and values.
    fn arena(&self) -> &KvArena;

    /// Returns the maximum number of tokens per sequence.
    fn max_len(&self) -> usize;

    /// Returns the number of live sequences.
    fn num_sequences(&self) -> usize;

    /// Creates a sequence.
    ///
    /// # Errors
    /// Returns [`crate::Error::TooLarge`] if the batch of a static cache is full.
    fn create(&mut self, start: SequenceStart) -> Result<SequenceId>;

    /// Creates a sequence for a prompt. Returns the sequence's ID and the number of prompt tokens that are
    /// already cached, which is 0 for a cache that does not share prefixes.
    ///
    /// # Errors
    /// Returns the errors of [`create`](Self::create), and [`crate::Error::Mismatch`] if the cache shares
    /// prefixes and the keys were made for another block size.
    fn create_with_prefix(&mut self, _prompt: &PromptKeys) -> Result<(SequenceId, usize)> {
        Ok((self.create(SequenceStart::default())?, 0))
    }

    /// Reserves slots for `tokens` more tokens, and returns them.
    ///
    /// # Errors
    /// Returns an error if there are not enough blocks or the sequence would be too long. The sequence is
    /// unchanged in that case.
    fn grow(&mut self, id: SequenceId, tokens: usize) -> Result<WriteSlots>;

    /// Reserves slots for more tokens of several sequences, in one step that either succeeds for all or
    /// changes nothing. Replaces the contents of `slots` with the slots of the whole batch, in batch order.
    /// Reuses the memory of `slots` if no operation still holds it.
    ///
    /// # Errors
    /// Returns the errors of [`grow`](Self::grow), and [`crate::Error::Twice`] if a sequence is given twice.
    /// Nothing changes in these cases.
    fn grow_batch(&mut self, batch: &[(SequenceId, usize)], slots: &mut WriteSlots) -> Result<()>;

    /// Returns the number of blocks that a sequence needs for `tokens` more tokens, or 0 for a cache without
    /// a pool.
    ///
    /// # Errors
    /// Returns [`crate::Error::UnknownSequence`] if there is no such sequence.
    fn missing_blocks(&self, id: SequenceId, tokens: usize) -> Result<usize> {
        let _ = tokens;
        self.len(id).map(|_| 0)
    }

    /// Records the tokens written since the last commit. A cache that shares prefixes then shares the blocks
    /// of these tokens. The default implementation does nothing and returns no error.
    ///
    /// # Errors
    /// Returns [`crate::Error::UnknownSequence`] if there is no such sequence, and
    /// [`crate::Error::TooLarge`] if there are more tokens than slots from [`grow`](Self::grow).
    fn commit(&mut self, _id: SequenceId, _tokens: &[u32]) -> Result<()> {
        Ok(())
    }

    /// Frees the memory of the tokens before `token`, if the cache supports this. Later tokens must not
    /// attend to the freed tokens. Returns the number of freed blocks.
    ///
    /// # Errors
    /// Returns [`crate::Error::UnknownSequence`] if there is no such sequence.
    fn free_before(&mut self, id: SequenceId, token: usize) -> Result<usize> {
        let _ = token;
        self.len(id).map(|_| 0)
    }

    /// Removes the tokens past `len`, for example after a speculative rollback or a failed step.
    ///
    /// # Errors
    /// Returns [`crate::Error::UnknownSequence`] if there is no such sequence, [`crate::Error::TooLarge`] if
    /// `len` exceeds the length of the sequence, and [`crate::Error::SharedBlock`] if `len` is inside a block
    /// that others can find by its key.
    fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()>;

    /// Ends a sequence.
    ///
    /// # Errors
    /// Returns [`crate::Error::UnknownSequence`] if there is no such sequence.
    fn free(&mut self, id: SequenceId) -> Result<()>;

    /// Returns the number of tokens of a sequence.
    ///
    /// # Errors
    /// Returns [`crate::Error::UnknownSequence`] if there is no such sequence.
    fn len(&self, id: SequenceId) -> Result<usize>;

    /// Returns whether a sequence has no tokens.
    ///
    /// # Errors
    /// Returns [`crate::Error::UnknownSequence`] if there is no such sequence.
    fn is_empty(&self, id: SequenceId) -> Result<bool> {
        Ok(self.len(id)? == 0)
    }

    /// Returns all tokens of a sequence as one segment to attend to.
    ///
    /// # Errors
    /// Returns [`crate::Error::UnknownSequence`] if there is no such sequence.
    fn segment(&self, id: SequenceId) -> Result<Segment>;

    /// Ends all sequences, and removes all contents except blocks that something outside the cache holds or
    /// pins.
    fn reset(&mut self);

    /// Returns the cache if it is a paged cache, for operations that only a paged cache has.
    fn as_paged(&self) -> Option<&PagedKvCache> {
        None
    }

    /// Returns a mutable reference to the cache if it is a paged cache; see [`as_paged`](Self::as_paged).
    fn as_paged_mut(&mut self) -> Option<&mut PagedKvCache> {
        None
    }

    /// Returns the cache if it is a static cache, for operations that only a static cache has.
    fn as_static(&self) -> Option<&StaticKvCache> {
        None
    }
}
