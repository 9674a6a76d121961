//! Arenas whose blocks sleep: their memory is released, their IDs and addresses stay the same, and nothing
//! else changes.
#![cfg(target_os = "linux")]

use std::any::Any;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use kvbackend_cpu::{CpuBackend, CpuReserved, Execution};
use kvcore::{
    Backend, BlockId, BlockOrder, Capabilities, CounterSnapshot, DType, Error, KvArena, KvLayout, KvShape,
    MemoryKind, ReservedArena, ReservedStorage, Result, Storage, Stream, SwapBlocks, TensorView, WritePairs,
};
use rstest::rstest;

use crate::common::Memory;
use crate::faulty::Faulty;

fn shape(format: &str, order: BlockOrder, num_blocks: usize) -> KvShape {
    KvShape {
        num_layers: 3,
        num_blocks,
        block_size: 8,
        k_heads: 2,
        v_heads: 3,
        k_dim: 24,
        v_dim: 16,
        format: format.parse().unwrap(),
        order,
    }
}

fn layout(shape: KvShape) -> Arc<KvLayout> {
    Arc::new(KvLayout::new(shape).unwrap())
}

/// Fills every storage that belongs to blocks with pseudo-random bytes.
fn fill(stream: &dyn Stream, arena: &KvArena) {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut byte = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 32) as u8
    };
    for storage in arena.storages() {
        let bytes: Vec<u8> = (0..storage.len()).map(|_| byte()).collect();
        let view = TensorView::new(Arc::clone(storage), DType::U8, &[bytes.len()]).unwrap();
        stream.write(&view, &bytes).unwrap();
    }
    stream.synchronize().unwrap();
}

/// Returns the codes and scales of one block.
fn block(backend: &dyn Backend, arena: &KvArena, block: u32) -> Vec<u8> {
    let stream = backend.stream().unwrap();
    let one = layout(KvShape { num_blocks: 1, ..arena.layout().shape().clone() });
    let one = KvArena::allocate(backend, MemoryKind::System, one).unwrap();
    let pairs = [(BlockId(block), BlockId(0))];
    stream
        .swap_blocks(&SwapBlocks {
            src: arena.clone(),
            dst: one.clone(),
            pairs: WritePairs::unchecked(pairs),
        })
        .unwrap();
    let read = |storage: &Arc<dyn Storage>| {
        let mut bytes = vec![0; storage.len()];
        let view = TensorView::new(Arc::clone(storage), DType::U8, &[bytes.len()]).unwrap();
        stream.read(&view, &mut bytes).unwrap();
        bytes
    };
    one.storages().flat_map(read).collect()
}

fn blocks(backend: &dyn Backend, arena: &KvArena) -> Vec<Vec<u8>> {
    (0..arena.layout().shape().num_blocks as u32).map(|at| block(backend, arena, at)).collect()
}

/// Returns the number of an arena's bytes that are backed by physical memory, according to the system's page
/// table.
fn resident(arena: &KvArena) -> usize {
    let table = File::open("/proc/self/pagemap").unwrap();
    let page = rustix::param::page_size();
    let present = |&at: &usize| {
        let mut entry = [0; 8];
        table.read_exact_at(&mut entry, 8 * at as u64).unwrap();
        u64::from_ne_bytes(entry) >> 62 != 0
    };
    let pages = |storage: &Arc<dyn Storage>| {
        let first = storage.address() as usize / page;
        (first..first + storage.len() / page).filter(present).count()
    };
    arena.storages().map(pages).sum::<usize>() * page
}

const KEPT: [u32; 4] = [30, 31, 69, 104];

