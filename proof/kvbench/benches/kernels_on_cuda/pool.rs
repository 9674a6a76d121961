//! Operations that move and convert a pool's rows and blocks.

use std::cell::Cell;
use std::sync::Arc;

use kvbench::lab::{BLOCK, DIM, HEADS, shuffled};
use kvcore::{
    ApplyRope, BlockId, BlockOrder, CopyBlocks, DType, Dequantize, Gather, KvArena, KvFormat, KvLayout,
    KvShape, MemoryKind, Quantize, Result, Rope, RopeConfig, RotateKeys, Rotation, RowRotation, Scatter,
    SwapBlocks, TensorView, WritePairs, WriteSlots, allocate_tensor,
};

use crate::card::Card;

/// The model's number of query heads.
pub(crate) const QUERY_HEADS: usize = 64;

/// The maximum size of an arena in pinned memory, in bytes.
const PINNED: usize = 512 << 20;

/// Returns the shape of a cache whose rows have the given heads and elements for K and V.
pub(crate) fn shape(
    format: KvFormat,
    layers: usize,
    blocks: usize,
    (k, v): ((usize, usize), (usize, usize)),
) -> KvShape {
    KvShape {
        num_layers: layers,
        num_blocks: blocks,
        block_size: BLOCK,
        k_heads: k.0,
        v_heads: v.0,
        k_dim: k.1,
        v_dim: v.1,
        format,
        order: BlockOrder::TokenMajor,
    }
}

/// Allocates a cache with the model's heads and fills it with numbers.
pub(crate) fn arena(card: &Card, kind: MemoryKind, shape: KvShape) -> Result<KvArena> {
    let arena = KvArena::allocate(card.backend.as_ref(), kind, Arc::new(KvLayout::new(shape)?))?;
    if kind == MemoryKind::Device {
        for plane in [arena.k_plane(), arena.v_plane()] {
            card.fill(plane.storage);
        }
    }
    Ok(arena)
}

/// Returns the model's number of heads and elements per head, for K and for V.
pub(crate) fn usual() -> ((usize, usize), (usize, usize)) {
    ((HEADS, DIM), (HEADS, DIM))
}

/// Allocates rows filled with numbers.
pub(crate) fn rows(card: &Card, dtype: DType, shape: [usize; 3]) -> Result<TensorView> {
    let rows = allocate_tensor(card.backend.as_ref(), MemoryKind::Device, dtype, &shape)?;
    card.fill(rows.storage());
    Ok(rows)
}

/// Returns the model's RoPE angles, for positions up to 131,071.
pub(crate) fn rope(dim: usize) -> Result<Arc<Rope>> {
    Ok(Arc::new(Rope::new(RopeConfig::new(dim, 500_000.0), 1 << 17)?))
}

/// Returns the number of blocks in a pool of `bytes` bytes, rounded to an even number.
fn blocks_in(format: KvFormat, layers: usize, bytes: usize) -> Result<usize> {
    let one = KvLayout::new(shape(format, layers, 1, usual()))?.block_bytes();
    Ok((bytes / one).next_multiple_of(2).max(2))
}

/// Returns pairs of blocks: sources in the order of a pool in use, destinations in sequence starting at
/// `first`.
fn pairs(blocks: usize, first: u32) -> WritePairs {
    let pairs =
        shuffled(blocks as u32).into_iter().zip(first..).map(|(from, to)| (BlockId(from), BlockId(to)));
    WritePairs::unchecked(pairs.collect::<Arc<[_]>>())
}

/// Cycles through the layers, so the next layer is never in a cache.
fn layers(count: usize) -> impl Fn() -> usize {
    let next = Cell::new(0);
    move || next.replace((next.get() + 1) % count)
}

