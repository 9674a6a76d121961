//! One part of a call: its tokens one tile at a time, with softmaxes that stay open.

use half::{bf16, f16};
use kvcore::{Attend, DType, KeyForm, Result, TensorView};

use super::block::Meeting;
use super::finish::Finish;
use super::matrix;
use super::plan::{Item, MANY, TokenRun, Units, states};
use super::products::Rows;
use super::source::Source;
use super::tile::{Form, Room, TILE, Tile, beside};
use super::{Outputs, State};
use crate::fast::locked::LockedStorages;
use crate::fast::rotate::{RotationTable, rotate};
use crate::raw::{Origin, Target};
use crate::simd::{Simd, Task, widen};

/// The inputs that all parts of a call read.
pub(super) struct Inputs<'a> {
    pub(super) op: &'a Attend,
    pub(super) units: Units,
    pub(super) keys: Source<'a>,
    pub(super) values: Source<'a>,
    pub(super) q: Queries<'a>,
    /// Queries that latent attention multiplies by the values.
    pub(super) latent: Option<Queries<'a>>,
    pub(super) table: Option<RotationTable>,
    /// The form of products of matrices, if matrices can compute the call.
    pub(super) matrices: Option<matrix::Form>,
}

/// Query rows in place.
#[derive(Clone, Copy)]
pub(super) struct Queries<'a> {
    view: &'a TensorView,
    /// The bytes of the view, from its first element on.
    bytes: Origin<'a>,
}

impl<'a> Queries<'a> {
    /// Takes the queries of a view. Queries that lie where results will be written are copied to `copy`
    /// first.
    pub(super) fn new<'b: 'a>(
        view: &'a TensorView,
        out: &TensorView,
        locked: &LockedStorages<'b>,
        copy: &'a mut Vec<u8>,
    ) -> Result<Self> {
        let size = view.dtype().bits() / 8;
        let last: usize =
            view.shape().iter().zip(view.strides()).map(|(n, stride)| n.max(&1) * stride - stride).sum();
        let len = if view.is_empty() { 0 } else { (last + 1) * size };
        let bytes = locked.origin(view.storage())?.part(view.offset() * size, len);
        if !view.overlaps(out)? {
            return Ok(Self { view, bytes });
        }
        copy.clear();
        // SAFETY: `part` checked that `len` bytes lie inside. The storages are locked and no kernel of this
        // call runs yet, so that nobody writes them while the slice lives.
        copy.extend_from_slice(unsafe { std::slice::from_raw_parts(bytes.at(0, len), len) });
        Ok(Self { view, bytes: Origin::new(copy) })
    }

    /// Returns the elements of a row.
    fn dim(&self) -> usize {
        self.view.shape()[2]
    }
}

/// Widens the queries of all units of an item, and rotates them to their positions minus `moved`, if given.
///
/// # Safety
/// `to` is valid for writes of the queries of the item, each of the width of `queries`, outside the queries'
/// storage.
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
                    // SAFETY: `at` checked that the row lies inside, views are aligned, and `to` has room for
                    // `dim` elements of each query by the contract of `Read`. The operation's check bounds
                    // the rotary dimension by the width of a key, the only width that is rotated.
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

/// Memory of a thread. It grows to the needs of its largest part, and never shrinks.
#[derive(Default)]
pub(super) struct Scratch {
    queries: Vec<f32>,
    latents: Vec<f32>,
    states: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    packed: Vec<f32>,
    columns: Vec<*const u8>,
    matrices: Vec<f32>,
}

/// An item, with its inputs and its outputs.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) inputs: &'a Inputs<'a>,
    pub(super) item: &'a Item,
    /// The runs of tokens of the item.
    pub(super) runs: &'a [TokenRun],
    pub(super) outputs: &'a Outputs<'a>,
    /// The shared buffer, for states of divided rows.
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
    /// Puts the queries of all units where products of matrices need them: those for keys if `which` is 0,
    /// those for values if it is 1.
    ///
    /// # Safety
    /// `from` is valid for reads of `self.state.count` queries of `dim` elements, the width of keys or of
    /// values. A room of matrices was made for `units` units of these queries, in this thread, with latents
    /// if `which` is 1.
    unsafe fn put_queries(&self, which: usize, units: usize, from: *const f32, dim: usize) {
        let queries = self.state.count / units;
        if let Some(room) = &self.matrices {
            for unit in 0..units {
                // SAFETY: `unit < units`, so that `from` has the `queries` queries of the unit, and the room
                // has columns for them, by contract. A form of matrices exists only on processors with AMX.
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
            // SAFETY: `Form::of` gives a form only at the level `Amx`, which is available. A thread computes
            // one item at a time and drops the room at its end, before the memory changes, so that no other
            // `Tiles` of this thread lives.
            matrices: inputs.matrices.filter(|_| form == Form::Matrix).map(|form| unsafe {
                form.room(item.units.len(), queries / item.units.len(), &mut scratch.matrices)
            }),
        };
        // SAFETY: each buffer was sized above: `queries` queries of each width, `size` elements of states, a
        // tile of rows and columns. `at` checked the range of the shared buffer, which is this item's own.
        // The caller guarantees the instruction set.
        unsafe {
            state.open(open.states, op.work.groups().len());
            if let (Some(queries), Some(to)) = (&inputs.latent, open.latents) {
                S::call(Read { inputs, item, queries, to, moved: None });
                open.put_queries(1, item.units.len(), to, v_dim);
            }
            let mut turned = None;
            for TokenRun { segment, tokens: run } in part.runs {
                let segment = &op.work.batch()[item.entry].segments[*segment];
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
    /// Returns the form in which keys and values come to the products.
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

    /// Processes all units of heads against a tile.
    ///
    /// # Safety
    /// `open` was made for this item and `form`, `tile` and `next` are tiles of its tokens, the queries in
    /// `open` are rotated for the segment of `tile`, and the caller is compiled for the instruction set of
    /// `S`.
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
            // SAFETY: `open` has queries and states of all units of the item, of which unit `i` has those
            // from `first` on, and rooms for a tile of rows and columns. Rows in place lie inside, as
            // `Source::rows` checked, and have the element type that `form` and `dense` name.
            unsafe {
                let mut meeting = Meeting {
                    op: inputs.op,
                    entry: &inputs.op.work.batch()[item.entry],
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

    /// Writes the results of rows that no other item shares.
    ///
    /// # Safety
    /// `open.states` has a state for each merge group and query of the item, all tokens of the item are
    /// processed, and the caller is compiled for the instruction set of `S`.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, open: &Open) {
        let (inputs, item) = (self.inputs, self.item);
        let mut states = open.states;
        for unit in item.units.clone() {
            for row in item.rows.clone() {
                for head in inputs.units.heads_of(unit) {
                    let (op, outputs, at) = (inputs.op, self.outputs, (row, head));
                    // SAFETY: `open` has a state of each merge group for every query by contract, and no
                    // other item has this row and head.
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
    /// Returns the head of K and the head of V of a unit.
    fn kv_heads(&self, unit: usize) -> (usize, usize) {
        let s = self.op.arena.layout().shape();
        let head = unit * self.units.size;
        (head * s.k_heads / self.units.heads, head * s.v_heads / self.units.heads)
    }
}

/// Returns the start of a buffer, which is grown to at least `n` elements.
fn room(buffer: &mut Vec<f32>, n: usize) -> *mut f32 {
    if buffer.len() < n {
        buffer.resize(n, 0.0);
    }
    buffer.as_mut_ptr()
}