#[rstest]
fn kept_blocks_come_back_and_others_never_change(
    #[values(Execution::Immediate, Execution::Deferred)] execution: Execution,
    #[values("f32", "bf16", "int8:8", "int4:8", "fp8-e4m3")] format: &str,
    #[values(BlockOrder::HeadMajor, BlockOrder::TokenMajor)] order: BlockOrder,
) {
    let backend = CpuBackend::with_execution(execution);
    let stream = backend.stream().unwrap();
    let layout = layout(shape(format, order, 128));
    let reserved = ReservedArena::create(backend.clone(), MemoryKind::Device, layout).unwrap();
    let arena = reserved.arena().clone();
    fill(stream.as_ref(), &arena);
    let before = blocks(backend.as_ref(), &arena);
    let addresses: Vec<u64> = arena.storages().map(|storage| storage.address()).collect();
    let (mapped, held) = (reserved.mapped_bytes(), resident(&arena));

    let range = 30..105;
    let asleep = reserved.sleep("test", range.clone(), &KEPT.map(BlockId), stream.as_ref()).unwrap();
    let released = asleep.released_bytes();
    let block_bytes = arena.layout().block_bytes();
    // At each end of a run, less than one granule stays mapped.
    let granularity = rustix::param::page_size();
    let runs = 3 * if format.starts_with("int") { 4 } else { 2 };
    assert!(released <= range.len() * block_bytes);
    assert!(released + 2 * runs * granularity > range.len() * block_bytes, "{released} bytes released");
    assert_eq!(resident(&arena), held - released, "memory went back to the system");
    assert_eq!(reserved.mapped_bytes(), mapped - released);
    assert_eq!(asleep.saved_bytes(), 4 * block_bytes);
    assert_eq!((asleep.tag(), asleep.blocks()), ("test", range.clone()));
    assert_eq!(reserved.asleep(), [("test".to_owned(), range.clone())]);
    for outside in (0..range.start).chain(range.end..128) {
        assert_eq!(block(backend.as_ref(), &arena, outside), before[outside as usize], "{outside}");
    }

    asleep.wake(stream.as_ref()).unwrap();
    let after = blocks(backend.as_ref(), &arena);
    for at in 0..128 {
        if !range.contains(&at) || KEPT.contains(&at) {
            assert_eq!(after[at as usize], before[at as usize], "block {at}");
        }
    }
    assert_ne!(after[50], before[50], "what was not kept is gone");
    assert_eq!((reserved.mapped_bytes(), reserved.asleep()), (mapped, vec![]));
    assert!(arena.storages().map(|storage| storage.address()).eq(addresses));
}

#[test]
fn a_range_too_small_for_a_granule_releases_nothing_and_says_so() {
    let backend = CpuBackend::new();
    let stream = backend.stream().unwrap();
    let layout = layout(shape("bf16", BlockOrder::TokenMajor, 128));
    let reserved = ReservedArena::create(backend.clone(), MemoryKind::Device, layout).unwrap();
    fill(stream.as_ref(), reserved.arena());
    let before = blocks(backend.as_ref(), reserved.arena());
    let asleep = reserved.sleep("small", 20..22, &[BlockId(21)], stream.as_ref()).unwrap();
    assert_eq!(asleep.released_bytes(), 0);
    asleep.wake(stream.as_ref()).unwrap();
    assert_eq!(blocks(backend.as_ref(), reserved.arena()), before);
}

#[test]
fn wrong_ranges_are_refused_and_a_drop_gives_memory_back() {
    let backend = CpuBackend::new();
    let stream = backend.stream().unwrap();
    let layout = layout(shape("f32", BlockOrder::TokenMajor, 32));
    let reserved = ReservedArena::create(backend, MemoryKind::Device, layout).unwrap();
    let mapped = reserved.mapped_bytes();
    let sleep = |range: Range<u32>, keep: &[BlockId]| reserved.sleep("it", range, keep, stream.as_ref());
    assert!(matches!(sleep(3..3, &[]), Err(Error::Zero { .. })));
    assert!(matches!(sleep(0..33, &[]), Err(Error::OutOfRange { value: 32, limit: 32, .. })));
    assert!(matches!(sleep(0..4, &[BlockId(4)]), Err(Error::ForeignBlock { block: BlockId(4), .. })));
    let asleep = sleep(8..24, &[BlockId(9), BlockId(9)]).unwrap();
    for range in [0..9, 8..24, 23..32, 10..11] {
        let Err(Error::Asleep { tag, start: 8, end: 24 }) = sleep(range.clone(), &[]) else {
            panic!("{range:?}")
        };
        assert_eq!(tag, "it");
    }
    let beside = sleep(24..32, &[]).unwrap();
    assert_eq!(reserved.asleep().len(), 2);
    drop((asleep, beside));
    assert_eq!((reserved.mapped_bytes(), reserved.asleep()), (mapped, vec![]));
    drop(sleep(0..32, &[]).unwrap());
}

#[test]
fn a_stream_that_refuses_the_copy_leaves_everything_as_it_was() {
    let m = Memory::new(Execution::Immediate);
    let layout = layout(shape("f32", BlockOrder::HeadMajor, 32));
    let reserved = ReservedArena::create(m.backend.clone(), MemoryKind::Device, layout).unwrap();
    fill(m.stream.as_ref(), reserved.arena());
    let (before, mapped) = (blocks(m.backend.as_ref(), reserved.arena()), reserved.mapped_bytes());
    let faulty = Faulty::new(&m, "swap_blocks");
    let keep: Vec<BlockId> = (4..30).map(BlockId).collect();
    assert!(reserved.sleep("x", 4..30, &keep, &faulty).is_err());
    assert_eq!((reserved.mapped_bytes(), reserved.asleep()), (mapped, vec![]));
    assert_eq!(blocks(m.backend.as_ref(), reserved.arena()), before);

    let asleep = reserved.sleep("x", 4..30, &keep, m.stream.as_ref()).unwrap();
    let released = asleep.released_bytes();
    let rejected = asleep.wake(&faulty).unwrap_err();
    assert_eq!((rejected.blocks.released_bytes(), reserved.mapped_bytes()), (released, mapped - released));
    rejected.blocks.wake(m.stream.as_ref()).unwrap();
    assert_eq!(blocks(m.backend.as_ref(), reserved.arena()), before);
}

