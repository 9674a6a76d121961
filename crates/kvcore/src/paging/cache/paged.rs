//! The paged cache: sequences whose tokens lie in blocks, with prefixes shared between them.

use std::collections::HashMap;
use std::sync::Arc;

use super::partial::Continuations;
use super::{Error, Result, SequenceId, SequenceStart, SlotMapping};
use crate::base::BlockId;
use crate::device::{CopyBlocks, KvArena, Scatter, Segment, Stream, TensorView};
use crate::paging::{BlockKey, BlockPool, BlockTable, KeyScheme};

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) table: BlockTable,
    pub(super) start: SequenceStart,
    /// For sequences that share their blocks.
    pub(super) chain: Option<Chain>,
}

/// What a sequence's blocks are registered under.
#[derive(Debug, Clone)]
pub(super) struct Chain {
    pub(super) scheme: KeyScheme,
    /// Keys of the shared blocks, one each.
    pub(super) keys: Vec<BlockKey>,
    /// Committed tokens after the shared blocks.
    pub(super) pending: Vec<u32>,
}

impl Chain {
    /// The key of the last shared block, or the root.
    pub(super) fn last_key(&self) -> BlockKey {
        self.keys.last().copied().unwrap_or_else(|| self.scheme.root())
    }
}

/// Sequences in blocks of one arena and pool.
///
/// The usual step is [`grow`](Self::grow), which gives slots for the new tokens;
/// [`write`](Self::write) in every layer; an attend over [`segment`](Self::segment); and
/// [`commit`](Self::commit), which shares blocks that became full. When a step fails half-way,
/// [`truncate`](Self::truncate) takes the new tokens back.
///
/// # Order
/// Writes and copies are enqueued, while blocks are let go at once: by [`free`](Self::free),
/// [`truncate`](Self::truncate), [`copy_on_write`](Self::copy_on_write), a swap, an eviction. The next
/// holder of a block may have it while work on its old contents is still under way. Therefore all work on
/// an arena goes to one stream, or to streams of which the one that writes blocks again waits for an event
/// of those that used them before ([`Stream::wait_for`]). The same holds for the arena that sequences are
/// swapped to.
///
/// On a quantised arena (`format: "int8:32".parse()?` in the shape) all of this holds unchanged: writes
/// quantise, an attend dequantises.
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
/// let mut cache = PagedKvCache::new(arena, BlockPool::new(0..32)?)?.with_partial_reuse();
/// let root = KeyScope::new("model", b"weights").tenant_salt(b"alice").root();
///
/// // A prompt of ten tokens; two full blocks of it can be found from now on.
/// let (first, cached, slots) = cache.admit(root, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10])?;
/// assert_eq!((cached, slots.len()), (0, 10));
/// cache.commit(first, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10])?;
///
/// // Another one with the same beginning: a block by its key, two tokens by a copy.
/// let prompt = [1, 2, 3, 4, 5, 6, 77, 78];
/// let (second, cached) = cache.create_with_prefix(root, &prompt)?;
/// let copied = cache.reuse_partial(second, &prompt[cached..], stream.as_ref())?;
/// assert_eq!((cached, copied), (4, 2));
/// let slots = cache.grow(second, 2)?;
/// cache.commit(second, &prompt[6..])?;
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
    arena: KvArena,
    pool: BlockPool,
    pub(super) sequences: HashMap<SequenceId, Sequence>,
    next: u64,
    /// For caches that copy the common part of blocks.
    pub(super) continuations: Option<Continuations>,
}

impl PagedKvCache {
    /// A cache over the blocks of `pool`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] when the pool has blocks that the arena lacks.
    pub fn new(arena: KvArena, pool: BlockPool) -> Result<Self> {
        let (end, limit) = (pool.range().end as usize, arena.layout().shape().num_blocks);
        if end > limit {
            return Err(Error::range("last block of the pool", end, limit + 1));
        }
        Ok(Self { arena, pool, sequences: HashMap::new(), next: 0, continuations: None })
    }

    /// Keys and values.
    pub fn arena(&self) -> &KvArena {
        &self.arena
    }

