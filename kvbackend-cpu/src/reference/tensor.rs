//! Strided copies of tensors.

use kvcore::{CopyTensor, Result};
use smallvec::SmallVec;

use crate::memory::{Access, ByteSpan};

pub(crate) fn copy_tensor(op: &CopyTensor) -> Result<()> {
    if op.dst.is_empty() {
        return Ok(());
    }
    let (src, dst) = (ByteSpan::of(&op.src)?, ByteSpan::of(&op.dst)?);
    let runs = DenseRuns::new(op);
    let mut access = Access::new(&[&src], &[&dst])?;
    let mut parts = access.parts();
    // The views do not overlap, because the operation's check has rejected such views.
    let (source, mut target) = (parts.read(&src)?, parts.write(&dst)?);
    runs.each(|from, to| target[to..to + runs.bytes].copy_from_slice(&source[from..from + runs.bytes]));
    Ok(())
}

/// A copy, split into runs of bytes that are dense on both sides.
pub(crate) struct DenseRuns {
    /// Number of bytes per run.
    pub(crate) bytes: usize,
    /// Byte offsets of the first run in the source and in the destination.
    pub(crate) start: (usize, usize),
    /// The axes along which runs are repeated, outermost first.
    pub(crate) axes: SmallVec<[Axis; 6]>,
}

/// An axis of a copy: its extent, and its byte strides in the source and in the destination.
#[derive(Clone)]
pub(crate) struct Axis {
    pub(crate) n: usize,
    pub(crate) src: usize,
    pub(crate) dst: usize,
}

impl DenseRuns {
    pub(crate) fn new(op: &CopyTensor) -> Self {
        let bytes = |elements: usize| elements * op.dst.dtype().bits() / 8;
        let strides = op.src.strides().iter().zip(op.dst.strides());
        let mut axes: SmallVec<[(usize, (usize, usize)); 6]> = (op.dst.shape().iter().copied())
            .zip(strides.map(|(&src, &dst)| (src, dst)))
            .filter(|&(n, _)| n != 1)
            .collect();
        let mut run = 1;
        while let Some(&(n, _)) = axes.last().filter(|(_, strides)| *strides == (run, run)) {
            run *= n;
            axes.pop();
        }
        let in_bytes = |(n, (src, dst))| Axis { n, src: bytes(src), dst: bytes(dst) };
        Self {
            bytes: bytes(run),
            start: (bytes(op.src.offset()), bytes(op.dst.offset())),
            axes: axes.into_iter().map(in_bytes).collect(),
        }
    }

    /// Calls `copy` with the byte offsets of each run in the source and in the destination.
    fn each(&self, mut copy: impl FnMut(usize, usize)) {
        over(&self.axes, self.start.0, self.start.1, &mut copy);
    }
}

fn over(axes: &[Axis], from: usize, to: usize, copy: &mut impl FnMut(usize, usize)) {
    match axes.split_first() {
        None => copy(from, to),
        Some((axis, inner)) => {
            (0..axis.n).for_each(|i| over(inner, from + i * axis.src, to + i * axis.dst, copy));
        }
    }
}
