//! Copies rows to the slots of another engine's cache, and back.
//!
//! Tokens that are adjacent in one of the engine's blocks are copied together, head by head. Their rows are
//! rotated into a small buffer, and copied from the buffer in the engine's order, which fills whole cache
//! lines.

use std::ops::Range;

use half::{bf16, f16};
use kvcore::{DType, KvArena, LayerRopes, PlaneStrides, Result, SlotMapping};

use super::locked::with_locked;
use super::rotate::{RotationTable, rotate};
use super::{Fast, share};
use crate::foreign::{ForeignCache, ForeignLoad, ForeignOrder, ForeignPlane, ForeignShape};
use crate::memory::ByteSpan;
use crate::plane::PlaneSpans;
use crate::raw::{Destination, Origin};
use crate::simd::{Simd, SimdElement, SimdTask};

/// Size of a cache line in bytes. Only complete lines are written past the caches.
const LINE: usize = 64;
const LINES: usize = 4096;

/// A buffer in which cache lines are filled.
#[repr(align(64))]
struct Lines([u8; LINES]);

/// Tokens that are adjacent in one of the engine's blocks.
struct AdjacentTokens<'a> {
    /// The tokens' slots in the arena.
    ours: &'a [i64],
    /// The engine's block.
    block: usize,
    /// Index of the first token in the block.
    token: usize,
    /// Number of positions to rotate the keys by.
    delta: i64,
}

/// Splits the tokens of a transfer into runs, and appends them to `runs`. Tokens with a negative engine slot
/// are skipped.
fn runs<'a>(
    runs: &mut Vec<AdjacentTokens<'a>>,
    ours: &'a [i64],
    theirs: &[i64],
    block_size: usize,
    delta: i64,
) {
    let mut at = 0;
    while at < theirs.len() {
        if theirs[at] < 0 {
            at += 1;
            continue;
        }
        let first = theirs[at] as usize;
        let (block, token) = (first / block_size, first % block_size);
        let most = (block_size - token).min(theirs.len() - at);
        let beside = |i: &usize| theirs[at + i] == theirs[at] + *i as i64;
        let len = (0..most).take_while(beside).count();
        runs.push(AdjacentTokens { ours: &ours[at..at + len], block, token, delta });
        at += len;
    }
}

/// One layer's keys or values, in the arena and in the engine's cache.
#[derive(Clone, Copy)]
struct LayerPlaces<'a> {
    layer: usize,
    /// The strides of the rows in the arena.
    strides: PlaneStrides,
    /// Number of tokens per block of the arena.
    block_size: usize,
    /// The plane in the engine's memory.
    theirs: &'a ForeignPlane,
    shape: &'a ForeignShape,
    size: usize,
}

impl<'a> LayerPlaces<'a> {
    fn new(cache: &'a ForeignCache, arena: &KvArena, layer: usize, plane: usize) -> Self {
        let layout = arena.layout();
        let shape = cache.shape();
        Self {
            layer,
            strides: [layout.k_strides(), layout.v_strides()][plane],
            block_size: layout.shape().block_size,
            theirs: &cache.layers()[layer][plane],
            shape,
            size: shape.dtype.bits() / 8,
        }
    }

    /// Returns the byte offset of a head's row in the arena.
    #[inline(always)]
    fn row(&self, slot: i64, head: usize) -> usize {
        let slot = slot as usize;
        self.strides.at(self.layer, slot / self.block_size, slot % self.block_size, head) * self.size
    }

    #[inline(always)]
    fn row_bytes(&self) -> usize {
        self.shape.dim * self.size
    }

    /// Returns the byte offset of one head of a block in the engine's memory.
    #[inline(always)]
    fn piece(&self, block: usize, head: usize) -> usize {
        (self.theirs.start + block * self.theirs.block + head * self.theirs.head) * self.size
    }

    /// Returns the size in bytes of one head of a block, from its first to its last element.
    #[inline(always)]
    fn piece_bytes(&self) -> usize {
        let elements = match self.theirs.order {
            ForeignOrder::Rows { token } => (self.shape.block_size - 1) * token + self.shape.dim,
            _ => self.shape.block_size * self.shape.dim,
        };
        elements * self.size
    }
}

