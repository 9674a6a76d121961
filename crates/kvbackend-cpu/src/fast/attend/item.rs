//! One part of a call: its tokens a tile at a time, with a softmax that stays open.

use std::ops::Range;

use half::{bf16, f16};
use kvcore::kernels::{Attend, AttendRows};
use kvcore::{DType, KeyForm, Result, Segment, TensorView};

use super::finish::finish;
use super::plan::{Item, MANY, Units, states, union};
use super::products::{Ahead, accumulate, dots, transpose};
use super::softmax::{Scaling, weights};
use super::source::Source;
use super::{Outputs, State};
use crate::fast::rotate::{Lane, Turn, rotate};
use crate::plane::RowAt;
use crate::raw::{Origin, Target};
use crate::reference::{seen, visible};
use crate::simd::{Simd, Task};

/// Tokens of a tile, at most.
const TILE: usize = 64;
/// Tokens of a tile that is packed: its keys and values stay in the first cache for all queries.
const PACKED: usize = 64;
/// Logits of a query, and a vector more.
const STRIDE: usize = TILE + 16;
/// Most queries of a register block.
const QUERIES: usize = 8;

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
}

/// Query rows as they lie.
#[derive(Clone, Copy)]
pub(super) struct Queries<'a> {
    view: &'a TensorView,
    bytes: Origin<'a>,
}

impl<'a> Queries<'a> {
    pub(super) fn new(view: &'a TensorView, bytes: &'a [u8]) -> Self {
        Self { view, bytes: Origin::new(bytes) }
    }

    /// Elements of a row.
    fn dim(&self) -> usize {
        self.view.shape()[2]
    }

    /// Widens a row.
    #[inline(always)]
    unsafe fn read<S: Simd>(&self, row: usize, head: usize, to: *mut f32) {
        let (strides, size) = (self.view.strides(), self.view.dtype().bits() / 8);
        let at = (self.view.offset() + row * strides[0] + head * strides[1]) * size;
        let from = self.bytes.at(at, self.dim() * size);
        // SAFETY: `at` has checked the row, and `to` has room for it.
        unsafe { widen_as::<S>(self.view.dtype(), from, to, self.dim()) };
    }
}

#[inline(always)]
unsafe fn widen_as<S: Simd>(dtype: DType, from: *const u8, to: *mut f32, n: usize) {
    // SAFETY: the caller's.
    unsafe {
        match dtype {
            DType::F16 => widen::<S, f16>(from.cast(), to, n),
            DType::BF16 => widen::<S, bf16>(from.cast(), to, n),
            _ => std::ptr::copy_nonoverlapping(from.cast::<f32>(), to, n),
        }
    }
}

