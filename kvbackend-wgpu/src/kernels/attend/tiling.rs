//! The division of a call's work into workgroups, and the pipeline constants that follow from it.

use std::sync::Arc;

use kvcore::{Attend, Error, KeyForm, Pairing, Result};

use crate::device::{GpuDevice, NAME};
use crate::kernels::angles::pairs_of;
use crate::kernels::convert::{group, kind};
use crate::pipeline::{Constant, Pipeline, Shader};

/// The number of threads per workgroup of `attend.wgsl`.
const THREADS: usize = 128;

/// The maximum number of queries per workgroup. Each tile of keys is read once for all of them.
const QUERIES: usize = 16;

/// The number of tokens per tile, if so many fit in the workgroup memory. Each thread then has at most one
/// group of four logits.
const TOKENS: usize = 4 * THREADS / QUERIES;

/// The work of one workgroup, in heads, rows and tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tiling {
    /// The number of query heads per workgroup. All of them read the same K head and V head.
    pub(super) heads: usize,
    /// The number of workgroups that cover all heads of a row.
    pub(super) units: usize,
    /// The number of rows per workgroup.
    pub(super) rows: usize,
    /// The number of tokens per tile.
    pub(super) tokens: usize,
    latent: bool,
}

impl Tiling {
    /// Chooses the work of each workgroup for a call.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the heads are too wide for the device's workgroup memory.
    pub(super) fn of(device: &GpuDevice, op: &Attend, latent: bool) -> Result<Self> {
        let s = op.arena.layout().shape();
        let all_heads = op.q.shape()[1];
        let shared = all_heads / least_common_multiple(s.k_heads, s.v_heads);
        let memory = device.limits.max_compute_workgroup_storage_size as usize / size_of::<f32>();
        let longest = op.work.batch().iter().map(|entry| entry.rows.len()).max().unwrap_or(1).max(1);
        let widest = s.k_dim.max(s.v_dim) + 1;
        let latent_dim = if latent { s.v_dim } else { 1 };
        // The workgroup memory in words: queries in groups of four, a tile, weights, and the state of each
        // query.
        let words = |queries: usize, tokens: usize| {
            let quads = queries.div_ceil(4);
            // The size of each of the six arrays may be rounded up to a multiple of 16 bytes.
            4 * quads * (s.k_dim + latent_dim + shares(quads, tokens) * tokens + 2) + tokens * widest + 24
        };
        for most in [QUERIES, 8, 4, 2, 1] {
            let heads = (1..=most.min(shared)).rev().find(|n| shared.is_multiple_of(*n)).unwrap_or(1);
            let rows = (most / heads).min(longest.next_power_of_two()).max(1);
            let tokens =
                [TOKENS, 16, 8, 4, 2, 1].into_iter().find(|&tokens| words(heads * rows, tokens) <= memory);
            // Fewer tokens per tile would cost more than reading the keys a second time.
            if let Some(tokens) = tokens.filter(|&tokens| tokens >= 8 || most == 1) {
                return Ok(Self { heads, units: all_heads / heads, rows, tokens, latent });
            }
        }
        let what = format!(
            "attention over heads of {} and {} elements: the device has only {} bytes of workgroup memory; the cpu \
             backend has no such limit",
            s.k_dim,
            s.v_dim,
            4 * memory
        );
        Err(Error::Unsupported { backend: NAME, what })
    }

    pub(super) fn pipeline(
        &self,
        device: &GpuDevice,
        op: &Attend,
        latent: Option<kvcore::DType>,
        shader: Shader,
    ) -> Result<Arc<Pipeline>> {
        let s = op.arena.layout().shape();
        let flag = |yes: bool| f64::from(u8::from(yes));
        let interleaved = op.rope.as_ref().is_some_and(|rope| rope.pairing() == Pairing::Interleaved);
        let queries = self.heads * self.rows;
        let quads = queries.div_ceil(4);
        let width = THREADS.min(s.v_dim.next_power_of_two());
        let constants: [Constant; 18] = [
            ("KIND", f64::from(kind(s.format.storage_dtype()))),
            ("QUERY", f64::from(kind(op.q.dtype()))),
            ("LATENT_KIND", f64::from(latent.map_or(0, kind))),
            ("K_DIM", s.k_dim as f64),
            ("V_DIM", s.v_dim as f64),
            ("PER_SCALE", group(s.format).unwrap_or(1) as f64),
            ("BLOCK", s.block_size as f64),
            ("HEADS", self.heads as f64),
            ("QUERIES", queries as f64),
            ("TOKENS", self.tokens as f64),
            ("SHARES", shares(quads, self.tokens) as f64),
            ("WIDTH", width as f64),
            ("PAIRS", op.rope.as_ref().map_or(0, |rope| pairs_of(rope)) as f64),
            ("INTERLEAVED", flag(interleaved)),
            ("UNROTATED", flag(op.keys == KeyForm::Unrotated)),
            ("LATENT", flag(self.latent)),
            ("LATENT_DIM", if self.latent { s.v_dim as f64 } else { 1.0 }),
            ("TILE_ROW", (s.k_dim.max(s.v_dim) + 1) as f64),
        ];
        // WGSL needs the sizes of per-thread arrays as constants in the source code.
        let (turns, columns) = (quads.div_ceil(THREADS / width), s.v_dim.div_ceil(width));
        let texts = format!("const TURNS: u32 = {turns}u;\nconst COLUMNS: u32 = {columns}u;\n");
        device.pipeline(shader, &constants, &texts)
    }
}

/// Returns the number of threads that share the product of a key and four queries. The result is more than 1
/// if there are so few queries that threads would otherwise be idle.
fn shares(quads: usize, tokens: usize) -> usize {
    (THREADS / (quads * tokens)).max(1)
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}
