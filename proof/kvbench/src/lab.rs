//! The setup shared by the kernel benchmarks: an arena with up to 8 KV heads and a `head_dim` of 128, in
//! blocks of 16 tokens. The arena's blocks are in the order in which a pool in use would allocate them. The
//! lab has one operation of each kind, over all blocks.

use std::sync::Arc;

use kvbackend_cpu::{CpuBackend, CpuOptions};
use kvcore::{
    ApplyRope, Attend, AttendMass, AttendMla, AttendRows, AttendWork, Backend, BlockId, BlockOrder,
    CopyBlocks, DType, Gather, KeyForm, KvArena, KvFormat, KvLayout, KvShape, MemoryKind, QueryRow, Result,
    Rope, RopeConfig, RotateKeys, Rotation, Scatter, Segment, Stream, SwapBlocks, TensorView, WritePairs,
    WriteSlots, allocate_tensor,
};

/// The number of KV heads.
pub const HEADS: usize = 8;
/// The number of query heads per KV head (GQA).
const GROUP: usize = 4;
/// The number of query heads.
pub const QUERY_HEADS: usize = HEADS * GROUP;
/// The number of elements per head (`head_dim`).
pub const DIM: usize = 128;
/// The number of tokens per block.
pub const BLOCK: usize = 16;

/// Tokens in the first half of an arena. Copies are written to the arena's second half.
#[allow(missing_debug_implementations, reason = "a benchmark prints times")]
pub struct Lab {
    /// The backend that owns the memory.
    pub backend: Arc<dyn Backend>,
    /// The stream that runs the operations.
    pub stream: Arc<dyn Stream>,
    /// The arena, with one layer.
    pub arena: KvArena,
    /// The arena's element type.
    pub dtype: DType,
    /// The arena's number of KV heads.
    heads: usize,
    /// The number of tokens in the arena.
    pub tokens: usize,
    /// The blocks that hold the tokens, in the first half of the arena.
    blocks: Vec<u32>,
    rope: Arc<Rope>,
}

impl Lab {
    /// Creates a lab on the CPU backend, with [`HEADS`] KV heads. `tokens` is rounded up to whole blocks, to
    /// at least one.
    pub fn new(dtype: DType, tokens: usize, options: &CpuOptions) -> Result<Self> {
        Self::of(dtype, HEADS, tokens, options)
    }

    /// Like [`new`](Self::new), but with `heads` KV heads.
    pub fn of(dtype: DType, heads: usize, tokens: usize, options: &CpuOptions) -> Result<Self> {
        Self::on(CpuBackend::with_options(options)?, dtype, heads, tokens)
    }

    /// Creates a lab on any backend, with `heads` KV heads. `tokens` is rounded up to whole blocks, to at
    /// least one.
    pub fn on(backend: Arc<dyn Backend>, dtype: DType, heads: usize, tokens: usize) -> Result<Self> {
        let tokens = tokens.next_multiple_of(BLOCK).max(BLOCK);
        let arena = arena_of(backend.as_ref(), heads, dtype.into(), 2 * tokens / BLOCK)?;
        let rope = Arc::new(Rope::new(RopeConfig::new(DIM, 500_000.0), 1 << 17)?);
        let blocks = shuffled((tokens / BLOCK) as u32);
        Ok(Self { stream: backend.stream()?, backend, arena, dtype, heads, tokens, blocks, rope })
    }

    /// Returns the size of all tokens' K and V, in bytes.
    pub fn bytes(&self) -> usize {
        self.tokens * 2 * self.heads * DIM * self.dtype.bits() / 8
    }

    /// Allocates `rows` rows with `heads` heads each, in the arena's element type.
    pub fn rows(&self, rows: usize, heads: usize) -> Result<TensorView> {
        allocate_tensor(self.backend.as_ref(), MemoryKind::Device, self.dtype, &[rows, heads, DIM])
    }

    fn slots(&self) -> Arc<[i64]> {
        let of = |&block: &u32| (0..BLOCK as i64).map(move |i| i64::from(block) * BLOCK as i64 + i);
        self.blocks.iter().flat_map(of).collect()
    }

