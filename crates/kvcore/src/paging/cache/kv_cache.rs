//! What every cache can do, so that an engine chooses one at run time.

use std::fmt;

use super::{PagedKvCache, SequenceId, SequenceStart, SlotMapping, StaticKvCache};
use crate::base::Result;
use crate::device::{KvArena, Segment, Stream, TensorView};
use crate::paging::KeyScheme;

/// Which cache it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheKind {
    /// [`StaticKvCache`]: one run of slots for each batch entry, as long as the longest sequence.
    Static,
    /// [`PagedKvCache`]: blocks as they are needed, shared where prefixes agree.
    Paged,
}

impl fmt::Display for CacheKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Static => "static",
            Self::Paged => "paged",
        })
    }
}

/// Where the rows of an [`KvCache::update`] go.
#[derive(Debug, Clone, Copy)]
pub enum Places<'a> {
    /// For a static cache: where each batch entry's new tokens begin.
    Starts(&'a [usize]),
    /// For a paged cache: the slot of each row; negative ones are skipped.
    Slots(&'a SlotMapping),
}

/// K and V as views of the cache's own memory; nothing is copied.
///
/// Of a static cache: `([batch, k_heads, len, k_dim], [batch, v_heads, len, v_dim])` up to the longest
/// entry. Of a paged one: the whole layer, `([num_blocks, k_heads, block_size, k_dim], …)`.
pub type LayerViews = (TensorView, TensorView);

/// A cache of keys and values: sequences whose tokens have slots, in every layer.
///
/// The usual step is [`grow`](Self::grow), which gives the slots of new tokens; scatter in every layer;
/// an attend over [`segment`](Self::segment); and [`commit`](Self::commit). Engines that think in whole
/// layers call [`update`](Self::update) instead.
///
/// ```
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{CacheChoice, CacheConfig, DType, KvExtents, MemoryKind, RankInfo, SequenceStart};
///
/// let extents = KvExtents {
///     num_layers: 2, k_heads: 4, v_heads: 4, k_dim: 16, v_dim: 16, max_positions: 128,
///     format: DType::F16.into(),
/// };
/// for choice in ["static", "paged"] {
///     let config: CacheChoice = choice.parse()?;
///     let mut cache =
///         config.build(CpuBackend::new().as_ref(), MemoryKind::Device, &extents, &RankInfo::default())?;
///     let sequence = cache.create(SequenceStart::default())?;
///     assert_eq!(cache.grow(sequence, 20)?.len(), 20);
///     assert_eq!(cache.segment(sequence)?.len, 20);
///     cache.free(sequence)?;
/// }
/// # Ok::<(), kvcore::Error>(())
/// ```
pub trait KvCache: Send + fmt::Debug {
    /// Which cache it is.
    fn kind(&self) -> CacheKind;

    /// Keys and values.
    fn arena(&self) -> &KvArena;

    /// Tokens that a sequence can have.
    fn max_len(&self) -> usize;

    /// Live sequences.
    fn num_sequences(&self) -> usize;

    /// A new sequence.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] when a static cache's batch is full.
    fn create(&mut self, start: SequenceStart) -> Result<SequenceId>;

    /// A new sequence at the start of a prompt, and how many of its tokens are cached already. A cache
    /// that shares nothing has none.
    fn create_with_prefix(&mut self, _scheme: KeyScheme, _tokens: &[u32]) -> Result<(SequenceId, usize)> {
        Ok((self.create(SequenceStart::default())?, 0))
    }

    /// Room for `tokens` more tokens; returns their slots.
    ///
    /// # Errors
    /// No room, in blocks or in length; the sequence is as before then.
    fn grow(&mut self, id: SequenceId, tokens: usize) -> Result<SlotMapping>;

    /// Says which tokens were written since the last commit, so that a cache that shares prefixes can
    /// share them.
    ///
    /// # Errors
    /// [`crate::Error::UnknownSequence`], [`crate::Error::OutOfRange`] for more tokens than were grown.
    fn commit(&mut self, _id: SequenceId, _tokens: &[u32]) -> Result<()> {
        Ok(())
    }

    /// Forgets tokens past `len` (speculative rollback, a failed step).
    ///
    /// # Errors
    /// [`crate::Error::UnknownSequence`], [`crate::Error::OutOfRange`] for more tokens than there are,
    /// [`crate::Error::SharedBlock`] for a length inside a block that others find by its key.
    fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()>;

    /// Ends a sequence.
    ///
    /// # Errors
    /// [`crate::Error::UnknownSequence`].
    fn free(&mut self, id: SequenceId) -> Result<()>;

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// [`crate::Error::UnknownSequence`].
    fn len(&self, id: SequenceId) -> Result<usize>;

    /// Whether a sequence has no token.
    ///
    /// # Errors
    /// [`crate::Error::UnknownSequence`].
    fn is_empty(&self, id: SequenceId) -> Result<bool> {
        Ok(self.len(id)? == 0)
    }

    /// All tokens of a sequence as one segment of an attend.
    ///
    /// # Errors
    /// [`crate::Error::UnknownSequence`].
    fn segment(&self, id: SequenceId) -> Result<Segment>;

    /// Writes new rows of one layer and returns the layer's cache.
    ///
    /// A static cache takes head-major rows of its whole batch, `[batch, heads, new, dim]`, and
    /// [`Places::Starts`]; a paged one takes head-major rows `[heads, rows, dim]` and [`Places::Slots`],
    /// which may cross blocks.
    ///
    /// # Errors
    /// A layer out of range, a batch that is not the cache's, a length past its end, slots in blocks that
    /// no live sequence fills itself ([`crate::Error::NotOwned`]), places of the other cache
    /// ([`crate::Error::WrongCache`]); nothing has changed then.
    fn update(
        &mut self,
        stream: &dyn Stream,
        layer: usize,
        k: &TensorView,
        v: &TensorView,
        places: Places<'_>,
    ) -> Result<LayerViews>;

    /// Ends all sequences and forgets what is cached.
    fn reset(&mut self);

    /// The cache as a paged one, for what only it can do.
    fn as_paged(&self) -> Option<&PagedKvCache> {
        None
    }

    /// As [`as_paged`](Self::as_paged), to change it.
    fn as_paged_mut(&mut self) -> Option<&mut PagedKvCache> {
        None
    }

    /// The cache as a static one, for what only it can do.
    fn as_static(&self) -> Option<&StaticKvCache> {
        None
    }
}
