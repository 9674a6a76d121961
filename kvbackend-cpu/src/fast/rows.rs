//! Scatter, which copies rows to slots, and gather, which copies slots to rows.

use std::cell::{Cell, OnceCell, RefCell};
use std::ops::Range;

use kvcore::{DType, Gather, KvFormat, Result, Scatter};

use super::locked::with_locked;
use super::rotate::{RotateRows, RotationTable};
use super::runs::CopyRuns;
use super::{Fast, queues, share};
use crate::movement::LayerMovement;
use crate::raw::{Destination, Origin};
use crate::simd::{Simd, SimdTask, narrow};

/// A division of rows into equally sized runs, each of which is contiguous both in the rows and in the cache.
#[derive(Clone, Copy)]
struct Cut {
    steps: Steps,
    /// Number of runs per step: one, or the number of heads.
    runs: usize,
    /// Number of elements per run.
    elements: usize,
}

/// The grouping of rows into steps.
#[derive(Clone, Copy)]
enum Steps {
    /// Each row is a step.
    Single,
    /// Each step has this many rows, whose slots are consecutive and start at a multiple of this number. All
    /// other rows are left out.
    Joined(usize),
    /// Each row that `Joined` with the same number leaves out is a step of its own.
    Rest(usize),
}

impl Steps {
    /// Returns the first row of each step in a range of rows.
    fn rows(self, slots: &[i64], range: Range<usize>) -> impl Iterator<Item = usize> {
        let (count, joined) = match self {
            Self::Single => (1, false),
            Self::Joined(count) => (count, true),
            Self::Rest(count) => (count, false),
        };
        let (mut next, end) = (range.start, range.end);
        let whole = move |row: usize| {
            count > 1 && end - row >= count && slots[row] & (count as i64 - 1) == 0 && {
                let slots = &slots[row..row + count];
                slots[0] >= 0 && slots.windows(2).all(|pair| pair[0] + 1 == pair[1])
            }
        };
        std::iter::from_fn(move || {
            while next < end {
                let (row, whole) = (next, whole(next));
                next += if whole { count } else { 1 };
                if whole == joined {
                    return Some(row);
                }
            }
            None
        })
    }
}

/// Maximum size of a step of joined rows, in bytes.
const JOINED: usize = 4096;

impl LayerMovement<'_> {
    /// Returns the division with one row per step. If heads are adjacent both in the rows and in the cache, a
    /// row is a single run.
    fn single(&self) -> Cut {
        let (heads, dim) = (self.plane.heads, self.plane.dim);
        let dense = heads == 1 || (self.rows.strides()[1] == dim && self.plane.strides.head == dim);
        let (runs, elements) = if dense { (1, heads * dim) } else { (heads, dim) };
        Cut { steps: Steps::Single, runs, elements }
    }

    /// Calls `work` with divisions that together cover all rows. Contiguous rows are joined if their slots
    /// are also contiguous, like the slots of a block. `left` must initially be the number of rows.
    fn each_cut(&self, left: &Cell<usize>, mut work: impl FnMut(Cut)) {
        let cut = self.single();
        let n = cut.elements;
        let dense = cut.runs == 1 && self.plane.strides.token == n && self.rows.strides()[0] == n;
        let fit = (JOINED / (n * self.rows.dtype().bits() / 8).max(1)).checked_ilog2();
        let count = 1 << fit.unwrap_or(0).min(self.block_size.trailing_zeros());
        if !dense || count == 1 || count > left.get() {
            return work(cut);
        }
        work(Cut { steps: Steps::Joined(count), elements: count * n, ..cut });
        if left.get() > 0 {
            work(Cut { steps: Steps::Rest(count), ..cut });
        }
    }

    /// Returns the index of the first element of each run of the given rows, in the rows and in the plane.
    /// Padding is skipped. Decreases `left` by the number of rows covered.
    fn offsets(
        &self,
        cut: Cut,
        rows: Range<usize>,
        left: &Cell<usize>,
    ) -> impl Iterator<Item = (usize, usize)> {
        let (row_strides, strides) = (self.rows.strides(), self.plane.strides);
        let (layer, block_size, first) = (self.layer, self.block_size, self.rows.offset());
        // If true, the distance between tokens depends only on their slots, even across blocks, so no
        // division by the block size is needed.
        let linear = strides.block == block_size * strides.token;
        let count = if let Steps::Joined(count) = cut.steps { count } else { 1 };
        let slots = cut.steps.rows(self.slots, rows).map(move |row| {
            left.set(left.get() - count);
            (self.slots[row], row)
        });
        slots.filter(|(slot, _)| *slot >= 0).flat_map(move |(slot, row)| {
            let slot = slot as usize;
            let at = if linear {
                strides.at(layer, 0, slot, 0)
            } else {
                strides.at(layer, slot / block_size, slot % block_size, 0)
            };
            let row = first + row * row_strides[0];
            (0..cut.runs).map(move |head| (row + head * row_strides[1], at + head * strides.head))
        })
    }

    pub(super) fn bytes(&self) -> usize {
        self.slots.len() * self.plane.heads * self.plane.dim * self.rows.dtype().bits() / 8
    }
}