/// Measures moving rows and blocks: the rows of all blocks in one layer, and half of the blocks in all
/// layers.
pub(crate) fn moves(card: &Card, dtype: DType, num_layers: usize, bytes: usize) -> Result<()> {
    let blocks = blocks_in(dtype.into(), num_layers, bytes)?;
    let arena = arena(card, MemoryKind::Device, shape(dtype.into(), num_layers, blocks, usual()))?;
    let (stream, layer, tokens) = (card.stream.as_ref(), layers(num_layers), blocks * BLOCK);
    let of_layer = arena.layout().block_bytes() / num_layers * blocks;
    let order = shuffled(blocks as u32);
    let slots: Arc<[i64]> = order
        .iter()
        .flat_map(|&block| (0..BLOCK as i64).map(move |i| i64::from(block) * BLOCK as i64 + i))
        .collect();
    let (k, v) = (rows(card, dtype, [tokens, HEADS, DIM])?, rows(card, dtype, [tokens, HEADS, DIM])?);
    let mut scatter = Scatter {
        arena: arena.clone(),
        layer: 0,
        k: k.clone(),
        v: v.clone(),
        slots: WriteSlots::unchecked(Arc::clone(&slots)),
        rotation: None,
    };
    card.against_copy(&format!("scatter {dtype}"), of_layer, of_layer, || {
        scatter.layer = layer();
        stream.scatter(&scatter)
    })?;
    let positions = (0..tokens as i64).map(|i| i % 8192).collect();
    scatter.rotation = Some(RowRotation { rope: rope(DIM)?, positions });
    card.against_copy(&format!("scatter, K rotated, {dtype}"), of_layer, of_layer, || {
        scatter.layer = layer();
        stream.scatter(&scatter)
    })?;
    let mut gather = Gather { arena: arena.clone(), layer: 0, k, v, slots, rotation: None };
    card.against_copy(&format!("gather {dtype}"), of_layer, of_layer, || {
        gather.layer = layer();
        stream.gather(&gather)
    })?;
    let half = blocks / 2;
    let copy = CopyBlocks { arena: arena.clone(), pairs: pairs(half, half as u32) };
    card.against_copy(&format!("copy_blocks {dtype}"), copy.bytes(), copy.bytes(), || {
        stream.copy_blocks(&copy)
    })?;
    let rotation = Rotation { rope: rope(DIM)?, delta: 777 };
    let (src, dst) = (arena.clone(), arena.clone());
    let mut rotate = RotateKeys { src, dst, layer: 0, pairs: copy.pairs.clone(), rotation };
    let what = format!("rotate_keys (K rotated, V copied) {dtype}");
    card.against_copy(&what, of_layer / 2, of_layer / 2, || {
        rotate.layer = layer();
        stream.rotate_keys(&rotate)
    })?;
    swaps(card, dtype, num_layers, &arena)?;
    turned(card, dtype, tokens / 4)
}

/// Measures copying whole blocks to pinned memory and back.
fn swaps(card: &Card, dtype: DType, num_layers: usize, pool: &KvArena) -> Result<()> {
    let all = pool.layout().shape().num_blocks;
    let blocks = blocks_in(dtype.into(), num_layers, PINNED)?.min(all);
    let pinned = arena(card, MemoryKind::Pinned, shape(dtype.into(), num_layers, blocks, usual()))?;
    let stream = card.stream.as_ref();
    let out = SwapBlocks { src: pool.clone(), dst: pinned.clone(), pairs: pairs(blocks, 0) };
    let what = format!("swap_blocks to pinned memory {dtype}");
    card.against_host(&what, out.bytes(), false, || stream.swap_blocks(&out))?;
    let back = SwapBlocks { src: pinned, dst: pool.clone(), pairs: pairs(blocks, 0) };
    let what = format!("swap_blocks from pinned memory {dtype}");
    card.against_host(&what, back.bytes(), true, || stream.swap_blocks(&back))
}

/// Measures rotating queries in place.
fn turned(card: &Card, dtype: DType, tokens: usize) -> Result<()> {
    let tokens = tokens.max(1);
    let rows = rows(card, dtype, [tokens, QUERY_HEADS, DIM])?;
    let bytes = rows.storage().len();
    let positions = (0..tokens as i64).map(|i| i % 8192).collect();
    let op = ApplyRope { rows, positions, rope: rope(DIM)? };
    card.against_copy(&format!("rope {dtype}"), bytes, bytes, || card.stream.rope(&op))
}

/// Measures converting the blocks of all layers to a format with fewer bits, and back. Counts the bytes on
/// the dense side.
pub(crate) fn formats(card: &Card, format: KvFormat, num_layers: usize, bytes: usize) -> Result<()> {
    let blocks = blocks_in(DType::BF16.into(), num_layers, bytes / 2)?;
    let dense = arena(card, MemoryKind::Device, shape(DType::BF16.into(), num_layers, blocks, usual()))?;
    let small = arena(card, MemoryKind::Device, shape(format, num_layers, blocks, usual()))?;
    let (stream, bytes) = (card.stream.as_ref(), dense.layout().block_bytes() * blocks);
    let quantize = Quantize { src: dense.clone(), dst: small.clone(), pairs: pairs(blocks, 0) };
    let what = format!("quantize, bf16 to {format}");
    card.against_copy(&what, bytes, bytes, || stream.quantize(&quantize))?;
    let back = Dequantize { src: small, dst: dense, pairs: pairs(blocks, 0) };
    let what = format!("dequantize, {format} to bf16");
    card.against_copy(&what, bytes, bytes, || stream.dequantize(&back))
}
