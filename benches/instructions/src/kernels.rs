//! Kernels of the CPU backend on small fixed sizes: 256 tokens of 8 heads of 128, in blocks of 16.

use std::sync::Arc;

use kvbackend_cpu::{CpuBackend, CpuOptions, SimdLevel};
use kvcore::kernels::{
    ApplyRope, Attend, AttendRows, CopyBlocks, Gather, MergeGroup, QueryRow, RotateKeys, Rotation, Scatter,
};
use kvcore::{
    Backend, BlockId, BlockOrder, DType, KeyForm, KvArena, KvLayout, KvShape, MemoryKind, Result, Rope,
    RopeConfig, Segment, Stream, TensorView, allocate_tensor,
};

const HEADS: usize = 8;
/// Heads of queries.
const QUERY_HEADS: usize = 32;
const DIM: usize = 128;
const BLOCK: usize = 16;
const TOKENS: usize = 256;
/// Blocks that hold the tokens; as many again take copies.
const BLOCKS: u32 = (TOKENS / BLOCK) as u32;

/// Does the work once on a stream.
type Work = Box<dyn Fn(&dyn Stream) -> Result<()>>;

/// One operation on a stream that works at once.
pub struct Kernel {
    stream: Arc<dyn Stream>,
    work: Work,
}

impl Kernel {
    /// `scatter` of all tokens into blocks in no order.
    pub fn scatter(dtype: DType) -> Self {
        Self::ready(dtype, |lab| {
            let op = Scatter {
                arena: lab.arena.clone(),
                layer: 0,
                k: lab.tensor(&[TOKENS, HEADS, DIM])?,
                v: lab.tensor(&[TOKENS, HEADS, DIM])?,
                slots: lab.slots(),
            };
            Ok(Box::new(move |stream| stream.scatter(&op)))
        })
    }

    /// `gather` of the same.
    pub fn gather(dtype: DType) -> Self {
        Self::ready(dtype, |lab| {
            let op = Gather {
                arena: lab.arena.clone(),
                layer: 0,
                k: lab.tensor(&[TOKENS, HEADS, DIM])?,
                v: lab.tensor(&[TOKENS, HEADS, DIM])?,
                slots: lab.slots(),
                rotation: None,
            };
            Ok(Box::new(move |stream| stream.gather(&op)))
        })
    }

    /// `copy_blocks` of all blocks.
    pub fn copy_blocks(dtype: DType) -> Self {
        Self::ready(dtype, |lab| {
            let op = CopyBlocks { arena: lab.arena.clone(), pairs: lab.pairs() };
            Ok(Box::new(move |stream| stream.copy_blocks(&op)))
        })
    }

    /// `rope` of one row per token.
    pub fn rope(dtype: DType) -> Self {
        Self::ready(dtype, |lab| {
            let op = ApplyRope {
                rows: lab.tensor(&[TOKENS, HEADS, DIM])?,
                positions: (0..TOKENS as i64).collect(),
                rope: lab.rope()?,
            };
            Ok(Box::new(move |stream| stream.rope(&op)))
        })
    }

    /// `rotate_keys` of all blocks.
    pub fn rotate_keys(dtype: DType) -> Self {
        Self::ready(dtype, |lab| {
            let rotation = Rotation { rope: lab.rope()?, delta: 777 };
            let (src, dst) = (lab.arena.clone(), lab.arena.clone());
            let op = RotateKeys { src, dst, layer: 0, pairs: lab.pairs(), rotation };
            Ok(Box::new(move |stream| stream.rotate_keys(&op)))
        })
    }

    /// `attend` of the last `rows` tokens to all: one is a step of decoding, more are a prefill. Every query
    /// head reads a quarter of a KV head.
    pub fn attend(dtype: DType, rows: usize) -> Self {
        Self::ready(dtype, |lab| {
            let blocks: Arc<[BlockId]> = lab.order().map(BlockId).collect();
            let row = |i: usize| QueryRow { logical: i, position: i as i64 };
            let shape = [rows, QUERY_HEADS, DIM];
            let op = Attend {
                arena: lab.arena.clone(),
                layer: 0,
                q: lab.tensor(&shape)?,
                rope: Some(lab.rope()?),
                keys: KeyForm::default(),
                rows: (TOKENS - rows..TOKENS).map(row).collect(),
                batch: [AttendRows::new(0..rows, [Segment::new(blocks, TOKENS, 0, 0)])].into(),
                groups: [MergeGroup::default()].into(),
                scale: 0.088,
                window: None,
                softcap: None,
                out: lab.tensor(&shape)?,
                lse: None,
            };
            Ok(Box::new(move |stream| stream.attend(&op)))
        })
    }

    /// The operation, which has run once.
    fn ready(dtype: DType, make: impl FnOnce(&Lab) -> Result<Work>) -> Self {
        // What BLAKE3 and the C library choose by the processor hangs on this too.
        assert!(!SimdLevel::Avx512.is_available(), "counted under valgrind, which hides AVX-512");
        // Only this thread is counted, so it is the one that plain kernels run on. It fails where it has been said.
        let _ = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global();
        let made = Lab::new(dtype).and_then(|lab| Ok(Self { work: make(&lab)?, stream: lab.stream }));
        let kernel = made.unwrap_or_else(|error| panic!("{error}"));
        kernel.run();
        kernel
    }

    /// Runs it.
    pub fn run(&self) {
        (self.work)(self.stream.as_ref()).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// Memory for one operation.
struct Lab {
    backend: Arc<CpuBackend>,
    stream: Arc<dyn Stream>,
    arena: KvArena,
    dtype: DType,
}

impl Lab {
    fn new(dtype: DType) -> Result<Self> {
        let options = CpuOptions { simd: Some(SimdLevel::Avx2), threads: Some(1), ..CpuOptions::default() };
        let backend = CpuBackend::with_options(&options)?;
        let layout = KvLayout::new(KvShape {
            num_layers: 1,
            num_blocks: 2 * BLOCKS as usize,
            block_size: BLOCK,
            k_heads: HEADS,
            v_heads: HEADS,
            k_dim: DIM,
            v_dim: DIM,
            format: dtype.into(),
            order: BlockOrder::TokenMajor,
        })?;
        let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(layout))?;
        Ok(Self { stream: backend.stream()?, backend, arena, dtype })
    }

    fn tensor(&self, shape: &[usize]) -> Result<TensorView> {
        allocate_tensor(self.backend.as_ref(), MemoryKind::Device, self.dtype, shape)
    }

    fn rope(&self) -> Result<Arc<Rope>> {
        Ok(Arc::new(Rope::new(RopeConfig::new(DIM, 500_000.0), 1 << 14)?))
    }

    /// Blocks in an order in which no two that follow each other are neighbours.
    fn order(&self) -> impl Iterator<Item = u32> {
        (0..BLOCKS).map(|i| i * 7 % BLOCKS)
    }

    fn slots(&self) -> Arc<[i64]> {
        let of = |block: u32| (0..BLOCK as i64).map(move |i| i64::from(block) * BLOCK as i64 + i);
        self.order().flat_map(of).collect()
    }

    fn pairs(&self) -> Arc<[(BlockId, BlockId)]> {
        self.order().zip(BLOCKS..).map(|(from, to)| (BlockId(from), BlockId(to))).collect()
    }
}
