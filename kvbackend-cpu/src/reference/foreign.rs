//! Copies rows to the slots of another engine's cache and back, element by element.

use kvcore::{KvArena, KvPlane, LayerRopes, Result, SlotMapping};

use super::Rotator;
use crate::element::{Element, dispatch};
use crate::foreign::{ForeignCache, ForeignLoad, ForeignPlane};
use crate::memory::{Access, ByteSpan};
use crate::plane::PlaneSpans;

pub(crate) fn load_foreign(
    cache: &ForeignCache,
    arena: &KvArena,
    loads: &[ForeignLoad],
    ropes: &LayerRopes,
) -> Result<()> {
    for (layer, (planes, rope)) in cache.layers().iter().zip(ropes.layers()).enumerate() {
        for load in loads {
            for (ours, theirs, rotates) in
                [(arena.k_plane(), &planes[0], load.delta != 0), (arena.v_plane(), &planes[1], false)]
            {
                let mut rotator = Rotator::new(rope, [load.delta])?;
                dispatch!(cache.shape().dtype, T => {
                    let rotate = |row: &mut [T]| {
                        if rotates {
                            rotator.rotate_elements(row, load.delta, 1.0);
                        }
                    };
                    load_plane::<T>(cache, arena, (ours, theirs), layer, load, rotate)
                })?;
            }
        }
    }
    Ok(())
}

fn load_plane<T: Element>(
    cache: &ForeignCache,
    arena: &KvArena,
    (ours, theirs): (KvPlane<'_>, &ForeignPlane),
    layer: usize,
    load: &ForeignLoad,
    mut rotate: impl FnMut(&mut [T]),
) -> Result<()> {
    let from = PlaneSpans::of_layer(arena, &ours, layer).codes;
    let to = ByteSpan::new(&theirs.storage, 0..theirs.storage.len());
    let mut access = Access::new(&[&from], &[&to])?;
    let mut parts = access.parts();
    let rows = parts.read(&from)?.elements::<T>()?;
    let mut own = parts.write(&to)?.elements::<T>()?;
    let mut row = Vec::new();
    for (from, to) in pairs(&load.from, &load.to) {
        for head in 0..cache.shape().heads {
            let at = arena_row(arena, &ours, layer, from, head);
            row.clear();
            row.extend_from_slice(&rows[at..at + ours.dim]);
            rotate(&mut row);
            for (i, &x) in row.iter().enumerate() {
                let at = theirs.at(cache, to, head, i);
                own[at..at + 1][0] = x;
            }
        }
    }
    Ok(())
}

pub(crate) fn save_foreign(
    cache: &ForeignCache,
    arena: &KvArena,
    to: &SlotMapping,
    from: &SlotMapping,
) -> Result<()> {
    for (layer, planes) in cache.layers().iter().enumerate() {
        for (ours, theirs) in [(arena.k_plane(), &planes[0]), (arena.v_plane(), &planes[1])] {
            dispatch!(cache.shape().dtype, T => save_plane::<T>(cache, arena, (ours, theirs), layer, (to, from)))?;
        }
    }
    Ok(())
}

fn save_plane<T: Element>(
    cache: &ForeignCache,
    arena: &KvArena,
    (ours, theirs): (KvPlane<'_>, &ForeignPlane),
    layer: usize,
    (to, from): (&SlotMapping, &SlotMapping),
) -> Result<()> {
    let (own, rows) = (
        ByteSpan::new(&theirs.storage, 0..theirs.storage.len()),
        PlaneSpans::of_layer(arena, &ours, layer).codes,
    );
    let mut access = Access::new(&[&own], &[&rows])?;
    let mut parts = access.parts();
    let own = parts.read(&own)?.elements::<T>()?;
    let mut rows = parts.write(&rows)?.elements::<T>()?;
    for (to, from) in pairs(to, from) {
        for head in 0..cache.shape().heads {
            let at = arena_row(arena, &ours, layer, to, head);
            for i in 0..ours.dim {
                let from = theirs.at(cache, from, head, i);
                rows[at + i..at + i + 1][0] = own[from..from + 1][0];
            }
        }
    }
    Ok(())
}

/// Returns the pairs of slots in which neither slot is padding.
fn pairs(a: &SlotMapping, b: &SlotMapping) -> impl Iterator<Item = (usize, usize)> {
    let pairs = a.iter().zip(b.iter()).filter(|(a, b)| **a >= 0 && **b >= 0);
    pairs.map(|(&a, &b)| (a as usize, b as usize))
}

/// Returns the index of the first element of a head's row in an arena.
fn arena_row(arena: &KvArena, plane: &KvPlane<'_>, layer: usize, slot: usize, head: usize) -> usize {
    let block_size = arena.layout().shape().block_size;
    plane.strides.at(layer, slot / block_size, slot % block_size, head)
}

impl ForeignPlane {
    /// Returns the storage index of element `i` of the given slot and head.
    fn at(&self, cache: &ForeignCache, slot: usize, head: usize, i: usize) -> usize {
        let shape = cache.shape();
        let piece = self.start + slot / shape.block_size * self.block + head * self.head;
        piece + self.order.at(shape, slot % shape.block_size, i)
    }
}
