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
pub use gather::{Gather, Rotation};
pub use mla::AttendMla;
pub use quantize::{Dequantize, Quantize};
pub use rope::ApplyRope;
pub use rotate::RotateKeys;
pub use scatter::Scatter;
pub use selection::{Selection, SelectionUnit};
pub use tensor::CopyTensor;

/// The kernels of the contract.
///
/// [`REQUIRED`] ones work for f32, f16 and bf16 on every backend. A backend that lacks another kernel,
/// or a quantised format in any of them, says so in its
/// [`Capabilities`](crate::device::Capabilities) and returns [`Error::Unsupported`].
pub trait Kernels {
    /// New K and V rows into cache slots.
    fn scatter(&self, op: &Scatter) -> Result<()>;

    /// Cache slots into contiguous rows, K rotated on the way if asked.
    fn gather(&self, op: &Gather) -> Result<()>;

    /// Whole blocks inside one arena, over all layers.
    fn copy_blocks(&self, op: &CopyBlocks) -> Result<()>;

    /// Whole blocks from one arena to another, over all layers.
    fn swap_blocks(&self, op: &SwapBlocks) -> Result<()>;

    /// A tensor of any strides into another one of the same shape.
    fn copy_tensor(&self, op: &CopyTensor) -> Result<()>;

    /// Rotary embedding of rows in place.
    fn rope(&self, op: &ApplyRope) -> Result<()>;

    /// Copies of cached blocks with their keys moved by a distance.
    fn rotate_keys(&self, op: &RotateKeys) -> Result<()>;

    /// Grouped-query attention over segments.
    fn attend(&self, op: &Attend) -> Result<()>;

    /// Attention over cached latents.
    fn attend_mla(&self, op: &AttendMla) -> Result<()>;

    /// Blocks of a dense arena into a quantised one.
    fn quantize(&self, op: &Quantize) -> Result<()>;

    /// Blocks of a quantised arena into a dense one.
    fn dequantize(&self, op: &Dequantize) -> Result<()>;
}

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
