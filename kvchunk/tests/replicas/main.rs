//! Replicas that share chunks: a parcel arrives once and unchanged, or the chunk is computed.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod contents;
mod failures;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use kvbackend_cpu::{CpuBackend, Execution};
use kvchunk::{
    Acquired, ArenaSleep, ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager, ChunkContext, ChunkHash,
    ChunkHasher, ChunkParcel, ChunkReservation, ColdRule, ComputeMode, Error, HashAlgorithm, LocalReplica,
    PieceHold, RemoteLookup, ReplicaDevice, ReplicaId, ReplicaLink, ReplicaTransport, SleepForm, TenantId,
};
use kvcore::{
    Backend, BlockId, BlockOrder, DType, KeyForm, KeyScope, KvArena, KvLayout, KvShape, MemoryKind, Scatter,
    Storage, SwapBlocks, SystemClock, TensorView, WritePairs, allocate_tensor,
};
use rstest::rstest;

const BLOCK: usize = 4;
const BLOCKS: u32 = 8;

/// A replica with memory, a cache and a transport to the other replicas.
struct Replica {
    cache: ChunkCacheManager,
    link: ReplicaLink,
    hasher: ChunkHasher,
}

fn hasher(algorithm: HashAlgorithm) -> ChunkHasher {
    let root = KeyScope::new("m", b"w").root();
    ChunkHasher::new(algorithm, ChunkContext::new(root, ComputeMode::Alone, &[]), BLOCK)
}

fn group(replicas: u32) -> Vec<Replica> {
    group_of(replicas, "f32", Execution::Immediate, &ChunkCacheConfig::default())
}

fn group_of(replicas: u32, format: &str, execution: Execution, config: &ChunkCacheConfig) -> Vec<Replica> {
    let shape = KvShape {
        num_layers: 2,
        num_blocks: BLOCKS as usize,
        block_size: BLOCK,
        k_heads: 2,
        v_heads: 1,
        k_dim: 32,
        v_dim: 64,
        format: format.parse().unwrap(),
        order: BlockOrder::TokenMajor,
    };
    let replica = |transport: LocalReplica| {
        let backend = CpuBackend::with_execution(execution);
        let stream = backend.stream().unwrap();
        let layout = Arc::new(KvLayout::new(shape.clone()).unwrap());
        let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, layout).unwrap();
        let sleep =
            ArenaSleep::new(backend.clone(), arena.clone(), stream.clone(), SleepForm::Plain, 1 << 20);
        let device = ReplicaDevice { backend, stream, arena, keys: KeyForm::Rotated };
        let pool = ChunkBlockPool::new(0..BLOCKS, BLOCK).unwrap();
        let (sleep, clock) = (Arc::new(sleep.unwrap()), Arc::new(SystemClock::default()));
        let cache = ChunkCacheManager::build(config.clone(), pool, Some(sleep), clock).unwrap();
        transport.serve(&cache, &device);
        let hasher = hasher(config.hash_algorithm);
        Replica { cache, link: ReplicaLink { device, transport: Arc::new(transport) }, hasher }
    };
    LocalReplica::group(replicas).into_iter().map(replica).collect()
}

impl Replica {
    fn lookup(&self, tokens: &[u32]) -> RemoteLookup {
        let piece = self.hasher.pieces(tokens, usize::MAX).next().unwrap();
        self.cache.get_chunk_with_remote_lookup(TenantId::default(), &piece, 0, &self.link)
    }

    fn pull(&self, tokens: &[u32], from: u32) -> kvchunk::Result<PieceHold> {
        let piece = self.hasher.pieces(tokens, usize::MAX).next().unwrap();
        self.cache.pull_chunk(TenantId::default(), &piece, 0, &self.link, ReplicaId(from))
    }

    /// Computes a chunk that no replica has.
    fn compute(&self, tokens: &[u32]) -> PieceHold {
        let RemoteLookup { acquired: Acquired::Compute(reservation), failed, .. } = self.lookup(tokens)
        else {
            panic!("it is there already")
        };
        assert_eq!(failed, []);
        self.fill(&reservation);
        reservation.store()
    }