    /// The blocks.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Live sequences.
    pub fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Live sequences, the oldest first.
    pub fn sequence_ids(&self) -> impl DoubleEndedIterator<Item = SequenceId> + use<> {
        let mut ids: Vec<SequenceId> = self.sequences.keys().copied().collect();
        ids.sort_unstable();
        ids.into_iter()
    }

    /// A new sequence that shares nothing.
    ///
    /// # Errors
    /// [`Error::Zero`] for a block size of 0, which no [`KvLayout`](crate::KvLayout) has.
    pub fn create(&mut self, start: SequenceStart) -> Result<SequenceId> {
        let table = BlockTable::new(&self.pool, self.block_size())?;
        Ok(self.insert(Sequence { table, start, chain: None }))
    }

    /// A new sequence at the start of a prompt that shares full blocks with earlier ones.
    ///
    /// Returns its id and how many of `tokens` are cached already. At least one token is left to
    /// compute, so that there are logits to continue from.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_with_prefix(
        &mut self,
        scheme: impl Into<KeyScheme>,
        tokens: &[u32],
    ) -> Result<(SequenceId, usize)> {
        let (scheme, block_size) = (scheme.into(), self.block_size());
        let mut keys = scheme.keys(&tokens[..tokens.len().saturating_sub(1)], block_size);
        let shared = self.pool.lookup_chain(&keys);
        keys.truncate(shared.len());
        let table = BlockTable::with_prefix(shared, block_size)?;
        let cached = table.len();
        let chain = Some(Chain { scheme, keys, pending: Vec::new() });
        Ok((self.insert(Sequence { table, start: SequenceStart::default(), chain }), cached))
    }

    /// As [`create_with_prefix`](Self::create_with_prefix) with room for all of `tokens`, in one step that
    /// takes all or nothing: returns the id, how many tokens are cached, and the slots of the others. The
    /// pool's watermark stays free for sequences that run already.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`]; nothing has changed then, not even which blocks go next.
    pub fn admit(
        &mut self,
        scheme: impl Into<KeyScheme>,
        tokens: &[u32],
    ) -> Result<(SequenceId, usize, SlotMapping)> {
        let (scheme, block_size) = (scheme.into(), self.block_size());
        let mut keys = scheme.keys(&tokens[..tokens.len().saturating_sub(1)], block_size);
        let blocks = tokens.len().div_ceil(block_size);
        let (shared, fresh) = self.pool.admit_prefix(&keys, blocks, 0)?;
        keys.truncate(shared.len());
        let mut table = BlockTable::with_prefix(shared, block_size)?;
        let cached = table.len();
        table.supply(fresh)?;
        let slots = table.grow(tokens.len() - cached)?.into();
        let chain = Some(Chain { scheme, keys, pending: Vec::new() });
        let id = self.insert(Sequence { table, start: SequenceStart::default(), chain });
        Ok((id, cached, slots))
    }

    /// A second sequence over the same tokens (beam search, parallel sampling). Both share all blocks;
    /// before either grows, [`copy_on_write`](Self::copy_on_write) gives it a last block of its own.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        let Sequence { table, start, chain } = self.get_mut(id)?;
        let twin = Sequence { table: table.fork()?, start: *start, chain: chain.clone() };
        Ok(self.insert(twin))
    }

    /// Makes the place of the next token writable: if the last block is partial and shared, it is copied
    /// on `stream` into a block of the sequence's own. Returns whether a copy was made; without a fork
    /// there is none.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`]; nothing has changed then.
    pub fn copy_on_write(&mut self, id: SequenceId, stream: &dyn Stream) -> Result<bool> {
        let arena = self.arena.clone();
        let Some(copy) = self.get_mut(id)?.table.unshare_tail()? else { return Ok(false) };
        let pairs = Arc::new([(copy.source.ids()[0], copy.target)]);
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
        self.arena.layout().shape().block_size
    }

    pub(super) fn get(&self, id: SequenceId) -> Result<&Sequence> {
        self.sequences.get(&id).ok_or(Error::UnknownSequence(id.0))
    }

    pub(super) fn get_mut(&mut self, id: SequenceId) -> Result<&mut Sequence> {
        self.sequences.get_mut(&id).ok_or(Error::UnknownSequence(id.0))
    }

    /// Room for `tokens` more tokens; returns their slots.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`]; the sequence is as before then.
    pub fn grow(&mut self, id: SequenceId, tokens: usize) -> Result<SlotMapping> {
        Ok(self.get_mut(id)?.table.grow(tokens)?.into())
    }

    /// The same, in place of the slots of the step before: a step of decoding allocates nothing unless it takes a
    /// block, provided that no operation of the last step is held any more.
    ///
    /// # Errors
    /// As [`grow`](Self::grow); `slots` are as before then.
    pub fn grow_into(&mut self, id: SequenceId, tokens: usize, slots: &mut SlotMapping) -> Result<()> {
        slots.refill(self.get_mut(id)?.table.extend(tokens)?);
        Ok(())
    }

    /// Forgets tokens past `len` and frees whole blocks (speculative rollback, a failed step).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::OutOfRange`] for more tokens than there are, [`Error::SharedBlock`]
    /// for a length inside a block that others find by its key; the sequence is as before then.
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

    /// Scatters new rows of a sequence in one layer: `k` `[rows, k_heads, k_dim]`, `v` `[rows, v_heads, v_dim]`.
    ///
    /// # Errors
    /// [`Error::NotOwned`] for a slot outside the blocks that this sequence fills itself: shared
    /// blocks and other sequences' blocks are not written. The kernel alone makes no such check.
    pub fn write(
        &self,
        id: SequenceId,
        stream: &dyn Stream,
        layer: usize,
        k: TensorView,
        v: TensorView,
        slots: &SlotMapping,
    ) -> Result<()> {
        if let Err(slot) = self.get(id)?.table.may_write(slots.slots()) {
            return Err(Error::NotOwned { slot, sequence: Some(id.0) });
        }
        stream.scatter(&Scatter { arena: self.arena.clone(), layer, k, v, slots: Arc::clone(slots.slots()) })
    }

    /// Shares blocks that `tokens`, written since the last commit, made full. Without a prefix root
    /// this does nothing.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for more tokens than were grown.
    pub fn commit(&mut self, id: SequenceId, tokens: &[u32]) -> Result<()> {
        let block_size = self.block_size();
        let sequence = self.sequences.get_mut(&id).ok_or(Error::UnknownSequence(id.0))?;
        if let Some(chain) = &mut sequence.chain {
            let held = sequence.table.keyed_blocks() * block_size + chain.pending.len();
            let room = sequence.table.len().saturating_sub(held);
            if tokens.len() > room {
                return Err(Error::range("tokens to commit", tokens.len(), room + 1));
            }
            chain.pending.extend_from_slice(tokens);
            let full = chain.pending.len() / block_size * block_size;
            let parent = chain.last_key();
            let start = chain.keys.len() * block_size;
            let keys = chain.scheme.extend(&parent, start, &chain.pending[..full], block_size);
            sequence.table.share_full(Some(parent), &keys)?;
            if let Some(known) = &mut self.continuations {
                let parents = std::iter::once(&parent).chain(&keys);
                for ((parent, key), tokens) in parents.zip(&keys).zip(chain.pending.chunks(block_size)) {
                    known.add(*parent, *key, tokens, &self.pool);
                }
            }
            chain.keys.extend(keys);
            chain.pending.drain(..full);
        }
        Ok(())
    }

    /// Ends a sequence. Its own blocks are free, its shared ones cached.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn free(&mut self, id: SequenceId) -> Result<()> {
        self.sequences.remove(&id).map(drop).ok_or(Error::UnknownSequence(id.0))
    }

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn len(&self, id: SequenceId) -> Result<usize> {
        Ok(self.get(id)?.table.len())
    }

    /// Whether a sequence has no token.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn is_empty(&self, id: SequenceId) -> Result<bool> {
        Ok(self.get(id)?.table.is_empty())
    }

    /// Blocks of a sequence in order.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn blocks(&self, id: SequenceId) -> Result<&Arc<[BlockId]>> {
        Ok(self.get(id)?.table.ids())
    }

    /// Slots of some tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] past the end.
    pub fn slots(&self, id: SequenceId, tokens: std::ops::Range<usize>) -> Result<SlotMapping> {
        let table = &self.get(id)?.table;
        tokens.map(|token| table.slot(token)).collect::<Result<Vec<_>>>().map(Into::into)
    }

    /// All tokens of a sequence as one segment.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn segment(&self, id: SequenceId) -> Result<Segment> {
        let Sequence { table, start, .. } = self.get(id)?;
        Ok(Segment::new(Arc::clone(table.ids()), table.len(), start.logical, start.position))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{BlockOrder, DType, KvLayout, KvShape, MemoryKind};
    use crate::device::Storage;
    use crate::paging::KeyScope;

    #[derive(Debug)]
    struct Nothing(usize, u64);

    impl Storage for Nothing {
        fn len(&self) -> usize {
            self.0
        }
        fn address(&self) -> u64 {
            self.1
        }
        fn kind(&self) -> MemoryKind {
            MemoryKind::System
        }
        fn as_any(&self) -> &dyn std::any::Any {
            self
        }
    }

    fn cache(blocks: usize) -> PagedKvCache {
        let layout = KvLayout::new(KvShape {
            num_layers: 1,
            num_blocks: blocks,
            block_size: 4,
            k_heads: 1,
            v_heads: 1,
            k_dim: 2,
            v_dim: 2,
            format: DType::F32.into(),
            order: BlockOrder::TokenMajor,
        })
        .unwrap();
        let (k, v) = (Arc::new(Nothing(layout.k_bytes(), 0)), Arc::new(Nothing(layout.v_bytes(), 4096)));
        let arena = KvArena::from_storage(k, v, Arc::new(layout)).unwrap();
        PagedKvCache::new(arena, BlockPool::new(0..blocks as u32).unwrap()).unwrap()
    }

    fn fill(cache: &mut PagedKvCache, root: BlockKey, tokens: &[u32]) -> (SequenceId, usize) {
        let (id, cached) = cache.create_with_prefix(root, tokens).unwrap();
        cache.grow(id, tokens.len() - cached).unwrap();
        cache.commit(id, &tokens[cached..]).unwrap();
        (id, cached)
    }

    #[test]
    fn a_prefix_is_shared_block_by_block_and_one_token_is_left() {
        let mut cache = cache(8);
        let root = KeyScope::new("m", b"").root();
        let tokens: Vec<u32> = (0..8).collect();
        let (a, cached) = fill(&mut cache, root, &tokens);
        assert_eq!(cached, 0);
        let (b, cached) = fill(&mut cache, root, &tokens);
        assert_eq!(cached, 4, "the last block is computed again, so that there are logits");
        assert_eq!(
            cache.blocks(a).unwrap()[..],
            cache.blocks(b).unwrap()[..],
            "and found to be the known one"
        );
        let (c, cached) = fill(&mut cache, root, &[0, 1, 2, 3, 9, 9]);
        assert_eq!((cached, cache.pool().counts().shared), (4, 2));
        for id in [a, b, c] {
            cache.free(id).unwrap();
        }
        assert_eq!(cache.pool().counts().cached, 2);
        cache.pool().check_invariants().unwrap();
    }

    #[test]
    fn of_a_cached_prefix_less_may_be_taken_and_what_was_known_stays() {
        let mut cache = cache(8);
        let root = KeyScope::new("m", b"").root();
        let tokens: Vec<u32> = (0..10).collect();
        let known = cache.fill_prefix(Some(root), &tokens).unwrap().finish().unwrap();
        for (most, taken) in [(10, 10), (9, 8), (8, 8), (5, 4), (0, 0)] {
            let mut fill = cache.fill_prefix(Some(root), &tokens).unwrap();
            fill.take_at_most(most).unwrap();
            assert_eq!((fill.cached(), fill.slots().len(), fill.segment().len), (taken, 10 - taken, 10));
            assert_eq!(fill.segment().blocks[..taken / 4], known.segment().blocks[..taken / 4]);
            let filled = fill.finish().unwrap();
            assert_eq!(filled.segment().blocks, known.segment().blocks, "what is known under its key");
        }
        // Others hold the prefix and all other blocks: there is no room for blocks of its own.
        let mut fill = cache.fill_prefix(Some(root), &tokens).unwrap();
        let taken = cache.pool().allocate(5).unwrap();
        assert!(matches!(fill.take_at_most(0), Err(Error::OutOfBlocks { .. })));
        drop(fill);
        assert_eq!(known.len(), 10);
        // Nobody else holds the prefix: its blocks are evicted for it.
        drop(known);
        let mut fill = cache.fill_prefix(Some(root), &tokens).unwrap();
        fill.take_at_most(0).unwrap();
        assert_eq!((fill.cached(), fill.slots().len()), (0, 10));
        drop((fill, taken));
        assert_eq!(cache.pool().counts().free + cache.pool().counts().cached, 8);
        cache.pool().check_invariants().unwrap();
        let id = cache.create(SequenceStart::default()).unwrap();
        cache.free(id).unwrap();
    }

    #[test]
    fn a_filled_prefix_is_found_to_the_token() {
        let mut cache = cache(8);
        let root = KeyScope::new("m", b"").root();
        let tokens: Vec<u32> = (0..6).collect();
        let fill = cache.fill_prefix(Some(root), &tokens).unwrap();
        assert_eq!((fill.cached(), fill.slots().len()), (0, 6));
        let first = fill.finish().unwrap();
        assert_eq!((first.len(), first.segment().blocks.len()), (6, 2));
        let again = cache.fill_prefix(Some(root), &tokens).unwrap();
        assert_eq!((again.cached(), again.slots().len()), (6, 0));
        let longer = cache.fill_prefix(Some(root), &[0, 1, 2, 3, 4, 5, 6]).unwrap();
        assert_eq!(longer.cached(), 4, "a partial block is only for exactly its tokens");
        let whole = cache.fill_prefix(Some(root), &tokens[..4]).unwrap();
        assert_eq!(whole.cached(), 4);
        let (sequence, cached) = cache.create_with_prefix(root, &tokens).unwrap();
        assert_eq!(cached, 4, "ordinary prompts share the full blocks");
        cache.free(sequence).unwrap();
        drop((first, again.finish().unwrap(), longer, whole));
        cache.pool().check_invariants().unwrap();
        assert_eq!(cache.pool().counts().cached, 2);
        drop(cache.fill_prefix(None, &tokens).unwrap().finish().unwrap());
        assert_eq!(cache.pool().counts().cached, 2, "without a root nothing is found or kept");
    }

    #[test]
    fn after_a_rollback_blocks_are_registered_under_what_they_hold() {
        let root = KeyScope::new("m", b"").root();
        let mut cache = cache(8);
        let (id, _) = fill(&mut cache, root, &[0, 1, 2, 3, 4, 5]);
        assert!(cache.commit(id, &[9]).is_err(), "a token that was never grown");
        cache.truncate(id, 5).unwrap();
        cache.grow(id, 3).unwrap();
        cache.commit(id, &[7, 8, 9]).unwrap();
        let (other, cached) = cache.create_with_prefix(root, &[0, 1, 2, 3, 4, 7, 8, 9, 0]).unwrap();
        assert_eq!(cached, 8);
        let (stale, cached) = cache.create_with_prefix(root, &[0, 1, 2, 3, 4, 5, 7, 8, 0]).unwrap();
        assert_eq!(cached, 4, "what was rolled back is in no key");
        // below a shared block: the chain goes back with the table
        cache.truncate(id, 4).unwrap();
        cache.grow(id, 4).unwrap();
        cache.commit(id, &[6, 6, 6, 6]).unwrap();
        let (again, cached) = cache.create_with_prefix(root, &[0, 1, 2, 3, 6, 6, 6, 6, 0]).unwrap();
        assert_eq!(cached, 8);
        for id in [id, other, stale, again] {
            cache.free(id).unwrap();
        }
        cache.pool().check_invariants().unwrap();
    }

    #[test]
    fn a_failed_grow_changes_nothing() {
        let mut cache = cache(2);
        let id = cache.create(SequenceStart::default()).unwrap();
        cache.grow(id, 3).unwrap();
        assert!(matches!(cache.grow(id, 6), Err(Error::OutOfBlocks { asked: 2, free: 1, .. })));
        assert_eq!((cache.len(id).unwrap(), cache.pool().counts().free), (3, 1));
        cache.free(id).unwrap();
        assert_eq!(cache.free(id), Err(Error::UnknownSequence(0)));
        assert_eq!(cache.grow(id, 1), Err(Error::UnknownSequence(0)));
        cache.pool().check_invariants().unwrap();
    }
}
