//! The paged cache, which stores sequences in blocks and shares prefixes between sequences.

use std::ops::Range;
use std::sync::Arc;

use hashbrown::HashMap;

use super::{Error, KvPool, Result, SequenceId, SequenceStart};
use crate::base::{BlockId, SlotMapping, same};
use crate::device::{KvArena, Scatter, Segment, Stream, TensorView, WriteSlots};
use crate::paging::{BlockKey, BlockPool, BlockTable, PromptKeys, Retention, SharedBlocks};

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) table: BlockTable,
    pub(super) start: SequenceStart,
    /// The keys of the sequence's blocks, or `None` if the sequence does not share its blocks.
    pub(super) chain: Option<KeyChain>,
    /// The value of [`PagedKvCache::batches`] for the last batch that contained the sequence.
    pub(super) batch: u64,
}

/// The keys under which the blocks of a sequence are registered.
#[derive(Debug, Clone)]
pub(super) struct KeyChain {
    /// The prompt, whose keys are already computed.
    pub(super) prompt: PromptKeys,
    /// Keys of the shared blocks, one per block.
    pub(super) keys: Vec<BlockKey>,
    /// Committed tokens after the shared blocks.
    pub(super) pending: Vec<u32>,
}

impl KeyChain {
    /// Creates a chain that begins after the first `known` blocks of a prompt.
    fn new(prompt: PromptKeys, known: usize) -> Self {
        Self { keys: prompt.keys()[..known].to_vec(), prompt, pending: Vec::new() }
    }

    /// Returns the keys of the next blocks, which hold the first `tokens` pending tokens. Computes only the
    /// keys that the prompt does not already have.
    fn next_keys(&self, tokens: usize, block_size: usize) -> Vec<BlockKey> {
        let (parent, next) = (self.last_key(), &self.pending[..tokens]);
        match self.prompt.of(&parent, self.keys.len(), next) {
            Some(keys) => keys.to_vec(),
            None => self.prompt.scheme().extend(&parent, self.keys.len() * block_size, next, block_size),
        }
    }

    /// Returns the key of the last shared block, or the root key.
    pub(super) fn last_key(&self) -> BlockKey {
        self.keys.last().copied().unwrap_or_else(|| self.prompt.scheme().root())
    }
}

/// A cache that stores sequences in blocks of one arena, allocated from one pool.
///
/// A step has four parts: [`grow`](Self::grow), which returns the slots of the new tokens;
/// [`write`](Self::write) in every layer; an [`Attend`](crate::Attend) over [`segment`](Self::segment); and
/// [`commit`](Self::commit), which shares the blocks that have become full. If a step fails halfway,
/// [`truncate`](Self::truncate) removes the new tokens.
///
/// # Order
/// Writes and copies are enqueued, but blocks are released immediately: by [`free`](Self::free),
/// [`truncate`](Self::truncate), [`copy_on_write`](Self::copy_on_write), a swap, or an eviction. The next
/// holder of a block may get it while work on its old contents is still in progress. Therefore the caller
/// MUST send all work on an arena to one stream. If there are several streams, a stream MUST wait for an
/// event from every stream that used a block before writing to that block again ([`Stream::wait_for`]). This
/// also applies to the arena that sequences are swapped to.
///
/// On a quantised arena (`format: "int8:32".parse()?` in the shape) the cache works in the same way: writes
/// quantise, and attention dequantises.
///
/// ```
/// use std::sync::Arc;
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{
///     Backend, BlockOrder, BlockPool, DType, KeyScope, KvArena, KvLayout, KvShape, MemoryKind, PagedKvCache,
///     PromptKeys, WriteSlots,
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
/// let prompt = PromptKeys::new(root, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 4);
/// let (first, cached, slots) = cache.admit(&prompt, 10)?;
/// assert_eq!((cached, slots.len()), (0, 10));
/// cache.commit(first, prompt.tokens())?;
///
/// // Another prompt with the same beginning: a block is found by its key.
/// let prompt = PromptKeys::new(root, &[1, 2, 3, 4, 5, 6, 77, 78], 4);
/// let (second, cached) = cache.create_with_prefix(&prompt)?;
/// assert_eq!(cached, 4);
/// let slots = cache.grow(second, 4)?;
/// cache.commit(second, &prompt.tokens()[cached..])?;
///
/// // Two answers to the prompt (parallel sampling). One of them is rolled back by a token (speculative
/// // decoding).
/// cache.grow(second, 1)?;
/// let twin = cache.fork(second)?;
/// cache.copy_on_write(&[second, twin], stream.as_ref())?;
/// let mut slots = WriteSlots::default();
/// cache.grow_batch(&[(second, 2), (twin, 2)], &mut slots)?;
/// assert_eq!(slots.len(), 4);
/// cache.truncate(twin, 10)?;
/// assert_eq!((cache.len(second)?, cache.len(twin)?), (11, 10));
///
/// // Make room: the first sequence waits in host memory and comes back.
/// let layout = KvLayout::new(KvShape { num_blocks: 8, ..cache.arena().layout().shape().clone() })?;
/// let host = KvArena::allocate(backend.as_ref(), MemoryKind::Pinned, Arc::new(layout))?;
/// let waiting = cache.swap_out(first, stream.as_ref(), &host, &BlockPool::new(0..8)?)?;
/// let first = cache.swap_in(&waiting, stream.as_ref())?;
/// assert_eq!(cache.len(first)?, 10);
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug)]
pub struct PagedKvCache {
    pool: KvPool,
    pub(super) sequences: HashMap<SequenceId, Sequence>,
    pub(super) next: u64,
    /// Number of batches so far.
    pub(super) batches: u64,
    /// Buffer for a batch's slots, reused between batches.
    pub(super) minted: Vec<i64>,
}

