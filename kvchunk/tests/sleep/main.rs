//! Sleep with real KV memory: pieces wake with unchanged contents, and their memory is really released while
//! they sleep.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(target_os = "linux")]

mod forms;
mod pool;
mod threads;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use kvbackend_cpu::{CpuBackend, Execution};
use kvchunk::{
    Acquired, ArenaSleep, ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager, ChunkContext, ChunkHash,
    ChunkHasher, ChunkReservation, ColdRule, ComputeMode, HashAlgorithm, PieceHold, SleepForm, TenantId,
};
use kvcore::{
    Attend, AttendRows, AttendWork, Backend, BlockId, BlockOrder, DType, KeyForm, KeyScope, KvArena,
    KvLayout, KvShape, ManualClock, MemoryKind, QueryRow, ReservedArena, Scatter, Segment, Storage, Stream,
    SwapBlocks, TensorView, WritePairs, allocate_tensor,
};

const BLOCK: usize = 4;
const HEADS: usize = 2;
const DIM: usize = 32;
const LAYERS: usize = 2;
/// The blocks of the chunk pool. The blocks around this range do not belong to the pool.
const POOL: std::ops::Range<u32> = 40..120;

/// A chunk cache over an arena in reserved memory, with rows that are computed from tokens alone.
struct World {
    backend: Arc<CpuBackend>,
    stream: Arc<dyn Stream>,
    reserved: ReservedArena,
    sleep: Arc<ArenaSleep>,
    cache: ChunkCacheManager,
    clock: ManualClock,
    hasher: ChunkHasher,
    tenant: TenantId,
}

fn shape(format: &str) -> KvShape {
    KvShape {
        num_layers: LAYERS,
        num_blocks: 128,
        block_size: BLOCK,
        k_heads: HEADS,
        v_heads: HEADS,
        k_dim: DIM,
        v_dim: DIM,
        format: format.parse().unwrap(),
        order: BlockOrder::TokenMajor,
    }
}

fn hasher(salt: &[u8]) -> ChunkHasher {
    let root = KeyScope::new("m", b"w").tenant_salt(salt).root();
    ChunkHasher::new(HashAlgorithm::Blake3, ChunkContext::new(root, ComputeMode::Alone, &[]), BLOCK)
}

impl World {
    fn new(format: &str, execution: Execution, form: SleepForm, budget: usize) -> Self {
        Self::over(POOL, format, execution, form, budget)
    }

    fn over(
        pool: std::ops::Range<u32>,
        format: &str,
        execution: Execution,
        form: SleepForm,
        budget: usize,
    ) -> Self {
        let backend = CpuBackend::with_execution(execution);
        let stream = backend.stream().unwrap();
        let layout = Arc::new(KvLayout::new(shape(format)).unwrap());
        let reserved = ReservedArena::create(backend.clone(), MemoryKind::Device, layout).unwrap();
        let device = reserved.arena().clone();
        let sleep = Arc::new(ArenaSleep::new(backend.clone(), device, stream.clone(), form, budget).unwrap());
        let clock = ManualClock::default();
        let cache = ChunkCacheManager::build(
            ChunkCacheConfig::default(),
            ChunkBlockPool::new(pool, BLOCK).unwrap(),
            Some(sleep.clone()),
            Arc::new(clock.clone()),
        )
        .unwrap();
        let (hasher, tenant) = (hasher(b""), TenantId::default());
        Self { backend, stream, reserved, sleep, cache, clock, hasher, tenant }
    }

    fn plain(format: &str, execution: Execution) -> Self {
        Self::new(format, execution, SleepForm::Plain, 1 << 20)
    }

    fn arena(&self) -> &KvArena {
        self.reserved.arena()
    }

    fn hash(&self, tokens: &[u32]) -> ChunkHash {
        self.hasher.pieces(tokens, usize::MAX).next().unwrap().hash()
    }

    fn acquire(&self, tokens: &[u32]) -> Acquired {
        self.cache.acquire(self.tenant, &self.hasher.pieces(tokens, usize::MAX).next().unwrap(), 0)
    }

    fn lookup(&self, tokens: &[u32]) -> Option<PieceHold> {
        self.cache.lookup(self.tenant, &self.hasher.pieces(tokens, usize::MAX).next().unwrap())
    }

    fn hit(&self, tokens: &[u32]) -> PieceHold {
        match self.acquire(tokens) {
            Acquired::Hit(chunk) => chunk,
            other => panic!("{other:?}"),
        }
    }

    fn reserve(&self, tokens: &[u32]) -> ChunkReservation {
        match self.acquire(tokens) {
            Acquired::Compute(reservation) => reservation,
            other => panic!("{other:?}"),
        }
    }

    /// Enqueues the rows of a chunk: numbers between −2 and 2, derived from its tokens.
    fn compute(&self, reservation: &ChunkReservation) {
        self.compute_up_to(reservation, 2.0);
    }

