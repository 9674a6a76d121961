//! Decode attention through CANN's fused operator on the paged cache.
//!
//! `FusedInferAttentionScoreV2` computes plain softmax attention for one row per sequence, over the first
//! tokens in a block table. The composed operators handle everything else, including operands that exceed the
//! limits in CANN's documentation.

use std::sync::Arc;

use kvcore::{Attend, AttendRows, BlockId, KeyForm, QueryRow, Result};

use super::lists::{DecodeTables, SequenceTables};
use super::operands::AttentionOperands;
use crate::bindings::types as sys;
use crate::library::Serves;
use crate::operations::angles::SentAngles;
use crate::operations::plans::{ByAddress, PlanKey, StepWork};
use crate::operations::sent::SentTensor;
use crate::operators::{PagedAttention, Tensor};
use crate::queue::Work;

/// The maximum number of sequences per call.
const SEQUENCES: usize = 65_536;
/// The maximum number of query heads.
const HEADS: usize = 256;
/// The maximum number of elements per head.
const DIM: usize = 512;
/// The maximum number of tokens per sequence.
const TOKENS: usize = 262_144;
/// The maximum number of query heads per KV head.
const HEADS_PER_KV_HEAD: usize = 64;

/// The maximum number of elements per token when its heads are contiguous.
const TOKEN_ELEMENTS: usize = 65_535;

/// The operator requires that the number of elements per head and the number of tokens per block are
/// multiples of this value. Sixteen two-byte elements fill 32 bytes.
const UNIT: usize = 16;

/// The maximum number of tokens per block.
const BLOCK: usize = 512;

/// The tokens that a row sees. They must be the first tokens in a list of blocks. No segment or merge group
/// may scale their logits or log-sum-exps.
struct RowTokens {
    blocks: Vec<BlockId>,
    tokens: usize,
    /// The position at which a key is used, minus the position to which it was rotated when it was stored.
    /// The difference is the same for all tokens.
    offset: i64,
}

impl RowTokens {
    fn of(op: &Attend, entry: &AttendRows, at: QueryRow, block_size: usize) -> Option<Self> {
        let mut row = Self { blocks: Vec::new(), tokens: 0, offset: 0 };
        for segment in entry.segments.iter() {
            let seen = op.visible(segment, at);
            if seen.is_empty() {
                continue;
            }
            let groups = op.work.groups();
            let plain = segment.logit_scale == 1.0 && groups[segment.merge_group].lse_scale == 1.0;
            let follows = row.tokens.is_multiple_of(block_size) && seen.start == 0;
            let first = row.tokens == 0;
            if !plain || !follows || !(first || row.offset == segment.position_offset) {
                return None;
            }
            row.offset = segment.position_offset;
            row.blocks.extend_from_slice(&segment.blocks[..seen.end.div_ceil(block_size)]);
            row.tokens += seen.end;
        }
        (1..=TOKENS).contains(&row.tokens).then_some(row)
    }
}

/// Returns an operation's block tables, which are built once for all layers.
fn block_tables(work: &mut StepWork<'_, '_>, op: &Attend) -> Result<Arc<DecodeTables>> {
    let block_size = op.arena.layout().shape().block_size;
    let key = PlanKey::Sequences { work: op.work.id(), block_size, window: op.window };
    work.shared(key, |work| {
        let (rows, batch) = (op.work.rows(), op.work.batch());
        let in_order = rows.len() == batch.len() && rows.len() <= SEQUENCES;
        let sequences = batch.iter().zip(0..).map(|(entry, row)| {
            let one = entry.rows == (row..row + 1) && entry.selection.is_none();
            if one { RowTokens::of(op, entry, rows[row], block_size) } else { None }
        });
        let sequences: Option<Vec<RowTokens>> = if in_order { sequences.collect() } else { None };
        let tables = sequences.map(|sequences| SequenceTables::send(work, rows, &sequences)).transpose()?;
        Ok(Arc::new(DecodeTables(tables)))
    })
}

impl SequenceTables {
    fn send(work: &mut Work<'_>, rows: &[QueryRow], sequences: &[RowTokens]) -> Result<Self> {
        let width = sequences.iter().map(|sequence| sequence.blocks.len()).max().unwrap_or(0);
        let mut table = vec![0; sequences.len() * width];
        for (row, sequence) in table.chunks_exact_mut(width).zip(sequences) {
            row.iter_mut().zip(&sequence.blocks).for_each(|(to, block)| *to = block.0 as i32);
        }
        let position = |(row, sequence): (&QueryRow, &RowTokens)| row.position - sequence.offset;
        Ok(Self {
            table: SentTensor::send(work, &table, sys::ACL_INT32, &[sequences.len(), width])?,
            lengths: sequences.iter().map(|sequence| sequence.tokens as i64).collect(),
            blocks: sequences.iter().map(|sequence| sequence.blocks.len()).sum(),
            positions: rows.iter().zip(sequences).map(position).collect(),
        })
    }
}

