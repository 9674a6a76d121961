//! Chooses the kernel for a call, and the work of each thread block.

use kvcore::{Attend, DType, Error, KeyForm, KvFormat, Result, TensorView};

use crate::driver::NAME;
use crate::facts::DeviceFacts;
use crate::kernels::places::Region;
use crate::module::{CudaKernel, Module};

/// Threads per block, for every kernel.
pub(super) const THREADS: usize = 128;
const WARPS: usize = THREADS / 32;

/// The size of one memory access by the tensor-core kernels, in bytes.
const UNIT: i64 = 16;

/// A kernel, and the work of each of its thread blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct KernelTiling {
    pub(super) kernel: CudaKernel,
    /// Shared memory per block, in bytes.
    pub(super) shared: u32,
    /// The number of query heads per block. All of them read the same K and V heads.
    pub(super) heads: usize,
    /// The number of blocks that cover all heads of a row.
    pub(super) units: usize,
    /// The maximum number of rows per block.
    pub(super) rows: usize,
    /// The number of tokens that a block reads at once.
    pub(super) tokens: usize,
    /// The number of blocks that run on one multiprocessor at the same time.
    pub(super) resident: usize,
    /// The numbers of terms that queries and latent queries are split into; both are 0 in the plain kernel.
    pub(super) terms: (usize, usize),
    /// In the plain kernel, the number of groups of four queries per block.
    pub(super) quads: usize,
    /// In the plain kernel, the number of blocks that share a task's columns.
    pub(super) columns: usize,
    /// In the plain kernel, two flags: bit 0 is set if keys are read eight elements at a time, and bit 1 if
    /// values are.
    pub(super) eights: u32,
}

/// The tensor-core kernels for one pool format.
struct KernelFamily {
    /// The element type of the matrices.
    dtype: DType,
    /// True if the pools contain codes that are widened to `dtype`.
    codes: bool,
    entries: &'static [TileKernel],
}

/// A tensor-core kernel.
struct TileKernel {
    module: Module,
    name: &'static str,
    /// The maximum number of queries per block.
    queries: usize,
    /// True if the kernel handles latents and wide values.
    latent: bool,
    /// The maximum number of value columns.
    columns: usize,
    /// The number of tokens that a block reads at once.
    tokens: usize,
}

const fn heads(module: Module, name: &'static str, queries: usize, columns: usize) -> TileKernel {
    TileKernel { module, name, queries, latent: false, columns, tokens: 64 }
}

const fn latents(module: Module, name: &'static str, queries: usize) -> TileKernel {
    TileKernel { module, name, queries, latent: true, columns: 512, tokens: 32 }
}

const BF16: KernelFamily = KernelFamily {
    dtype: DType::BF16,
    codes: false,
    entries: &[
        heads(Module::AttendBf16, "attend_bf16_q64_v128", 64, 128),
        heads(Module::AttendBf16, "attend_bf16_q32_v256", 32, 256),
        heads(Module::AttendBf16, "attend_bf16_q16_v256", 16, 256),
        latents(Module::AttendBf16Latent, "attend_bf16_latent_q32", 32),
        latents(Module::AttendBf16Latent, "attend_bf16_latent_q16", 16),
    ],
};

const F16: KernelFamily = KernelFamily {
    dtype: DType::F16,
    codes: false,
    entries: &[
        heads(Module::AttendF16, "attend_f16_q64_v128", 64, 128),
        heads(Module::AttendF16, "attend_f16_q32_v256", 32, 256),
        heads(Module::AttendF16, "attend_f16_q16_v256", 16, 256),
        latents(Module::AttendF16Latent, "attend_f16_latent_q32", 32),
        latents(Module::AttendF16Latent, "attend_f16_latent_q16", 16),
    ],
};

const CODES: KernelFamily = KernelFamily {
    dtype: DType::BF16,
    codes: true,
    entries: &[
        heads(Module::AttendCodes, "attend_codes_q64_v128", 64, 128),
        heads(Module::AttendCodes, "attend_codes_q16_v256", 16, 256),
        latents(Module::AttendCodesLatent, "attend_codes_latent_q16", 16),
    ],
};

/// The plain kernels' names, each with its number of value columns per block.
const PLAIN: [(&str, usize); 2] = [("attend_plain_v128", 128), ("attend_plain_v256", 256)];

/// The number of queries per block of the plain kernel.
const PLAIN_QUERIES: usize = 16;
/// The number of tokens that the plain kernel reads at once.
const PLAIN_TOKENS: usize = 32;

impl KernelTiling {
    /// Chooses the kernel for a call.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the heads are too wide for the device's shared memory.
    pub(super) fn of(facts: &DeviceFacts, op: &Attend, latent: Option<&TensorView>) -> Result<Self> {
        let known = family(op).and_then(|family| family.tiling(facts, op, latent));
        match known {
            Some(tiling) => Ok(tiling),
            None => plain(facts, op, latent.is_some()),
        }
    }
}