impl PagedKvCache {
    /// Creates a cache over the blocks of `pool`.
    ///
    /// # Errors
    /// Returns [`Error::TooLarge`] if the pool has blocks that are not in the arena.
    pub fn new(arena: KvArena, pool: BlockPool) -> Result<Self> {
        let (sequences, minted) = (HashMap::new(), Vec::new());
        Ok(Self { pool: KvPool::new(arena, pool)?, sequences, next: 0, batches: 0, minted })
    }

    /// Returns the arena of the keys and values.
    pub fn arena(&self) -> &KvArena {
        self.pool.arena()
    }

    /// Returns the pool of the cache's blocks.
    pub fn pool(&self) -> &BlockPool {
        self.pool.blocks()
    }

    /// Returns the arena and the pool, for code that allocates blocks outside sequences.
    pub fn kv_pool(&self) -> &KvPool {
        &self.pool
    }

    /// Returns the number of live sequences.
    pub fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Creates a sequence without a shared prefix.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if the block size is 0, which no [`KvLayout`](crate::KvLayout) allows.
    pub fn create(&mut self, start: SequenceStart) -> Result<SequenceId> {
        let sequence = self.empty(start)?;
        Ok(self.insert(sequence))
    }

    /// Returns a sequence without tokens.
    pub(super) fn empty(&self, start: SequenceStart) -> Result<Sequence> {
        let table = BlockTable::new(self.pool(), self.block_size())?;
        Ok(Sequence { table, start, chain: None, batch: 0 })
    }

    /// Creates a sequence for a prompt. The sequence shares the prompt's cached full blocks with earlier
    /// sequences.
    ///
    /// Returns the sequence's ID and the number of prompt tokens that are already cached. At least one token
    /// is left to compute, because the answer continues from its logits.
    ///
    /// # Errors
    /// Returns the errors of [`create`](Self::create), and [`Error::Mismatch`] if the keys were made for
    /// another block size.
    pub fn create_with_prefix(&mut self, prompt: &PromptKeys) -> Result<(SequenceId, usize)> {
        self.check_prompt(prompt)?;
        let sequence = self.begun(prompt, 0, self.pool().lookup_chain(prompt.findable()))?;
        let cached = sequence.table.len();
        Ok((self.insert(sequence), cached))
    }

    /// Returns a sequence that begins with cached blocks of a prompt. The first `gone` blocks are freed, and
    /// `shared` holds the next blocks.
    pub(super) fn begun(&self, prompt: &PromptKeys, gone: usize, shared: SharedBlocks) -> Result<Sequence> {
        let chain = Some(KeyChain::new(prompt.clone(), gone + shared.len()));
        let table = BlockTable::after_freed(gone, shared, self.block_size())?;
        Ok(Sequence { table, start: SequenceStart::default(), chain, batch: 0 })
    }

    /// Creates a sequence for a prompt, with slots for its first `piece` uncached tokens (fewer if the prompt
    /// is shorter), in one step that either succeeds or changes nothing. Returns the sequence's ID, the
    /// number of cached tokens, and the slots. Unlike [`create_with_prefix`](Self::create_with_prefix), this
    /// leaves the pool's watermark for running sequences.
    ///
    /// # Errors
    /// Returns [`Error::OutOfBlocks`] if there are not enough blocks. Nothing changes in that case, not even
    /// the eviction order. Returns [`Error::Mismatch`] if the keys were made for another block size.
    pub fn admit(&mut self, prompt: &PromptKeys, piece: usize) -> Result<(SequenceId, usize, WriteSlots)> {
        self.check_prompt(prompt)?;
        let (cached, sequence, slots) = self.admitted(prompt, 0..prompt.findable().len(), piece)?;
        Ok((self.insert(sequence), cached, slots))
    }

