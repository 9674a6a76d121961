//! Copies that convert, rotate or scale rows.

use bytemuck::{Pod, Zeroable};
use kvcore::{
    ApplyRope, DType, Dequantize, Error, KvArena, KvFormat, KvPlane, Pairing, Quantize, Result, Rope,
    RotateKeys, TensorView, WritePairs,
};
use smallvec::SmallVec;

use super::places::{ItemKind, Items, Region, Side, blocks, bytes_of, element_kind, unit_log};
use crate::driver::NAME;
use crate::module::{CudaKernel, Module};
use crate::queue::{Launch, Lowering};

const DENSE: CudaKernel = CudaKernel { module: Module::Convert, name: "convert_dense", shared: 0 };

/// The maximum shared memory per block of the kernel `convert_any`, in bytes.
const MOST_SHARED: usize = 48 << 10;

const ANY: CudaKernel =
    CudaKernel { module: Module::Convert, name: "convert_any", shared: MOST_SHARED as u32 };

/// Threads per block, as declared in `convert.cu`.
const THREADS: u32 = 256;

/// The maximum number of [`ConvertPart`]s per launch.
const PARTS: usize = 4;

/// A part of a launch, as declared in `convert.cu`.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct ConvertPart {
    src: Side,
    dst: Side,
    src_scales: Side,
    dst_scales: Side,
    src_token: i64,
    dst_token: i64,
    src_scales_token: i64,
    dst_scales_token: i64,
    src_head: i64,
    dst_head: i64,
    src_scales_head: i64,
    dst_scales_head: i64,
    how: u32,
    src_kind: u32,
    dst_kind: u32,
    tokens: u32,
    heads: u32,
    dim: u32,
    group: u32,
    pairs: u32,
    interleaved: u32,
    unit_log: u32,
    tasks: u32,
    pad: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ConvertArgs {
    items: Items,
    positions: u64,
    delta: i64,
    angles: u64,
    factor: f32,
    row_words: u32,
    parts: [ConvertPart; PARTS],
}

/// The source or the destination of rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowsEnd {
    region: Region,
    scales: Option<Region>,
    dtype: DType,
    group: Option<usize>,
}

impl RowsEnd {
    pub(super) fn view(view: &TensorView) -> Self {
        Self { region: Region::rows(view), scales: None, dtype: view.dtype(), group: None }
    }

    pub(super) fn plane(plane: &KvPlane, layer: usize) -> Self {
        let group = match plane.format {
            KvFormat::Int8 { group } | KvFormat::Int4 { group } => Some(group),
            _ => None,
        };
        let dtype = plane.format.storage_dtype();
        Self { region: Region::plane(plane, layer), scales: Region::scales(plane, layer), dtype, group }
    }
}

/// Rows of `dim` elements to copy from one end to the other, bit for bit or converted.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowsOf {
    pub(super) src: RowsEnd,
    pub(super) dst: RowsEnd,
    /// The number of tokens per item: the block size for whole blocks, otherwise 1.
    pub(super) tokens: usize,
    pub(super) heads: usize,
    pub(super) dim: usize,
    /// True if the rows are rotated.
    pub(super) turns: bool,
}

/// The rotation that a launch applies.
#[derive(Clone, Copy)]
pub(super) struct RowTurn<'a> {
    pub(super) rope: &'a Rope,
    pub(super) factor: f32,
    /// The device address of the items' positions. If it is 0, all items are rotated by `delta`.
    pub(super) positions: u64,
    pub(super) delta: i64,
}

impl RowsOf {
    /// Returns whether the rows are copied bit for bit.
    fn is_raw(&self) -> bool {
        let scaled = self.src.scales.is_some() || self.dst.scales.is_some();
        !self.turns && !scaled && self.src.dtype == self.dst.dtype
    }

