//! Computes one item of a call: processes its tokens tile by tile, and keeps partial softmax states between
//! tiles.

use std::ops::Range;

use half::{bf16, f16};
use kvcore::{DType, Fp8Kind, KeyForm, KvFormat};

use super::block::TileAttention;
use super::elements::{AnyNan, E4M3, E5M2, Grouped, Int4, Int8};
use super::finish::{Finish, Outputs};
use super::inputs::{CallInputs, QueryRows};
use super::matrix::{MatrixBuffers, MatrixForm};
use super::plan::{MANY_QUERIES, TokenRun, WorkItem, number_of_states};
use super::pointers::RowPointers;
use super::scales::{ReadScales, TileScales};
use super::softmax::StateLayout;
use super::tile::{TILE, TileBuffers, TileForm, TokenTile, adjacent_rows};
use crate::fast::rotate::rotate;
use crate::raw::Destination;
use crate::simd::{Simd, SimdTask, widen};

/// Converts the queries of all units of an item to f32. If `moved` is given, also rotates the queries to
/// their positions minus `moved`.
///
/// # Safety
/// `to` must be valid for writes of the item's queries, each as wide as `queries`, and must be outside the
/// queries' storage.
pub(super) struct WidenQueries<'a> {
    pub(super) inputs: &'a CallInputs<'a>,
    pub(super) units: Range<usize>,
    pub(super) rows: Range<usize>,
    pub(super) queries: &'a QueryRows<'a>,
    pub(super) to: *mut f32,
    pub(super) moved: Option<i64>,
}

impl SimdTask for WidenQueries<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (inputs, view) = (self.inputs, self.queries.view);
        let (dim, strides, size) = (self.queries.dim(), view.strides(), view.dtype().bits() / 8);
        let mut to = self.to;
        for unit in self.units {
            for row in self.rows.clone() {
                for head in inputs.units.heads_of(unit) {
                    let at = (row * strides[0] + head * strides[1]) * size;
                    // SAFETY: `at` checked that the row is in bounds, views are aligned, and `to` has room
                    // for `dim` elements of each query by the contract of `WidenQueries`. The operation's
                    // check bounds the rotary dimension by the width of a key, the only width that is
                    // rotated.
                    unsafe {
                        widen::<S>(view.dtype(), self.queries.bytes.at(at, dim * size), to, dim);
                        if let (Some(table), Some(moved)) = (&inputs.table, self.moved) {
                            let angle = table.at(inputs.op.work.rows()[row].position - moved);
                            rotate::<S, f32>(to, to, dim, angle, table.factor);
                        }
                        to = to.add(dim);
                    }
                }
            }
        }
    }
}

/// A thread's buffers. They grow to the size that the thread's largest item needs, and never shrink.
#[derive(Default)]
pub(super) struct ItemScratch {
    queries: Vec<f32>,
    latents: Vec<f32>,
    states: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    packed: Vec<f32>,
    scales: [Vec<f32>; 2],
    columns: Vec<*const u8>,
    matrices: Vec<f32>,
}

/// An item, with the inputs and outputs of its call.
#[derive(Clone, Copy)]
pub(super) struct ItemContext<'a> {
    pub(super) inputs: &'a CallInputs<'a>,
    pub(super) item: &'a WorkItem,
    /// The item's runs of tokens.
    pub(super) runs: &'a [TokenRun],
    /// The form of the matrix products, if the matrix unit can compute the call.
    pub(super) matrix_form: Option<MatrixForm>,
    pub(super) outputs: &'a Outputs<'a>,
    /// The buffer shared by all threads, for the states of rows whose tokens are split.
    pub(super) shared: Destination<'a>,
}

/// Computes an item, using one thread's buffers.
///
/// # Safety
/// The fields of `context` must belong to one checked operation, and `item` and `runs` to a plan of this
/// operation. If the item's tokens are split, `shared` must have room for its states. `matrix_form`, if
/// given, must have been made for the inputs and for a level that the processor supports. No other thread may
/// access the rows and heads of `item` in the outputs, or its states in `shared`, during the call.
pub(super) struct ComputeItem<'a> {
    pub(super) context: ItemContext<'a>,
    pub(super) scratch: &'a mut ItemScratch,
}

/// An item's queries and partial softmax states, and buffers for one of its tiles.
struct ItemBuffers<'a> {
    q: *mut f32,
    latents: Option<*mut f32>,
    states: *mut f32,
    layout: StateLayout,
    tile: TileBuffers<'a>,
    /// The scales of keys and of values, for rows that are read in place.
    scales: [TileScales; 2],
    matrix: Option<MatrixBuffers>,
}

