//! The operations of the backend contract, as descriptors that a [`Stream`](crate::device::Stream)
//! enqueues.
//!
//! Each descriptor owns handles to the memory it touches and knows how to check itself: a backend
//! calls `check()` first, so that a wrong slot, block or shape is an error before anything runs,
//! the same on every device.

use smallvec::SmallVec;

use crate::base::{DType, Error, Result, same};
use crate::device::tensor::MAX_RANK;
use crate::device::{KvArena, TensorView};

mod attend;
mod copy;
mod entry;
mod gather;
mod mla;
mod quantize;
mod rope;
mod rotate;
mod scatter;
mod selection;
mod tensor;

pub use attend::{Attend, AttendRows, MergeGroup, QueryRow, Segment};
pub use copy::{CopyBlocks, SwapBlocks};
pub use entry::{Checked, Operation};
pub use gather::{Gather, Rotation};
pub use mla::AttendMla;
pub use quantize::{Dequantize, Quantize};
pub use rope::ApplyRope;
pub use rotate::RotateKeys;
pub use scatter::Scatter;
pub use selection::{Selection, SelectionUnit};
pub use tensor::CopyTensor;

/// Names of the kernels that no backend may lack.
pub const REQUIRED: [&str; 8] =
    ["scatter", "gather", "copy_blocks", "swap_blocks", "copy_tensor", "rope", "rotate_keys", "attend"];

/// Names of what a backend may list as missing; `selection` is an attend with a [`Selection`], `reserve`
/// is [`Backend::reserve`](crate::Backend::reserve).
pub const OPTIONAL: [&str; 5] = ["attend_mla", "selection", "quantize", "dequantize", "reserve"];

/// Checks K rows `[rows, k_heads, k_dim]` and V rows `[rows, v_heads, v_dim]` against an arena.
fn check_rows(arena: &KvArena, rows: usize, k: &TensorView, v: &TensorView) -> Result<()> {
    for (view, plane, what) in [(k, arena.k_plane(), "K rows"), (v, arena.v_plane(), "V rows")] {
        same("rank of rows [rows, heads, dim]", 3, view.shape().len())?;
        same("number of rows", rows, view.shape()[0])?;
        same("heads of rows", plane.heads, view.shape()[1])?;
        same("dim of rows", plane.dim, view.shape()[2])?;
        computable(what, view)?;
        innermost_dense(what, view)?;
        arena.check_apart(what, view)?;
    }
    Ok(())
}

/// Negative slots are padding; the others must exist.
fn check_slots(arena: &KvArena, slots: &[i64]) -> Result<()> {
    let limit = arena.layout().num_slots();
    match slots.iter().find(|&&slot| slot >= limit as i64) {
        Some(&slot) => Err(Error::range("slot", slot, limit)),
        None => Ok(()),
    }
}

/// Bytes of K, V and their scales in one layer at the slots that are no padding.
fn slot_bytes(arena: &KvArena, slots: &[i64]) -> usize {
    slots.iter().filter(|&&slot| slot >= 0).count() * arena.layout().token_bytes()
}

/// Kernels compute with rows of [`DType::COMPUTE`] only.
fn computable(what: &'static str, view: &TensorView) -> Result<()> {
    if view.dtype().is_compute() {
        Ok(())
    } else {
        Err(Error::DTypeMismatch { what, expected: DType::F32, got: view.dtype() })
    }
}

/// A view that is written must not have two elements at one address: from the smallest stride to the
/// largest, each axis must step over what the axes before it cover.
fn writable(what: &'static str, view: &TensorView) -> Result<()> {
    if view.is_empty() {
        return Ok(());
    }
    let mut axes: SmallVec<[(usize, usize); MAX_RANK]> =
        view.strides().iter().copied().zip(view.shape().iter().copied()).filter(|axis| axis.1 > 1).collect();
    axes.sort_unstable();
    let mut covered = 1;
    for (stride, n) in axes {
        if stride < covered {
            return Err(Error::Aliased { what });
        }
        covered += stride * (n - 1); // inside the storage, so that it cannot overflow
    }
    Ok(())
}

/// A view that is written must not reach into one that is read or written beside it.
fn apart(what: &'static str, written: &TensorView, other: &TensorView) -> Result<()> {
    if written.overlaps(other)? { Err(Error::Aliased { what }) } else { Ok(()) }
}

/// Kernels read and write whole heads: the last axis must be dense.
fn innermost_dense(what: &'static str, view: &TensorView) -> Result<()> {
    match (view.shape().last(), view.strides().last()) {
        (Some(&n), Some(&stride)) if n > 1 && stride != 1 => {
            Err(Error::InvalidStrides { what, reason: format!("the last axis has stride {stride}, not 1") })
        }
        _ => Ok(()),
    }
}
