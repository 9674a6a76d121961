//! The paged cache: sequences whose tokens lie in blocks, with prefixes shared between sequences.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Error, KvPool, Result, SequenceId, SequenceStart};
use crate::base::{BlockId, SlotMapping};
use crate::device::{CopyBlocks, KvArena, Scatter, Segment, Stream, TensorView, WriteSlots};
use crate::paging::{BlockKey, BlockPool, BlockTable, KeyScheme};

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) table: BlockTable,
    pub(super) start: SequenceStart,
    /// Present for sequences that share their blocks.
    pub(super) chain: Option<KeyChain>,
}

/// The keys under which a sequence's blocks are registered.
#[derive(Debug, Clone)]
pub(super) struct KeyChain {
    pub(super) scheme: KeyScheme,
    /// Keys of the shared blocks, one per block.
    pub(super) keys: Vec<BlockKey>,
    /// Committed tokens after the shared blocks.
    pub(super) pending: Vec<u32>,
}

impl KeyChain {
    /// Returns the key of the last shared block, or the root key.
    pub(super) fn last_key(&self) -> BlockKey {
        self.keys.last().copied().unwrap_or_else(|| self.scheme.root())
    }
}

/// A cache of sequences in the blocks of one arena and pool.
///
/// A step has four parts: [`grow`](Self::grow), which returns the slots of the new tokens;
/// [`write`](Self::write) in every layer; an attend over [`segment`](Self::segment); and
/// [`commit`](Self::commit), which shares the blocks that became full. If a step fails half-way,
/// [`truncate`](Self::truncate) removes the new tokens.
///
/// # Order
/// Writes and copies are enqueued, but blocks are released immediately: by [`free`](Self::free),
/// [`truncate`](Self::truncate), [`copy_on_write`](Self::copy_on_write), a swap, or an eviction. The next
/// holder of a block may get it while work on its old contents is still in progress. Therefore the caller
/// MUST send all work on an arena to one stream. If there are several streams, the one that writes to
/// blocks again MUST wait for an event of the streams that used the blocks before ([`Stream::wait_for`]).
/// The rule also applies to the arena that sequences are swapped to.
///
/// On a quantised arena (`format: "int8:32".parse()?` in the shape) the cache works without changes: writes
/// quantise, and an attend dequantises.
///
/// ```
/// use std::sync::Arc;
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{
///     Backend, BlockOrder, BlockPool, DType, KeyScope, KvArena, KvLayout, KvShape, MemoryKind, PagedKvCache,
/// };
///
/// let backend = CpuBackend::new();
/// let stream = backend.stream()?;
/// let shape = KvShape {
///     num_layers: 2, num_blocks: 32, block_size: 4, k_heads: 2, v_heads: 2, k_dim: 8, v_dim: 8,
///     format: DType::BF16.into(), order: BlockOrder::TokenMajor,
/// };
/// let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(KvLayout::new(shape)?))?;
/// let mut cache = PagedKvCache::new(arena, BlockPool::new(0..32)?)?;
/// let root = KeyScope::new("model", b"weights").tenant_salt(b"alice").root();
///
/// // A prompt of ten tokens; two full blocks of it can be found from now on.
/// let (first, cached, slots) = cache.admit(root, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10])?;
/// assert_eq!((cached, slots.len()), (0, 10));
/// cache.commit(first, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10])?;
///
/// // Another one with the same beginning: a block is found by its key.
/// let prompt = [1, 2, 3, 4, 5, 6, 77, 78];
/// let (second, cached) = cache.create_with_prefix(root, &prompt)?;
/// assert_eq!(cached, 4);
/// let slots = cache.grow(second, 4)?;
/// cache.commit(second, &prompt[cached..])?;
///
/// // Two answers to it (parallel sampling), one of them rolled back by a token (speculative decoding).
/// cache.grow(second, 1)?;
/// let twin = cache.fork(second)?;
/// for id in [second, twin] {
///     cache.copy_on_write(id, stream.as_ref())?;
///     cache.grow(id, 2)?;
/// }
/// cache.truncate(twin, 10)?;
/// assert_eq!((cache.len(second)?, cache.len(twin)?), (11, 10));
///
/// // Make room: the first sequence waits in host memory and comes back.
/// let layout = KvLayout::new(KvShape { num_blocks: 8, ..cache.arena().layout().shape().clone() })?;
/// let host = KvArena::allocate(backend.as_ref(), MemoryKind::Pinned, Arc::new(layout))?;
/// let waiting = cache.swap_out(first, stream.as_ref(), &host, &BlockPool::new(0..8)?)?;
/// let first = cache.swap_in(waiting, stream.as_ref())?;
/// assert_eq!(cache.len(first)?, 10);
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug)]
pub struct PagedKvCache {
    pool: KvPool,
    pub(super) sequences: HashMap<SequenceId, Sequence>,
    next: u64,
}