/// Copies runs of tokens from the arena to the engine, for one plane of one layer.
///
/// # Safety
/// No other thread may access the elements being written, and the rotary dimension of `angles` must be at
/// most the rows' length.
struct LoadRuns<'a> {
    places: LayerPlaces<'a>,
    from: Origin<'a>,
    to: Destination<'a>,
    runs: &'a [AdjacentTokens<'a>],
    /// The rotation to apply to keys.
    angles: Option<&'a RotationTable>,
    /// True if writes of whole cache lines bypass the caches.
    stream: bool,
}

/// Copies runs of tokens from the engine to the arena, for one plane of one layer.
///
/// # Safety
/// No other thread may access the elements being written.
struct SaveRuns<'a> {
    places: LayerPlaces<'a>,
    from: Origin<'a>,
    to: Destination<'a>,
    runs: &'a [AdjacentTokens<'a>],
}

impl SimdTask for LoadRuns<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the instruction set of `S` is available by contract, and `load` requires only what
        // `LoadRuns` does.
        unsafe {
            match self.places.shape.dtype {
                DType::F16 => load::<S, f16>(&self),
                DType::BF16 => load::<S, bf16>(&self),
                _ => load::<S, f32>(&self),
            }
            S::fence();
        }
    }
}

impl SimdTask for SaveRuns<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the instruction set of `S` is available by contract, and `save` requires only what
        // `SaveRuns` does.
        unsafe {
            match self.places.shape.dtype {
                DType::F16 => save::<S, f16>(&self),
                DType::BF16 => save::<S, bf16>(&self),
                _ => save::<S, f32>(&self),
            }
        }
    }
}