    /// Fills a reservation with rows that are derived from the tokens, like a request that gets the chunk
    /// from no replica.
    fn fill(&self, reservation: &ChunkReservation) {
        let device = &self.link.device;
        let tokens = Arc::clone(reservation.tokens());
        let slots = reservation.write_slots().unwrap();
        for layer in 0..2 {
            let rows = |heads: usize, dim: usize| {
                let value = |at: usize| ((tokens[0] as usize * 31 + layer * 7 + at) as f32 * 0.37).sin();
                let bytes: Vec<u8> =
                    (0..tokens.len() * heads * dim).flat_map(|at| value(at).to_le_bytes()).collect();
                let shape = [tokens.len(), heads, dim];
                let view =
                    allocate_tensor(device.backend.as_ref(), MemoryKind::Device, DType::F32, &shape).unwrap();
                device.stream.write(&view, &bytes).unwrap();
                view
            };
            let (k, v, arena) = (rows(2, 32), rows(1, 64), device.arena.clone());
            device
                .stream
                .scatter(&Scatter { arena, layer, k, v, slots: slots.clone(), rotation: None })
                .unwrap();
        }
    }

    /// Returns the codes and scales of a chunk's blocks, bit for bit.
    fn bytes(&self, chunk: &PieceHold) -> Vec<u8> {
        let (device, blocks) = (&self.link.device, chunk.block_ids());
        let shape = KvShape { num_blocks: blocks.len(), ..device.arena.layout().shape().clone() };
        let layout = Arc::new(KvLayout::new(shape).unwrap());
        let dst = KvArena::allocate(device.backend.as_ref(), MemoryKind::System, layout).unwrap();
        let pairs = blocks.iter().copied().zip((0..).map(BlockId)).collect::<Arc<[_]>>();
        let op =
            SwapBlocks { src: device.arena.clone(), dst: dst.clone(), pairs: WritePairs::unchecked(pairs) };
        device.stream.swap_blocks(&op).unwrap();
        let read = |storage: &Arc<dyn Storage>| {
            let mut bytes = vec![0; storage.len()];
            let view = TensorView::new(Arc::clone(storage), DType::U8, &[bytes.len()]).unwrap();
            device.stream.read(&view, &mut bytes).unwrap();
            bytes
        };
        dst.storages().flat_map(read).collect()
    }

    fn assert_nothing_held(&self) {
        self.cache.check_invariants().unwrap();
        assert!(self.cache.chunks().iter().all(|chunk| chunk.ref_count == 0));
        let used: usize = self.cache.index().iter().map(|chunk| chunk.chunk_hash.num_blocks).sum();
        assert_eq!(self.cache.pool().num_free_blocks() + used, BLOCKS as usize);
    }
}

fn hit(lookup: RemoteLookup) -> (PieceHold, Option<u32>) {
    match lookup.acquired {
        Acquired::Hit(chunk) => (chunk, lookup.fetched_from.map(|from| from.0)),
        other => panic!("{other:?}, {:?}", lookup.failed),
    }
}

/// A transport that runs `then` before every pull.
struct Before<F> {
    inner: Arc<dyn ReplicaTransport>,
    pulls: AtomicUsize,
    then: F,
}

impl<F> std::fmt::Debug for Before<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Before")
    }
}

impl<F: Fn() + Send + Sync> ReplicaTransport for Before<F> {
    fn locate(&self, hash: &ChunkHash) -> kvchunk::Result<Vec<ReplicaId>> {
        self.inner.locate(hash)
    }

    fn pull(&self, from: ReplicaId, hash: &ChunkHash) -> kvchunk::Result<Option<ChunkParcel>> {
        self.pulls.fetch_add(1, SeqCst);
        (self.then)();
        self.inner.pull(from, hash)
    }
}

#[rstest]
fn a_chunk_comes_bit_for_bit_and_is_local_afterwards(
    #[values("f32", "bf16", "int8:32", "int4:32", "fp8-e4m3", "fp8-e5m2:head")] format: &str,
    #[values(Execution::Immediate, Execution::Deferred)] execution: Execution,
) {
    let all = group_of(3, format, execution, &ChunkCacheConfig::default());
    let tokens = [7; 10];
    let there = all[2].compute(&tokens);
    let (here, from) = hit(all[0].lookup(&tokens));
    assert_eq!(from, Some(2));
    let expected = all[2].bytes(&there);
    assert!(expected.iter().any(|byte| *byte != 0) && all[0].bytes(&here) == expected);
    assert_eq!((here.num_tokens(), here.is_exact(), here.cached_position_start()), (10, true, 0));
    let (again, from) = hit(all[0].lookup(&tokens));
    assert_eq!((from, again.block_ids()), (None, here.block_ids()), "it is here now");
    let m = all[0].cache.metrics();
    assert_eq!((m.fetched, m.miss_count, m.hit_count, m.tokens_computed), (1, 1, 1, 0));
    assert_eq!(all[2].cache.metrics().lookup_count, 1, "giving is no lookup");
    drop((there, here, again));
    all.iter().for_each(Replica::assert_nothing_held);
}