impl PagedKvCache {
    /// Creates a cache over the blocks of `pool`.
    ///
    /// # Errors
    /// Returns [`Error::TooLarge`] if the pool has blocks that the arena lacks.
    pub fn new(arena: KvArena, pool: BlockPool) -> Result<Self> {
        Ok(Self { pool: KvPool::new(arena, pool)?, sequences: HashMap::new(), next: 0 })
    }

    /// Returns the arena of the keys and values.
    pub fn arena(&self) -> &KvArena {
        self.pool.arena()
    }

    /// Returns the pool of the cache's blocks.
    pub fn pool(&self) -> &BlockPool {
        self.pool.blocks()
    }

    /// Returns arena and pool, for what takes blocks beside the sequences.
    pub fn kv_pool(&self) -> &KvPool {
        &self.pool
    }

    /// Returns the number of live sequences.
    pub fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Creates a sequence that shares nothing.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if the block size is 0, which no [`KvLayout`](crate::KvLayout) allows.
    pub fn create(&mut self, start: SequenceStart) -> Result<SequenceId> {
        let table = BlockTable::new(self.pool(), self.block_size())?;
        Ok(self.insert(Sequence { table, start, chain: None }))
    }

    /// Creates a sequence at the start of a prompt. The sequence shares full blocks with earlier sequences.
    ///
    /// Returns its id and the number of `tokens` that are cached already. At least one token is left to
    /// compute, so that there are logits to continue from.
    ///
    /// # Errors
    /// Returns the errors of [`create`](Self::create).
    pub fn create_with_prefix(
        &mut self,
        scheme: impl Into<KeyScheme>,
        tokens: &[u32],
    ) -> Result<(SequenceId, usize)> {
        let (scheme, block_size) = (scheme.into(), self.block_size());
        let mut keys = scheme.keys(&tokens[..tokens.len().saturating_sub(1)], block_size);
        let shared = self.pool().lookup_chain(&keys);
        keys.truncate(shared.len());
        let table = BlockTable::with_prefix(shared, block_size)?;
        let cached = table.len();
        let chain = Some(KeyChain { scheme, keys, pending: Vec::new() });
        Ok((self.insert(Sequence { table, start: SequenceStart::default(), chain }), cached))
    }

    /// Creates a sequence with slots for all of `tokens`, in one step that succeeds or changes nothing.
    /// Returns its id, the number of tokens that are cached, and the slots of the other tokens. Unlike
    /// [`create_with_prefix`](Self::create_with_prefix), reserves the slots at once and leaves the pool's
    /// watermark to running sequences.
    ///
    /// # Errors
    /// Returns [`Error::OutOfBlocks`] if there are not enough blocks. In that case nothing has changed, not
    /// even the order of eviction.
    pub fn admit(
        &mut self,
        scheme: impl Into<KeyScheme>,
        tokens: &[u32],
    ) -> Result<(SequenceId, usize, WriteSlots)> {
        let (scheme, block_size) = (scheme.into(), self.block_size());
        let mut keys = scheme.keys(&tokens[..tokens.len().saturating_sub(1)], block_size);
        let blocks = tokens.len().div_ceil(block_size);
        let (shared, fresh) = self.pool().admit_prefix(&keys, blocks, 0)?;
        keys.truncate(shared.len());
        let mut table = BlockTable::with_prefix(shared, block_size)?;
        let cached = table.len();
        table.supply(fresh)?;
        let slots = table.grow(tokens.len() - cached)?;
        let chain = Some(KeyChain { scheme, keys, pending: Vec::new() });
        let id = self.insert(Sequence { table, start: SequenceStart::default(), chain });
        Ok((id, cached, slots))
    }

