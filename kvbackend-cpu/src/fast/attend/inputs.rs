//! The inputs of an attention call: the operation, its queries, and the planes of keys and values.

use kvcore::{Attend, Result, TensorView};

use super::heads::HeadUnits;
use super::source::SourcePlane;
use crate::fast::locked::Locked;
use crate::fast::rotate::RotationTable;
use crate::memory::ByteSpan;
use crate::raw::Origin;

/// The inputs shared by all items of a call.
pub(super) struct CallInputs<'a> {
    pub(super) op: &'a Attend,
    pub(super) units: HeadUnits,
    pub(super) keys: SourcePlane<'a>,
    pub(super) values: SourcePlane<'a>,
    pub(super) q: QueryRows<'a>,
    /// In latent attention, the queries that are multiplied by the values.
    pub(super) latent: Option<QueryRows<'a>>,
    /// The rotations to apply to queries, and to keys that are stored unrotated.
    pub(super) table: Option<RotationTable>,
}

impl CallInputs<'_> {
    /// Returns a unit's K head and V head.
    pub(super) fn kv_heads(&self, unit: usize) -> (usize, usize) {
        let s = self.op.arena.layout().shape();
        let head = unit * self.units.size;
        (head * s.k_heads / self.units.heads, head * s.v_heads / self.units.heads)
    }

    /// Returns whether `group` elements are a whole row, for both keys and values.
    pub(super) fn one_scale_a_row(&self, group: usize) -> bool {
        group == self.keys.dim && group == self.values.dim
    }
}

/// The query rows of a view, which are read from the view itself or from a copy.
#[derive(Clone, Copy)]
pub(super) struct QueryRows<'a> {
    pub(super) view: &'a TensorView,
    /// The bytes of the view or of its copy, starting at the first element.
    pub(super) bytes: Origin<'a>,
}

impl<'a> QueryRows<'a> {
    /// Creates query rows from a view. If the view overlaps the output, its bytes are first copied to `copy`.
    pub(super) fn new<'b: 'a>(
        view: &'a TensorView,
        out: &TensorView,
        locked: &Locked<'b>,
        copy: &'a mut Vec<u8>,
    ) -> Result<Self> {
        let span = ByteSpan::of(view)?;
        let (start, len) = (span.bytes().start, span.bytes().len());
        let bytes = locked.origin(&span)?.part(start, len);
        // Decision: docs/decisions/backend-cpu.md#queries-that-overlap-the-output-are-copied
        if !view.overlaps(out)? {
            return Ok(Self { view, bytes });
        }
        copy.clear();
        // SAFETY: `part` checked that `len` bytes are in bounds. The bytes are locked and no kernel of this
        // call runs yet, so no code writes them while the slice lives.
        copy.extend_from_slice(unsafe { std::slice::from_raw_parts(bytes.at(0, len), len) });
        Ok(Self { view, bytes: Origin::new(copy) })
    }

    /// Returns the number of elements per row.
    pub(super) fn dim(&self) -> usize {
        self.view.shape()[2]
    }
}
