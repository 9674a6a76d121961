//! Attention: decode steps, prefills, and segments with offsets.

use std::sync::Arc;

use kvbackend_cuda::dense::{CudaSteps, StoredKind};
use kvbench::lab::{BLOCK, DIM, HEADS, shuffled};
use kvcore::{
    Attend, AttendMla, AttendRows, AttendWork, BlockId, DType, KeyForm, KvArena, KvFormat, MemoryKind,
    QueryRow, Result, Segment,
};

use crate::card::Card;
use crate::pool::{QUERY_HEADS, arena, rope, rows, shape, usual};

/// The widths in DeepSeek-V3: of the rotated part of a key, and of the latent.
const LATENT: ((usize, usize), (usize, usize)) = ((1, 64), (1, 512));

/// The number of heads that attend over latents on one card of eight.
const LATENT_HEADS: usize = 16;

/// The number of rows and columns of the matrix product that a prefill is compared with.
const PRODUCT: usize = 4096;

/// The number of bf16 products that one projection of many rows consists of.
const TERMS: f64 = 3.0;

/// Returns the element type of the queries for a cache format.
fn queries(format: KvFormat) -> DType {
    match format {
        KvFormat::Dense(dtype) => dtype,
        _ => DType::BF16,
    }
}

/// Returns a decode step with one row for each of `sequences` sequences of `context` tokens. Each sequence is
/// split into `parts` segments. If there are several, each has its own offset.
fn step(sequences: usize, context: usize, parts: usize) -> AttendWork {
    let per_sequence = context / BLOCK;
    let order = shuffled((sequences * per_sequence) as u32);
    let entries: Vec<AttendRows> = order
        .chunks_exact(per_sequence)
        .enumerate()
        .map(|(row, blocks)| {
            let mut start = 0;
            let segment = |(i, blocks): (usize, &[u32])| {
                let blocks: Arc<[BlockId]> = blocks.iter().map(|&block| BlockId(block)).collect();
                let len = blocks.len() * BLOCK;
                // Like a document that was stored right after a system prompt and is reused after other
                // documents.
                let offset = if parts > 1 { start as i64 + 7 * i as i64 } else { 0 };
                let stored = if parts > 1 { 0 } else { start as i64 };
                let segment = Segment::new(blocks, len, start, stored).at_offset(offset);
                start += len;
                segment
            };
            let each = per_sequence.div_ceil(parts);
            let segments: Vec<Segment> = blocks.chunks(each).enumerate().map(segment).collect();
            AttendRows::new(row..row + 1, segments)
        })
        .collect();
    let row = QueryRow { logical: context - 1, position: context as i64 + 512 };
    AttendWork::new(vec![row; sequences], entries)
}

/// Returns an attend with the model's heads.
fn attend(card: &Card, arena: KvArena, work: AttendWork) -> Result<Attend> {
    let dtype = queries(arena.layout().shape().format);
    let count = work.rows().len();
    Ok(Attend {
        arena,
        layer: 0,
        q: rows(card, dtype, [count, QUERY_HEADS, DIM])?,
        rope: Some(rope(DIM)?),
        keys: KeyForm::default(),
        work: Arc::new(work),
        scale: 1.0 / (DIM as f32).sqrt(),
        window: None,
        softcap: None,
        out: rows(card, dtype, [count, QUERY_HEADS, DIM])?,
        lse: None,
    })
}

/// Returns the number of tokens, rounded to whole blocks, and as many sequences as fit into a third of the
/// free memory.
fn fitting(card: &Card, sequences: usize, context: usize, token: usize) -> (usize, usize) {
    let context = context.next_multiple_of(BLOCK).max(BLOCK);
    (sequences.min(card.free / 3 / (context * token)).max(1), context)
}

/// Allocates one layer for a decode step. Returns it with its size in bytes.
fn layer(card: &Card, format: KvFormat, tokens: usize) -> Result<(KvArena, usize)> {
    let arena = arena(card, MemoryKind::Device, shape(format, 1, tokens / BLOCK, usual()))?;
    let bytes = arena.layout().block_bytes() * (tokens / BLOCK);
    Ok((arena, bytes))
}

/// Measures a decode step over one layer. The step reads each byte of the cache once, while a copy reads and
/// writes. The limit therefore copies half as many bytes.
pub(crate) fn decode(card: &Card, format: KvFormat, sequences: usize, context: usize) -> Result<()> {
    let (sequences, context) = fitting(card, sequences, context, 8 * HEADS * DIM);
    let (arena, bytes) = layer(card, format, sequences * context)?;
    let op = attend(card, arena, step(sequences, context, 1))?;
    let what = format!("attend, decode, GQA 8, {format}");
    card.against_copy(&what, bytes, bytes / 2, || card.stream.attend(&op))
}

