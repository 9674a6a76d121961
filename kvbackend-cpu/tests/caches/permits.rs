//! Checks that no descriptor can write to a shared block, not even with a permit issued before the block was
//! shared.

use std::sync::Arc;

use kvbackend_cpu::Execution::{self, Deferred, Immediate};
use kvcore::{
    Backend, BlockId, BlockKey, BlockPool, BlockTable, CopyBlocks, DType, Dequantize, Error, KvArena,
    KvCache, KvFormat, KvLayout, KvShape, MemoryKind, MutableBlocks, PagedKvCache, Quantize, Result, Rope,
    RopeConfig, RotateKeys, Rotation, Scatter, SequenceStart, StaticKvCache, SwapBlocks, WritePairs,
    WriteSlots,
};
use rstest::rstest;

use crate::common::{DIM, HEADS, Memory};

const BLOCK: usize = 4;

/// Memory with an arena of every kind. A guard holds block 1 of the pool for writing.
struct Lab {
    memory: Memory,
    dense: KvArena,
    other: KvArena,
    quantised: KvArena,
    own: MutableBlocks,
}

impl Lab {
    fn new(execution: Execution) -> Self {
        let memory = Memory::new(execution);
        let dense = memory.arena(8, BLOCK);
        let arena = |format: KvFormat| {
            let shape = KvShape { format, ..dense.layout().shape().clone() };
            let layout = Arc::new(KvLayout::new(shape).unwrap());
            KvArena::allocate(memory.backend.as_ref(), MemoryKind::Device, layout).unwrap()
        };
        let (other, quantised) = (arena(DType::F32.into()), arena(KvFormat::Int8 { group: DIM }));
        let own = BlockPool::new(1..2).unwrap().allocate(1).unwrap();
        Self { memory, dense, other, quantised, own }
    }

    fn scatter(&self, slots: &WriteSlots) -> Result<()> {
        let rows = self.memory.tensor(&[slots.len(), HEADS, DIM], 9.0);
        let (arena, slots) = (self.dense.clone(), slots.clone());
        let op = Scatter { arena, layer: 0, k: rows.clone(), v: rows, slots, rotation: None };
        self.memory.stream.scatter(&op)
    }

    /// Runs every operation that writes to explicitly listed blocks, and returns the results by name.
    fn copies(&self, pairs: &WritePairs) -> Vec<(&'static str, Result<()>)> {
        let stream = &self.memory.stream;
        let pairs = || pairs.clone();
        let rope = Arc::new(Rope::new(RopeConfig::new(2, 10_000.0), 64).unwrap());
        let rotation = Rotation { rope, delta: 3 };
        let (dense, other, quantised) = (&self.dense, &self.other, &self.quantised);
        let (src, dst) = (|arena: &KvArena| arena.clone(), |arena: &KvArena| arena.clone());
        vec![
            ("copy", stream.copy_blocks(&CopyBlocks { arena: dense.clone(), pairs: pairs() })),
            ("swap", stream.swap_blocks(&SwapBlocks { src: src(other), dst: dst(dense), pairs: pairs() })),
            (
                "rotate",
                stream.rotate_keys(&RotateKeys {
                    src: src(dense),
                    dst: dst(dense),
                    layer: 0,
                    pairs: pairs(),
                    rotation,
                }),
            ),
            ("quantise", stream.quantize(&Quantize { src: src(dense), dst: dst(quantised), pairs: pairs() })),
            (
                "dequantise",
                stream.dequantize(&Dequantize { src: src(quantised), dst: dst(dense), pairs: pairs() }),
            ),
        ]
    }
}

#[rstest]
fn permits_of_mutable_blocks_serve_every_descriptor(#[values(Immediate, Deferred)] execution: Execution) {
    let lab = Lab::new(execution);
    let slots = lab.own.write_slots(BLOCK, [4, 7, -1]).unwrap();
    lab.scatter(&slots).unwrap();
    for (what, result) in lab.copies(&lab.own.write_pairs([(BlockId(5), BlockId(1))]).unwrap()) {
        assert_eq!(result, Ok(()), "{what}");
    }
    lab.memory.stream.synchronize().unwrap();
}

