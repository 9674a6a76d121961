//! Copies that convert, rotate or scale rows.

use std::sync::Arc;

use kvcore::{
    ApplyRope, BlockId, DType, Dequantize, KvArena, KvFormat, KvPlane, Pairing, Quantize, Result, Rope,
    RotateKeys, Rotation, ScaleLayout, TensorView,
};
use smallvec::smallvec;
use wgpu::Buffer;

use super::angles::{RowAngles, pairs_of};
use super::copy;
use super::places::{PlaceBuffer, RowAxis, RowItems, RowPlace, windows};
use crate::device::GpuDevice;
use crate::memory;
use crate::pipeline::{Binding, Constant, Shader};
use crate::queue::Dispatch;

/// The maximum number of workgroups per dispatch. A workgroup's index has 32 bits.
const MOST_GROUPS: u64 = 1 << 31;

/// Returns an element type's constant in `element.wgsl`.
pub(super) fn kind(dtype: DType) -> u32 {
    match dtype {
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::F8E4M3 => 3,
        DType::F8E5M2 => 4,
        DType::I8 => 5,
        DType::I4 => 6,
        _ => 0,
    }
}

/// Returns the number of elements that share a scale in an integer format, or `None` for any other format.
pub(super) fn group(format: KvFormat) -> Option<usize> {
    match format {
        KvFormat::Int8 { group } | KvFormat::Int4 { group } => Some(group),
        _ => None,
    }
}

/// The source or destination of rows.
pub(super) struct RowEnd {
    buffer: Buffer,
    dtype: DType,
    group: Option<usize>,
    scales: Option<(Buffer, ScaleLayout)>,
}

impl RowEnd {
    pub(super) fn view(device: &Arc<GpuDevice>, view: &TensorView) -> Result<Self> {
        let buffer = memory::of(device, view.storage())?.buffer()?;
        Ok(Self { buffer, dtype: view.dtype(), group: None, scales: None })
    }

    pub(super) fn plane(device: &Arc<GpuDevice>, plane: &KvPlane) -> Result<Self> {
        let buffer = memory::of(device, plane.storage)?.buffer()?;
        let scales = plane
            .scales
            .map(|(storage, layout)| memory::of(device, storage)?.buffer().map(|buffer| (buffer, layout)));
        let format = plane.format;
        Ok(Self { buffer, dtype: format.storage_dtype(), group: group(format), scales: scales.transpose()? })
    }

    /// Returns the buffer of rows of `dim` elements, and the buffer of their scales.
    fn sides(&self, device: &GpuDevice, dim: usize) -> [PlaceBuffer; 2] {
        let rows =
            PlaceBuffer { buffer: self.buffer.clone(), bits: self.dtype.bits() as u64, row: dim as u64 };
        let scales = match &self.scales {
            Some((buffer, layout)) => PlaceBuffer {
                buffer: buffer.clone(),
                bits: layout.dtype.bits() as u64,
                row: layout.per_row as u64,
            },
            None => PlaceBuffer { buffer: device.nothing[0].clone(), bits: 32, row: 1 },
        };
        [rows, scales]
    }
}

/// The rotation of a conversion's rows, by the positions in [`RowItems::numbers`].
pub(super) struct ConversionTurn<'a> {
    pub(super) rope: &'a Rope,
    pub(super) factor: f32,
}

/// A conversion of rows of `dim` elements from `source` to `dest`. The rows' offsets are in elements, and
/// their scales' offsets are in scales.
pub(super) struct Conversion<'a> {
    pub(super) source: RowEnd,
    pub(super) dest: RowEnd,
    pub(super) dim: usize,
    pub(super) rows: RowItems,
    pub(super) turn: Option<ConversionTurn<'a>>,
}

impl Conversion<'_> {
    pub(super) fn dispatches(self, device: &Arc<GpuDevice>) -> Result<Vec<Dispatch>> {
        let Self { source, dest, dim, rows, turn } = self;
        if dim == 0 || rows.items.is_empty() || rows.axes.iter().any(|axis| axis.n == 0) {
            return Ok(Vec::new());
        }
        let turns = turn
            .as_ref()
            .map(|turn| RowAngles::of(device, turn.rope, rows.numbers.iter().map(|&at| at..=at)));
        let turns = turns.transpose()?;
        let pairs = turn.as_ref().map_or(0, |turn| pairs_of(turn.rope));
        let interleaved = turn.as_ref().is_some_and(|turn| turn.rope.pairing() == Pairing::Interleaved);
        let per_scale = source.group.or(dest.group).unwrap_or(dim);
        device.check_workgroup(dim + dim / per_scale)?;
        let constants: [Constant; 6] = [
            ("SOURCE", f64::from(kind(source.dtype))),
            ("DEST", f64::from(kind(dest.dtype))),
            ("DIM", dim as f64),
            ("PER_SCALE", per_scale as f64),
            ("PAIRS", pairs as f64),
            ("INTERLEAVED", f64::from(u8::from(interleaved))),
        ];
        let pipeline = device.pipeline(Shader::ConvertRows, &constants, "")?;
        let [from, from_scales] = source.sides(device, dim);
        let [to, to_scales] = dest.sides(device, dim);
        let mut work = Vec::new();
        for part in windows(device, rows.with_axes(2), &[from, to, from_scales, to_scales])? {
            let mut axes = part.axes;
            while axes.len() < 2 {
                axes.insert(0, RowAxis { n: 1, strides: RowPlace::default() });
            }
            let per_item = axes.iter().map(|axis| axis.n as u64).product::<u64>();
            let mut bindings = part.bindings;
            bindings.push(
                turns.as_ref().map_or_else(|| Binding::whole(&device.nothing[1]), |t| t.binding.clone()),
            );
            for items in part.items.chunks((MOST_GROUPS / per_item).max(1) as usize) {
                let mut args = vec![items.len() as u32, axes[0].n as u32, axes[1].n as u32];
                args.extend(axes.iter().flat_map(|axis| axis.strides.map(|stride| stride as u32)));
                args.push(turns.as_ref().map_or(0, |turns| turns.first));
                args.push(turn.as_ref().map_or(1.0, |turn| turn.factor).to_bits());
                for (places, number) in items {
                    args.extend_from_slice(places);
                    args.push(turns.as_ref().map_or(0, |turns| turns.number(*number)).cast_unsigned());
                }
                work.push(Dispatch {
                    pipeline: Arc::clone(&pipeline),
                    args,
                    bindings: bindings.clone(),
                    groups: items.len() as u64 * per_item,
                    keeps: None,
                });
            }
        }
        Ok(work)
    }
}