    /// Enqueues the rows of a chunk with magnitudes up to `largest`.
    fn compute_up_to(&self, reservation: &ChunkReservation, largest: f32) {
        let tokens = Arc::clone(reservation.tokens());
        let slots = reservation.write_slots().unwrap();
        for layer in 0..LAYERS {
            let rows = |plane: usize| {
                let value = |(i, token): (usize, &u32), at: usize| {
                    let x = (*token as usize * 31 + i * 17 + layer * 7 + plane * 3) as f32 + at as f32 * 0.7;
                    (x * 0.37).sin() * largest
                };
                let row = |of| (0..HEADS * DIM).flat_map(move |at| value(of, at).to_le_bytes());
                let bytes: Vec<u8> = tokens.iter().enumerate().flat_map(row).collect();
                let view = self.tensor(&[tokens.len(), HEADS, DIM]);
                self.stream.write(&view, &bytes).unwrap();
                view
            };
            let (k, v, arena) = (rows(0), rows(1), self.arena().clone());
            self.stream
                .scatter(&Scatter { arena, layer, k, v, slots: slots.clone(), rotation: None })
                .unwrap();
        }
    }

    fn store(&self, tokens: &[u32]) -> PieceHold {
        let reservation = self.reserve(tokens);
        self.compute(&reservation);
        reservation.store()
    }

    fn tensor(&self, shape: &[usize]) -> TensorView {
        allocate_tensor(self.backend.as_ref(), MemoryKind::Device, DType::F32, shape).unwrap()
    }

    /// Returns the codes and scales of `blocks`, bit for bit.
    fn bytes(&self, blocks: &[BlockId]) -> Vec<u8> {
        let shape = KvShape { num_blocks: blocks.len(), ..self.arena().layout().shape().clone() };
        let layout = Arc::new(KvLayout::new(shape).unwrap());
        let copy = KvArena::allocate(self.backend.as_ref(), MemoryKind::System, layout).unwrap();
        let pairs = blocks.iter().copied().zip((0..).map(BlockId)).collect::<Arc<[_]>>();
        let src = self.arena().clone();
        self.stream
            .swap_blocks(&SwapBlocks { src, dst: copy.clone(), pairs: WritePairs::unchecked(pairs) })
            .unwrap();
        let read = |storage: &Arc<dyn Storage>| {
            let mut bytes = vec![0; storage.len()];
            let view = TensorView::new(Arc::clone(storage), DType::U8, &[bytes.len()]).unwrap();
            self.stream.read(&view, &mut bytes).unwrap();
            bytes
        };
        copy.storages().flat_map(read).collect()
    }

    /// Returns the output of one query that attends to a chunk in the last layer.
    fn answer(&self, chunk: &PieceHold) -> Vec<u8> {
        let (q, out) = (self.tensor(&[1, HEADS, DIM]), self.tensor(&[1, HEADS, DIM]));
        let query: Vec<u8> = (0..HEADS * DIM).flat_map(|i| (i as f32 * 0.1).cos().to_le_bytes()).collect();
        self.stream.write(&q, &query).unwrap();
        let n = chunk.num_tokens();
        let segment = Segment::new(Arc::clone(chunk.block_ids()), n, 0, 0);
        let op = Attend {
            arena: self.arena().clone(),
            layer: LAYERS - 1,
            q,
            rope: None,
            keys: KeyForm::default(),
            work: Arc::new(AttendWork::new(
                [QueryRow { logical: n, position: n as i64 }],
                [AttendRows::new(0..1, [segment])],
            )),
            scale: 0.2,
            window: None,
            softcap: None,
            out: out.clone(),
            lse: None,
        };
        self.stream.attend(&op).unwrap();
        let mut bytes = vec![0; HEADS * DIM * 4];
        self.stream.read(&out, &mut bytes).unwrap();
        bytes
    }

    /// Advances the clock until every piece is cold, and puts all pieces without holders to sleep.
    fn sleep_all(&self) -> kvchunk::Result<usize> {
        self.clock.advance(Duration::from_secs(7200));
        self.cache.sleep_cold_chunks(ColdRule::default())
    }

    /// Returns the number of bytes of the arena that are backed by physical memory, according to the system's
    /// page table.
    fn resident(&self) -> usize {
        let table = File::open("/proc/self/pagemap").unwrap();
        let page = self.backend.reserve(MemoryKind::Device, 1).unwrap().len();
        let present = |&at: &usize| {
            let mut entry = [0; 8];
            table.read_exact_at(&mut entry, 8 * at as u64).unwrap();
            u64::from_ne_bytes(entry) >> 62 != 0
        };
        let pages = |storage: &Arc<dyn Storage>| {
            let first = storage.address() as usize / page;
            (first..first + storage.len() / page).filter(present).count()
        };
        self.arena().storages().map(pages).sum::<usize>() * page
    }

    fn check(&self) {
        self.cache.check_invariants().unwrap();
    }

    fn free(&self) -> usize {
        self.cache.pool().num_free_blocks()
    }
}

/// Returns the tokens of the chunk with this number. Most chunks do not fill whole blocks.
fn tokens(chunk: u32) -> Vec<u32> {
    (0..9 + chunk % 7).map(|i| chunk * 100 + i).collect()
}