/// Returns the tensor-core kernels for a call, or `None` if the plain kernel must run it.
fn family(op: &Attend) -> Option<KernelFamily> {
    let s = op.arena.layout().shape();
    let family = match s.format {
        KvFormat::Dense(DType::BF16) => BF16,
        KvFormat::Dense(DType::F16) => F16,
        KvFormat::Dense(_) => return None,
        KvFormat::Int8 { group } | KvFormat::Int4 { group } if !group.is_multiple_of(16) => return None,
        _ => CODES,
    };
    let bits = s.format.storage_dtype().bits();
    let whole = |dim: usize| dim.is_multiple_of(8) && (dim * bits).is_multiple_of(8 * UNIT as usize);
    // A key that is rotated when it is read needs more bits than the matrices' type has.
    let fits = op.keys == KeyForm::Rotated && whole(s.k_dim) && whole(s.v_dim) && aligned(op, UNIT);
    fits.then_some(family)
}

/// Returns whether every row of keys and values starts at a multiple of `unit` bytes.
fn aligned(op: &Attend, unit: i64) -> bool {
    [op.arena.k_plane(), op.arena.v_plane()].iter().all(|plane| row_places(op, plane) % unit == 0)
}

/// Returns the bitwise OR of a plane's address and its strides in bytes. A power of two that divides this
/// value divides every row's address.
fn row_places(op: &Attend, plane: &kvcore::KvPlane) -> i64 {
    let rows = Region::plane(plane, op.layer);
    rows.side.address.cast_signed() | rows.side.outer | rows.side.token | rows.head
}

/// Returns the number of query heads that share the same K and V heads.
fn sharing(op: &Attend) -> usize {
    let s = op.arena.layout().shape();
    let (mut x, mut y) = (s.k_heads, s.v_heads);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    op.q.shape()[1] / (s.k_heads / x * s.v_heads)
}

/// Returns the number of query heads and the number of rows for a block with at most `most` queries.
fn heads_and_rows(op: &Attend, most: usize) -> (usize, usize) {
    let shared = sharing(op);
    let heads = (1..=most.min(shared)).rev().find(|n| shared.is_multiple_of(*n)).unwrap_or(1);
    (heads, (most / heads).min(longest(op)).max(1))
}

/// Returns the number of rows in the longest entry.
fn longest(op: &Attend) -> usize {
    op.work.batch().iter().map(|entry| entry.rows.len()).max().unwrap_or(1).max(1)
}

impl KernelFamily {
    fn tiling(&self, facts: &DeviceFacts, op: &Attend, latent: Option<&TensorView>) -> Option<KernelTiling> {
        let s = op.arena.layout().shape();
        let queries = sharing(op) * longest(op);
        let rotated = op.rope.is_some();
        let terms = |entry: &TileKernel| {
            // Decision: docs/decisions/backend-cuda.md#attention-splits-its-f32-operands
            // Three bf16 terms represent an f32 exactly.
            let many = if entry.queries <= 32 && self.dtype == DType::BF16 { 3 } else { 2 };
            let terms = |dtype: DType, rotated: bool| if dtype == self.dtype && !rotated { 1 } else { many };
            (terms(op.q.dtype(), rotated), latent.map_or(0, |view| terms(view.dtype(), false)))
        };
        // Skips kernels for which at most half of a block's queries would be used.
        let entry = self.entries.iter().find(|entry| {
            entry.columns >= s.v_dim
                && (entry.latent || latent.is_none())
                && (entry.queries == 16 || 2 * queries > entry.queries)
                && self.shared(op, entry, terms(entry)) <= facts.shared_memory as usize
        })?;
        let (heads, rows) = heads_and_rows(op, entry.queries);
        let terms = terms(entry);
        let shared = self.shared(op, entry, terms);
        Some(KernelTiling {
            kernel: CudaKernel { module: entry.module, name: entry.name, shared: facts.shared_memory },
            shared: shared as u32,
            heads,
            units: op.q.shape()[1] / heads,
            rows,
            tokens: entry.tokens,
            resident: resident(facts, shared),
            terms,
            quads: 0,
            columns: 1,
            eights: 0,
        })
    }

