//! The operations of the backend contract, as descriptors that a [`Stream`](crate::backend::Stream)
//! enqueues.
//!
//! Each descriptor owns handles to the memory it touches and knows how to check itself: a backend
//! calls `check()` first, so that a wrong slot, block or shape is an error before anything runs,
//! the same on every device.

use std::sync::Arc;

use crate::backend::{Backend, MemoryKind, Storage};
use crate::block::BlockId;
use crate::error::{Error, Result, same};
use crate::layout::KvLayout;
use crate::tensor::TensorView;

mod attend;
mod copy;
mod gather;
mod rope;
mod rotate;
mod scatter;

pub use attend::{Attend, AttendRows, MergeGroup, QueryRow, Segment};
pub use copy::{CopyBlocks, SwapBlocks};
pub use gather::{Gather, Rotation};
pub use rope::ApplyRope;
pub use rotate::RotateKeys;
pub use scatter::Scatter;

/// Kernels that every backend implements for f32, f16 and bf16.
pub trait Kernels {
    /// New K and V rows into cache slots.
    fn scatter(&self, op: &Scatter) -> Result<()>;

    /// Cache slots into contiguous rows, K rotated on the way if asked.
    fn gather(&self, op: &Gather) -> Result<()>;

    /// Whole blocks inside one arena, over all layers.
    fn copy_blocks(&self, op: &CopyBlocks) -> Result<()>;

    /// Whole blocks from one arena to another, over all layers.
    fn swap_blocks(&self, op: &SwapBlocks) -> Result<()>;

    /// Rotary embedding of rows in place.
    fn rope(&self, op: &ApplyRope) -> Result<()>;

    /// Copies of cached blocks with their keys moved by a distance.
    fn rotate_keys(&self, op: &RotateKeys) -> Result<()>;

    /// Grouped-query attention over segments.
    fn attend(&self, op: &Attend) -> Result<()>;
}

/// The K and V memory of one device and one layout: what block ids and slots refer to.
///
/// The main pool and the chunk pool are quotas over one arena, so that one `attend` reads both.
#[derive(Debug, Clone)]
pub struct KvArena {
    k: Arc<dyn Storage>,
    v: Arc<dyn Storage>,
    layout: Arc<KvLayout>,
}

impl KvArena {
    /// Allocates K and V for `layout`.
    pub fn allocate(backend: &dyn Backend, kind: MemoryKind, layout: Arc<KvLayout>) -> Result<Self> {
        let k = backend.allocate(kind, layout.k_bytes())?;
        let v = backend.allocate(kind, layout.v_bytes())?;
        Self::from_storage(k, v, layout)
    }

    /// An arena over memory that the caller brings.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when a storage is smaller than the layout, [`Error::Misaligned`], and
    /// [`Error::Aliased`] when K and V are the same storage.
    pub fn from_storage(k: Arc<dyn Storage>, v: Arc<dyn Storage>, layout: Arc<KvLayout>) -> Result<Self> {
        for (what, storage, bytes) in [("K", &k, layout.k_bytes()), ("V", &v, layout.v_bytes())] {
            if storage.len() < bytes {
                return Err(Error::Mismatch {
                    what: "bytes of the arena's storage",
                    expected: bytes,
                    got: storage.len(),
                });
            }
            let align = layout.shape().dtype.align();
            if !storage.address().is_multiple_of(align as u64) {
                return Err(Error::Misaligned { what, address: storage.address(), align });
            }
        }
        if k.address() == v.address() {
            return Err(Error::Aliased { what: "K and V" });
        }
        Ok(Self { k, v, layout })
    }

    /// The K storage.
    pub fn k(&self) -> &Arc<dyn Storage> {
        &self.k
    }

    /// The V storage.
    pub fn v(&self) -> &Arc<dyn Storage> {
        &self.v
    }

    /// The layout of both.
    pub fn layout(&self) -> &Arc<KvLayout> {
        &self.layout
    }

    pub(crate) fn check_layer(&self, layer: usize) -> Result<()> {
        let limit = self.layout.shape().num_layers;
        if layer < limit { Ok(()) } else { Err(Error::range("layer", layer, limit)) }
    }

    /// Rows that lie in the arena itself would be read while it is written.
    pub(crate) fn check_apart(&self, what: &'static str, view: &TensorView) -> Result<()> {
        let address = view.storage().address();
        if address == self.k.address() || address == self.v.address() {
            Err(Error::Aliased { what })
        } else {
            Ok(())
        }
    }

    pub(crate) fn check_block(&self, block: BlockId) -> Result<()> {
        let limit = self.layout.shape().num_blocks;
        if block.index() < limit { Ok(()) } else { Err(Error::range("block", block.index(), limit)) }
    }
}

/// Checks K and V rows `[rows, kv_heads, dim]` against an arena.
fn check_rows(arena: &KvArena, rows: usize, k: &TensorView, v: &TensorView) -> Result<()> {
    let s = arena.layout().shape();
    for (view, dim, what) in [(k, s.k_dim, "K rows"), (v, s.v_dim, "V rows")] {
        same("rank of rows [rows, kv_heads, dim]", 3, view.shape().len())?;
        same("number of rows", rows, view.shape()[0])?;
        same("kv_heads of rows", s.kv_heads, view.shape()[1])?;
        same("dim of rows", dim, view.shape()[2])?;
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

/// Bytes of K and V in one layer at the slots that are no padding.
fn slot_bytes(arena: &KvArena, slots: &[i64]) -> usize {
    let s = arena.layout().shape();
    let rows = slots.iter().filter(|&&slot| slot >= 0).count();
    rows * s.kv_heads * (s.k_dim + s.v_dim) * s.dtype.bits() / 8
}

/// A view that is written must not have two elements at one address.
fn writable(what: &'static str, view: &TensorView) -> Result<()> {
    let repeated = view.shape().iter().zip(view.strides()).any(|(&n, &stride)| n > 1 && stride == 0);
    if repeated { Err(Error::Aliased { what }) } else { Ok(()) }
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
