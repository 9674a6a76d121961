//! Prefixes kept to the token: a system prompt with its partial last block.

use std::sync::Arc;

use super::{PagedKvCache, Result, SlotMapping};
use crate::device::Segment;
use crate::paging::{BlockKey, BlockTable};

/// A prefix at the start of a prompt, part of it cached, the rest to be computed.
///
/// ```
/// # use std::sync::Arc;
/// # use kvbackend_cpu::CpuBackend;
/// # use kvcore::{
/// #     Backend, BlockOrder, BlockPool, DType, KeyScope, KvArena, KvLayout, KvShape, MemoryKind, PagedKvCache,
/// # };
/// # let backend = CpuBackend::new();
/// # let shape = KvShape {
/// #     num_layers: 1, num_blocks: 8, block_size: 4, k_heads: 1, v_heads: 1, k_dim: 2, v_dim: 2,
/// #     format: DType::F32.into(), order: BlockOrder::TokenMajor,
/// # };
/// # let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(KvLayout::new(shape)?))?;
/// # let cache = PagedKvCache::new(arena, BlockPool::new(0..8)?)?;
/// let root = KeyScope::new("model", b"weights").root();
/// let system_prompt = [1, 2, 3, 4, 5, 6];
/// let fill = cache.fill_prefix(Some(root), &system_prompt)?;
/// assert_eq!((fill.cached(), fill.slots().len()), (0, 6));
/// // … scatter the keys and values of six tokens to these slots in every layer, then:
/// let held = fill.finish()?;
/// assert_eq!(held.segment().len, 6);
/// assert_eq!(cache.fill_prefix(Some(root), &system_prompt)?.cached(), 6, "to the token");
/// # Ok::<(), kvcore::Error>(())
/// ```
///
/// # Drop behaviour
/// Blocks that were to be filled are free again, cached ones stay cached.
#[derive(Debug)]
#[must_use = "dropping it forgets the prefix"]
pub struct PrefixFill {
    table: BlockTable,
    cached: usize,
    slots: SlotMapping,
    root: Option<BlockKey>,
    /// Keys of all blocks, in order; empty if the prefix is not to be found again.
    keys: Vec<BlockKey>,
    /// Blocks that were found.
    known: usize,
}

/// A computed prefix, its partial last block included, held as long as this value lives.
#[derive(Debug)]
pub struct SealedPrefix(BlockTable);

impl PagedKvCache {
    /// Finds or makes room for a prefix of exactly `tokens` at position 0.
    ///
    /// Unlike [`create_with_prefix`](Self::create_with_prefix), all tokens may be cached, and a
    /// partial last block is shared too, with requests for exactly the same tokens. Without a root
    /// nothing is looked up and nothing is kept.
    ///
    /// # Errors
    /// [`crate::Error::OutOfBlocks`].
    pub fn fill_prefix(&self, root: Option<BlockKey>, tokens: &[u32]) -> Result<PrefixFill> {
        let block_size = self.block_size();
        let keys = root.map(|root| root.chain(tokens, block_size)).unwrap_or_default();
        let found = self.pool().lookup_chain(&keys);
        let known = found.len();
        let mut table = BlockTable::with_prefix(found, block_size)?;
        let cached = table.len().min(tokens.len());
        if cached < table.len() {
            table.shorten_last(cached)?;
        }
        let slots = table.grow(tokens.len() - cached)?.into();
        Ok(PrefixFill { table, cached, slots, root, keys, known })
    }
}

impl PrefixFill {
    /// Tokens that need not be computed.
    pub fn cached(&self) -> usize {
        self.cached
    }

    /// Takes no more than the first `tokens` from the cache, rounded down to whole blocks, though more are cached: the
    /// rest is computed into blocks of its own. What is cached already stays what is found under its key.
    ///
    /// Several ranks that compute a prompt together agree so on what they compute.
    ///
    /// # Errors
    /// [`crate::Error::OutOfBlocks`]; drop it then.
    pub fn take_at_most(&mut self, tokens: usize) -> Result<()> {
        if tokens >= self.cached {
            return Ok(());
        }
        let (len, block_size) = (self.table.len(), self.table.block_size());
        self.known = tokens / block_size;
        self.cached = self.known * block_size;
        self.table.truncate(self.cached)?;
        self.slots = self.table.grow(len - self.cached)?.into();
        Ok(())
    }

    /// Slots of the tokens from [`cached`](Self::cached) on.
    pub fn slots(&self) -> &SlotMapping {
        &self.slots
    }

    /// The whole prefix as a segment.
    pub fn segment(&self) -> Segment {
        Segment::new(Arc::clone(self.table.ids()), self.table.len(), 0, 0)
    }

    /// Declares all slots written; the blocks can be found from now on.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] for more keys than blocks, which [`PagedKvCache::fill_prefix`] does not
    /// make.
    pub fn finish(mut self) -> Result<SealedPrefix> {
        let parent = self.known.checked_sub(1).map_or(self.root, |last| self.keys.get(last).copied());
        self.table.seal(parent, self.keys.get(self.known..).unwrap_or_default())?;
        Ok(SealedPrefix(self.table))
    }
}

impl SealedPrefix {
    /// The prefix as a segment of a request.
    pub fn segment(&self) -> Segment {
        Segment::new(Arc::clone(self.0.ids()), self.0.len(), 0, 0)
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