/// Measures the same step with each sequence split into segments, like chunks that are used at other
/// positions than their stored ones.
pub(crate) fn segments(card: &Card, sequences: usize, context: usize, parts: usize) -> Result<()> {
    let (sequences, context) = fitting(card, sequences, context, 8 * HEADS * DIM);
    let (arena, bytes) = layer(card, DType::BF16.into(), sequences * context)?;
    let op = attend(card, arena, step(sequences, context, parts))?;
    let what = match parts {
        1 => "attend over 1 segment, decode, bf16".to_owned(),
        _ => format!("attend over {parts} segments at offsets, decode, bf16"),
    };
    card.against_copy(&what, bytes, bytes / 2, || card.stream.attend(&op))
}

/// Measures a decode step over latents. Like [`decode`], it reads the cache once.
pub(crate) fn latent(card: &Card, format: KvFormat, sequences: usize, context: usize) -> Result<()> {
    let (key, value) = (LATENT.0.1, LATENT.1.1);
    let (sequences, context) = fitting(card, sequences, context, 4 * (key + value));
    let blocks = sequences * context / BLOCK;
    let arena = arena(card, MemoryKind::Device, shape(format, 1, blocks, LATENT))?;
    let bytes = arena.layout().block_bytes() * blocks;
    let dtype = queries(format);
    let rows = |dim| rows(card, dtype, [sequences, LATENT_HEADS, dim]);
    let attend = Attend {
        arena,
        layer: 0,
        q: rows(key)?,
        rope: None,
        keys: KeyForm::default(),
        work: Arc::new(step(sequences, context, 1)),
        scale: 1.0 / 192f32.sqrt(),
        window: None,
        softcap: None,
        out: rows(value)?,
        lse: None,
    };
    let op = AttendMla { attend, q_latent: rows(value)? };
    let what = format!("attend_mla, decode, 16 heads, {format}");
    card.against_copy(&what, bytes, bytes / 2, || card.stream.attend_mla(&op))
}

/// Measures a prompt whose tokens attend to all tokens before them. Counts two dot products for each pair of
/// tokens inside the mask. The limit is cuBLAS's matrix product in bf16 with f32 sums. Without cuBLAS, a copy
/// of the cache takes its place, although it is not a limit.
pub(crate) fn prefill(card: &Card, format: KvFormat, tokens: usize) -> Result<()> {
    let tokens = tokens.next_multiple_of(BLOCK).max(BLOCK);
    let (arena, bytes) = layer(card, format, tokens)?;
    let blocks: Arc<[BlockId]> = shuffled((tokens / BLOCK) as u32).into_iter().map(BlockId).collect();
    let all: Vec<QueryRow> = (0..tokens).map(|i| QueryRow { logical: i, position: i as i64 }).collect();
    let op = attend(
        card,
        arena,
        AttendWork::new(all, [AttendRows::new(0..tokens, [Segment::new(blocks, tokens, 0, 0)])]),
    )?;
    let pairs = tokens as f64 * (tokens as f64 + 1.0) / 2.0;
    let operations = 4.0 * pairs * (QUERY_HEADS * DIM) as f64;
    let what = format!("attend, prefill, GQA 8, {format}");
    let raw = card.raw;
    let mut work = || card.stream.attend(&op);
    let gflop = (operations * 1e-9, "GFLOP");
    let Ok(steps) = CudaSteps::new(&card.backend) else {
        let mut copy = || {
            card.copy(raw, bytes);
            Ok(())
        };
        let [seconds, limit] = card.in_turns([(raw, &mut work), (raw, &mut copy)])?;
        card.row(&what, gflop, seconds, "cuMemcpyDtoD (cuBLAS is missing)", limit);
        return Ok(());
    };
    let side = if tokens < PRODUCT / 4 { 128 } else { PRODUCT };
    let matrix = steps.weight(StoredKind::BF16, side, side, &halves(side * side))?;
    let x = rows(card, DType::F32, [side, 1, side])?;
    let x = steps.join_heads(&x)?;
    let mut product = || steps.project(&x, &matrix, None).map(drop);
    let products = steps.stream().raw();
    let [seconds, limit] = card.in_turns([(raw, &mut work), (products, &mut product)])?;
    let done = TERMS * 2.0 * (side as f64).powi(3);
    card.row(&what, gflop, seconds, "cuBLAS in bf16", limit * operations / done);
    Ok(())
}

/// Returns bf16 numbers between 0.5 and 2.
fn halves(count: usize) -> Vec<u8> {
    (0..count as u32)
        .flat_map(|i| (0x3f00 | (i.wrapping_mul(2_654_435_761) >> 24) as u16).to_le_bytes())
        .collect()
}