    fn part(&self, turn: Option<RowTurn<'_>>) -> Result<ConvertPart> {
        let Self { src, dst, tokens, heads, dim, .. } = *self;
        let narrow = |n: usize| u32::try_from(n).map_err(|_| Error::Overflow { what: "extents of rows" });
        let scales =
            |end: &RowsEnd| end.scales.map_or((Side::default(), 0), |scales| (scales.side, scales.head));
        let ((src_scales, src_scales_head), (dst_scales, dst_scales_head)) = (scales(&src), scales(&dst));
        // For whole blocks, tokens are an axis within the item; for slots, the token is part of the item's
        // address.
        let token = |side: &Side| if tokens == 1 { 0 } else { side.token };
        let mut part = ConvertPart {
            src: src.region.side,
            dst: dst.region.side,
            src_scales,
            dst_scales,
            src_token: token(&src.region.side),
            dst_token: token(&dst.region.side),
            src_scales_token: token(&src_scales),
            dst_scales_token: token(&dst_scales),
            src_head: src.region.head,
            dst_head: dst.region.head,
            src_scales_head,
            dst_scales_head,
            how: 1,
            src_kind: element_kind(src.dtype),
            dst_kind: element_kind(dst.dtype),
            tokens: narrow(tokens)?,
            heads: narrow(heads)?,
            dim: narrow(dim)?,
            group: narrow(src.group.or(dst.group).unwrap_or(dim))?,
            ..ConvertPart::default()
        };
        if let Some(turn) = turn.filter(|_| self.turns) {
            part.pairs = narrow(turn.rope.config().rotary_dim / 2)?;
            part.interleaved = u32::from(turn.rope.pairing() == Pairing::Interleaved);
        }
        if self.is_raw() {
            part.how = 0;
            let row = bytes_of(src.dtype, dim);
            part.unit_log = unit_log(part.distances().into_iter().chain([row]));
            part.dim = narrow((row >> part.unit_log) as usize)?;
        }
        part.tasks = part.tasks();
        Ok(part)
    }
}

impl ConvertPart {
    /// Returns the addresses and strides on both sides.
    fn distances(&self) -> [i64; 12] {
        let [a, b, c, d] = self.src.places();
        let [e, f, g, h] = self.dst.places();
        [a, b, c, d, e, f, g, h, self.src_token, self.dst_token, self.src_head, self.dst_head]
    }

    /// Returns the number of threads per row in `convert_dense`, or 0 if that kernel cannot run the part.
    fn tasks(&self) -> u32 {
        let aligned = unit_log(self.distances()) == 4;
        if self.how == 0 {
            return if aligned && self.unit_log == 4 { self.dim } else { 0 };
        }
        let dense = self.src_kind <= element_kind(DType::BF16) && self.dst_kind <= element_kind(DType::BF16);
        let per_turn = if self.interleaved != 0 { 4 } else { 8 };
        if !dense || !aligned || !self.dim.is_multiple_of(8) || !self.pairs.is_multiple_of(per_turn) {
            return 0;
        }
        self.pairs / per_turn + (self.dim - 2 * self.pairs) / 8
    }

    /// Returns the number of 4-byte words of shared memory per row.
    fn words(&self) -> usize {
        let groups = self.dim.checked_div(self.group).unwrap_or(0);
        if self.how == 0 { 0 } else { (self.dim + groups) as usize }
    }
}

/// Launches conversions and copies of several sets of rows, which all have the same items and layers.
pub(super) fn run(
    to: &mut Lowering<'_>,
    items: Items,
    layers: usize,
    rows: &[RowsOf],
    turn: Option<RowTurn<'_>>,
) -> Result<()> {
    let rows = rows.iter().filter(|rows| rows.dim > 0 && rows.heads > 0);
    let parts: SmallVec<[ConvertPart; PARTS]> = rows.map(|rows| rows.part(turn)).collect::<Result<_>>()?;
    let angles = turn.map_or(Ok(0), |turn| to.angles(turn.rope))?;
    let mut args = ConvertArgs {
        items,
        positions: turn.map_or(0, |turn| turn.positions),
        delta: turn.map_or(0, |turn| turn.delta),
        angles,
        factor: turn.map_or(1.0, |turn| turn.factor),
        row_words: parts.iter().map(ConvertPart::words).max().unwrap_or(0) as u32,
        parts: [ConvertPart::default(); PARTS],
    };
    args.parts[..parts.len()].copy_from_slice(&parts);
    let of_item = |part: &ConvertPart| u64::from(part.tokens) * u64::from(part.heads);
    let most = |each: fn(&ConvertPart) -> u64| {
        parts.iter().map(|part| u64::from(items.count) * of_item(part) * each(part)).max().unwrap_or(0)
    };
    let (rows, tasks) = (most(|_| 1), most(|part| u64::from(part.tasks)));
    if rows.max(tasks) > u64::from(u32::MAX) {
        return Err(Error::Overflow { what: "rows of one operation" });
    }
    let grid = |blocks| [blocks, layers as u32, parts.len() as u32];
    if parts.iter().all(|part| part.tasks > 0) {
        to.launch(Launch::new(DENSE, grid(blocks(tasks, u64::from(THREADS))), THREADS, 0, &args));
        return Ok(());
    }
    let bytes = 4 * args.row_words as usize;
    let warps = MOST_SHARED.checked_div(bytes).unwrap_or(8).min(8);
    if warps == 0 {
        let what = format!(
            "rows that take {bytes} bytes of shared memory: a block has only {MOST_SHARED}; the cpu backend has no such \
             limit"
        );
        return Err(Error::Unsupported { backend: NAME, what });
    }
    let (threads, shared) = (32 * warps as u32, (bytes * warps) as u32);
    to.launch(Launch::new(ANY, grid(blocks(rows, warps as u64)), threads, shared, &args));
    Ok(())
}