#[inline(always)]
unsafe fn widen<S: Simd, E: Lane>(from: *const E, to: *mut f32, n: usize) {
    let mut i = 0;
    // SAFETY: the caller's.
    unsafe {
        while i + S::LANES <= n {
            S::store(to.add(i), E::load::<S>(from.add(i)));
            i += S::LANES;
        }
        for i in i..n {
            *to.add(i) = from.add(i).read().to_f32();
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
}

/// The runs of tokens that an item has, in order.
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
        for (segment, tokens) in seen(op, entry, item.rows.start) {
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

impl Task for Compute<'_> {
    type Output = Result<()>;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Result<()> {
        // SAFETY: the instruction set is the caller's.
        unsafe { self.part.compute::<S>(self.scratch) }
    }
}

/// A tile of tokens of one segment.
struct Tile {
    tokens: Range<usize>,
    /// Rows of head 0.
    at: [RowAt; TILE],
}

impl Tile {
    #[inline(always)]
    fn new(op: &Attend, segment: &Segment, tokens: Range<usize>) -> Self {
        let block_size = op.arena.layout().shape().block_size;
        let mut at = [RowAt { layer: op.layer, block: 0, token: 0, head: 0 }; TILE];
        let (mut block, mut token) = (tokens.start / block_size, tokens.start % block_size);
        for at in &mut at[..tokens.len()] {
            (at.block, at.token) = (segment.blocks[block].index(), token);
            token += 1;
            if token == block_size {
                (block, token) = (block + 1, 0);
            }
        }
        Self { tokens, at }
    }

    fn len(&self) -> usize {
        self.tokens.len()
    }
}

impl Part<'_> {
    #[inline(always)]
    unsafe fn compute<S: Simd>(self, scratch: &mut Scratch) -> Result<()> {
        let (inputs, item, op) = (self.inputs, self.item, self.inputs.op);
        let entry = &op.batch[item.entry];
        runs_of(op, item, &mut scratch.runs);
        let queries = item.units.len() * inputs.units.size * item.rows.len();
        let state = State { v_dim: inputs.values.dim, count: queries };
        let size = states(op, inputs.units, item) * state.stride();
        let states = match item.shared {
            Some(at) => self.shared.at(at * 4, size * 4).cast::<f32>(),
            None => room(&mut scratch.states, size),
        };
        let q = room(&mut scratch.queries, queries * inputs.keys.dim);
        let latents = inputs.latent.as_ref().map(|_| room(&mut scratch.latents, queries * inputs.values.dim));
        let keys = room(&mut scratch.keys, TILE * inputs.keys.dim);
        let values = room(&mut scratch.values, TILE * inputs.values.dim);
        let form = self.form();
        let columns = if form == Form::Packed {
            let count = inputs.keys.dim + inputs.latent.as_ref().map_or(0, |_| inputs.values.dim);
            let packed = room(&mut scratch.packed, count * PACKED);
            scratch.columns.clear();
            scratch
                .columns
                .extend((0..count).map(|i| packed.wrapping_add(i * PACKED).cast::<u8>().cast_const()));
            scratch.columns.as_slice()
        } else {
            &[]
        };
        // SAFETY: each buffer has just been given its size.
        unsafe {
            state.open(states, op.groups.len());
            if let (Some(latent), Some(to)) = (&inputs.latent, latents) {
                self.read::<S>(latent, to, None);
            }
            let mut turned = None;
            for (index, run) in &scratch.runs {
                let segment = &entry.segments[*index];
                let moved = if op.keys == KeyForm::Rotated { segment.position_offset } else { 0 };
                if turned != Some(moved) {
                    self.read::<S>(&inputs.q, q, Some(moved));
                    turned = Some(moved);
                }
                let group = states.add(segment.merge_group * queries * state.stride());
                let work = Work { entry, segment, q, latents, keys, values, columns, states: group, state };
                let step = if form == Form::Packed { PACKED } else { TILE };
                let mut start = run.start;
                let mut now = Tile::new(op, segment, start..(start + step).min(run.end));
                while now.len() > 0 {
                    start += now.len();
                    let next = Tile::new(op, segment, start..(start + step).min(run.end));
                    self.tile::<S>(&work, form, &now, &next)?;
                    now = next;
                }
            }
            if item.shared.is_none() {
                self.write::<S>(states, state);
            }
        }
        Ok(())
    }

    /// Widened queries of all units, rotated to their positions less `moved`.
    #[inline(always)]
    unsafe fn read<S: Simd>(&self, queries: &Queries, mut to: *mut f32, moved: Option<i64>) {
        let (inputs, item) = (self.inputs, self.item);
        let (dim, size) = (queries.dim(), inputs.units.size);
        for unit in item.units.clone() {
            for row in item.rows.clone() {
                for head in unit * size..(unit + 1) * size {
                    // SAFETY: there is room for `dim` elements of each query.
                    unsafe {
                        queries.read::<S>(row, head, to);
                        if let (Some(turn), Some(moved)) = (&inputs.turn, moved) {
                            let angle = turn.at(inputs.op.rows[row].position - moved);
                            rotate::<S, f32>(to, to, dim, angle, turn.factor);
                        }
                        to = to.add(dim);
                    }
                }
            }
        }
    }

    /// How keys and values come to the products.
    fn form(&self) -> Form {
        let inputs = self.inputs;
        if self.item.rows.len() * inputs.units.size >= MANY {
            Form::Packed
        } else if inputs.keys.dense.is_none() || inputs.op.keys == KeyForm::Unrotated {
            Form::Widened
        } else {
            Form::InPlace
        }
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(&self, work: &Work<'_>, form: Form, tile: &Tile, next: &Tile) -> Result<()> {
        let inputs = self.inputs;
        let queries = self.item.rows.len() * inputs.units.size;
        let (mut rows, mut ahead) = (TileRows::default(), TileRows::default());
        for (i, unit) in self.item.units.clone().enumerate() {
            let heads = self.heads(unit);
            // SAFETY: all buffers were made for this item.
            unsafe {
                let unit = work.of_unit(i, queries, inputs);
                match form {
                    Form::InPlace => {
                        rows.find(inputs, tile, heads);
                        ahead.find(inputs, next, heads);
                        let ahead = Ahead {
                            keys: &ahead.keys[..next.len()],
                            values: &ahead.values[..next.len()],
                            bytes: (inputs.keys.row_bytes(), inputs.values.row_bytes()),
                        };
                        match inputs.keys.dense {
                            Some(DType::BF16) => self.blocks::<S, bf16>(&unit, tile, &rows, ahead),
                            Some(DType::F16) => self.blocks::<S, f16>(&unit, tile, &rows, ahead),
                            _ => self.blocks::<S, f32>(&unit, tile, &rows, ahead),
                        }
                    }
                    Form::Widened => {
                        self.widen_keys::<S>(work, tile, heads.0, &mut rows.keys)?;
                        self.widen_values::<S>(work, tile, heads.1, &mut rows.values)?;
                        self.blocks::<S, f32>(&unit, tile, &rows, Ahead::default());
                    }
                    Form::Packed => {
                        self.pack::<S>(work, tile, heads, &mut rows)?;
                        self.packed_blocks::<S>(&unit, tile, &rows);
                    }
                }
            }
        }
        Ok(())
    }

    /// The K and the V head of a unit.
    fn heads(&self, unit: usize) -> (usize, usize) {
        let (units, s) = (self.inputs.units, self.inputs.op.arena.layout().shape());
        let head = unit * units.size;
        (head * s.k_heads / units.heads, head * s.v_heads / units.heads)
    }

    /// Keys of a tile as f32, rotated to where they are used if they are not yet.
    #[inline(always)]
    unsafe fn widen_keys<S: Simd>(
        &self,
        work: &Work<'_>,
        tile: &Tile,
        head: usize,
        rows: &mut [*const u8; TILE],
    ) -> Result<()> {
        let (plane, op) = (&self.inputs.keys, self.inputs.op);
        // SAFETY: there is room for a tile of rows.
        unsafe {
            widen_rows::<S>(plane, tile, head, work.keys, rows)?;
            if let (KeyForm::Unrotated, Some(turn)) = (op.keys, &self.inputs.turn) {
                for t in 0..tile.len() {
                    let angle = turn.at(work.segment.position((tile.tokens.start + t) as i64));
                    let row = work.keys.add(t * plane.dim);
                    rotate::<S, f32>(row, row, plane.dim, angle, turn.factor);
                }
            }
        }
        Ok(())
    }

    #[inline(always)]
    unsafe fn widen_values<S: Simd>(
        &self,
        work: &Work<'_>,
        tile: &Tile,
        head: usize,
        rows: &mut [*const u8; TILE],
    ) -> Result<()> {
        // SAFETY: there is room for a tile of rows.
        unsafe { widen_rows::<S>(&self.inputs.values, tile, head, work.values, rows) }
    }

    /// Values as f32, and keys as columns, those of latent attention after the rotated ones.
    #[inline(always)]
    unsafe fn pack<S: Simd>(
        &self,
        work: &Work<'_>,
        tile: &Tile,
        (k_head, v_head): (usize, usize),
        rows: &mut TileRows,
    ) -> Result<()> {
        let (inputs, n, dim) = (self.inputs, tile.len(), self.inputs.keys.dim);
        let to = work.columns[0].cast_mut().cast::<f32>();
        // SAFETY: there are columns for keys, and for values where those are keys too.
        unsafe {
            self.widen_values::<S>(work, tile, v_head, &mut rows.values)?;
            if inputs.latent.is_some() {
                transpose::<S, f32>(&rows.values[..n], inputs.values.dim, to.add(dim * PACKED), PACKED);
            }
            let dense = inputs.keys.dense.filter(|_| inputs.op.keys == KeyForm::Rotated);
            if dense.is_some() {
                for (row, at) in rows.keys.iter_mut().zip(&tile.at[..n]) {
                    *row = inputs.keys.row(at.head(k_head));
                }
            } else {
                self.widen_keys::<S>(work, tile, k_head, &mut rows.keys)?;
            }
            match dense {
                Some(DType::BF16) => transpose::<S, bf16>(&rows.keys[..n], dim, to, PACKED),
                Some(DType::F16) => transpose::<S, f16>(&rows.keys[..n], dim, to, PACKED),
                _ => transpose::<S, f32>(&rows.keys[..n], dim, to, PACKED),
            }
        }
        Ok(())
    }

    /// All queries of a unit against rows where they lie, a register block at a time.
    #[inline(always)]
    unsafe fn blocks<S: Simd, E: Lane>(
        &self,
        unit: &Unit<'_>,
        tile: &Tile,
        rows: &TileRows,
        mut ahead: Ahead<'_>,
    ) {
        let (mut m, count) = (0, self.item.rows.len() * self.inputs.units.size);
        // SAFETY: `m` plus the size of each block stays within the unit's queries.
        unsafe {
            while m + 4 <= count && S::ROWS >= 8 {
                self.block::<S, E, 4, 4, false>(unit, m, tile, rows, std::mem::take(&mut ahead));
                m += 4;
            }
            while m + 2 <= count {
                self.block::<S, E, 2, 4, false>(unit, m, tile, rows, std::mem::take(&mut ahead));
                m += 2;
            }
            while m < count {
                self.block::<S, E, 1, 4, false>(unit, m, tile, rows, std::mem::take(&mut ahead));
                m += 1;
            }
        }
    }

    /// The same against packed rows.
    #[inline(always)]
    unsafe fn packed_blocks<S: Simd>(&self, unit: &Unit<'_>, tile: &Tile, rows: &TileRows) {
        let (mut m, count) = (0, self.item.rows.len() * self.inputs.units.size);
        // SAFETY: as above.
        unsafe {
            while m + 8 <= count && S::ROWS >= 8 {
                self.block::<S, f32, 8, 2, true>(unit, m, tile, rows, Ahead::default());
                m += 8;
            }
            while m + 4 <= count {
                self.block::<S, f32, 4, 2, true>(unit, m, tile, rows, Ahead::default());
                m += 4;
            }
            while m < count {
                self.block::<S, f32, 1, 2, true>(unit, m, tile, rows, Ahead::default());
                m += 1;
            }
        }
    }

    /// Tokens of a tile that query `m` of a unit sees, counted from the tile's first.
    #[inline(always)]
    fn range(&self, unit: &Unit<'_>, m: usize, tile: &Tile) -> Range<usize> {
        if unit.work.entry.selection.is_some() {
            return 0..tile.len();
        }
        let row = self.item.rows.start + m / self.inputs.units.size;
        let seen = visible(self.inputs.op, unit.work.segment, self.inputs.op.rows[row]);
        let first = tile.tokens.start;
        let at = |token: usize| token.saturating_sub(first).min(tile.len());
        at(seen.start)..at(seen.end).max(at(seen.start))
    }

    #[inline(always)]
    unsafe fn block<S: Simd, E: Lane, const Q: usize, const N: usize, const PACK: bool>(
        &self,
        unit: &Unit<'_>,
        m: usize,
        tile: &Tile,
        rows: &TileRows,
        ahead: Ahead<'_>,
    ) {
        let (inputs, state) = (self.inputs, unit.work.state);
        let (k_dim, v_dim) = (inputs.keys.dim, inputs.values.dim);
        let mut ranges = [const { 0..0 }; Q];
        // Tokens that any of the queries sees, and those that all see.
        let (mut all, mut common) = (0..0, 0..tile.len());
        for (a, range) in ranges.iter_mut().enumerate() {
            *range = self.range(unit, m + a, tile);
            if range.start < range.end {
                let first = if all.end == 0 { range.start } else { all.start.min(range.start) };
                all = first..all.end.max(range.end);
            }
            common = common.start.max(range.start)..common.end.min(range.end);
        }
        if all.end == 0 {
            return;
        }
        let mut logits = [0.0f32; QUERIES * STRIDE];
        let row = logits.as_mut_ptr();
        let scaling =
            Scaling { factor: inputs.op.scale * unit.work.segment.logit_scale, softcap: inputs.op.softcap };
        // SAFETY: `logits` has a stride for each query, and states and queries are those of this unit.
        unsafe {
            if PACK {
                let (keys, latents) = unit.work.columns.split_at(k_dim);
                let to = (row, STRIDE);
                accumulate::<S, f32, Q, N>(unit.q.add(m * k_dim), k_dim, keys, PACKED, to, [1.0; Q]);
                if let Some(q) = unit.latents {
                    accumulate::<S, f32, Q, N>(q.add(m * v_dim), v_dim, latents, PACKED, to, [1.0; Q]);
                }
            } else {
                let (keys, to) = (&rows.keys[all.clone()], (row.add(all.start), STRIDE));
                dots::<S, E, Q>(unit.q.add(m * k_dim), k_dim, keys, to, false, ahead);
                if let Some(q) = unit.latents {
                    let values = &rows.values[all.clone()];
                    dots::<S, E, Q>(q.add(m * v_dim), v_dim, values, to, true, Ahead::default());
                }
            }
            let mut shrink = [1.0; Q];
            for (a, range) in ranges.iter_mut().enumerate() {
                let to = unit.states.add((m + a) * state.stride());
                match weights::<S>(row.add(a * STRIDE + range.start), range.len(), scaling, to) {
                    Some(by) if range.start < range.end => shrink[a] = by,
                    _ => {
                        *range = 0..0;
                        common = 0..0;
                    }
                }
            }
            let out = unit.states.add(m * state.stride() + 2);
            if common.start < common.end {
                let (weights, values) = (row.add(common.start), &rows.values[common.clone()]);
                accumulate::<S, E, Q, N>(weights, STRIDE, values, v_dim, (out, state.stride()), shrink);
                shrink = [1.0; Q];
            } else {
                common = 0..0;
            }
            // What only some of the queries see: on the diagonal, at a window's edge.
            for (a, range) in ranges.into_iter().enumerate() {
                let (before, after) = if common.is_empty() {
                    (range.clone(), 0..0)
                } else {
                    (range.start..common.start, common.end..range.end)
                };
                let mut shrink = shrink[a];
                for part in [before, after] {
                    if part.start < part.end {
                        let (weights, values) = (row.add(a * STRIDE + part.start), &rows.values[part]);
                        let out = (out.add(a * state.stride()), state.stride());
                        accumulate::<S, E, 1, N>(weights, STRIDE, values, v_dim, out, [shrink]);
                        shrink = 1.0;
                    }
                }
            }
        }
    }

    /// Writes the results of rows whose tokens are all seen.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, states: *mut f32, state: State) {
        let (inputs, item) = (self.inputs, self.item);
        let mut at = states;
        for unit in item.units.clone() {
            for row in item.rows.clone() {
                for head in unit * inputs.units.size..(unit + 1) * inputs.units.size {
                    // SAFETY: there is a state for each query, and no other item has this row and head.
                    unsafe {
                        finish::<S>(inputs.op, self.outputs, (row, head), at, (1, 0), state);
                        at = at.add(state.stride());
                    }
                }
            }
        }
    }
}

/// The start of a buffer of `n` elements.
fn room(buffer: &mut Vec<f32>, n: usize) -> *mut f32 {
    if buffer.len() < n {
        buffer.resize(n, 0.0);
    }
    buffer.as_mut_ptr()
}

/// How keys and values come to the products.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// From where they lie.
    InPlace,
    /// As rows of f32: they must be decoded or rotated.
    Widened,
    /// Values as rows, keys as columns, for many queries.
    Packed,
}

