//! The attention mass of tokens: each thread takes one part of the tokens at a time, and adds the weights of
//! all queries to the part's sums in a fixed order.

use std::cell::RefCell;
use std::ops::Range;

use kvcore::{Attend, AttendMass, AttendRows, Result, Segment};
use smallvec::SmallVec;

use super::block::{QUERIES, STRIDE, packed_products};
use super::heads::HeadUnits;
use super::inputs::{CallInputs, QueryRows};
use super::item::{WidenQueries, grown};
use super::plan::MOST_QUERIES;
use super::softmax::{LogitScaling, scaled};
use super::source::SourcePlane;
use super::tile::{TILE, TileBuffers, TokenTile};
use crate::fast::Fast;
use crate::fast::locked::with_locked;
use crate::fast::rotate::RotationTable;
use crate::memory::ByteSpan;
use crate::plane::PlaneSpans;
use crate::raw::{Destination, Origin};
use crate::simd::{Simd, SimdTask, exp};

/// Number of tokens per part.
const PART: usize = 2 * TILE;

/// A thread's buffers, which grow to the largest size that the thread needs.
#[derive(Default)]
struct MassScratch {
    queries: Vec<f32>,
    latents: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    packed: Vec<f32>,
    columns: Vec<*const u8>,
}

thread_local! {
    static SCRATCH: RefCell<MassScratch> = RefCell::default();
}

/// Consecutive tokens of one segment.
struct MassPart<'a> {
    segment: &'a Segment,
    tokens: Range<usize>,
    /// Offset in bytes of the first token's sum.
    to: usize,
}

/// The data of a call, which all threads share.
struct MassCall<'a> {
    inputs: CallInputs<'a>,
    /// The log-sum-exps `[rows, heads]`, with the offset of the first one and both strides, in bytes.
    lse: (Origin<'a>, usize, [usize; 2]),
    sums: Destination<'a>,
    entry: &'a AttendRows,
}

impl Fast {
    pub(crate) fn attend_mass(&self, mass: &AttendMass) -> Result<()> {
        let op = &mass.attend;
        let (Some(entry), Some(lse)) = (mass.rows(), &op.lse) else { return Ok(()) };
        let s = op.arena.layout().shape();
        let (k, v) = (op.arena.k_plane(), op.arena.v_plane());
        let planes = [k, v].map(|plane| PlaneSpans::of_layer(&op.arena, &plane, op.layer));
        let q_latent = mass.q_latent.as_ref();
        let (q, latent) = (ByteSpan::of(&op.q)?, q_latent.map(ByteSpan::of).transpose()?);
        let (of_lse, of_sums) = (ByteSpan::of(lse)?, ByteSpan::of(&mass.sums)?);
        let mut reads: SmallVec<[&ByteSpan; 8]> = planes.iter().flat_map(PlaneSpans::all).collect();
        reads.extend([&q, &of_lse].into_iter().chain(&latent));
        with_locked(&reads, &[&of_sums], |locked| {
            let mut copies = [Vec::new(), Vec::new()];
            let [copy, latent_copy] = &mut copies;
            let rows = |view, copy| QueryRows::new(view, &mass.sums, locked, copy);
            let inputs = CallInputs {
                op,
                units: HeadUnits::new(op.q.shape()[1], s.k_heads, s.v_heads),
                keys: SourcePlane::new(&k, &planes[0], locked)?,
                values: SourcePlane::new(&v, &planes[1], locked)?,
                q: rows(&op.q, copy)?,
                latent: q_latent.map(|view| rows(view, latent_copy)).transpose()?,
                table: op.rope.as_deref().map(RotationTable::of_checked).transpose()?,
            };
            let strides = lse.strides();
            let lse = (locked.origin(&of_lse)?, 4 * lse.offset(), [4 * strides[0], 4 * strides[1]]);
            let call = MassCall { inputs, lse, sums: locked.target(&of_sums)?, entry };
            self.run_parts(&call, 4 * mass.sums.offset());
            Ok(())
        })
    }