#[rstest]
fn no_descriptor_writes_a_block_that_was_shared_after_its_permit(
    #[values(Immediate, Deferred)] execution: Execution,
) {
    let mut lab = Lab::new(execution);
    let slots = lab.own.write_slots(BLOCK, [4, 5]).unwrap();
    let pairs = lab.own.write_pairs([(BlockId(5), BlockId(1))]).unwrap();
    let own = std::mem::replace(&mut lab.own, BlockPool::new(7..8).unwrap().allocate(1).unwrap());
    let shared = own.share();
    let before = lab.memory.backend.counters();
    assert_eq!(lab.scatter(&slots), Err(Error::PermitVoid { what: "slots" }));
    for (what, result) in lab.copies(&pairs) {
        assert_eq!(result, Err(Error::PermitVoid { what: "blocks" }), "{what}");
    }
    lab.memory.stream.synchronize().unwrap();
    let since = lab.memory.backend.counters().since(&before);
    assert_eq!((since.scatter_bytes, since.block_copy_bytes, since.quantize_bytes), (0, 0, 0));
    drop(shared);
}

#[rstest]
fn permits_end_with_a_split_a_drop_and_a_rollback(#[values(Immediate, Deferred)] execution: Execution) {
    let lab = Lab::new(execution);
    let pool = BlockPool::new(0..6).unwrap();
    let void = Err(Error::PermitVoid { what: "slots" });
    let mut guard = pool.allocate(2).unwrap();
    let slots = guard.write_slots(BLOCK, [0]).unwrap();
    let rest = guard.split_off(1).unwrap();
    assert_eq!(lab.scatter(&slots), void, "a block of the guard went another way");
    assert!(matches!(guard.write_slots(BLOCK, [BLOCK as i64]), Err(Error::NotOwned { block: BlockId(1) })));
    drop((guard, rest));

    let mut table = BlockTable::new(&pool, BLOCK).unwrap();
    let (first, more) = (table.grow(3).unwrap(), table.grow(4).unwrap());
    lab.scatter(&WriteSlots::concat([&first, &more].into_iter())).unwrap();
    table.truncate(2).unwrap();
    assert_eq!((lab.scatter(&first), lab.scatter(&more)), (void.clone(), void.clone()));
    let twin = table.fork().unwrap();
    assert!(matches!(table.grow(1), Err(Error::SharedBlock { .. })));
    drop(twin);
    table.unshare_tail().unwrap();
    let last = table.grow(1).unwrap();
    lab.scatter(&last).unwrap();
    drop(table);
    assert_eq!(lab.scatter(&last), void, "the sequence has ended");
}

#[test]
fn permits_end_when_another_guard_takes_the_blocks() {
    let lab = Lab::new(Immediate);
    let pool = BlockPool::new(0..6).unwrap();
    let (mut first, second) = (pool.allocate(1).unwrap(), pool.allocate(2).unwrap());
    let slots = |i: usize| second.write_slots(BLOCK, [(second.ids()[i].index() * BLOCK) as i64]).unwrap();
    let before = [slots(0), slots(1)];
    first.append(second).unwrap();
    let shared = first.share();
    for slots in before {
        assert_eq!(lab.scatter(&slots), Err(Error::PermitVoid { what: "slots" }));
    }
    drop(shared);
}

/// Returns the keys of the first `n` blocks of a prompt.
fn keys(n: u32) -> Vec<BlockKey> {
    (0..n).map(|block| crate::sharing::root().child(&[block])).collect()
}