/// Where the rows of a tile lie.
struct TileRows {
    keys: [*const u8; TILE],
    values: [*const u8; TILE],
}

impl Default for TileRows {
    fn default() -> Self {
        Self { keys: [std::ptr::null(); TILE], values: [std::ptr::null(); TILE] }
    }
}

impl TileRows {
    /// The rows of a tile in dense planes.
    #[inline(always)]
    fn find(&mut self, inputs: &Inputs, tile: &Tile, (k_head, v_head): (usize, usize)) {
        for (t, at) in tile.at[..tile.len()].iter().enumerate() {
            self.keys[t] = inputs.keys.row(at.head(k_head));
            self.values[t] = inputs.values.row(at.head(v_head));
        }
    }
}

/// Rows of a tile as f32.
#[inline(always)]
unsafe fn widen_rows<S: Simd>(
    plane: &Source,
    tile: &Tile,
    head: usize,
    to: *mut f32,
    rows: &mut [*const u8; TILE],
) -> Result<()> {
    for (t, at) in tile.at[..tile.len()].iter().enumerate() {
        // SAFETY: there is room for a tile of rows.
        unsafe {
            let to = to.add(t * plane.dim);
            match plane.dense {
                Some(dtype) => widen_as::<S>(dtype, plane.row(at.head(head)), to, plane.dim),
                None => plane.decode::<S>(at.head(head), to)?,
            }
            rows[t] = to.cast::<u8>();
        }
    }
    Ok(())
}

/// Buffers of an item, and the segment at work.
#[derive(Clone, Copy)]
struct Work<'a> {
    entry: &'a AttendRows,
    segment: &'a Segment,
    q: *mut f32,
    latents: Option<*mut f32>,
    keys: *mut f32,
    values: *mut f32,
    /// Of packed keys: a pointer to each element of all tokens.
    columns: &'a [*const u8],
    /// Those of the segment's merge group.
    states: *mut f32,
    state: State,
}

/// The same for one unit.
struct Unit<'a> {
    work: &'a Work<'a>,
    q: *const f32,
    latents: Option<*const f32>,
    states: *mut f32,
}

impl<'a> Work<'a> {
    #[inline(always)]
    unsafe fn of_unit(&'a self, i: usize, queries: usize, inputs: &Inputs) -> Unit<'a> {
        // SAFETY: buffers have `queries` rows for each unit.
        unsafe {
            Unit {
                work: self,
                q: self.q.add(i * queries * inputs.keys.dim),
                latents: self.latents.map(|all| all.add(i * queries * inputs.values.dim).cast_const()),
                states: self.states.add(i * queries * self.state.stride()),
            }
        }
    }
}