    /// Runs all parts of a call whose sums begin at offset `to`, in bytes.
    fn run_parts(&self, call: &MassCall<'_>, mut to: usize) {
        let mut parts = Vec::new();
        let before = &call.entry.segments[..call.entry.segments.len().saturating_sub(1)];
        for segment in before {
            let part = |start: usize| {
                let tokens = start..(start + PART).min(segment.len);
                MassPart { segment, to: to + 4 * start, tokens }
            };
            parts.extend((0..segment.len).step_by(PART).map(part));
            to += 4 * segment.len;
        }
        let keys = &call.inputs.keys;
        let tokens: usize = before.iter().map(|segment| segment.len).sum();
        let products = (call.entry.rows.len() * call.inputs.units.heads).div_ceil(4);
        let work = |i: usize| {
            // This closure is outside of the task, because a closure inside the task would be compiled
            // without the task's instruction set.
            SCRATCH.with_borrow_mut(|scratch| {
                // SAFETY: the operation was checked, its memory is locked, and the token ranges of the parts
                // are disjoint, so no other thread accesses the sums of this part.
                unsafe { self.level.run(ComputePart { call, part: &parts[i], scratch }) };
            });
        };
        if self.parts(parts.len(), tokens * products * keys.row_bytes()) == 1 {
            (0..parts.len()).for_each(work);
        } else {
            self.workers.run(parts.len(), &work);
        }
    }
}

/// Adds the weights of all queries to the sums of one part.
///
/// # Safety
/// `call` must belong to a checked operation whose memory is locked, and `part` to its entry. No other thread
/// may access the part's sums during the call.
struct ComputePart<'a> {
    call: &'a MassCall<'a>,
    part: &'a MassPart<'a>,
    scratch: &'a mut MassScratch,
}

impl SimdTask for ComputePart<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { call, part, scratch } = self;
        let (inputs, entry) = (&call.inputs, call.entry);
        let (dims, size) = ((inputs.keys.dim, inputs.values.dim), inputs.units.size);
        let step = (MOST_QUERIES / size).max(1).min(entry.rows.len());
        let columns = dims.0 + inputs.latent.as_ref().map_or(0, |_| dims.1);
        let packed = grown(&mut scratch.packed, columns * TILE);
        scratch.columns.clear();
        let at = (0..columns).map(|i| packed.wrapping_add(i * TILE).cast::<u8>().cast_const());
        scratch.columns.extend(at);
        let buffers = TileBuffers {
            keys: grown(&mut scratch.keys, TILE * dims.0),
            values: grown(&mut scratch.values, TILE * dims.1),
            columns: &scratch.columns,
        };
        let q = grown(&mut scratch.queries, step * size * dims.0);
        let latents = inputs.latent.as_ref().map(|_| grown(&mut scratch.latents, step * size * dims.1));
        let moved = Some(inputs.key_offset(part.segment));
        for unit in 0..inputs.units.count() {
            for start in entry.rows.clone().step_by(step.max(1)) {
                let rows = start..(start + step).min(entry.rows.end);
                // SAFETY: `q` and `latents` have room for `step` rows of the unit's queries, and the other
                // buffers for a tile. `at` checks that the tile's sums are in bounds, and no other thread
                // accesses them, by contract. The caller guarantees the instruction set.
                unsafe {
                    let units = unit..unit + 1;
                    let queries = &inputs.q;
                    let (of, all) = (units.clone(), rows.clone());
                    S::call(WidenQueries { inputs, units: of, rows: all, queries, to: q, moved });
                    if let (Some(queries), Some(to)) = (&inputs.latent, latents) {
                        let rows = rows.clone();
                        S::call(WidenQueries { inputs, units, rows, queries, to, moved: None });
                    }
                    let mut token = part.tokens.start;
                    while token < part.tokens.end {
                        let tile = TokenTile::new(inputs, part.segment, token, part.tokens.end);
                        inputs.pack_columns::<S>(&tile, inputs.kv_heads(unit), &buffers);
                        let at = part.to + 4 * (token - part.tokens.start);
                        let to = call.sums.at(at, 4 * tile.len()).cast::<f32>();
                        let of = MassTile {
                            call,
                            tile: &tile,
                            columns: buffers.columns,
                            unit,
                            rows: rows.clone(),
                        };
                        of.add::<S>((q, latents.map(<*mut f32>::cast_const)), to);
                        token = tile.tokens.end;
                    }
                }
            }
        }
    }
}

impl CallInputs<'_> {
    /// Returns the offset to subtract from the query positions: the segment's position offset if its keys are
    /// stored rotated, and 0 otherwise.
    fn key_offset(&self, segment: &Segment) -> i64 {
        let Attend { keys, .. } = self.op;
        if *keys == kvcore::KeyForm::Rotated { segment.position_offset } else { 0 }
    }
}

/// One head unit's queries in some rows, and the packed tile to multiply them by.
struct MassTile<'a> {
    call: &'a MassCall<'a>,
    tile: &'a TokenTile<'a>,
    columns: &'a [*const u8],
    unit: usize,
    rows: Range<usize>,
}

