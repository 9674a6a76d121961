//! The operations of the backend contract, as descriptors that a [`Stream`](crate::device::Stream)
//! enqueues.
//!
//! Each descriptor holds handles to the memory it touches and can check itself.
//! [`Stream::run`](crate::device::Stream::run) calls `check()` first, so a wrong slot, block or shape is
//! reported before anything runs, with the same error on every device.

use smallvec::SmallVec;

use crate::base::{Error, Result, Rope, same};
use crate::device::tensor::MAX_RANK;
use crate::device::{KvArena, TensorView};

mod attend;
mod copy;
mod entry;
mod gather;
mod mass;
mod mla;
mod quantize;
mod rope;
mod rotate;
mod scatter;
mod selection;
mod tensor;
mod work;

pub use attend::{Attend, MergeGroup, Segment};
pub use copy::{CopyBlocks, SwapBlocks};
pub use entry::{Checked, Operation};
pub use gather::{Gather, Rotation};
pub use mass::AttendMass;
pub use mla::AttendMla;
pub use quantize::{Dequantize, Quantize};
pub use rope::ApplyRope;
pub use rotate::RotateKeys;
pub use scatter::{RowRotation, Scatter};
pub use selection::{Selection, SelectionUnit};
pub use tensor::CopyTensor;
pub use work::{AttendRows, AttendWork, QueryRow};

/// The names of the operations that every backend must support.
pub const REQUIRED: [&str; 8] =
    ["scatter", "gather", "copy_blocks", "swap_blocks", "copy_tensor", "rope", "rotate_keys", "attend"];

/// The names of the features that a backend may list as missing. `selection` means attention with a
/// [`Selection`], `reserve` means [`Backend::reserve`](crate::Backend::reserve), and `graphs` means
/// [`Stream::capture`](crate::Stream::capture).
pub const OPTIONAL: [&str; 7] =
    ["attend_mla", "attend_mass", "selection", "quantize", "dequantize", "reserve", "graphs"];

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

/// Checks that all slots exist. Negative slots are padding and always pass.
fn check_slots(arena: &KvArena, slots: &[i64]) -> Result<()> {
    let limit = arena.layout().num_slots();
    match slots.iter().find(|&&slot| slot >= limit as i64) {
        Some(&slot) => Err(Error::range("slot", slot, limit)),
        None => Ok(()),
    }
}

/// Returns the total size, in bytes, of K, V and the per-block scales in one layer, for all slots that are
/// not padding.
fn slot_bytes(arena: &KvArena, slots: &[i64]) -> usize {
    slots.iter().filter(|&&slot| slot >= 0).count() * arena.layout().token_bytes()
}

/// Checks that a view has one of the types in [`DType::COMPUTE`](crate::DType::COMPUTE), the only types that
/// kernels compute with.
fn computable(what: &'static str, view: &TensorView) -> Result<()> {
    if view.dtype().is_compute() { Ok(()) } else { Err(Error::NotComputed { what, got: view.dtype() }) }
}

// Decision: docs/decisions/device.md#overlap-is-decided-by-first-and-last-byte
/// Checks that no two elements of a written view share an address: from the smallest stride to the largest,
/// each axis must step over the elements covered by the axes before it.
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
            let reason = format!("elements {stride} apart lie among {covered} elements of the other axes");
            return Err(Error::InvalidStrides { what, reason });
        }
        covered += stride * (n - 1); // inside the storage, so it cannot overflow
    }
    Ok(())
}

/// Checks that a written view does not overlap another view that is read or written.
pub(in crate::device) fn apart(what: &'static str, written: &TensorView, other: &TensorView) -> Result<()> {
    if written.overlaps(other)? { Err(Error::Aliased { what }) } else { Ok(()) }
}

/// Checks that the last axis is dense, because kernels read and write the rows of heads as a whole.
fn innermost_dense(what: &'static str, view: &TensorView) -> Result<()> {
    match (view.shape().last(), view.strides().last()) {
        (Some(&n), Some(&stride)) if n > 1 && stride != 1 => {
            Err(Error::InvalidStrides { what, reason: format!("the last axis has stride {stride}, not 1") })
        }
        _ => Ok(()),
    }
}

/// Checks that the rotary dimension is at most the width of a key.
fn check_rotary(rope: &Rope, k_dim: usize) -> Result<()> {
    let rotary = rope.config().rotary_dim;
    if rotary > k_dim { Err(Error::too_large("rotary_dim", rotary, k_dim)) } else { Ok(()) }
}
