//! One part of a call: its tokens a tile at a time, with softmaxes that stay open.

use std::ops::Range;

use half::{bf16, f16};
use kvcore::{Attend, DType, KeyForm, Result, TensorView};

use super::block::Meeting;
use super::finish::Finish;
use super::matrix;
use super::plan::{Item, MANY, Units, states, union};
use super::products::Rows;
use super::source::Source;
use super::tile::{Form, Room, TILE, Tile, beside};
use super::{Outputs, State};
use crate::fast::ends::Ends;
use crate::fast::rotate::{Turn, rotate};
use crate::raw::{Origin, Target};
use crate::simd::{Simd, Task, widen};

/// What all parts of a call read.
pub(super) struct Inputs<'a> {
    pub(super) op: &'a Attend,
    pub(super) units: Units,
    pub(super) keys: Source<'a>,
    pub(super) values: Source<'a>,
    pub(super) q: Queries<'a>,
    /// Of latent attention: queries that meet the values.
    pub(super) latent: Option<Queries<'a>>,
    pub(super) turn: Option<Turn>,
    /// Whether products are those of matrices, and how.
    pub(super) matrices: Option<matrix::Form>,
}

/// Query rows as they lie.
#[derive(Clone, Copy)]
pub(super) struct Queries<'a> {
    view: &'a TensorView,
    /// From the view's first element on.
    bytes: Origin<'a>,
}

impl<'a> Queries<'a> {
    /// Queries that lie where results will are copied first.
    pub(super) fn new<'b: 'a>(
        view: &'a TensorView,
        out: &TensorView,
        ends: &Ends<'b>,
        copy: &'a mut Vec<u8>,
    ) -> Result<Self> {
        let size = view.dtype().bits() / 8;
        let last: usize =
            view.shape().iter().zip(view.strides()).map(|(n, stride)| n.max(&1) * stride - stride).sum();
        let len = if view.is_empty() { 0 } else { (last + 1) * size };
        let bytes = ends.origin(view.storage())?.part(view.offset() * size, len);
        if !view.overlaps(out)? {
            return Ok(Self { view, bytes });
        }
        copy.clear();
        // SAFETY: `part` has checked that they are inside, and nothing is written yet.
        copy.extend_from_slice(unsafe { std::slice::from_raw_parts(bytes.at(0, len), len) });
        Ok(Self { view, bytes: Origin::new(copy) })
    }

    /// Elements of a row.
    fn dim(&self) -> usize {
        self.view.shape()[2]
    }
}

/// Widened queries of all units of an item, rotated to their positions less `moved`, if that is given.
struct Read<'a> {
    inputs: &'a Inputs<'a>,
    item: &'a Item,
    queries: &'a Queries<'a>,
    to: *mut f32,
    moved: Option<i64>,
}

impl Task for Read<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (inputs, view) = (self.inputs, self.queries.view);
        let (dim, strides, size) = (self.queries.dim(), view.strides(), view.dtype().bits() / 8);
        let mut to = self.to;
        for unit in self.item.units.clone() {
            for row in self.item.rows.clone() {
                for head in inputs.units.heads_of(unit) {
                    let at = (row * strides[0] + head * strides[1]) * size;
                    // SAFETY: `at` checks the row, and there is room for `dim` elements of each query.
                    unsafe {
                        widen::<S>(view.dtype(), self.queries.bytes.at(at, dim * size), to, dim);
                        if let (Some(turn), Some(moved)) = (&inputs.turn, self.moved) {
                            let angle = turn.at(inputs.op.rows[row].position - moved);
                            rotate::<S, f32>(to, to, dim, angle, turn.factor);
                        }
                        to = to.add(dim);
                    }
                }
            }
        }
    }
}

/// Memory of a thread, which grows to what its largest part needed and stays.
#[derive(Default)]
pub(super) struct Scratch {
    runs: Vec<(usize, Range<usize>)>,
    queries: Vec<f32>,
    latents: Vec<f32>,
    states: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    packed: Vec<f32>,
    columns: Vec<*const u8>,
    matrices: Vec<f32>,
}