    fn pairs(&self) -> WritePairs {
        let half = self.blocks.len() as u32;
        let pairs = self.blocks.iter().zip(half..).map(|(&from, to)| (BlockId(from), BlockId(to)));
        WritePairs::unchecked(pairs.collect::<Arc<[_]>>())
    }

    /// Returns a scatter of all tokens' rows to their slots.
    pub fn scatter(&self) -> Result<Scatter> {
        let (k, v) = (self.rows(self.tokens, self.heads)?, self.rows(self.tokens, self.heads)?);
        Ok(Scatter {
            arena: self.arena.clone(),
            layer: 0,
            k,
            v,
            slots: WriteSlots::unchecked(self.slots()),
            rotation: None,
        })
    }

    /// Returns a gather of all tokens' rows from their slots.
    pub fn gather(&self) -> Result<Gather> {
        let (k, v) = (self.rows(self.tokens, self.heads)?, self.rows(self.tokens, self.heads)?);
        Ok(Gather { arena: self.arena.clone(), layer: 0, k, v, slots: self.slots(), rotation: None })
    }

    /// Returns a copy of all blocks into the second half of the arena.
    pub fn copy_blocks(&self) -> CopyBlocks {
        CopyBlocks { arena: self.arena.clone(), pairs: self.pairs() }
    }

    /// Returns a copy of all blocks into another arena.
    pub fn swap_blocks(&self) -> Result<SwapBlocks> {
        let dst = arena_of(self.backend.as_ref(), self.heads, self.dtype.into(), self.blocks.len())?;
        let pairs =
            self.blocks.iter().zip(0..).map(|(&from, to)| (BlockId(from), BlockId(to))).collect::<Arc<[_]>>();
        Ok(SwapBlocks { src: self.arena.clone(), dst, pairs: WritePairs::unchecked(pairs) })
    }

    /// Returns a copy of all blocks into the second half of the arena, with the keys rotated by 777
    /// positions.
    pub fn rotate_keys(&self) -> RotateKeys {
        let rotation = Rotation { rope: Arc::clone(&self.rope), delta: 777 };
        let (src, dst) = (self.arena.clone(), self.arena.clone());
        RotateKeys { src, dst, layer: 0, pairs: self.pairs(), rotation }
    }

    /// Returns a rotation of one key per token and head by RoPE, at positions of at most 8191.
    pub fn rope(&self) -> Result<ApplyRope> {
        let positions = (0..self.tokens as i64).map(|i| i % 8192).collect();
        Ok(ApplyRope { rows: self.rows(self.tokens, self.heads)?, positions, rope: Arc::clone(&self.rope) })
    }

    /// Returns a causal [`Attend`] from the last `rows` tokens to all tokens. If `rotate` is true, the call
    /// also rotates the queries.
    pub fn attend(&self, rows: usize, rotate: bool) -> Result<Attend> {
        let blocks: Arc<[BlockId]> = self.blocks.iter().map(|&block| BlockId(block)).collect();
        let row = |i: usize| QueryRow { logical: i, position: i as i64 };
        Ok(Attend {
            arena: self.arena.clone(),
            layer: 0,
            q: self.rows(rows, self.heads * GROUP)?,
            rope: rotate.then(|| Arc::clone(&self.rope)),
            keys: KeyForm::default(),
            work: Arc::new(AttendWork::new(
                (self.tokens - rows..self.tokens).map(row).collect::<Vec<_>>(),
                [AttendRows::new(0..rows, [Segment::new(blocks, self.tokens, 0, 0)])],
            )),
            scale: 1.0 / (DIM as f32).sqrt(),
            window: None,
            softcap: None,
            out: self.rows(rows, self.heads * GROUP)?,
            lse: None,
        })
    }