impl MassTile<'_> {
    /// Adds the weights of all queries to the sums at `to`.
    ///
    /// # Safety
    /// `q` and, in latent attention, `latents` must have the unit's queries of all rows in f32. `columns`
    /// must have been packed for the tile and the unit. `to` must have a sum for each token of the tile, and
    /// nothing else may access them. The caller must be compiled for the instruction set of `S`.
    #[inline(always)]
    unsafe fn add<S: Simd>(&self, (q, latents): (*const f32, Option<*const f32>), to: *mut f32) {
        let mut sums = [0.0; STRIDE];
        let (count, sums_at) = (self.rows.len() * self.call.inputs.units.size, sums.as_mut_ptr());
        let mut first = 0;
        // SAFETY: `first` plus the number of queries in a block is at most `count`, `sums` has `STRIDE`
        // elements, and `to` has as many as the tile has tokens, by contract.
        unsafe {
            if const { S::REGISTERS >= 32 } {
                while first + 6 <= count {
                    S::call(MassBlock::<6, 4> { of: self, first, q, latents, sums: sums_at });
                    first += 6;
                }
            }
            while first + 4 <= count {
                S::call(MassBlock::<4, 2> { of: self, first, q, latents, sums: sums_at });
                first += 4;
            }
            while first < count {
                S::call(MassBlock::<1, 2> { of: self, first, q, latents, sums: sums_at });
                first += 1;
            }
            for (t, sum) in sums.iter().enumerate().take(self.tile.len()) {
                *to.add(t) += sum;
            }
        }
    }

    /// Returns the log-sum-exp of query `m`.
    fn lse(&self, m: usize) -> f32 {
        let ((origin, first, strides), units) = (self.call.lse, self.call.inputs.units);
        let (row, head) = (self.rows.start + m / units.size, self.unit * units.size + m % units.size);
        let at = origin.at(first + row * strides[0] + head * strides[1], 4);
        // SAFETY: `at` checked that the element is in bounds, and views are aligned. The bytes are locked,
        // and the operation only writes the sums, which do not overlap them.
        unsafe { at.cast::<f32>().read() }
    }
}

/// Adds the weights of `Q` queries, starting at query `first`, to `sums`. Computes `N` vectors of products at
/// a time.
///
/// # Safety
/// The conditions of [`MassTile::add`] must hold for `q` and `latents`, and `first + Q` must be at most the
/// number of queries. `sums` must have [`STRIDE`] initialised elements, which nothing else may access.
struct MassBlock<'a, const Q: usize, const N: usize> {
    of: &'a MassTile<'a>,
    first: usize,
    q: *const f32,
    latents: Option<*const f32>,
    sums: *mut f32,
}

impl<const Q: usize, const N: usize> SimdTask for MassBlock<'_, Q, N> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { of, first, q, latents, sums } = self;
        let (inputs, tile) = (&of.call.inputs, of.tile);
        let dims = (inputs.keys.dim, inputs.values.dim);
        let seen: [_; Q] =
            std::array::from_fn(|a| tile.visible(of.rows.start + (first + a) / inputs.units.size));
        if seen.iter().all(Range::is_empty) {
            return;
        }
        let factor = inputs.op.scale * tile.segment.logit_scale;
        let scaling = LogitScaling { factor, softcap: inputs.op.softcap };
        let mut products = [0.0; QUERIES * STRIDE];
        let row = products.as_mut_ptr();
        // SAFETY: `Q <= QUERIES`, so `products` has `STRIDE` elements for each query. `first + Q` is at most
        // the number of queries by contract. A range of `seen` ends inside the tile, and a vector that starts
        // inside it ends before `TILE + LANES <= STRIDE`, both in `products` and in `sums`.
        unsafe {
            let queries = (q.add(first * dims.0), latents.map(|all| all.add(first * dims.1)));
            packed_products::<S, Q, N>(queries, dims, of.columns, row);
            for (a, seen) in seen.into_iter().enumerate() {
                let lse = of.lse(first + a);
                // A row whose logits are all −∞ has no weights.
                if seen.is_empty() || lse == f32::NEG_INFINITY {
                    continue;
                }
                let (row, sums, n) = (row.add(a * STRIDE + seen.start), sums.add(seen.start), seen.len());
                scaled::<S>(row, n, scaling);
                for t in n..n + S::LANES {
                    *row.add(t) = f32::NEG_INFINITY;
                }
                let lse = S::splat(lse);
                for t in (0..n).step_by(S::LANES) {
                    let weight = exp::<S>(S::sub(S::load(row.add(t)), lse));
                    S::store(sums.add(t), S::add(S::load(sums.add(t)), weight));
                }
            }
        }
    }
}