/// The runs of tokens that an item has, in order: segments, and tokens of each.
fn runs_of(op: &Attend, item: &Item, runs: &mut Vec<(usize, Range<usize>)>) {
    runs.clear();
    let entry = &op.batch[item.entry];
    let mut before = 0;
    let mut push = |segment: usize, tokens: Range<usize>| {
        let start = tokens.start + item.tokens.start.saturating_sub(before).min(tokens.len());
        let end = tokens.start + item.tokens.end.saturating_sub(before).min(tokens.len());
        before += tokens.len();
        if start < end {
            runs.push((segment, start..end));
        }
    };
    if entry.selection.is_some() {
        for (segment, tokens) in op.seen(entry, item.rows.start) {
            let index = entry.segments.iter().position(|other| std::ptr::eq(other, segment));
            push(index.unwrap_or_default(), tokens);
        }
    } else {
        for (index, segment) in entry.segments.iter().enumerate() {
            push(index, union(op, segment, item.rows.clone()));
        }
    }
}

/// An item, and what it reads and writes.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) inputs: &'a Inputs<'a>,
    pub(super) item: &'a Item,
    pub(super) outputs: &'a Outputs<'a>,
    /// Where states of divided rows go.
    pub(super) shared: Target<'a>,
}

/// Computes an item in a thread's memory.
pub(super) struct Compute<'a> {
    pub(super) part: Part<'a>,
    pub(super) scratch: &'a mut Scratch,
}

/// Queries and open softmaxes of an item.
struct Open<'a> {
    q: *mut f32,
    latents: Option<*mut f32>,
    states: *mut f32,
    state: State,
    room: Room<'a>,
    matrices: Option<matrix::Room>,
}

impl Open<'_> {
    /// Puts the queries of all units where products of matrices want them: those for keys, or for values.
    unsafe fn put_queries(&self, which: usize, units: usize, from: *const f32, dim: usize) {
        let queries = self.state.count / units;
        if let Some(room) = &self.matrices {
            for unit in 0..units {
                // SAFETY: there is room for the queries of all units.
                unsafe { room.put_queries(which, unit, queries, from.add(unit * queries * dim)) };
            }
        }
    }
}

impl Task for Compute<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (part, scratch) = (self.part, self.scratch);
        let (inputs, item, op) = (part.inputs, part.item, part.inputs.op);
        runs_of(op, item, &mut scratch.runs);
        let (k_dim, v_dim) = (inputs.keys.dim, inputs.values.dim);
        let queries = item.units.len() * inputs.units.size * item.rows.len();
        let state = State { v_dim, count: queries };
        let size = states(op, inputs.units, item) * state.stride();
        let form = part.form();
        scratch.columns.clear();
        if form == Form::Packed {
            let columns = k_dim + inputs.latent.as_ref().map_or(0, |_| v_dim);
            let packed = room(&mut scratch.packed, columns * TILE);
            let columns = (0..columns).map(|i| packed.wrapping_add(i * TILE).cast::<u8>().cast_const());
            scratch.columns.extend(columns);
        }
        let open = Open {
            q: room(&mut scratch.queries, queries * k_dim),
            latents: inputs.latent.as_ref().map(|_| room(&mut scratch.latents, queries * v_dim)),
            states: match item.shared {
                Some(at) => part.shared.at(at * 4, size * 4).cast::<f32>(),
                None => room(&mut scratch.states, size),
            },
            state,
            room: Room {
                keys: room(&mut scratch.keys, TILE * k_dim),
                values: room(&mut scratch.values, TILE * v_dim),
                columns: &scratch.columns,
            },
            // SAFETY: this form is made for processors that have the instructions.
            matrices: inputs.matrices.filter(|_| form == Form::Matrix).map(|form| unsafe {
                form.room(item.units.len(), queries / item.units.len(), &mut scratch.matrices)
            }),
        };
        // SAFETY: each buffer has just been given its size.
        unsafe {
            state.open(open.states, op.groups.len());
            if let (Some(queries), Some(to)) = (&inputs.latent, open.latents) {
                S::call(Read { inputs, item, queries, to, moved: None });
                open.put_queries(1, item.units.len(), to, v_dim);
            }
            let mut turned = None;
            for (segment, run) in &scratch.runs {
                let segment = &op.batch[item.entry].segments[*segment];
                let moved = if op.keys == KeyForm::Rotated { segment.position_offset } else { 0 };
                if turned != Some(moved) {
                    S::call(Read { inputs, item, queries: &inputs.q, to: open.q, moved: Some(moved) });
                    open.put_queries(0, item.units.len(), open.q, k_dim);
                    turned = Some(moved);
                }
                let mut now = Tile::new(inputs, segment, run.start, run.end);
                while now.len() > 0 {
                    let next = Tile::new(inputs, segment, now.tokens.end, run.end);
                    part.tile::<S>(&open, form, &now, &next);
                    now = next;
                }
            }
            if item.shared.is_none() {
                part.write::<S>(&open);
            }
        }
    }
}

