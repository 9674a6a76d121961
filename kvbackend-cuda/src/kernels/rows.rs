//! Scatter and gather: copies of rows to slots and from slots.

use kvcore::{Gather, KvArena, KvFormat, KvPlane, Result, Scatter, TensorView};

use super::convert::{self, RowTurn, RowsEnd, RowsOf};
use super::copy::{self, CopyPart, InnerAxis};
use super::places::{ItemKind, Items, Region, bytes_of};
use crate::queue::Lowering;

/// K or V of a pool, and the rows to scatter into it or gather from it.
struct PlaneMovement<'a> {
    plane: KvPlane<'a>,
    rows: &'a TensorView,
    layer: usize,
    turns: bool,
}

impl PlaneMovement<'_> {
    /// Returns whether the rows are copied bit for bit.
    fn is_raw(&self) -> bool {
        self.plane.format == KvFormat::Dense(self.rows.dtype()) && !self.turns
    }

    /// Describes a copy from rows to slots if `forth` is true, otherwise from slots to rows.
    fn copy(&self, forth: bool) -> Result<CopyPart> {
        let (rows, slots) = (Region::rows(self.rows), Region::plane(&self.plane, self.layer));
        let (src, dst) = if forth { (rows, slots) } else { (slots, rows) };
        let heads = InnerAxis { n: self.plane.heads, src: src.head, dst: dst.head };
        let none = InnerAxis { n: 1, src: 0, dst: 0 };
        CopyPart::new(src.side, dst.side, [none, heads], bytes_of(self.rows.dtype(), self.plane.dim), &[])
    }

    fn convert(&self, forth: bool) -> RowsOf {
        let (rows, slots) = (RowsEnd::view(self.rows), RowsEnd::plane(&self.plane, self.layer));
        let (src, dst) = if forth { (rows, slots) } else { (slots, rows) };
        RowsOf { src, dst, tokens: 1, heads: self.plane.heads, dim: self.plane.dim, turns: self.turns }
    }
}

/// Moves K and V in one launch: a plain copy if both stay unchanged, otherwise a conversion.
fn run(
    to: &mut Lowering<'_>,
    items: Items,
    both: [PlaneMovement<'_>; 2],
    forth: bool,
    turn: Option<RowTurn<'_>>,
) -> Result<()> {
    if both.iter().all(PlaneMovement::is_raw) {
        let [k, v] = [both[0].copy(forth)?, both[1].copy(forth)?];
        copy::run(to, items, 1, &[k, v]);
        return Ok(());
    }
    convert::run(to, items, 1, &both.map(|movement| movement.convert(forth)), turn)
}

fn movements<'a>(
    arena: &'a KvArena,
    layer: usize,
    k: &'a TensorView,
    v: &'a TensorView,
    turns: bool,
) -> [PlaneMovement<'a>; 2] {
    [
        PlaneMovement { plane: arena.k_plane(), rows: k, layer, turns },
        PlaneMovement { plane: arena.v_plane(), rows: v, layer, turns: false },
    ]
}

pub(super) fn scatter(to: &mut Lowering<'_>, op: &Scatter) -> Result<()> {
    let list = to.written_slots(&op.slots)?;
    let items = Items::slots(&op.arena, ItemKind::RowsToSlots, list, op.slots.len())?;
    let turn = match &op.rotation {
        None => None,
        Some(r) => {
            let positions = to.numbers(&r.positions)?;
            Some(RowTurn { rope: &r.rope, factor: r.rope.attention_factor(), positions, delta: 0 })
        }
    };
    run(to, items, movements(&op.arena, op.layer, &op.k, &op.v, turn.is_some()), true, turn)
}

pub(super) fn gather(to: &mut Lowering<'_>, op: &Gather) -> Result<()> {
    let list = to.numbers(&op.slots)?;
    let items = Items::slots(&op.arena, ItemKind::SlotsToRows, list, op.slots.len())?;
    let turn =
        op.rotation.as_ref().map(|r| RowTurn { rope: &r.rope, factor: 1.0, positions: 0, delta: r.delta });
    run(to, items, movements(&op.arena, op.layer, &op.k, &op.v, turn.is_some()), false, turn)
}
