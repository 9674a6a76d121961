//! Prefixes, such as system prompts, that are cached to the exact token, including their partial last block.

use std::sync::Arc;

use kvcore::{BlockKey, BlockTable, KvPool, Segment, WriteSlots};

use crate::error::Result;

// Decision: docs/decisions/chunks.md#the-system-prompt-is-cached-to-its-last-token
/// A prefix at the start of a prompt. Part of it is cached, and the rest must be computed.
///
/// ```
/// # use std::sync::Arc;
/// # use kvbackend_cpu::CpuBackend;
/// # use kvchunk::PrefixFill;
/// # use kvcore::{
/// #     Backend, BlockOrder, BlockPool, DType, KeyScope, KvArena, KvLayout, KvPool, KvShape, MemoryKind,
/// # };
/// # let backend = CpuBackend::new();
/// # let shape = KvShape {
/// #     num_layers: 1, num_blocks: 8, block_size: 4, k_heads: 1, v_heads: 1, k_dim: 2, v_dim: 2,
/// #     format: DType::F32.into(), order: BlockOrder::TokenMajor,
/// # };
/// # let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(KvLayout::new(shape)?))?;
/// # let pool = KvPool::new(arena, BlockPool::new(0..8)?)?;
/// let root = KeyScope::new("model", b"weights").root();
/// let system_prompt = [1, 2, 3, 4, 5, 6];
/// let fill = PrefixFill::new(&pool, Some(root), &system_prompt)?;
/// assert_eq!((fill.cached(), fill.slots().len()), (0, 6));
/// // … scatter the keys and values of six tokens to these slots in every layer, then:
/// let held = fill.finish()?;
/// assert_eq!(held.segment().len, 6);
/// assert_eq!(PrefixFill::new(&pool, Some(root), &system_prompt)?.cached(), 6, "to the token");
/// # Ok::<(), kvchunk::Error>(())
/// ```
///
/// # Drop behaviour
/// The blocks to fill become free. Cached blocks stay cached.
#[derive(Debug)]
#[must_use = "dropping it forgets the prefix"]
pub struct PrefixFill {
    table: BlockTable,
    cached: usize,
    slots: WriteSlots,
    root: Option<BlockKey>,
    tokens: Vec<u32>,
    /// Keys of all blocks, in order. Empty for a prefix without a root.
    keys: Vec<BlockKey>,
    /// Number of blocks that were found in the cache.
    known: usize,
}

/// A computed prefix, including its partial last block. The blocks are held until this value is dropped.
#[derive(Debug)]
pub struct SealedPrefix {
    table: BlockTable,
    tokens: Vec<u32>,
    keys: Vec<BlockKey>,
}

impl PrefixFill {
    /// Finds the cached blocks of the prefix `tokens`, which starts at position 0, and allocates blocks for
    /// the rest.
    ///
    /// Unlike with [`kvcore::PagedKvCache::create_with_prefix`], all tokens may be cached, and a partial last
    /// block is also shared with requests for exactly the same tokens. Without a root, nothing is looked up
    /// or kept.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfBlocks`] if there are not enough blocks.
    pub fn new(pool: &KvPool, root: Option<BlockKey>, tokens: &[u32]) -> Result<Self> {
        let block_size = pool.block_size();
        let keys = root.map(|root| root.chain(tokens, block_size)).unwrap_or_default();
        let found = pool.blocks().lookup_chain(&keys);
        let known = found.len();
        let mut table = BlockTable::with_prefix(found, block_size)?;
        let cached = table.len().min(tokens.len());
        if cached < table.len() {
            table.shorten_last(cached)?;
        }
        let slots = table.grow(tokens.len() - cached)?;
        Ok(Self { table, cached, slots, root, tokens: tokens.to_vec(), keys, known })
    }

    /// Returns the number of tokens that do not have to be computed.
    pub fn cached(&self) -> usize {
        self.cached
    }

    /// Returns the key of the whole prefix, which is the key of its last block, or `None` for a prefix
    /// without a root.
    pub fn key(&self) -> Option<BlockKey> {
        self.keys.last().copied()
    }

    /// Limits the cached part to the first `tokens` tokens, rounded down to whole blocks. The rest is
    /// computed into the prefix's own blocks. Blocks that are already cached can still be found by their
    /// keys.
    ///
    /// Ranks that compute a prompt together use this method so that all of them compute the same tokens.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfBlocks`] if there are not enough blocks. In that case, the caller must
    /// drop this value.
    pub fn take_at_most(&mut self, tokens: usize) -> Result<()> {
        if tokens >= self.cached {
            return Ok(());
        }
        let (len, block_size) = (self.table.len(), self.table.block_size());
        self.known = tokens / block_size;
        self.cached = self.known * block_size;
        self.table.truncate(self.cached)?;
        self.slots = self.table.grow(len - self.cached)?;
        Ok(())
    }

    /// Returns the slots of the tokens to compute, starting at index [`cached`](Self::cached).
    pub fn slots(&self) -> &WriteSlots {
        &self.slots
    }

    /// Returns the whole prefix as a segment.
    pub fn segment(&self) -> Segment {
        Segment::new(Arc::clone(self.table.ids()), self.table.len(), 0, 0)
    }

    /// Seals the prefix, whose slots must all have been written. After this call, the blocks can be found by
    /// their keys.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::TooLarge`] if there are more keys than blocks, which
    /// [`new`](Self::new) rules out.
    pub fn finish(mut self) -> Result<SealedPrefix> {
        let parent = self.known.checked_sub(1).map_or(self.root, |last| self.keys.get(last).copied());
        self.table.seal(parent, self.keys.get(self.known..).unwrap_or_default())?;
        Ok(SealedPrefix { table: self.table, tokens: self.tokens, keys: self.keys })
    }
}

impl SealedPrefix {
    /// Returns the prefix as a segment of a request.
    pub fn segment(&self) -> Segment {
        Segment::new(Arc::clone(self.table.ids()), self.table.len(), 0, 0)
    }

    /// Returns the tokens.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the keys of all blocks, or nothing for a prefix without a root.
    pub(crate) fn keys(&self) -> &[BlockKey] {
        &self.keys
    }

    /// Returns the number of tokens held.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Returns whether no tokens are held.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }
}