pub(super) fn rope(to: &mut Lowering<'_>, op: &ApplyRope) -> Result<()> {
    let end = RowsEnd::view(&op.rows);
    // Elements past the rotary dimension stay unchanged.
    let (heads, dim) = (op.rows.shape()[1], op.rope.config().rotary_dim);
    let rows = RowsOf { src: end, dst: end, tokens: 1, heads, dim, turns: true };
    let positions = to.numbers(&op.positions)?;
    let turn = RowTurn { rope: &op.rope, factor: op.rope.attention_factor(), positions, delta: 0 };
    let items = Items::new(ItemKind::Rows, 0, op.positions.len(), 1)?;
    run(to, items, 1, &[rows], Some(turn))
}

/// Describes one plane's rows in whole blocks, starting at layer `layer`.
fn block_rows(src: &KvPlane, dst: &KvPlane, layer: usize, block_size: usize, turns: bool) -> RowsOf {
    let (heads, dim) = (src.heads, src.dim);
    RowsOf {
        src: RowsEnd::plane(src, layer),
        dst: RowsEnd::plane(dst, layer),
        tokens: block_size,
        heads,
        dim,
        turns,
    }
}

/// Describes bit-for-bit copies of a plane's codes, and of its scales if blocks have their own scales.
fn raw_rows(src: &KvPlane, dst: &KvPlane, layer: usize, block_size: usize) -> SmallVec<[RowsOf; 2]> {
    let raw = |from: Region, to: Region, dtype: DType, elements: usize| {
        let end = |region| RowsEnd { region, scales: None, dtype: DType::U8, group: None };
        let dim = bytes_of(dtype, elements) as usize;
        (end(from), end(to), dim)
    };
    let mut ends: SmallVec<[(RowsEnd, RowsEnd, usize); 2]> = SmallVec::new();
    let codes = (Region::plane(src, layer), Region::plane(dst, layer));
    ends.push(raw(codes.0, codes.1, src.format.storage_dtype(), src.dim));
    if let (Some((_, scales)), Some(from), Some(to)) =
        (src.scales, Region::scales(src, layer), Region::scales(dst, layer))
        && !scales.is_static()
    {
        ends.push(raw(from, to, scales.dtype, scales.per_row));
    }
    let rows = |(src_end, dst_end, dim): (RowsEnd, RowsEnd, usize)| RowsOf {
        src: src_end,
        dst: dst_end,
        tokens: block_size,
        heads: src.heads,
        dim,
        turns: false,
    };
    ends.into_iter().map(rows).collect()
}

pub(super) fn rotate_keys(to: &mut Lowering<'_>, op: &RotateKeys) -> Result<()> {
    let block_size = op.src.layout().shape().block_size;
    let (src_v, dst_v) = (op.src.v_plane(), op.dst.v_plane());
    let mut rows: SmallVec<[RowsOf; 3]> = SmallVec::new();
    rows.push(block_rows(&op.src.k_plane(), &op.dst.k_plane(), op.layer, block_size, true));
    rows.extend(raw_rows(&src_v, &dst_v, op.layer, block_size));
    let items = Items::pairs(to, &op.pairs, block_size)?;
    let turn = RowTurn { rope: &op.rotation.rope, factor: 1.0, positions: 0, delta: op.rotation.delta };
    run(to, items, 1, &rows, Some(turn))
}

fn all_layers(to: &mut Lowering<'_>, src: &KvArena, dst: &KvArena, pairs: &WritePairs) -> Result<()> {
    let s = src.layout().shape();
    let items = Items::pairs(to, pairs, s.block_size)?;
    let rows = [
        block_rows(&src.k_plane(), &dst.k_plane(), 0, s.block_size, false),
        block_rows(&src.v_plane(), &dst.v_plane(), 0, s.block_size, false),
    ];
    run(to, items, s.num_layers, &rows, None)
}

pub(super) fn quantize(to: &mut Lowering<'_>, op: &Quantize) -> Result<()> {
    all_layers(to, &op.src, &op.dst, &op.pairs)
}

pub(super) fn dequantize(to: &mut Lowering<'_>, op: &Dequantize) -> Result<()> {
    all_layers(to, &op.src, &op.dst, &op.pairs)
}