#[rstest]
fn slots_ahead_survive_a_commit_of_earlier_blocks(#[values(Immediate, Deferred)] execution: Execution) {
    let lab = Lab::new(execution);
    let void = Err(Error::PermitVoid { what: "slots" });
    let mut table = BlockTable::new(&BlockPool::new(0..6).unwrap(), BLOCK).unwrap();
    let (first, second, both) = (0..BLOCK, BLOCK..2 * BLOCK, BLOCK - 1..BLOCK + 1);
    table.grow(2 * BLOCK).unwrap();
    let slots = |table: &BlockTable, tokens| table.write_slots(tokens).unwrap();
    let (of_first, of_second) = (slots(&table, first), slots(&table, second));
    let of_both = slots(&table, both);
    let ahead = table.grow(3).unwrap();
    let joined = WriteSlots::concat([&of_first, &ahead].into_iter());
    table.share_full(None, &keys(1)).unwrap();
    assert_eq!(lab.scatter(&of_first), void, "its block is shared");
    assert_eq!((lab.scatter(&of_both), lab.scatter(&joined)), (void.clone(), void.clone()));
    assert_eq!((lab.scatter(&of_second), lab.scatter(&ahead)), (Ok(()), Ok(())));
    // The second commit also voids a permit that was issued after the first one.
    let again = slots(&table, BLOCK..BLOCK + 1);
    table.share_full(None, &keys(2)[1..]).unwrap();
    assert_eq!((lab.scatter(&of_second), lab.scatter(&again)), (void.clone(), void.clone()));
    assert_eq!(lab.scatter(&ahead), Ok(()));
    lab.memory.stream.synchronize().unwrap();
}

#[test]
fn slots_ahead_end_with_a_fork_a_rollback_a_copy_on_write_and_the_end_after_a_commit() {
    let lab = Lab::new(Immediate);
    let void = Err(Error::PermitVoid { what: "slots" });
    let pool = BlockPool::new(0..6).unwrap();
    let committed = || {
        let mut table = BlockTable::new(&pool, BLOCK).unwrap();
        table.grow(BLOCK).unwrap();
        let ahead = table.grow(2).unwrap();
        table.share_full(None, &keys(1)).unwrap();
        assert_eq!(lab.scatter(&ahead), Ok(()));
        (table, ahead)
    };
    let (mut table, ahead) = committed();
    let twin = table.fork().unwrap();
    assert_eq!(lab.scatter(&ahead), void, "two tables read the last block");
    drop(twin);
    assert!(table.unshare_tail().unwrap().is_none());
    let after = table.grow(1).unwrap();
    assert_eq!((lab.scatter(&ahead), lab.scatter(&after)), (void.clone(), Ok(())));
    let twin = table.fork().unwrap();
    let copy = table.unshare_tail().unwrap().unwrap();
    assert_eq!(lab.scatter(&after), void, "the table has another last block");
    drop((copy, twin, table));

    let (mut table, ahead) = committed();
    table.truncate(BLOCK + 1).unwrap();
    assert_eq!(lab.scatter(&ahead), void);
    // A block added after a rollback is not covered by any earlier permit.
    let new = table.grow(BLOCK).unwrap();
    assert_eq!((lab.scatter(&ahead), lab.scatter(&new)), (void.clone(), Ok(())));
    drop(table);
    assert_eq!((lab.scatter(&ahead), lab.scatter(&new)), (void.clone(), void));
}

#[rstest]
fn slots_of_a_draft_survive_the_commit_of_the_tokens_before(
    #[values(Immediate, Deferred)] execution: Execution,
) {
    let m = Memory::new(execution);
    let mut cache = PagedKvCache::new(m.arena(8, BLOCK), BlockPool::new(0..8).unwrap()).unwrap();
    let prompt = [1, 2, 3, 4];
    let (id, _, slots) = crate::sharing::admit(&mut cache, crate::sharing::root(), &prompt).unwrap();
    let draft = cache.grow(id, 3).unwrap();
    let rows = |slots: &WriteSlots| m.tensor(&[slots.len(), HEADS, DIM], 1.0);
    let write = |cache: &PagedKvCache, slots: &WriteSlots| {
        cache.write(id, m.stream.as_ref(), 0, rows(slots), rows(slots), slots)
    };
    write(&cache, &slots).unwrap();
    cache.commit(id, &prompt).unwrap();
    assert_eq!(write(&cache, &slots), Err(Error::PermitVoid { what: "slots" }));
    assert_eq!(write(&cache, &draft), Ok(()));
    cache.truncate(id, 6).unwrap();
    assert_eq!(write(&cache, &draft), Err(Error::PermitVoid { what: "slots" }), "one token was refused");
}