impl Part<'_> {
    /// How keys and values come to the products.
    fn form(&self) -> Form {
        let inputs = self.inputs;
        if self.item.rows.len() * inputs.units.size >= MANY {
            inputs.matrices.map_or(Form::Packed, |_| Form::Matrix)
        } else if inputs.keys.dense.is_none() || inputs.op.keys == KeyForm::Unrotated {
            Form::Widened
        } else {
            Form::InPlace
        }
    }

    /// All units of heads against a tile.
    #[inline(always)]
    unsafe fn tile<S: Simd>(&self, open: &Open, form: Form, tile: &Tile, next: &Tile) {
        let (inputs, item, room) = (self.inputs, self.item, &open.room);
        let (k_dim, v_dim) = (inputs.keys.dim, inputs.values.dim);
        let (keys, values) = (beside(room.keys, k_dim), beside(room.values, v_dim));
        let beside = |at| Rows { at, head: 0 };
        let units = item.units.len();
        for (i, unit) in item.units.clone().enumerate() {
            let heads = inputs.kv_heads(unit);
            let at = (heads.0 * inputs.keys.head_bytes, heads.1 * inputs.values.head_bytes);
            let first = i * item.rows.len() * inputs.units.size;
            let group = tile.segment.merge_group * open.state.count;
            // SAFETY: all buffers were made for this item.
            unsafe {
                let mut meeting = Meeting {
                    op: inputs.op,
                    entry: &inputs.op.batch[item.entry],
                    rows: item.rows.clone(),
                    heads: inputs.units.size,
                    dims: (k_dim, v_dim),
                    q: open.q.add(first * k_dim),
                    latents: open.latents.map(|all| all.add(first * v_dim).cast_const()),
                    states: open.states.add((group + first) * open.state.stride()),
                    state: open.state,
                    tile,
                    keys: beside(&keys),
                    values: beside(&values),
                    columns: room.columns,
                    ahead: [
                        inputs.keys.ahead(&next.keys[..next.len()], (i, units), heads.0),
                        inputs.values.ahead(&next.values[..next.len()], (i, units), heads.1),
                    ],
                };
                if matches!(form, Form::InPlace | Form::Matrix) {
                    meeting.keys = Rows { at: &tile.keys[..tile.len()], head: at.0 };
                    meeting.values = Rows { at: &tile.values[..tile.len()], head: at.1 };
                }
                match form {
                    Form::InPlace => match inputs.keys.dense {
                        Some(DType::BF16) => meeting.in_place::<S, bf16>(),
                        Some(DType::F16) => meeting.in_place::<S, f16>(),
                        _ => meeting.in_place::<S, f32>(),
                    },
                    Form::Widened => {
                        inputs.widen::<S>(tile, heads, room);
                        meeting.in_place::<S, f32>();
                    }
                    Form::Matrix => {
                        if let Some(room) = &open.matrices {
                            meeting.by_matrices(room, i);
                        }
                    }
                    Form::Packed => {
                        inputs.pack::<S>(tile, heads, room);
                        meeting.packed::<S>();
                    }
                }
            }
        }
    }

    /// Writes the results of rows whose tokens are all seen.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, open: &Open) {
        let (inputs, item) = (self.inputs, self.item);
        let mut states = open.states;
        for unit in item.units.clone() {
            for row in item.rows.clone() {
                for head in inputs.units.heads_of(unit) {
                    let (op, outputs, at) = (inputs.op, self.outputs, (row, head));
                    // SAFETY: there is a state for each query, and no other item has this row and head.
                    unsafe {
                        S::call(Finish { op, outputs, at, states, parts: (1, 0), state: open.state });
                        states = states.add(open.state.stride());
                    }
                }
            }
        }
    }
}

impl Inputs<'_> {
    /// The K and the V head of a unit.
    fn kv_heads(&self, unit: usize) -> (usize, usize) {
        let s = self.op.arena.layout().shape();
        let head = unit * self.units.size;
        (head * s.k_heads / self.units.heads, head * s.v_heads / self.units.heads)
    }
}

/// The start of a buffer of `n` elements.
fn room(buffer: &mut Vec<f32>, n: usize) -> *mut f32 {
    if buffer.len() < n {
        buffer.resize(n, 0.0);
    }
    buffer.as_mut_ptr()
}