/// Copies all runs of a [`LoadRuns`].
///
/// # Safety
/// The conditions of [`LoadRuns`] must hold, and the caller must be compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn load<S: Simd, E: SimdElement>(task: &LoadRuns<'_>) {
    let places = &task.places;
    let ForeignShape { heads, dim, block_size, .. } = *places.shape;
    let mut turned = vec![E::from_f32(0.0); if task.angles.is_some() { block_size * dim } else { 0 }];
    let mut rows: Vec<*const E> = Vec::with_capacity(block_size);
    let mut lines = Lines([0; LINES]);
    let stream = task.stream && S::STREAMS;
    let stream_rows = stream && (dim * size_of::<E>()).is_multiple_of(LINE);
    let piece_of_lines = S::LANES * block_size * size_of::<E>();
    let stream_columns = stream
        && piece_of_lines <= LINES
        && (block_size * size_of::<E>()).is_multiple_of(LINE)
        && dim.is_multiple_of(S::LANES);
    for run in task.runs {
        let angle = task.angles.filter(|_| run.delta != 0).map(|table| table.at(run.delta));
        for head in 0..heads {
            let piece = task.to.at(places.piece(run.block, head), places.piece_bytes()).cast::<E>();
            rows.clear();
            for (i, &slot) in run.ours.iter().enumerate() {
                let row = task.from.at(places.row(slot, head), places.row_bytes()).cast::<E>();
                // SAFETY: `at` checked that the row is inside the arena. A run has at most `block_size`
                // tokens, so row `i` of `turned`, or token `token + i` of the block's head, is in bounds; the
                // rotary dimension is at most `dim`.
                unsafe {
                    match (angle, places.theirs.order) {
                        (Some(angle), ForeignOrder::Rows { token }) => {
                            rotate::<S, E>(row, piece.add((run.token + i) * token), dim, angle, 1.0);
                        }
                        (None, ForeignOrder::Rows { token }) => {
                            let to = piece.add((run.token + i) * token);
                            if stream_rows && to.addr().is_multiple_of(LINE) {
                                stream_lines::<S>(row.cast(), to.cast(), dim * size_of::<E>());
                            } else {
                                std::ptr::copy_nonoverlapping(row, to, dim);
                            }
                        }
                        (Some(angle), _) => {
                            let to = turned.as_mut_ptr().add(i * dim);
                            rotate::<S, E>(row, to, dim, angle, 1.0);
                            rows.push(to);
                        }
                        (None, _) => rows.push(row),
                    }
                }
            }
            // SAFETY: `rows` are rows of `dim` elements. The block's head has `block_size × dim` elements;
            // the tokens starting at `run.token` belong to the run, and no other thread accesses them, by
            // contract.
            unsafe {
                match places.theirs.order {
                    ForeignOrder::Rows { .. } => {}
                    ForeignOrder::Columns
                        if stream_columns
                            && rows.len() == block_size
                            && piece.addr().is_multiple_of(LINE) =>
                    {
                        let buffer = lines.0.as_mut_ptr();
                        for i in (0..dim).step_by(S::LANES) {
                            columns::<S, E>(&rows, i..i + S::LANES, buffer.cast(), block_size);
                            stream_lines::<S>(buffer, piece.add(i * block_size).cast(), piece_of_lines);
                        }
                    }
                    ForeignOrder::Columns => {
                        columns::<S, E>(&rows, 0..dim, piece.add(run.token), block_size);
                    }
                    ForeignOrder::KeyTiles => {
                        tiles(run.token, rows.len(), |at, tile, token| {
                            // A pair of 2-byte elements is copied as one 4-byte element.
                            let rows = std::slice::from_raw_parts(rows[at.start..].as_ptr().cast(), at.len());
                            let to = piece.add(tile * 16 * dim + 2 * token).cast::<f32>();
                            columns::<S, f32>(rows, 0..dim / 2, to, 16);
                        });
                    }
                    ForeignOrder::ValueTiles => {
                        for (i, row) in rows.iter().enumerate() {
                            let token = run.token + i;
                            let to = piece.add(token / 2 * 32 + token % 2);
                            for i in 0..dim {
                                to.add(i / 16 * 16 * block_size + i % 16 * 2).write(row.add(i).read());
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Copies all runs of a [`SaveRuns`].
///
/// # Safety
/// The conditions of [`SaveRuns`] must hold, and the caller must be compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn save<S: Simd, E: SimdElement>(task: &SaveRuns<'_>) {
    let places = &task.places;
    let ForeignShape { heads, dim, block_size, .. } = *places.shape;
    let mut rows: Vec<*mut E> = Vec::with_capacity(block_size);
    for run in task.runs {
        for head in 0..heads {
            let piece = task.from.at(places.piece(run.block, head), places.piece_bytes()).cast::<E>();
            rows.clear();
            for &slot in run.ours {
                rows.push(task.to.at(places.row(slot, head), places.row_bytes()).cast());
            }
            // SAFETY: `at` checked that all rows are inside the arena, where no other thread accesses them by
            // contract. The block's head has `block_size × dim` elements, of which the tokens starting at
            // `run.token` are read.
            unsafe {
                match places.theirs.order {
                    ForeignOrder::Rows { token } => {
                        for (i, row) in rows.iter().enumerate() {
                            let from = piece.add((run.token + i) * token);
                            std::ptr::copy_nonoverlapping(from, *row, dim);
                        }
                    }
                    ForeignOrder::Columns => {
                        from_columns::<S, E>(piece.add(run.token), block_size, &rows, dim);
                    }
                    ForeignOrder::KeyTiles => {
                        tiles(run.token, rows.len(), |at, tile, token| {
                            let rows = std::slice::from_raw_parts(rows[at.start..].as_ptr().cast(), at.len());
                            let from = piece.add(tile * 16 * dim + 2 * token).cast::<f32>();
                            from_columns::<S, f32>(from, 16, rows, dim / 2);
                        });
                    }
                    ForeignOrder::ValueTiles => {
                        for (i, row) in rows.iter().enumerate() {
                            let token = run.token + i;
                            let from = piece.add(token / 2 * 32 + token % 2);
                            for i in 0..dim {
                                row.add(i).write(from.add(i / 16 * 16 * block_size + i % 16 * 2).read());
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Splits `len` tokens starting at `first` at the boundaries of 16-token tiles, and calls `work` for each
/// part. The arguments of `work` are the part's range among these tokens, the index of the tile, and the
/// index of the part's first token in the tile.
#[inline(always)]
fn tiles(first: usize, len: usize, mut work: impl FnMut(Range<usize>, usize, usize)) {
    let mut at = 0;
    while at < len {
        let token = first + at;
        let end = len.min(at + 16 - token % 16);
        work(at..end, token / 16, token % 16);
        at = end;
    }
}

/// Copies whole cache lines, bypassing the caches.
///
/// # Safety
/// `from` must be valid for reads and `to` for writes of `bytes` bytes, and they must not overlap. `bytes`
/// must be a multiple of a line, and `to` must be aligned to a line. The caller must be compiled for the
/// instruction set of `S`.
#[inline(always)]
unsafe fn stream_lines<S: Simd>(from: *const u8, to: *mut u8, bytes: usize) {
    let mut at = 0;
    while at < bytes {
        // SAFETY: `at` is a multiple of a line below `bytes`, so a whole line is in bounds by contract.
        unsafe { S::stream_line(to.add(at), from.add(at)) };
        at += LINE;
    }
}

/// Writes `to[(i - elements.start) * stride + t] = rows[t][i]` for each `i` in `elements`.
///
/// # Safety
/// Each row must have all of `elements`. `to` must have room for `rows.len()` elements at each of
/// `elements.len()` strides. `rows` and `to` must not overlap. The caller must be compiled for the
/// instruction set of `S`.
#[inline(always)]
unsafe fn columns<S: Simd, E: SimdElement>(
    rows: &[*const E],
    elements: Range<usize>,
    to: *mut E,
    stride: usize,
) {
    let whole_rows = rows.len() - rows.len() % S::LANES;
    let whole = elements.end - elements.len() % S::LANES;
    let first = elements.start;
    // SAFETY: `t + LANES <= rows.len()` and `i + LANES <= elements.end` where vectors are accessed, and `t <
    // rows.len()` and `i < elements.end` where a single element is accessed. By contract, both sides have
    // these elements.
    unsafe {
        for i in (first..whole).step_by(S::LANES) {
            for t in (0..whole_rows).step_by(S::LANES) {
                let mut square = [S::splat(0.0); 16];
                for (lane, vector) in square[..S::LANES].iter_mut().enumerate() {
                    *vector = E::load::<S>(rows[t + lane].add(i));
                }
                S::transpose(&mut square);
                for (lane, vector) in square[..S::LANES].iter().enumerate() {
                    E::store::<S>(to.add((i - first + lane) * stride + t), *vector);
                }
            }
            for (t, row) in rows.iter().enumerate().skip(whole_rows) {
                for i in i..i + S::LANES {
                    to.add((i - first) * stride + t).write(row.add(i).read());
                }
            }
        }
        for i in whole..elements.end {
            for (t, row) in rows.iter().enumerate() {
                to.add((i - first) * stride + t).write(row.add(i).read());
            }
        }
    }
}

/// Writes `rows[t][i] = from[i * stride + t]` for rows of `dim` elements.
///
/// # Safety
/// `from` must have `rows.len()` elements at each multiple of `stride` below `dim * stride`, and each row
/// must have room for `dim` elements. The two sides must not overlap. The caller must be compiled for the
/// instruction set of `S`.
#[inline(always)]
unsafe fn from_columns<S: Simd, E: SimdElement>(from: *const E, stride: usize, rows: &[*mut E], dim: usize) {
    let (whole_rows, whole) = (rows.len() - rows.len() % S::LANES, dim - dim % S::LANES);
    // SAFETY: `t + LANES <= rows.len()` and `i + LANES <= dim` where vectors are accessed, and `t <
    // rows.len()` and `i < dim` where a single element is accessed. By contract, both sides have these
    // elements.
    unsafe {
        for i in (0..whole).step_by(S::LANES) {
            for t in (0..whole_rows).step_by(S::LANES) {
                let mut square = [S::splat(0.0); 16];
                for (lane, vector) in square[..S::LANES].iter_mut().enumerate() {
                    *vector = E::load::<S>(from.add((i + lane) * stride + t));
                }
                S::transpose(&mut square);
                for (lane, vector) in square[..S::LANES].iter().enumerate() {
                    E::store::<S>(rows[t + lane].add(i), *vector);
                }
            }
            for (t, row) in rows.iter().enumerate().skip(whole_rows) {
                for i in i..i + S::LANES {
                    row.add(i).write(from.add(i * stride + t).read());
                }
            }
        }
        for i in whole..dim {
            for (t, row) in rows.iter().enumerate() {
                row.add(i).write(from.add(i * stride + t).read());
            }
        }
    }
}

/// The runs of tokens to copy in every layer.
struct Moved<'a> {
    cache: &'a ForeignCache,
    arena: &'a KvArena,
    runs: Vec<AdjacentTokens<'a>>,
}

impl<'a> Moved<'a> {
    /// Returns the bytes of the arena's keys, and of its values.
    fn ours(&self) -> [ByteSpan<'a>; 2] {
        let layers = 0..self.cache.layers().len();
        [self.arena.k_plane(), self.arena.v_plane()]
            .map(|plane| PlaneSpans::new(self.arena, &plane, &layers).codes)
    }

    /// Returns the bytes of the engine's keys, and of its values, in each layer.
    fn theirs(&self) -> Vec<ByteSpan<'a>> {
        let planes = self.cache.layers().iter().flatten();
        planes.map(|plane| ByteSpan::new(&plane.storage, 0..plane.storage.len())).collect()
    }

    /// Returns the total number of bytes to write.
    fn bytes(&self) -> usize {
        let shape = self.cache.shape();
        let tokens: usize = self.runs.iter().map(|run| run.ours.len()).sum();
        2 * self.cache.layers().len() * tokens * shape.heads * shape.dim * shape.dtype.bits() / 8
    }

    /// Calls `work` with each layer and its runs, split into parts for the threads of `fast`.
    fn each(&self, fast: &Fast, work: impl Fn(usize, &[AdjacentTokens<'a>]) + Sync) {
        let count = self.runs.len();
        let units = self.cache.layers().len() * count;
        let parts = fast.parts(units, self.bytes());
        fast.workers.run(parts, &|part| {
            let mut units = share(0..units, part, parts);
            while !units.is_empty() {
                let (layer, first) = (units.start / count, units.start % count);
                let end = count.min(first + units.len());
                work(layer, &self.runs[first..end]);
                units.start += end - first;
            }
        });
    }
}

impl Fast {
    pub(crate) fn load_foreign(
        &self,
        cache: &ForeignCache,
        arena: &KvArena,
        loads: &[ForeignLoad],
        ropes: &LayerRopes,
    ) -> Result<()> {
        let mut moved = Moved { cache, arena, runs: Vec::new() };
        for load in loads {
            runs(&mut moved.runs, &load.from, &load.to, cache.shape().block_size, load.delta);
        }
        let deltas: Vec<i64> = loads.iter().map(|load| load.delta).collect();
        let tables = ropes.layers().iter().map(|rope| RotationTable::new(rope, &deltas));
        let tables = tables.collect::<Result<Vec<_>>>()?;
        let stream = self.streams(moved.bytes());
        let (ours, theirs) = (moved.ours(), moved.theirs());
        with_locked(&ours.each_ref(), &theirs.iter().collect::<Vec<_>>(), |locked| {
            let from = [locked.origin(&ours[0])?, locked.origin(&ours[1])?];
            let to = theirs.iter().map(|span| locked.target(span)).collect::<Result<Vec<_>>>()?;
            moved.each(self, |layer, runs| {
                for plane in 0..2 {
                    let load = LoadRuns {
                        places: LayerPlaces::new(cache, arena, layer, plane),
                        from: from[plane],
                        to: to[2 * layer + plane],
                        runs,
                        angles: Some(&tables[layer]).filter(|_| plane == 0),
                        stream,
                    };
                    // SAFETY: `ForeignCache::new` checked that no two planes share an element, and
                    // `ForeignCache::load` that no slot is written twice and that the arena is other memory.
                    // `each` gives each thread its own runs and layers.
                    unsafe { self.level.run(load) };
                }
            });
            Ok(())
        })
    }

    pub(crate) fn save_foreign(
        &self,
        cache: &ForeignCache,
        arena: &KvArena,
        to: &SlotMapping,
        from: &SlotMapping,
    ) -> Result<()> {
        let mut moved = Moved { cache, arena, runs: Vec::new() };
        runs(&mut moved.runs, to, from, cache.shape().block_size, 0);
        let (ours, theirs) = (moved.ours(), moved.theirs());
        with_locked(&theirs.iter().collect::<Vec<_>>(), &ours.each_ref(), |locked| {
            let to = [locked.target(&ours[0])?, locked.target(&ours[1])?];
            let from = theirs.iter().map(|span| locked.origin(span)).collect::<Result<Vec<_>>>()?;
            moved.each(self, |layer, runs| {
                for plane in 0..2 {
                    let places = LayerPlaces::new(cache, arena, layer, plane);
                    let save = SaveRuns { places, from: from[2 * layer + plane], to: to[plane], runs };
                    // SAFETY: `ForeignCache::new` checked that no two planes share an element, and
                    // `ForeignCache::save` that no slot is written twice and that the arena is other memory.
                    // `each` gives each thread its own runs and layers.
                    unsafe { self.level.run(save) };
                }
            });
            Ok(())
        })
    }
}
