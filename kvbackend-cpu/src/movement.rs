//! The rows to copy to or from the slots of one layer.

use std::ops::Range;

use kvcore::{KvArena, KvPlane, Result, TensorView};

use crate::memory::ByteSpan;
use crate::plane::{PlaneSpans, RowAt};

/// One plane of one layer, the rows to copy to or from the plane, and their slot mapping.
pub(crate) struct LayerMovement<'a> {
    pub(crate) plane: KvPlane<'a>,
    /// The bytes of the layer in the plane.
    pub(crate) spans: PlaneSpans<'a>,
    pub(crate) rows: &'a TensorView,
    pub(crate) layer: usize,
    pub(crate) block_size: usize,
    pub(crate) slots: &'a [i64],
}

impl<'a> LayerMovement<'a> {
    pub(crate) fn new(
        arena: &KvArena,
        plane: KvPlane<'a>,
        rows: &'a TensorView,
        layer: usize,
        slots: &'a [i64],
    ) -> Self {
        let spans = PlaneSpans::of_layer(arena, &plane, layer);
        Self { plane, spans, rows, layer, block_size: arena.layout().shape().block_size, slots }
    }

    /// Returns the byte range of the rows.
    pub(crate) fn span_of_rows(&self) -> Result<ByteSpan<'a>> {
        ByteSpan::of(self.rows)
    }

    /// Returns the indices of the given rows, each with the position of head 0 in its slot. Padding is
    /// skipped.
    pub(crate) fn tokens(&self, rows: Range<usize>) -> impl Iterator<Item = (usize, RowAt)> {
        let (layer, block_size) = (self.layer, self.block_size);
        let slots = self.slots[rows.clone()].iter().zip(rows).filter(|(slot, _)| **slot >= 0);
        slots.map(move |(&slot, row)| (row, RowAt::slot(layer, slot as usize, block_size)))
    }
}