#[test]
fn a_piece_is_pulled_from_the_named_replica_unless_it_is_here() {
    let all = group(3);
    drop(all[1].compute(&[7; 6]));
    let here = all[0].pull(&[7; 6], 1).unwrap();
    assert_eq!(
        all[0].pull(&[7; 6], 2).unwrap().block_ids(),
        here.block_ids(),
        "replica 2 has nothing to give"
    );
    assert_eq!(all[0].cache.metrics().fetched, 1);
    drop(here);
    assert_eq!(hit(all[2].lookup(&[7; 6])).1, Some(0), "the next in the ring that has it");
    all.iter().for_each(Replica::assert_nothing_held);
}

#[test]
fn of_eight_requests_that_miss_at_once_one_fetches_and_no_lock_is_held_meanwhile() {
    let mut all = group(2);
    let owner = all.remove(1);
    drop(owner.compute(&[7; 10]));
    let mut here = all.remove(0);
    let (cache, there) = (here.cache.clone(), owner.cache.clone());
    let transport = Arc::new(Before {
        inner: Arc::clone(&here.link.transport),
        pulls: AtomicUsize::new(0),
        // This call would never return if the lock of either cache were held.
        then: move || {
            assert_eq!((cache.metrics().cached_chunks, there.metrics().cached_chunks), (0, 1));
            std::thread::sleep(Duration::from_millis(50));
        },
    });
    here.link.transport = transport.clone();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                loop {
                    match here.lookup(&[7; 10]).acquired {
                        Acquired::Hit(chunk) => break assert_eq!(here.bytes(&chunk).len(), 3 * 4 * 256 * 4),
                        Acquired::Busy(waiter) => waiter.wait(),
                        other => panic!("{other:?}"),
                    }
                }
            });
        }
    });
    assert_eq!((transport.pulls.load(SeqCst), here.cache.metrics().fetched), (1, 1));
    [owner, here].iter().for_each(Replica::assert_nothing_held);
}

#[test]
fn replicas_that_pull_from_each_other_do_not_wait_for_each_other() {
    let all = group(2);
    for round in 0..50u32 {
        let chunks = [[100 + round; 8], [200 + round; 8]];
        for (replica, tokens) in all.iter().zip(&chunks) {
            drop(replica.compute(tokens));
        }
        let together = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for (replica, tokens) in all.iter().zip([&chunks[1], &chunks[0]]) {
                let together = &together;
                scope.spawn(move || {
                    together.wait();
                    assert!(hit(replica.lookup(tokens)).1.is_some());
                });
            }
        });
    }
    all.iter().for_each(Replica::assert_nothing_held);
}

#[test]
fn a_replica_alone_finds_nothing_and_waits_for_nobody() {
    let all = group(1);
    drop(all[0].compute(&[7; 5]));
    assert_eq!(hit(all[0].lookup(&[7; 5])).1, None);
    assert!(matches!(all[0].pull(&[8; 5], 0), Err(Error::ReplicaLacks { replica: ReplicaId(0) })));
    all[0].assert_nothing_held();
}

#[test]
fn sleeping_pieces_are_not_given() {
    let all = group(2);
    drop(all[1].compute(&[7; 5]));
    assert_eq!(all[1].cache.sleep_cold_chunks(ColdRule::EVERYTHING), Ok(1));
    assert!(matches!(all[0].lookup(&[7; 5]).acquired, Acquired::Compute(_)), "nor woken for others");
    assert!(matches!(all[0].pull(&[7; 5], 1), Err(Error::ReplicaLacks { .. })));
    assert_eq!(all[1].cache.metrics().woken, 0);
    all[0].assert_nothing_held();
}