/// Returns K and V in the layout of the fused operator, if it accepts these operands.
fn pages(operands: &AttentionOperands<'_>) -> Option<[Tensor; 2]> {
    let [k, v] = [operands.planes[0].pages()?, operands.planes[1].pages()?];
    let geometry = operands.planes[0].geometry;
    let (heads, dim, block_size) = (geometry.heads, geometry.dim, geometry.block_size);
    let elements: usize = k.dims().iter().product();
    let fits = k.dims() == v.dims()
        && [&k, &v, &operands.out].iter().all(|x| x.dtype() == operands.q.dtype())
        && operands.heads <= HEADS
        && operands.heads / heads <= HEADS_PER_KV_HEAD
        && (UNIT..=DIM).contains(&dim)
        && dim.is_multiple_of(UNIT)
        && (UNIT..=BLOCK).contains(&block_size)
        && block_size.is_multiple_of(UNIT)
        && i32::try_from(elements).is_ok();
    if !fits {
        return None;
    }
    if geometry.heads_lie_apart() {
        return Some([k, v]);
    }
    let blocks = k.dim(0);
    let by_token = |x: Tensor| x.reshaped(&[blocks, block_size, heads * dim]);
    (heads * dim <= TOKEN_ELEMENTS).then(|| [by_token(k), by_token(v)])
}

// Decision: docs/decisions/backend-ascend.md#fused-operators-are-used-where-they-fit
/// Computes attention with the fused operator if the operator supports the operation. Returns whether the
/// attention was computed.
pub(super) fn attend(work: &mut StepWork<'_, '_>, operands: &AttentionOperands<'_>) -> Result<bool> {
    let AttentionOperands { op, q, latent, out: wanted, lse: wanted_lse, planes, heads } = operands;
    let plain = latent.is_none() && op.softcap.is_none() && op.keys == KeyForm::Rotated;
    if !plain || !work.npu().fuses(Serves::FusedAttention) {
        return Ok(false);
    }
    let Some([k, v]) = pages(operands) else { return Ok(false) };
    let tables = block_tables(work, op)?;
    let Some(tables) = &tables.0 else { return Ok(false) };
    if tables.blocks > k.dim(0) {
        return Ok(false);
    }
    let (rows, dim) = (q.dim(0), q.dim(2));
    let each = [rows, *heads, 1, dim];
    let rotated = rotated(work, operands, tables)?.reshaped(&each);
    let dense = |work: &mut Work<'_>, wanted: Option<&Tensor>, dtype, dims: &[usize]| match wanted {
        Some(wanted) if wanted.is_dense() => Ok(wanted.reshaped(dims)),
        _ => work.temporary(dtype, dims),
    };
    let out = dense(work, Some(wanted), q.dtype(), &each)?;
    let sums = if wanted_lse.is_some() { &[rows, *heads, 1, 1][..] } else { &[1] };
    let lse = dense(work, wanted_lse.as_ref(), sys::ACL_FLOAT, sums)?;
    work.attend_paged(&PagedAttention {
        q: &rotated,
        k: &k,
        v: &v,
        table: &tables.table.tensor,
        lengths: &tables.lengths,
        kv_heads: planes[0].geometry.heads,
        block_size: planes[0].geometry.block_size,
        scale: op.scale,
        out: &out,
        lse: &lse,
    })?;
    if !wanted.is_dense() {
        work.convert(&out.reshaped(&[rows, *heads, dim]), wanted)?;
    }
    match wanted_lse {
        Some(wanted) if !wanted.is_dense() => work.convert(&lse.reshaped(&[rows, *heads]), wanted)?,
        _ => {}
    }
    Ok(true)
}

/// Returns the queries as a dense tensor of the same type, rotated if the operation has a rotary embedding.
fn rotated(
    work: &mut StepWork<'_, '_>,
    operands: &AttentionOperands<'_>,
    tables: &SequenceTables,
) -> Result<Tensor> {
    let (op, q) = (operands.op, &operands.q);
    let Some(rope) = &op.rope else {
        // If the output may overwrite the queries, they are copied.
        let apart = op.q.storage().address() != op.out.storage().address();
        return if apart { work.dense_in(q.dtype(), q) } else { work.copied(q.dtype(), q) };
    };
    let (work_id, window) = (op.work.id(), op.window);
    let key = PlanKey::SequenceAngles { work: work_id, window, rope: ByAddress::of(rope) };
    let send = |work: &mut StepWork<'_, '_>| {
        SentAngles::send(work, rope, &tables.positions, rope.attention_factor())
    };
    let angles = work.shared(key, send)?.all();
    let rotated = work.in_f32(q)?;
    angles.rotate(work, &rotated, &[q.dim(0), 1])?;
    work.copied(q.dtype(), &rotated)
}