/// Returns the strides of a plane's scales, or zeros if the plane has no scales.
pub(super) fn scale_strides(plane: &KvPlane) -> kvcore::PlaneStrides {
    let none = kvcore::PlaneStrides { layer: 0, block: 0, head: 0, token: 0 };
    plane.scales.map_or(none, |(_, scales)| scales.strides)
}

pub(crate) fn rope(device: &Arc<GpuDevice>, op: &ApplyRope) -> Result<Vec<Dispatch>> {
    let (shape, strides) = (op.rows.shape(), op.rows.strides());
    let at = |row: usize| (op.rows.offset() + row * strides[0]) as u64;
    let items: Vec<RowPlace> = (0..shape[0]).map(|row| [at(row), at(row), 0, 0]).collect();
    let numbers = op.positions.iter().map(|&position| position as i32).collect();
    let axes = smallvec![RowAxis { n: shape[1], strides: [strides[1] as u64, strides[1] as u64, 0, 0] }];
    let conversion = Conversion {
        source: RowEnd::view(device, &op.rows)?,
        dest: RowEnd::view(device, &op.rows)?,
        // Elements past the rotary dimension stay unchanged.
        dim: op.rope.config().rotary_dim,
        rows: RowItems { items, numbers, axes },
        turn: Some(ConversionTurn { rope: &op.rope, factor: op.rope.attention_factor() }),
    };
    conversion.dispatches(device)
}

/// Converts blocks of one plane into blocks of another plane, in the given layers.
fn blocks(
    device: &Arc<GpuDevice>,
    (src, dst): (&KvPlane, &KvPlane),
    layers: std::ops::Range<usize>,
    block_size: usize,
    pairs: &[(BlockId, BlockId)],
    rotation: Option<&Rotation>,
) -> Result<Vec<Dispatch>> {
    let strides = [src.strides, dst.strides, scale_strides(src), scale_strides(dst)];
    let items: Vec<RowPlace> = layers
        .flat_map(|layer| pairs.iter().map(move |&(from, to)| (layer, [from, to, from, to])))
        .map(|(layer, blocks)| {
            std::array::from_fn(|side| strides[side].at(layer, blocks[side].index(), 0, 0) as u64)
        })
        .collect();
    let axes = smallvec![
        RowAxis { n: block_size, strides: strides.map(|strides| strides.token as u64) },
        RowAxis { n: src.heads, strides: strides.map(|strides| strides.head as u64) },
    ];
    let turn = rotation.map(|rotation| ConversionTurn { rope: &rotation.rope, factor: 1.0 });
    let number = rotation.map_or(0, |rotation| rotation.delta as i32);
    let conversion = Conversion {
        source: RowEnd::plane(device, src)?,
        dest: RowEnd::plane(device, dst)?,
        dim: src.dim,
        rows: RowItems { numbers: vec![number; items.len()], items, axes },
        turn,
    };
    conversion.dispatches(device)
}

pub(crate) fn rotate_keys(device: &Arc<GpuDevice>, op: &RotateKeys) -> Result<Vec<Dispatch>> {
    let block_size = op.src.layout().shape().block_size;
    let layers = op.layer..op.layer + 1;
    let (k, v) = ((&op.src.k_plane(), &op.dst.k_plane()), (&op.src.v_plane(), &op.dst.v_plane()));
    let mut work = blocks(device, k, layers.clone(), block_size, &op.pairs, Some(&op.rotation))?;
    work.extend(copy::blocks(device, v, layers, block_size, &op.pairs)?);
    Ok(work)
}

fn all_blocks(
    device: &Arc<GpuDevice>,
    (src, dst): (&KvArena, &KvArena),
    pairs: &[(BlockId, BlockId)],
) -> Result<Vec<Dispatch>> {
    let s = src.layout().shape();
    let mut work =
        blocks(device, (&src.k_plane(), &dst.k_plane()), 0..s.num_layers, s.block_size, pairs, None)?;
    let v = (&src.v_plane(), &dst.v_plane());
    work.extend(blocks(device, v, 0..s.num_layers, s.block_size, pairs, None)?);
    Ok(work)
}

pub(crate) fn quantize(device: &Arc<GpuDevice>, op: &Quantize) -> Result<Vec<Dispatch>> {
    all_blocks(device, (&op.src, &op.dst), &op.pairs)
}

pub(crate) fn dequantize(device: &Arc<GpuDevice>, op: &Dequantize) -> Result<Vec<Dispatch>> {
    all_blocks(device, (&op.src, &op.dst), &op.pairs)
}