thread_local! {
    /// One bit per slot, which is set if the slot has already occurred.
    static SEEN: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Returns whether any slot is written twice. In that case, threads must not share the work.
fn has_duplicates(slots: &[i64], num_slots: usize) -> bool {
    SEEN.with_borrow_mut(|seen| {
        seen.clear();
        seen.resize(num_slots.div_ceil(64), 0);
        slots.iter().filter(|slot| **slot >= 0).any(|&slot| {
            let (word, bit) = (&mut seen[slot as usize / 64], 1 << (slot % 64));
            let before = *word & bit != 0;
            *word |= bit;
            before
        })
    })
}

impl Fast {
    /// Returns the number of parts to split a scatter into. Threads must not write to the same slot, so this
    /// is 1 if `twice` returns true. `twice` checks whether any slot is written twice, and is called only if
    /// its result matters.
    pub(super) fn parts_of_scatter(&self, m: &LayerMovement, twice: impl FnOnce() -> bool) -> usize {
        match self.parts(m.slots.len(), m.bytes()) {
            parts if parts > 1 && twice() => 1,
            parts => parts,
        }
    }

    pub(crate) fn scatter(&self, op: &Scatter) -> Result<()> {
        // Both planes use the same slot mapping, so it is checked only once.
        let twice = OnceCell::new();
        let twice = || *twice.get_or_init(|| has_duplicates(&op.slots, op.arena.layout().num_slots()));
        for (plane, rows, rotation) in
            [(op.arena.k_plane(), &op.k, op.rotation.as_ref()), (op.arena.v_plane(), &op.v, None)]
        {
            let dtype = match plane.format {
                KvFormat::Dense(dtype) if rotation.is_none() => dtype,
                _ => {
                    self.scatter_converted(op, &plane, rows, rotation, twice)?;
                    continue;
                }
            };
            let m = LayerMovement::new(&op.arena, plane, rows, op.layer, &op.slots);
            let parts = self.parts_of_scatter(&m, twice);
            let stream = self.streams(m.bytes());
            let (source, target) = (m.span_of_rows()?, &m.spans.codes);
            with_locked(&[&source], &[target], |locked| {
                let (from, to) = (locked.origin(&source)?, locked.target(target)?);
                self.workers.run(parts, &|part| {
                    let range = share(0..op.slots.len(), part, parts);
                    let left = Cell::new(range.len());
                    if rows.dtype() == dtype {
                        let size = dtype.bits() / 8;
                        m.each_cut(&left, |cut| {
                            let offsets = queues(range.clone(), |rows| {
                                m.offsets(cut, rows, &left).map(move |(row, slot)| (row * size, slot * size))
                            });
                            // SAFETY: the operation's check made sure that rows and arena are different
                            // storages, and threads share the work only if no slot is written twice.
                            unsafe {
                                self.level.run(CopyRuns {
                                    from,
                                    to,
                                    bytes: cut.elements * size,
                                    offsets,
                                    stream,
                                });
                            }
                        });
                    } else {
                        let cut = m.single();
                        let offsets = m.offsets(cut, range, &left);
                        // SAFETY: the operation's check made sure that rows and arena are different storages,
                        // and threads share the work only if no slot is written twice. Rows whose type
                        // differs from the cache's type are f32, so `dtype`, the cache's type, has two bytes.
                        unsafe {
                            self.level.run(NarrowRows { from, to, elements: cut.elements, dtype, offsets });
                        }
                    }
                });
                Ok(())
            })?;
        }
        Ok(())
    }

    pub(crate) fn gather(&self, op: &Gather) -> Result<()> {
        for (plane, rows, rotation) in
            [(op.arena.k_plane(), &op.k, op.rotation.as_ref()), (op.arena.v_plane(), &op.v, None)]
        {
            let KvFormat::Dense(dtype) = plane.format else {
                self.gather_codes(op, &plane, rows, rotation)?;
                continue;
            };
            let m = LayerMovement::new(&op.arena, plane, rows, op.layer, &op.slots);
            let size = dtype.bits() / 8;
            let stream = self.streams(m.bytes());
            let table = rotation.map(RotationTable::of_rotation).transpose()?;
            // Rows do not overlap, even if they are gathered from the same slot.
            let parts = self.parts(op.slots.len(), m.bytes());
            let (source, target) = (&m.spans.codes, m.span_of_rows()?);
            with_locked(&[source], &[&target], |locked| {
                let (from, to) = (locked.origin(source)?, locked.target(&target)?);
                self.workers.run(parts, &|part| {
                    let range = share(0..op.slots.len(), part, parts);
                    let left = Cell::new(range.len());
                    let offsets = |cut: Cut, rows: Range<usize>| {
                        m.offsets(cut, rows, &left).map(move |(row, slot)| (slot * size, row * size))
                    };
                    if let (Some(table), Some(rotation)) = (&table, rotation) {
                        let cut = Cut { steps: Steps::Single, runs: 1, elements: plane.dim };
                        // SAFETY: the operation's check made sure that rows and arena are different storages
                        // and that rows share no elements. The check bounded the rotary dimension by
                        // `plane.dim`, and `share` gives each thread its own rows.
                        unsafe {
                            self.level.run(RotateRows {
                                from,
                                to,
                                heads: plane.heads,
                                head_strides: (plane.strides.head * size, rows.strides()[1] * size),
                                dim: plane.dim,
                                dtype,
                                table,
                                factor: 1.0,
                                stream,
                                tokens: offsets(cut, range).map(|(slot, row)| (slot, row, rotation.delta)),
                            });
                        }
                    } else {
                        m.each_cut(&left, |cut| {
                            let bytes = cut.elements * size;
                            let offsets = queues(range.clone(), |rows| offsets(cut, rows));
                            // SAFETY: the operation's check made sure that rows and arena are different
                            // storages and that rows share no elements, and `share` gives each thread its own
                            // rows.
                            unsafe { self.level.run(CopyRuns { from, to, bytes, offsets, stream }) };
                        });
                    }
                });
                Ok(())
            })?;
        }
        Ok(())
    }
}

/// Copies f32 rows to a cache with a narrower type, rounding each element. Offsets are in elements.
///
/// # Safety
/// `from` and `to` must not overlap, no other thread may access the elements being written, and `dtype` must
/// have two bytes.
struct NarrowRows<'a, I> {
    from: Origin<'a>,
    to: Destination<'a>,
    elements: usize,
    dtype: DType,
    offsets: I,
}

impl<I: Iterator<Item = (usize, usize)>> SimdTask for NarrowRows<'_, I> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for (from, to) in self.offsets {
            let from = self.from.at(from * 4, self.elements * 4).cast::<f32>();
            let to = self.to.at(to * 2, self.elements * 2);
            // SAFETY: `at` checked that `elements` elements are in bounds on both sides, which are different
            // storages, because the operation's check rejects rows inside the arena. The caller guarantees
            // the instruction set.
            unsafe { narrow::<S>(self.dtype, from, to, self.elements) };
        }
    }
}