    /// Returns the number of cached tokens, a sequence and its slots, as for [`admit`](Self::admit). The
    /// sequence holds the known blocks in `found`, and the blocks before them are freed.
    pub(super) fn admitted(
        &self,
        prompt: &PromptKeys,
        found: Range<usize>,
        piece: usize,
    ) -> Result<(usize, Sequence, WriteSlots)> {
        let (len, block_size, gone) = (prompt.tokens().len(), self.block_size(), found.start);
        let most = piece.min(len).div_ceil(block_size);
        let keys = &prompt.findable()[found];
        let (shared, fresh) = self.pool().admit_piece(keys, len.div_ceil(block_size) - gone, most)?;
        let mut sequence = self.begun(prompt, gone, shared)?;
        let cached = sequence.table.len();
        sequence.table.supply(fresh)?;
        let slots = sequence.table.grow(piece.min(len - cached))?;
        Ok((cached, sequence, slots))
    }

    pub(super) fn check_prompt(&self, prompt: &PromptKeys) -> Result<()> {
        same("block size of a prompt's keys", self.block_size(), prompt.block_size())
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

    /// Reserves slots for `tokens` more tokens, and returns them.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence, and [`Error::OutOfBlocks`] if there
    /// are not enough blocks. The sequence is unchanged in these cases.
    pub fn grow(&mut self, id: SequenceId, tokens: usize) -> Result<WriteSlots> {
        self.get_mut(id)?.table.grow(tokens)
    }

    /// Removes the tokens past `len` and frees their blocks, for example after a speculative rollback or a
    /// failed step.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence, [`Error::TooLarge`] if `len` exceeds
    /// the length of the sequence, and [`Error::SharedBlock`] if `len` is inside a block that others can find
    /// by its key. The sequence is unchanged in these cases.
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

    /// Frees a sequence's blocks whose tokens all come before `token`. If the sequence shares its blocks,
    /// frees only blocks that [`commit`](Self::commit) has already registered. Later tokens must not attend
    /// to the freed tokens, which must have left the window of every layer. Returns the number of freed
    /// blocks. Registered blocks stay cached, and blocks with other holders stay in use. Afterwards,
    /// [`segment`](Self::segment) begins with the first token that is still held.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence.
    pub fn free_before(&mut self, id: SequenceId, token: usize) -> Result<usize> {
        let block_size = self.block_size();
        let Sequence { table, chain, .. } = self.get_mut(id)?;
        // Blocks must get their keys before they are freed.
        let keyed = table.keyed_blocks() * block_size;
        Ok(table.free_before(if chain.is_some() { token.min(keyed) } else { token }))
    }

    /// Writes new rows of a sequence to the given slots in one layer: `k` is `[rows, k_heads, k_dim]`, `v` is
    /// `[rows, v_heads, v_dim]`.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence, and [`Error::PermitVoid`] if one of
    /// the slots' blocks was shared since the slots were issued, or the sequence was truncated or freed. Also
    /// returns the stream's errors.
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
        stream.scatter(&Scatter::new(self.arena(), layer, k, v, slots))
    }

    /// Records `tokens`, which must be the tokens written since the last commit, and shares the blocks that
    /// have become full. Does nothing for a sequence without a key scheme.
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
            let keys = chain.next_keys(full, block_size);
            sequence.table.share_full(Some(chain.last_key()), &keys)?;
            chain.keys.extend(keys);
            chain.pending.drain(..full);
        }
        Ok(())
    }

    /// Sets the retention of a sequence's shared blocks, which applies when the blocks have no holder left.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence.
    pub fn retain(&self, id: SequenceId, retention: Retention) -> Result<()> {
        self.get(id)?.table.shared().retain(retention);
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

    /// Returns whether a sequence has no tokens.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence.
    pub fn is_empty(&self, id: SequenceId) -> Result<bool> {
        Ok(self.get(id)?.table.is_empty())
    }

    /// Returns the blocks that a sequence holds, in order.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence.
    pub fn blocks(&self, id: SequenceId) -> Result<&Arc<[BlockId]>> {
        Ok(self.get(id)?.table.ids())
    }

    /// Returns the slots of the given tokens of a sequence.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence, and [`Error::OutOfRange`] if a
    /// token is past the end of the sequence.
    pub fn slots(&self, id: SequenceId, tokens: Range<usize>) -> Result<SlotMapping> {
        let table = &self.get(id)?.table;
        tokens.map(|token| table.slot(token)).collect::<Result<Vec<_>>>().map(Into::into)
    }

    /// Returns the slots of the given tokens of a sequence, with a new permit to write to them.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence, [`Error::OutOfRange`] if a token is
    /// past the end of the sequence, and [`Error::NotOwned`] if a token is in a shared block.
    pub fn write_slots(&self, id: SequenceId, tokens: Range<usize>) -> Result<WriteSlots> {
        self.get(id)?.table.write_slots(tokens)
    }

    /// Returns all tokens that a sequence still holds as one segment.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSequence`] if there is no such sequence.
    pub fn segment(&self, id: SequenceId) -> Result<Segment> {
        let Sequence { table, start, .. } = self.get(id)?;
        let (first, ids) = (table.first(), Arc::clone(table.ids()));
        Ok(Segment::new(ids, table.len() - first, start.logical + first, start.position + first as i64))
    }
}