impl ItemBuffers<'_> {
    /// Copies the queries of all units to the buffers of the matrix products: the queries for keys if `which`
    /// is 0, and the queries for values if it is 1.
    ///
    /// # Safety
    /// `from` must be valid for reads of `self.layout.count` queries of `dim` elements, the width of keys or
    /// values. `self.matrix`, if given, must have been made in this thread for `units` units of these
    /// queries, with latents if `which` is 1.
    unsafe fn put_queries(&self, which: usize, units: usize, from: *const f32, dim: usize) {
        let queries = self.layout.count / units;
        if let Some(matrix) = &self.matrix {
            for unit in 0..units {
                // SAFETY: `unit < units`, so `from` has the `queries` queries of the unit, and the buffers
                // have columns for them, by contract. A matrix form exists only on processors with AMX.
                unsafe { matrix.put_queries(which, unit, queries, from.add(unit * queries * dim)) };
            }
        }
    }
}

impl SimdTask for ComputeItem<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (context, scratch) = (self.context, self.scratch);
        let (inputs, item, op) = (context.inputs, context.item, context.inputs.op);
        let (k_dim, v_dim) = (inputs.keys.dim, inputs.values.dim);
        let queries = item.units.len() * inputs.units.size * item.rows.len();
        let layout = StateLayout { v_dim, count: queries };
        let size = number_of_states(op, inputs.units, item) * layout.stride();
        let form = context.form::<S>();
        scratch.columns.clear();
        if form == TileForm::Packed {
            let columns = k_dim + inputs.latent.as_ref().map_or(0, |_| v_dim);
            let packed = grown(&mut scratch.packed, columns * TILE);
            let columns = (0..columns).map(|i| packed.wrapping_add(i * TILE).cast::<u8>().cast_const());
            scratch.columns.extend(columns);
        }
        let buffers = ItemBuffers {
            q: grown(&mut scratch.queries, queries * k_dim),
            latents: inputs.latent.as_ref().map(|_| grown(&mut scratch.latents, queries * v_dim)),
            states: match item.shared {
                Some(at) => context.shared.at(at * 4, size * 4).cast::<f32>(),
                None => grown(&mut scratch.states, size),
            },
            layout,
            tile: TileBuffers {
                keys: grown(&mut scratch.keys, TILE * k_dim),
                values: grown(&mut scratch.values, TILE * v_dim),
                columns: &scratch.columns,
            },
            scales: [(&inputs.keys, 0), (&inputs.values, 1)].map(|(source, which)| {
                let heads = context.kv_heads(which);
                let memory = &mut scratch.scales[which];
                let n = if form == TileForm::InPlace { TileScales::elements(source, heads.len()) } else { 0 };
                TileScales::new(source, heads.start, grown(memory, n))
            }),
            // SAFETY: `MatrixForm::of` returns a form only at the level `Amx`, which is available. A thread
            // computes one item at a time and drops the buffers at the end of the item, before the memory
            // changes, so this thread has no other `AmxTiles`.
            matrix: context.matrix_form.filter(|_| form == TileForm::Matrix).map(|form| unsafe {
                form.buffers(item.units.len(), queries / item.units.len(), &mut scratch.matrices)
            }),
        };
        // SAFETY: each buffer was sized above: `queries` queries of each width, `size` elements of states, a
        // tile of rows and columns. `at` checked the range of the shared buffer, which is this item's own.
        // The caller guarantees the instruction set.
        unsafe {
            layout.reset(buffers.states, op.work.groups().len());
            if let (Some(queries), Some(to)) = (&inputs.latent, buffers.latents) {
                let (units, rows) = (item.units.clone(), item.rows.clone());
                S::call(WidenQueries { inputs, units, rows, queries, to, moved: None });
                buffers.put_queries(1, item.units.len(), to, v_dim);
            }
            let mut rotated_by = None;
            for TokenRun { segment, tokens: run } in context.runs {
                let segment = &op.work.batch()[item.entry].segments[*segment];
                let moved = if op.keys == KeyForm::Rotated { segment.position_offset } else { 0 };
                if rotated_by != Some(moved) {
                    S::call(WidenQueries {
                        inputs,
                        units: item.units.clone(),
                        rows: item.rows.clone(),
                        queries: &inputs.q,
                        to: buffers.q,
                        moved: Some(moved),
                    });
                    buffers.put_queries(0, item.units.len(), buffers.q, k_dim);
                    rotated_by = Some(moved);
                }
                let mut now = TokenTile::new(inputs, segment, run.start, run.end);
                while now.len() > 0 {
                    let next = TokenTile::new(inputs, segment, now.tokens.end, run.end);
                    context.tile::<S>(&buffers, form, &now, &next);
                    now = next;
                }
            }
            if item.shared.is_none() {
                context.write::<S>(&buffers);
            }
        }
    }
}

