//! A piece's own scales for 8-bit floats, computed from its largest magnitudes.

use std::sync::Arc;

use kvcore::{
    Backend, BlockId, DType, Fp8Kind, Gather, KvArena, KvFormat, KvPlane, MemoryKind, ScaleScope, Stream,
    TensorView, allocate_tensor,
};

use crate::error::Result;

/// The number of blocks to read at a time. This limits the memory for the copies, however large the piece is.
const STAGED_BLOCKS: usize = 8;

// Decision: docs/decisions/chunks.md#each-piece-that-sleeps-in-fp8-has-its-own-scales
/// Returns an arena that shares the codes of `host` and has its own scales: the smallest scales that fit the
/// contents of `blocks` in `device`. Returns `None` for formats without static scales. Waits for the stream.
pub(super) fn of_piece(
    backend: &dyn Backend,
    stream: &dyn Stream,
    (device, host): (&KvArena, &KvArena),
    blocks: &[BlockId],
) -> Result<Option<KvArena>> {
    let KvFormat::Fp8 { kind, scales } = host.layout().shape().format else { return Ok(None) };
    let (Some(k), Some(v)) = (host.layout().k_scales(), host.layout().v_scales()) else { return Ok(None) };
    let host_memory = backend.capabilities().host_memory();
    let storage = |bytes| backend.allocate(host_memory, bytes);
    let (codes, layout) = ((host.k(), host.v()), Arc::clone(host.layout()));
    let own = KvArena::with_scales(
        Arc::clone(codes.0),
        Arc::clone(codes.1),
        storage(k.bytes)?,
        storage(v.bytes)?,
        layout,
    )?;
    let look = Look { stream, device, kind, scope: scales };
    let [k, v] = look.scales(backend, blocks)?;
    own.set_scales(stream, &k, &v)?;
    Ok(Some(own))
}

/// Finds the largest magnitudes of blocks on the device.
struct Look<'a> {
    stream: &'a dyn Stream,
    device: &'a KvArena,
    kind: Fp8Kind,
    scope: ScaleScope,
}

impl Look<'_> {
    /// Returns the scales of K and of V, layer by layer.
    fn scales(&self, backend: &dyn Backend, blocks: &[BlockId]) -> Result<[Vec<f32>; 2]> {
        let shape = self.device.layout().shape();
        let (dtype, staged) =
            (shape.format.storage_dtype(), blocks.len().min(STAGED_BLOCKS) * shape.block_size);
        let rows = |plane: &KvPlane<'_>| {
            allocate_tensor(backend, MemoryKind::Device, dtype, &[staged, plane.heads, plane.dim])
        };
        let planes = [self.device.k_plane(), self.device.v_plane()];
        let staging = [rows(&planes[0])?, rows(&planes[1])?];
        let mut all = [Vec::new(), Vec::new()];
        for layer in 0..shape.num_layers {
            let mut largest = planes.map(|plane| vec![0.0f32; self.groups(&plane)]);
            for blocks in blocks.chunks(STAGED_BLOCKS) {
                let slots: Arc<[i64]> = blocks
                    .iter()
                    .flat_map(|block| {
                        (0..shape.block_size).map(|at| (block.index() * shape.block_size + at) as i64)
                    })
                    .collect();
                let [k, v] = [staging[0].slice(0, 0, slots.len())?, staging[1].slice(0, 0, slots.len())?];
                let arena = self.device.clone();
                self.stream.gather(&Gather {
                    arena,
                    layer,
                    slots,
                    k: k.clone(),
                    v: v.clone(),
                    rotation: None,
                })?;
                for ((view, plane), largest) in [k, v].iter().zip(&planes).zip(&mut largest) {
                    self.raise(largest, view, plane)?;
                }
            }
            for (scales, largest) in all.iter_mut().zip(largest) {
                scales.extend(largest.into_iter().map(|largest| self.kind.scale_for(largest)));
            }
        }
        Ok(all)
    }

    /// Returns the number of scales of a plane in one layer.
    fn groups(&self, plane: &KvPlane<'_>) -> usize {
        match self.scope {
            ScaleScope::PerTensor => 1,
            ScaleScope::PerHead => plane.heads,
        }
    }

    /// Updates `largest`, the largest finite magnitudes found so far, with the rows in `view`.
    fn raise(&self, largest: &mut [f32], view: &TensorView, plane: &KvPlane<'_>) -> Result<()> {
        let mut bytes = vec![0; view.dtype().bytes_for(view.len())?];
        self.stream.read(view, &mut bytes)?;
        let groups = largest.len();
        for (at, x) in widened(view.dtype(), &bytes).enumerate() {
            let largest = &mut largest[at / plane.dim % groups];
            if x.is_finite() {
                *largest = largest.max(x.abs());
            }
        }
        Ok(())
    }
}

/// Converts elements from the device to f32.
fn widened(dtype: DType, bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    let size = if dtype == DType::F32 { 4 } else { 2 };
    bytes.chunks_exact(size).map(move |b| match (dtype, b) {
        (DType::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f32(),
        (DType::BF16, &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f32(),
        (_, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        _ => 0.0,
    })
}
