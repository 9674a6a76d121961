//! The attention kernels' argument, as declared in `attend.cuh`.

use bytemuck::{Pod, Zeroable};
use kvcore::{Attend, DType, KeyForm, KvPlane, Pairing, Result, TensorView};

use super::records::NO_WINDOW;
use super::tiling::{KernelTiling, groups};
use crate::kernels::places::{Region, element_kind};
use crate::queue::{Lowering, PlanChunk};

/// K or V of one layer. Strides are in bytes.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct AttendPlane {
    at: u64,
    block: i64,
    token: i64,
    head: i64,
    scales: u64,
    scale_block: i64,
    scale_token: i64,
    scale_head: i64,
}

impl AttendPlane {
    fn new(plane: &KvPlane, layer: usize) -> Self {
        let rows = Region::plane(plane, layer);
        let scales = Region::scales(plane, layer);
        let scale = scales.map(|scales| scales.side).unwrap_or_default();
        Self {
            at: rows.side.address,
            block: rows.side.outer,
            token: rows.side.token,
            head: rows.head,
            scales: scale.address,
            scale_block: scale.outer,
            scale_token: scale.token,
            scale_head: scales.map_or(0, |scales| scales.head),
        }
    }
}

/// A tensor with rows and heads. Strides are in bytes.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub(super) struct RowsArg {
    at: u64,
    row: i64,
    head: i64,
}

impl RowsArg {
    pub(super) fn new(view: &TensorView) -> Self {
        let rows = Region::rows(view);
        Self { at: rows.side.address, row: rows.side.outer, head: rows.head }
    }

    /// Describes a view's rows; the address is 0 if there is no view.
    pub(super) fn optional(view: Option<&TensorView>) -> Self {
        view.map(Self::new).unwrap_or_default()
    }
}

/// The argument of an attention kernel.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct AttendArgs {
    k: AttendPlane,
    v: AttendPlane,
    q: RowsArg,
    latent: RowsArg,
    out: RowsArg,
    lse: RowsArg,
    rows: u64,
    segments: u64,
    tables: u64,
    runs: u64,
    tasks: u64,
    sums: u64,
    values: u64,
    angles: u64,
    window: i64,
    scale: f32,
    softcap: f32,
    factor: f32,
    pairs: u32,
    interleaved: u32,
    unrotated: u32,
    kind: u32,
    q_kind: u32,
    latent_kind: u32,
    out_kind: u32,
    k_dim: u32,
    v_dim: u32,
    k_group: u32,
    v_group: u32,
    block_size: u32,
    heads: u32,
    k_heads: u32,
    v_heads: u32,
    unit_heads: u32,
    units: u32,
    q_terms: u32,
    latent_terms: u32,
    tile: u32,
    quads: u32,
    columns: u32,
    eights: u32,
}

/// The data that all chunks of a call share.
pub(super) struct AttendCall<'a> {
    pub(super) op: &'a Attend,
    pub(super) latent: Option<&'a TensorView>,
    pub(super) tiling: &'a KernelTiling,
}

impl AttendCall<'_> {
    /// Returns the kernel's argument for a chunk, given the address of the plan and the addresses of the
    /// parts' sums and values.
    pub(super) fn args(
        &self,
        to: &mut Lowering<'_>,
        chunk: &PlanChunk,
        plan: u64,
        (sums, values): (u64, u64),
    ) -> Result<AttendArgs> {
        let Self { op, latent, tiling } = self;
        let s = op.arena.layout().shape();
        let angles = op.rope.as_ref().map(|rope| to.angles(rope)).transpose()?;
        let window = op.window.map(|window| i64::try_from(window).unwrap_or(i64::MAX).min(NO_WINDOW));
        let interleaved = op.rope.as_ref().is_some_and(|rope| rope.pairing() == Pairing::Interleaved);
        let (k_group, v_group) = groups(op);
        Ok(AttendArgs {
            k: AttendPlane::new(&op.arena.k_plane(), op.layer),
            v: AttendPlane::new(&op.arena.v_plane(), op.layer),
            q: RowsArg::new(&op.q),
            latent: RowsArg::optional(*latent),
            out: RowsArg::new(&op.out),
            lse: RowsArg::optional(op.lse.as_ref()),
            rows: plan + chunk.shared.rows,
            segments: plan + chunk.shared.segments,
            tables: plan + chunk.shared.tables,
            runs: plan + chunk.runs,
            tasks: plan + chunk.tasks,
            sums,
            values,
            angles: angles.unwrap_or(0),
            window: window.unwrap_or(NO_WINDOW),
            scale: op.scale,
            softcap: op.softcap.unwrap_or(0.0),
            factor: op.rope.as_ref().map_or(1.0, |rope| rope.attention_factor()),
            pairs: op.rope.as_ref().map_or(0, |rope| rope.config().rotary_dim / 2) as u32,
            interleaved: u32::from(interleaved),
            unrotated: u32::from(op.keys == KeyForm::Unrotated),
            kind: element_kind(s.format.storage_dtype()),
            q_kind: element_kind(op.q.dtype()),
            latent_kind: element_kind(latent.map_or(DType::F32, TensorView::dtype)),
            out_kind: element_kind(op.out.dtype()),
            k_dim: s.k_dim as u32,
            v_dim: s.v_dim as u32,
            k_group: k_group as u32,
            v_group: v_group as u32,
            block_size: s.block_size as u32,
            heads: op.q.shape()[1] as u32,
            k_heads: s.k_heads as u32,
            v_heads: s.v_heads as u32,
            unit_heads: tiling.heads as u32,
            units: tiling.units as u32,
            q_terms: tiling.terms.0 as u32,
            latent_terms: tiling.terms.1 as u32,
            tile: tiling.tokens as u32,
            quads: tiling.quads as u32,
            columns: tiling.columns as u32,
            eights: tiling.eights,
        })
    }
}
