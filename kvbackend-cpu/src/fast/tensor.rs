//! Strided copies. They are split into runs that are dense on both sides, or into squares if the two sides
//! are contiguous along different axes.

use kvcore::{CopyTensor, Result};

use super::locked::with_locked;
use super::{Fast, share};
use crate::memory::ByteSpan;
use crate::raw::{Destination, Origin};
use crate::reference::{Axis, DenseRuns};

/// Side of a square, in runs, chosen so that the cache lines that a square touches on both sides stay in the
/// first-level cache.
const SIDE: usize = 32;

impl Fast {
    pub(crate) fn copy_tensor(&self, op: &CopyTensor) -> Result<()> {
        let runs = DenseRuns::new(op);
        if op.dst.is_empty() {
            return Ok(());
        }
        let (src, dst) = (ByteSpan::of(&op.src)?, ByteSpan::of(&op.dst)?);
        // The longest axis is split between threads.
        let longest = (0..runs.axes.len()).max_by_key(|&i| runs.axes[i].n);
        let parts = longest.map_or(1, |axis| self.parts(runs.axes[axis].n, op.bytes()));
        with_locked(&[&src], &[&dst], |locked| {
            let copy =
                StridedCopy { from: locked.origin(&src)?, to: locked.target(&dst)?, bytes: runs.bytes };
            let end = |stride: fn(&Axis) -> usize| {
                runs.axes.iter().map(|axis| (axis.n - 1) * stride(axis)).sum::<usize>() + runs.bytes
            };
            // Check that all bytes to copy are inside both views.
            copy.from.at(runs.start.0, end(|axis| axis.src));
            copy.to.at(runs.start.1, end(|axis| axis.dst));
            self.workers.run(parts, &|part| {
                let (mut start, mut axes) = (runs.start, runs.axes.clone());
                if let Some(i) = longest {
                    let axis = &mut axes[i];
                    let own = share(0..axis.n, part, parts);
                    start = (start.0 + own.start * axis.src, start.1 + own.start * axis.dst);
                    axis.n = own.len();
                }
                let first = nearest(&axes, |axis| axis.dst).map(|i| axes.remove(i));
                let second = nearest(&axes, |axis| axis.src).map(|i| axes.remove(i));
                let one = || Axis { n: 1, src: 0, dst: 0 };
                let inner = (second.unwrap_or_else(one), first.unwrap_or_else(one));
                // SAFETY: the two calls of `at` above checked the last byte of each side. `share` gives each
                // thread its own part of an axis, and the operation's check rejected destinations that
                // overlap themselves or the source.
                unsafe { copy.over(&axes, start, &inner) };
            });
            Ok(())
        })
    }
}

/// Returns the index of the axis with the smallest stride.
fn nearest(axes: &[Axis], stride: fn(&Axis) -> usize) -> Option<usize> {
    (0..axes.len()).min_by_key(|&i| stride(&axes[i]))
}

/// A copy of many runs of `bytes` bytes each.
#[derive(Clone, Copy)]
struct StridedCopy<'a> {
    from: Origin<'a>,
    to: Destination<'a>,
    bytes: usize,
}

impl StridedCopy<'_> {
    /// Copies the runs along `axes` and, within them, along the two axes `inner`, starting at offsets `at`.
    ///
    /// # Safety
    /// Every run that `axes` and `inner` reach from `at` must be inside `self.from` and `self.to`. No byte
    /// may be both read and written, and no other thread may access the bytes being written.
    unsafe fn over(&self, axes: &[Axis], at: (usize, usize), inner: &(Axis, Axis)) {
        // SAFETY: by contract, all runs are inside both sides, and each recursive call covers part of them.
        unsafe {
            if let Some((axis, rest)) = axes.split_first() {
                for i in 0..axis.n {
                    self.over(rest, (at.0 + i * axis.src, at.1 + i * axis.dst), inner);
                }
                return;
            }
            let (from, to) = (self.from.at(at.0, 0), self.to.at(at.1, 0));
            match self.bytes {
                1 => squares::<[u8; 1]>(from, to, inner),
                2 => squares::<[u8; 2]>(from, to, inner),
                4 => squares::<[u8; 4]>(from, to, inner),
                bytes => runs(from, to, inner, bytes),
            }
        }
    }
}

/// Copies elements of type `T` along two axes.
///
/// # Safety
/// `from` and `to` must be valid for an element at every offset that `axes` reaches, and no other thread may
/// write to these elements.
unsafe fn squares<T: Copy>(from: *const u8, to: *mut u8, axes: &(Axis, Axis)) {
    each_square(axes, |from_at, to_at| {
        // SAFETY: by contract, an element at `from_at` is readable and one at `to_at` writable.
        unsafe { to.add(to_at).cast::<T>().write_unaligned(from.add(from_at).cast::<T>().read_unaligned()) }
    });
}

/// Copies runs of `bytes` bytes along two axes.
///
/// # Safety
/// `from` and `to` must be valid for `bytes` bytes at every offset that `axes` reaches. The runs read and
/// written must not overlap, and no other thread may write to them.
unsafe fn runs(from: *const u8, to: *mut u8, axes: &(Axis, Axis), bytes: usize) {
    each_square(axes, |from_at, to_at| {
        // SAFETY: by contract, `bytes` bytes are readable at `from_at` and writable at `to_at`, and they do
        // not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.add(from_at), to.add(to_at), bytes) }
    });
}

/// Calls `copy` with the byte offsets of each run on both sides, one square of the two axes at a time.
#[inline(always)]
fn each_square((outer, inner): &(Axis, Axis), mut copy: impl FnMut(usize, usize)) {
    for i in (0..outer.n).step_by(SIDE) {
        for j in (0..inner.n).step_by(SIDE) {
            for i in i..outer.n.min(i + SIDE) {
                for j in j..inner.n.min(j + SIDE) {
                    copy(i * outer.src + j * inner.src, i * outer.dst + j * inner.dst);
                }
            }
        }
    }
}