#[test]
fn a_rollback_inside_a_block_ends_the_slots_of_the_tokens_taken_back() {
    let lab = Lab::new(Immediate);
    let mut table = BlockTable::new(&BlockPool::new(0..6).unwrap(), BLOCK).unwrap();
    let drafted = table.grow(3).unwrap();
    table.truncate(3).unwrap();
    lab.scatter(&drafted).unwrap();
    table.truncate(2).unwrap();
    let accepted = table.grow(1).unwrap();
    assert_eq!(lab.scatter(&drafted), Err(Error::PermitVoid { what: "slots" }), "it holds the accepted slot");
    lab.scatter(&accepted).unwrap();
}

#[test]
fn slots_in_blocks_of_another_size_are_refused() {
    let lab = Lab::new(Immediate);
    let pool = BlockPool::new(0..6).unwrap();
    let own = pool.allocate(1).unwrap();
    // If blocks have 1000 slots, slot 16 is in block 0, which the guard holds. In the arena, it is in block
    // 4.
    let slots = own.write_slots(1000, [16]).unwrap();
    let other = Error::mismatch("block_size of the arena that the slots address", 1000_usize, BLOCK);
    assert_eq!(lab.scatter(&slots), Err(other.clone()));
    let mut table = BlockTable::new(&pool, 1000).unwrap();
    assert_eq!(lab.scatter(&table.grow(20).unwrap()), Err(other));
}

#[rstest]
fn slots_of_a_sequence_end_with_its_commit_and_its_end(#[values(Immediate, Deferred)] execution: Execution) {
    let m = Memory::new(execution);
    let mut cache = PagedKvCache::new(m.arena(8, BLOCK), BlockPool::new(0..8).unwrap()).unwrap();
    let rows = |slots: &WriteSlots| m.tensor(&[slots.len(), HEADS, DIM], 1.0);
    let write = |cache: &PagedKvCache, id, slots: &WriteSlots| {
        cache.write(id, m.stream.as_ref(), 0, rows(slots), rows(slots), slots)
    };
    let tokens = [1, 2, 3, 4, 5];
    let (a, _, slots) = crate::sharing::admit(&mut cache, crate::sharing::root(), &tokens).unwrap();
    write(&cache, a, &slots).unwrap();
    cache.commit(a, &tokens).unwrap();
    let void = Err(Error::PermitVoid { what: "slots" });
    assert_eq!(write(&cache, a, &slots), void, "the first block is shared now");
    let next = cache.grow(a, 1).unwrap();
    write(&cache, a, &next).unwrap();
    cache.free(a).unwrap();
    assert_eq!(write(&cache, a, &next), Err(Error::UnknownSequence(0)));
    let b = cache.create(SequenceStart::default()).unwrap();
    cache.grow(b, 3).unwrap();
    assert_eq!(write(&cache, b, &next), void, "slots of a sequence that has ended");
}

#[test]
fn entries_of_a_static_cache_permit_their_own_slots_until_they_are_given_back() {
    let m = Memory::new(Immediate);
    let mut cache = StaticKvCache::new(m.arena(2, 8)).unwrap();
    let cache: &mut dyn KvCache = &mut cache;
    let (a, b) =
        (cache.create(SequenceStart::default()).unwrap(), cache.create(SequenceStart::default()).unwrap());
    let (of_a, of_b) = (cache.grow(a, 3).unwrap(), cache.grow(b, 2).unwrap());
    assert_eq!((of_a.check(), of_b.check()), (Ok(()), Ok(())));
    let void = Err(Error::PermitVoid { what: "slots" });
    cache.truncate(a, 1).unwrap();
    assert_eq!((of_a.check(), of_b.check()), (void.clone(), Ok(())));
    cache.free(b).unwrap();
    assert_eq!(of_b.check(), void);
    let again = cache.grow(a, 1).unwrap();
    cache.reset();
    assert_eq!(again.check(), void);
}