    /// Creates a second sequence over the tokens of sequence `id` (beam search, parallel sampling). Both
    /// sequences share all blocks. Call [`copy_on_write`](Self::copy_on_write) before a sequence grows, so
    /// that it has a last block of its own.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        let Sequence { table, start, chain } = self.get_mut(id)?;
        let twin = Sequence { table: table.fork()?, start: *start, chain: chain.clone() };
        Ok(self.insert(twin))
    }

    /// Makes the slot of the next token writable. If the last block is partial and shared, copies it on
    /// `stream` into a block of the sequence's own. Returns whether a copy was made; without a fork no copy
    /// is made.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence, [`Error::OutOfBlocks`] if there is
    /// no block for the copy, and the errors of the stream. In these cases nothing has changed.
    pub fn copy_on_write(&mut self, id: SequenceId, stream: &dyn Stream) -> Result<bool> {
        let arena = self.arena().clone();
        let Some(copy) = self.get_mut(id)?.table.unshare_tail()? else { return Ok(false) };
        let pairs = copy.pairs().clone();
        if let Err(error) = stream.copy_blocks(&CopyBlocks { arena, pairs }) {
            self.get_mut(id)?.table.reshare_tail(copy)?;
            return Err(error);
        }
        Ok(true)
    }

    pub(super) fn insert(&mut self, sequence: Sequence) -> SequenceId {
        let id = SequenceId(self.next);
        self.next += 1;
        self.sequences.insert(id, sequence);
        id
    }

    pub(super) fn block_size(&self) -> usize {
        self.pool.block_size()
    }

    pub(super) fn get(&self, id: SequenceId) -> Result<&Sequence> {
        self.sequences.get(&id).ok_or(Error::UnknownSequence(id.0))
    }

    pub(super) fn get_mut(&mut self, id: SequenceId) -> Result<&mut Sequence> {
        self.sequences.get_mut(&id).ok_or(Error::UnknownSequence(id.0))
    }

    /// Reserves slots for `tokens` more tokens, and returns these slots.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence, and [`Error::OutOfBlocks`] if there
    /// are not enough blocks. In these cases the sequence is unchanged.
    pub fn grow(&mut self, id: SequenceId, tokens: usize) -> Result<WriteSlots> {
        self.get_mut(id)?.table.grow(tokens)
    }

    /// Reserves slots for `tokens` more tokens, and replaces the contents of `slots` by these slots. Unlike
    /// [`grow`](Self::grow), a decode step allocates memory only if it takes a block, provided that no
    /// operation of the last step still holds `slots`.
    ///
    /// # Errors
    /// Returns the errors of [`grow`](Self::grow). In these cases `slots` are unchanged.
    pub fn grow_into(&mut self, id: SequenceId, tokens: usize, slots: &mut WriteSlots) -> Result<()> {
        self.get_mut(id)?.table.grow_into(tokens, slots)
    }

    /// Removes the tokens past `len` and frees the blocks behind them (speculative rollback, a failed
    /// step).
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence, [`Error::TooLarge`] if `len`
    /// exceeds the length of the sequence, and [`Error::SharedBlock`] if `len` lies inside a block that
    /// others can find by its key. In these cases the sequence is unchanged.
    pub fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()> {
        let block_size = self.block_size();
        let Sequence { table, chain, .. } = self.get_mut(id)?;
        table.truncate(len)?;
        if let Some(chain) = chain {
            let keyed = table.keyed_blocks();
            chain.keys.truncate(keyed);
            chain.pending.truncate(len - keyed * block_size);
        }
        Ok(())
    }

    /// Scatters new rows of a sequence in one layer: `k` is `[rows, k_heads, k_dim]`, `v` is
    /// `[rows, v_heads, v_dim]`.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence, and [`Error::PermitVoid`] if,
    /// since the slots were taken, one of their blocks was shared or the sequence was truncated or freed. Also
    /// returns the errors of the stream.
    pub fn write(
        &self,
        id: SequenceId,
        stream: &dyn Stream,
        layer: usize,
        k: TensorView,
        v: TensorView,
        slots: &WriteSlots,
    ) -> Result<()> {
        self.get(id)?;
        stream.scatter(&Scatter {
            arena: self.arena().clone(),
            layer,
            k,
            v,
            slots: slots.clone(),
            rotation: None,
        })
    }

    /// Records `tokens`, written since the last commit, and shares the blocks that became full. Does
    /// nothing for a sequence without a key scheme.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence, and [`Error::TooLarge`] if there
    /// are more tokens than slots from [`grow`](Self::grow).
    pub fn commit(&mut self, id: SequenceId, tokens: &[u32]) -> Result<()> {
        let block_size = self.block_size();
        let sequence = self.sequences.get_mut(&id).ok_or(Error::UnknownSequence(id.0))?;
        if let Some(chain) = &mut sequence.chain {
            let held = sequence.table.keyed_blocks() * block_size + chain.pending.len();
            let room = sequence.table.len().saturating_sub(held);
            if tokens.len() > room {
                return Err(Error::too_large("tokens to commit", tokens.len(), room));
            }
            chain.pending.extend_from_slice(tokens);
            let full = chain.pending.len() / block_size * block_size;
            let parent = chain.last_key();
            let start = chain.keys.len() * block_size;
            let keys = chain.scheme.extend(&parent, start, &chain.pending[..full], block_size);
            sequence.table.share_full(Some(parent), &keys)?;
            chain.keys.extend(keys);
            chain.pending.drain(..full);
        }
        Ok(())
    }

    /// Ends a sequence. Its own blocks become free. Shared blocks without other holders become cached.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence.
    pub fn free(&mut self, id: SequenceId) -> Result<()> {
        self.sequences.remove(&id).map(drop).ok_or(Error::UnknownSequence(id.0))
    }

    /// Returns the number of tokens of a sequence.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence.
    pub fn len(&self, id: SequenceId) -> Result<usize> {
        Ok(self.get(id)?.table.len())
    }

    /// Returns whether a sequence has no token.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence.
    pub fn is_empty(&self, id: SequenceId) -> Result<bool> {
        Ok(self.get(id)?.table.is_empty())
    }

    /// Returns the blocks of a sequence, in order.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence.
    pub fn blocks(&self, id: SequenceId) -> Result<&Arc<[BlockId]>> {
        Ok(self.get(id)?.table.ids())
    }

    /// Returns the slots of a range of tokens of a sequence.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence, and [`Error::OutOfRange`] if a
    /// token is past the end of the sequence.
    pub fn slots(&self, id: SequenceId, tokens: std::ops::Range<usize>) -> Result<SlotMapping> {
        let table = &self.get(id)?.table;
        tokens.map(|token| table.slot(token)).collect::<Result<Vec<_>>>().map(Into::into)
    }

    /// Returns the slots of some tokens of a sequence with the permit to write them again.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence, [`Error::OutOfRange`] past the end, and
    /// [`Error::NotOwned`] for a token in a shared block.
    pub fn write_slots(&self, id: SequenceId, tokens: std::ops::Range<usize>) -> Result<WriteSlots> {
        self.get(id)?.table.write_slots(tokens)
    }

    /// Returns all tokens of a sequence as one segment.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence.
    pub fn segment(&self, id: SequenceId) -> Result<Segment> {
        let Sequence { table, start, .. } = self.get(id)?;
        Ok(Segment::new(Arc::clone(table.ids()), table.len(), start.logical, start.position))
    }
}