/// A backend whose memory fails to map or unmap at a given call.
#[derive(Debug)]
struct Moody {
    inner: Arc<CpuBackend>,
    calls: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct MoodyStorage {
    inner: CpuReserved,
    /// Number of calls that succeed before one fails.
    calls: Arc<AtomicUsize>,
}

impl MoodyStorage {
    fn step(&self) -> Result<()> {
        match self.calls.fetch_sub(1, SeqCst) {
            0 => {
                Err(Error::Allocation { bytes: 0, kind: MemoryKind::Device, reason: "on purpose".to_owned() })
            }
            _ => Ok(()),
        }
    }
}

impl Storage for MoodyStorage {
    fn len(&self) -> usize {
        self.inner.len()
    }
    fn address(&self) -> u64 {
        self.inner.address()
    }
    fn kind(&self) -> MemoryKind {
        self.inner.kind()
    }
    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }
}

impl ReservedStorage for MoodyStorage {
    fn granularity(&self) -> usize {
        self.inner.granularity()
    }
    fn map(&self, range: Range<usize>) -> Result<()> {
        self.step()?;
        self.inner.map(range)
    }
    fn unmap(&self, range: Range<usize>) -> Result<()> {
        self.step()?;
        self.inner.unmap(range)
    }
    fn mapped_bytes(&self) -> usize {
        self.inner.mapped_bytes()
    }
}

impl Backend for Moody {
    fn name(&self) -> &'static str {
        "moody"
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    fn allocate(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn Storage>> {
        self.inner.allocate(kind, bytes)
    }
    fn reserve(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn ReservedStorage>> {
        let (inner, calls) = (CpuReserved::reserve(kind, bytes)?, Arc::clone(&self.calls));
        Ok(Arc::new(MoodyStorage { inner, calls }))
    }
    fn stream(&self) -> Result<Arc<dyn Stream>> {
        self.inner.stream()
    }
    fn counters(&self) -> CounterSnapshot {
        self.inner.counters()
    }
}

#[test]
fn a_refusal_at_any_step_leaves_everything_as_it_was() {
    let (inner, calls) = (CpuBackend::new(), Arc::new(AtomicUsize::new(usize::MAX)));
    let stream = inner.stream().unwrap();
    let backend = Arc::new(Moody { inner: inner.clone(), calls: Arc::clone(&calls) });
    let layout = layout(shape("int8:8", BlockOrder::HeadMajor, 128));
    let reserved = ReservedArena::create(backend, MemoryKind::Device, layout).unwrap();
    fill(stream.as_ref(), reserved.arena());
    let (before, mapped) = (blocks(inner.as_ref(), reserved.arena()), reserved.mapped_bytes());
    let keep: Vec<BlockId> = (30..120).map(BlockId).collect();
    let sleep = || reserved.sleep("x", 30..120, &keep, stream.as_ref());
    let mut refusals = 0;
    let mut asleep = loop {
        calls.store(refusals, SeqCst);
        let result = sleep();
        calls.store(usize::MAX, SeqCst);
        match result {
            Ok(asleep) => break asleep,
            Err(error) => assert!(error.to_string().contains("on purpose")),
        }
        assert_eq!((reserved.mapped_bytes(), reserved.asleep()), (mapped, vec![]), "step {refusals}");
        assert_eq!(blocks(inner.as_ref(), reserved.arena()), before, "step {refusals}");
        refusals += 1;
    };
    assert_eq!(refusals, 12, "a run in each of three layers of K, V and both scales");
    let released = asleep.released_bytes();
    for step in 0..refusals {
        calls.store(step, SeqCst);
        let rejected = asleep.wake(stream.as_ref()).unwrap_err();
        calls.store(usize::MAX, SeqCst);
        assert_eq!(reserved.mapped_bytes(), mapped - released, "step {step}");
        asleep = rejected.blocks;
    }
    asleep.wake(stream.as_ref()).unwrap();
    assert_eq!((blocks(inner.as_ref(), reserved.arena()), reserved.mapped_bytes()), (before, mapped));
}
