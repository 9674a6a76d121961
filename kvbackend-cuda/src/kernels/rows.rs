//! Scatter and gather: rows to slots and slots to rows.

use kvcore::{Gather, KvArena, KvFormat, KvPlane, Result, Scatter, TensorView};

use super::convert::{self, End, RowsOf, Turn};
use super::copy::{self, CopyPart, InnerAxis};
use super::places::{ItemKind, Items, Region, bytes_of};
use crate::queue::Lowering;

/// K or V of a pool, and the rows that go there or come from there.
struct Movement<'a> {
    plane: KvPlane<'a>,
    rows: &'a TensorView,
    layer: usize,
    turns: bool,
}

impl Movement<'_> {
    /// Returns whether the bits of the rows stay as they are.
    fn is_raw(&self) -> bool {
        self.plane.format == KvFormat::Dense(self.rows.dtype()) && !self.turns
    }

    /// Returns the copy from rows to slots if `forth` is true, otherwise from slots to rows.
    fn copy(&self, forth: bool) -> Result<CopyPart> {
        let (rows, slots) = (Region::rows(self.rows), Region::plane(&self.plane, self.layer));
        let (src, dst) = if forth { (rows, slots) } else { (slots, rows) };
        let heads = InnerAxis { n: self.plane.heads, src: src.head, dst: dst.head };
        let none = InnerAxis { n: 1, src: 0, dst: 0 };
        CopyPart::new(src.side, dst.side, [none, heads], bytes_of(self.rows.dtype(), self.plane.dim), &[])
    }

    fn convert(&self, forth: bool) -> RowsOf {
        let (rows, slots) = (End::view(self.rows), End::plane(&self.plane, self.layer));
        let (src, dst) = if forth { (rows, slots) } else { (slots, rows) };
        RowsOf { src, dst, tokens: 1, heads: self.plane.heads, dim: self.plane.dim, turns: self.turns }
    }
}

/// Moves K and V in one launch, which converts or turns one of them, or copies both.
fn run(
    to: &mut Lowering<'_>,
    items: Items,
    both: [Movement<'_>; 2],
    forth: bool,
    turn: Option<Turn<'_>>,
) -> Result<()> {
    if both.iter().all(Movement::is_raw) {
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
) -> [Movement<'a>; 2] {
    [
        Movement { plane: arena.k_plane(), rows: k, layer, turns },
        Movement { plane: arena.v_plane(), rows: v, layer, turns: false },
    ]
}

pub(super) fn scatter(to: &mut Lowering<'_>, op: &Scatter) -> Result<()> {
    let list = to.written_slots(&op.slots)?;
    let items = Items::slots(&op.arena, ItemKind::RowsToSlots, list, op.slots.len())?;
    let turn = match &op.rotation {
        None => None,
        Some(r) => {
            let positions = to.numbers(&r.positions)?;
            Some(Turn { rope: &r.rope, factor: r.rope.attention_factor(), positions, delta: 0 })
        }
    };
    run(to, items, movements(&op.arena, op.layer, &op.k, &op.v, turn.is_some()), true, turn)
}

pub(super) fn gather(to: &mut Lowering<'_>, op: &Gather) -> Result<()> {
    let list = to.numbers(&op.slots)?;
    let items = Items::slots(&op.arena, ItemKind::SlotsToRows, list, op.slots.len())?;
    let turn =
        op.rotation.as_ref().map(|r| Turn { rope: &r.rope, factor: 1.0, positions: 0, delta: r.delta });
    run(to, items, movements(&op.arena, op.layer, &op.k, &op.v, turn.is_some()), false, turn)
}