    /// Returns the size of a block's shared memory in bytes. Its layout matches `MmaShared`.
    fn shared(&self, op: &Attend, entry: &TileKernel, terms: (usize, usize)) -> usize {
        let s = op.arena.layout().shape();
        let row = |dim: usize| 2 * (dim.next_multiple_of(16) + 8);
        let (k_row, v_row, m, n) = (row(s.k_dim), row(s.v_dim), entry.queries, entry.tokens);
        let weights = if self.codes { 4 * m * (n + 4) } else { 4 * m * (n + 8) };
        let (stages, sides) = match (self.codes, entry.latent) {
            (true, _) => (1, 4),
            (false, true) => (2, 2),
            (false, false) => (1, 2),
        };
        let mut parts =
            vec![terms.0 * m * k_row, terms.1 * m * v_row, stages * n * k_row, stages * n * v_row, weights];
        parts.extend([2 * sides * n * 8, WARPS * m * 4, m * 4, m * 8, 16]);
        if self.codes {
            let bits = s.format.storage_dtype().bits();
            let (k_group, v_group) = groups(op);
            parts.extend([n * s.k_dim * bits / 8, n * s.v_dim * bits / 8]);
            parts.extend([2 * n * (s.k_dim / k_group) * 4, 2 * n * (s.v_dim / v_group) * 4]);
        }
        whole_units(&parts)
    }
}

/// Returns the number of blocks that run on one multiprocessor at the same time if each of them uses `shared`
/// bytes of shared memory: at least 1, and at most 4 because of their registers. Each block occupies one
/// kilobyte of shared memory more than it requests.
fn resident(facts: &DeviceFacts, shared: usize) -> usize {
    ((facts.shared_memory as usize + 1024) / (shared + 1024)).clamp(1, 4)
}

fn whole_units(parts: &[usize]) -> usize {
    parts.iter().map(|bytes| bytes.next_multiple_of(16)).sum()
}

/// Returns the size of the plain kernel's shared memory per block, in bytes. Its layout matches
/// `PlainShared`.
fn plain_shared(op: &Attend, latent: bool, quads: usize, tokens: usize) -> usize {
    let s = op.arena.layout().shape();
    let fours = |dim: usize| dim.div_ceil(4) | 1;
    let (k, v) = (16 * fours(s.k_dim), 16 * fours(s.v_dim));
    whole_units(&[
        4 * k * quads,
        if latent { 4 * v * quads } else { 0 },
        k * tokens,
        v * tokens,
        4 * WARPS * 4 * PLAIN_TOKENS,
        4 * PLAIN_TOKENS * (PLAIN_QUERIES + 4),
        4 * PLAIN_QUERIES,
        8 * 2 * 4 * PLAIN_TOKENS,
        4 * 2 * PLAIN_TOKENS,
        8 * PLAIN_QUERIES,
        16,
    ])
}

pub(super) fn plain(facts: &DeviceFacts, op: &Attend, latent: bool) -> Result<KernelTiling> {
    let s = op.arena.layout().shape();
    let bits = s.format.storage_dtype().bits();
    let eights = |plane: &kvcore::KvPlane| {
        let unit = bits.min(16) as i64;
        plane.dim.is_multiple_of(8) && row_places(op, plane) % unit == 0
    };
    let (name, most_columns) =
        PLAIN.into_iter().find(|(_, columns)| *columns >= s.v_dim).unwrap_or(PLAIN[PLAIN.len() - 1]);
    let limit = facts.shared_memory as usize;
    for most in [PLAIN_QUERIES, 8, 4] {
        let (heads, rows) = heads_and_rows(op, most);
        let quads = (heads * rows).div_ceil(4).next_power_of_two();
        let fits = |&tokens: &usize| plain_shared(op, latent, quads, tokens) <= limit;
        // Fewer tokens per tile would cost more than reading the keys a second time.
        let least = if most == 4 { 1 } else { 8 };
        let Some(tokens) = [PLAIN_TOKENS, 16, 8, 4, 2, 1].into_iter().filter(|&n| n >= least).find(fits)
        else {
            continue;
        };
        let shared = plain_shared(op, latent, quads, tokens);
        return Ok(KernelTiling {
            kernel: CudaKernel { module: Module::AttendPlain, name, shared: facts.shared_memory },
            shared: shared as u32,
            heads,
            units: op.q.shape()[1] / heads,
            rows,
            tokens,
            resident: resident(facts, shared),
            terms: (0, 0),
            quads,
            columns: s.v_dim.div_ceil(most_columns),
            eights: u32::from(eights(&op.arena.k_plane())) | u32::from(eights(&op.arena.v_plane())) << 1,
        });
    }
    let what = format!(
        "attention over heads of {} and {} elements: the device has only {limit} bytes of shared memory; the cpu backend \
         has no such limit",
        s.k_dim, s.v_dim
    );
    Err(Error::Unsupported { backend: NAME, what })
}

/// Returns the number of elements per scale for keys and for values.
pub(super) fn groups(op: &Attend) -> (usize, usize) {
    let s = op.arena.layout().shape();
    match s.format {
        KvFormat::Int8 { group } | KvFormat::Int4 { group } => (group, group),
        _ => (s.k_dim, s.v_dim),
    }
}

/// Returns a grid with `blocks` blocks.
pub(super) fn grid(blocks: usize) -> Result<[u32; 3]> {
    let blocks =
        i32::try_from(blocks).map_err(|_| Error::Overflow { what: "blocks of threads of one launch" })?;
    Ok([blocks.unsigned_abs(), 1, 1])
}