    /// Returns an [`AttendMass`] from the last block's tokens to all earlier tokens, of which there must be
    /// some. Runs the attention, which writes the log-sum-exps.
    pub fn attend_mass(&self) -> Result<AttendMass> {
        let before = self.tokens - BLOCK;
        let blocks: Vec<BlockId> = self.blocks.iter().map(|&block| BlockId(block)).collect();
        let (first, last) = blocks.split_at(blocks.len() - 1);
        let segments = [
            Segment::new(first.into(), before, 0, 0),
            Segment::new(last.into(), BLOCK, before, before as i64),
        ];
        let zeros =
            |shape: &[usize]| allocate_tensor(self.backend.as_ref(), MemoryKind::Device, DType::F32, shape);
        let attend = self.attend(BLOCK, true)?;
        let entry = AttendRows::new(0..BLOCK, segments);
        let work = Arc::new(AttendWork::new(attend.work.rows(), [entry]));
        let attend = Attend { work, lse: Some(zeros(&[BLOCK, self.heads * GROUP])?), ..attend };
        self.stream.attend(&attend)?;
        Ok(AttendMass { attend, q_latent: None, entry: 0, sums: zeros(&[before])? })
    }
}

/// Returns a decode step over a latent cache with DeepSeek-V3's widths, for 16 of its heads, and the size of
/// the cache in bytes.
pub fn attend_mla(backend: &dyn Backend, dtype: DType, tokens: usize) -> Result<(AttendMla, usize)> {
    const ROPE: usize = 64;
    const LATENT: usize = 512;
    const HEADS: usize = 16;
    let tokens = tokens.next_multiple_of(BLOCK).max(BLOCK);
    let blocks = tokens / BLOCK;
    let arena = allocate(backend, blocks, dtype.into(), (1, ROPE), (1, LATENT))?;
    let rows = |dim| allocate_tensor(backend, MemoryKind::Device, dtype, &[1, HEADS, dim]);
    let order: Arc<[BlockId]> = shuffled(blocks as u32).into_iter().map(BlockId).collect();
    let attend = Attend {
        arena,
        layer: 0,
        q: rows(ROPE)?,
        rope: None,
        keys: KeyForm::default(),
        work: Arc::new(AttendWork::new(
            [QueryRow { logical: tokens - 1, position: tokens as i64 - 1 }],
            [AttendRows::new(0..1, [Segment::new(order, tokens, 0, 0)])],
        )),
        scale: 1.0 / 192f32.sqrt(),
        window: None,
        softcap: None,
        out: rows(LATENT)?,
        lse: None,
    };
    let bytes = tokens * (ROPE + LATENT) * dtype.bits() / 8;
    Ok((AttendMla { attend, q_latent: rows(LATENT)? }, bytes))
}

/// Allocates one layer of `blocks` token-major blocks, with [`HEADS`] KV heads of [`DIM`] elements each.
pub fn arena(backend: &dyn Backend, format: KvFormat, blocks: usize) -> Result<KvArena> {
    arena_of(backend, HEADS, format, blocks)
}

fn arena_of(backend: &dyn Backend, heads: usize, format: KvFormat, blocks: usize) -> Result<KvArena> {
    allocate(backend, blocks, format, (heads, DIM), (heads, DIM))
}

/// Allocates one layer of token-major blocks, with the given numbers of heads and widths for K and V.
fn allocate(
    backend: &dyn Backend,
    blocks: usize,
    format: KvFormat,
    (k_heads, k_dim): (usize, usize),
    (v_heads, v_dim): (usize, usize),
) -> Result<KvArena> {
    let layout = KvLayout::new(KvShape {
        num_layers: 1,
        num_blocks: blocks,
        block_size: BLOCK,
        k_heads,
        v_heads,
        k_dim,
        v_dim,
        format,
        order: BlockOrder::TokenMajor,
    })?;
    KvArena::allocate(backend, MemoryKind::Device, Arc::new(layout))
}

/// Returns block IDs in the order in which a pool in use would allocate them.
pub fn shuffled(blocks: u32) -> Vec<u32> {
    let mut order: Vec<u32> = (0..blocks).collect();
    let mut state = 1u64;
    for i in (1..order.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        order.swap(i, (state >> 33) as usize % (i + 1));
    }
    order
}