impl ItemContext<'_> {
    /// Returns the form in which this item's products read keys and values.
    fn form<S: Simd>(&self) -> TileForm {
        let inputs = self.inputs;
        if self.item.rows.len() * inputs.units.size >= MANY_QUERIES {
            return self.matrix_form.map_or(TileForm::Packed, |_| TileForm::Matrix);
        }
        // True if every vector is inside a single group.
        let whole = match inputs.keys.format {
            KvFormat::Int8 { group } | KvFormat::Int4 { group } => {
                inputs.one_scale_a_row(group) || group.is_multiple_of(S::LANES)
            }
            _ => true,
        };
        if whole && inputs.op.keys == KeyForm::Rotated { TileForm::InPlace } else { TileForm::Widened }
    }

    /// Returns the K heads that the item reads if `which` is 0, or its V heads if `which` is 1.
    fn kv_heads(&self, which: usize) -> Range<usize> {
        let of = |unit| <[usize; 2]>::from(self.inputs.kv_heads(unit))[which];
        let units = &self.item.units;
        if units.is_empty() { 0..0 } else { of(units.start)..of(units.end - 1) + 1 }
    }

    /// Processes all of the item's head units for one tile.
    ///
    /// # Safety
    /// `buffers` must have been made for this item and `form`. `tile` and `next` must be tiles of its tokens,
    /// and the queries in `buffers` must be rotated for the segment of `tile`. The caller must be compiled
    /// for the instruction set of `S`.
    #[inline(always)]
    unsafe fn tile<S: Simd>(
        &self,
        buffers: &ItemBuffers,
        form: TileForm,
        tile: &TokenTile,
        next: &TokenTile,
    ) {
        let (inputs, item, tile_buffers) = (self.inputs, self.item, &buffers.tile);
        let (k_dim, v_dim) = (inputs.keys.dim, inputs.values.dim);
        let (keys, values) =
            (adjacent_rows(tile_buffers.keys, k_dim), adjacent_rows(tile_buffers.values, v_dim));
        let rows = |at| RowPointers { at, ..RowPointers::default() };
        let units = item.units.len();
        if form == TileForm::InPlace {
            let both = [(&inputs.keys, 0), (&inputs.values, 1)];
            for (source, which) in both {
                let (heads, to) = (self.kv_heads(which), buffers.scales[which]);
                let (rows, next) = (&tile.scales[which][..tile.len()], &next.scales[which][..next.len()]);
                // SAFETY: `buffers.scales` has room for the scales of this item's heads, and the scale
                // addresses in `tile` are in bounds.
                unsafe { S::call(ReadScales { source, rows, next, heads, to }) };
            }
        }
        for (i, unit) in item.units.clone().enumerate() {
            let heads = inputs.kv_heads(unit);
            let at = (heads.0 * inputs.keys.head_bytes, heads.1 * inputs.values.head_bytes);
            let first = i * item.rows.len() * inputs.units.size;
            let group = tile.segment.merge_group * buffers.layout.count;
            // SAFETY: `buffers` has queries and states of all the item's units, where the ones of unit `i`
            // start at `first`, and room for a tile of rows and columns. Rows that are read inside the cache
            // are in bounds, as `SourcePlane::rows` checked, and have the element type given by `form` and
            // `dense`.
            unsafe {
                let mut attention = TileAttention {
                    op: inputs.op,
                    entry: &inputs.op.work.batch()[item.entry],
                    rows: item.rows.clone(),
                    heads: inputs.units.size,
                    dims: (k_dim, v_dim),
                    q: buffers.q.add(first * k_dim),
                    latents: buffers.latents.map(|all| all.add(first * v_dim).cast_const()),
                    states: buffers.states.add((group + first) * buffers.layout.stride()),
                    layout: buffers.layout,
                    tile,
                    keys: rows(&keys),
                    values: rows(&values),
                    columns: tile_buffers.columns,
                    ahead: [
                        inputs.keys.ahead(&next.keys[..next.len()], (i, units), heads.0),
                        inputs.values.ahead(&next.values[..next.len()], (i, units), heads.1),
                    ],
                };
                if matches!(form, TileForm::InPlace | TileForm::Matrix) {
                    let scales = [buffers.scales[0].of(heads.0), buffers.scales[1].of(heads.1)];
                    attention.keys =
                        RowPointers { at: &tile.keys[..tile.len()], offset: at.0, scales: scales[0] };
                    attention.values =
                        RowPointers { at: &tile.values[..tile.len()], offset: at.1, scales: scales[1] };
                }
                let form = match form {
                    TileForm::InPlace if !self.is_readable::<S>(&attention) => {
                        (attention.keys, attention.values) = (rows(&keys), rows(&values));
                        TileForm::Widened
                    }
                    form => form,
                };
                match form {
                    TileForm::InPlace => self.in_place::<S>(&attention),
                    TileForm::Widened => {
                        inputs.widen::<S>(tile, heads, tile_buffers);
                        attention.in_place::<S, f32>();
                    }
                    TileForm::Matrix => {
                        if let Some(matrix) = &buffers.matrix {
                            attention.by_matrices(matrix, i);
                        }
                    }
                    TileForm::Packed => {
                        inputs.pack::<S>(tile, heads, tile_buffers);
                        attention.packed::<S>();
                    }
                }
            }
        }
    }

    /// Returns whether codes can be read as vectors: `fp8-e4m3` codes must not be NaN, and their scales,
    /// multiplied by the unit of [`Simd::load_e4m3`], must be finite.
    ///
    /// # Safety
    /// `attention` must have rows in the arena's format, and the caller must be compiled for the instruction
    /// set of `S`.
    #[inline(always)]
    unsafe fn is_readable<S: Simd>(&self, attention: &TileAttention<'_>) -> bool {
        let KvFormat::Fp8 { kind: Fp8Kind::E4M3, .. } = self.inputs.keys.format else { return true };
        [(attention.keys, attention.dims.0), (attention.values, attention.dims.1)].into_iter().all(
            // SAFETY: each row has a scale and `dim` codes, by contract.
            |(rows, dim)| unsafe { (*rows.scales.row(0)).is_finite() && !S::call(AnyNan { rows, dim }) },
        )
    }

    // Decision: docs/decisions/backend-cpu.md#few-queries-read-codes-in-registers
    /// Processes all queries of a unit, reading the rows in place.
    ///
    /// # Safety
    /// The same as for [`TileAttention::in_place`]. The rows must be in the arena's format.
    #[inline(always)]
    unsafe fn in_place<S: Simd>(&self, attention: &TileAttention<'_>) {
        let inputs = self.inputs;
        // SAFETY: the caller guarantees the same conditions, with the element type given by the format.
        unsafe {
            match inputs.keys.format {
                KvFormat::Dense(DType::BF16) => attention.in_place::<S, bf16>(),
                KvFormat::Dense(DType::F16) => attention.in_place::<S, f16>(),
                KvFormat::Int8 { group } if inputs.one_scale_a_row(group) => attention.in_place::<S, Int8>(),
                KvFormat::Int8 { .. } => attention.in_place::<S, Grouped<Int8>>(),
                KvFormat::Int4 { group } if inputs.one_scale_a_row(group) => attention.in_place::<S, Int4>(),
                KvFormat::Int4 { .. } => attention.in_place::<S, Grouped<Int4>>(),
                KvFormat::Fp8 { kind: Fp8Kind::E4M3, .. } => attention.in_place::<S, E4M3>(),
                KvFormat::Fp8 { kind: Fp8Kind::E5M2, .. } => attention.in_place::<S, E5M2>(),
                _ => attention.in_place::<S, f32>(),
            }
        }
    }

    /// Writes the results of the item's rows, whose tokens must not be split between items.
    ///
    /// # Safety
    /// `buffers.states` must have a state for each merge group and query of the item, all the item's tokens
    /// must have been processed, and the caller must be compiled for the instruction set of `S`.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, buffers: &ItemBuffers) {
        let (inputs, item) = (self.inputs, self.item);
        let mut states = buffers.states;
        for unit in item.units.clone() {
            for row in item.rows.clone() {
                for head in inputs.units.heads_of(unit) {
                    let (op, outputs, at) = (inputs.op, self.outputs, (row, head));
                    // SAFETY: `buffers` has a state for each merge group and query by contract, and no other
                    // item has this row and head.
                    unsafe {
                        S::call(Finish { op, outputs, at, states, parts: (1, 0), layout: buffers.layout });
                        states = states.add(buffers.layout.stride());
                    }
                }
            }
        }
    }
}

/// Grows a buffer to at least `n` elements, and returns a pointer to its start.
pub(super) fn grown(buffer: &mut Vec<f32>, n: usize) -> *mut f32 {
    if buffer.len() < n {
        buffer.resize(n, 0.0);
    }
    buffer.as_mut_ptr()
}
