//! Scatter and gather: rows to slots, slots to rows.

use std::sync::Arc;

use kvcore::kernels::{Gather, Scatter};
use kvcore::{DType, KvArena, PlaneStrides, Result, Storage, TensorView};

use super::{Rotator, token_offset};
use crate::element::{Element, dispatch, elements, elements_mut};
use crate::memory::Access;

/// K or V of an arena with the rows that go there or come from there.
struct Plane<'a> {
    storage: &'a Arc<dyn Storage>,
    strides: PlaneStrides,
    rows: &'a TensorView,
}

fn planes<'a>(arena: &'a KvArena, k: &'a TensorView, v: &'a TensorView) -> [Plane<'a>; 2] {
    let layout = arena.layout();
    [
        Plane { storage: arena.k(), strides: layout.k_strides(), rows: k },
        Plane { storage: arena.v(), strides: layout.v_strides(), rows: v },
    ]
}

pub(crate) fn scatter(op: &Scatter) -> Result<()> {
    let cache = op.arena.layout().shape().dtype;
    for plane in planes(&op.arena, &op.k, &op.v) {
        dispatch!(cache, T => {
            if plane.rows.dtype() == DType::F32 {
                scatter_plane::<f32, T>(op, &plane, T::from_f32)
            } else {
                scatter_plane::<T, T>(op, &plane, |x| x)
            }
        })?;
    }
    Ok(())
}

fn scatter_plane<S: Element, T: Element>(
    op: &Scatter,
    plane: &Plane,
    convert: impl Fn(S) -> T,
) -> Result<()> {
    let mut access = Access::new(&[plane.rows.storage()], &[plane.storage])?;
    let (rows, cache) = access.read_write(plane.rows.storage(), plane.storage)?;
    let (rows, cache) = (elements::<S>(rows)?, elements_mut::<T>(cache)?);
    let ([_, heads, dim], [row_stride, head_stride, _]) = (dims(plane.rows), strides(plane.rows));
    for (row, &slot) in op.slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
        let token = token_offset(op.arena.layout(), plane.strides, op.layer, slot as usize);
        for head in 0..heads {
            let from = plane.rows.offset() + row * row_stride + head * head_stride;
            let to = token + head * plane.strides.head;
            for (x, &y) in cache[to..to + dim].iter_mut().zip(&rows[from..from + dim]) {
                *x = convert(y);
            }
        }
    }
    Ok(())
}

pub(crate) fn gather(op: &Gather) -> Result<()> {
    let [k, v] = planes(&op.arena, &op.k, &op.v);
    dispatch!(op.arena.layout().shape().dtype, T => {
        gather_plane::<T>(op, &k, true)?;
        gather_plane::<T>(op, &v, false)
    })
}

fn gather_plane<T: Element>(op: &Gather, plane: &Plane, keys: bool) -> Result<()> {
    let mut access = Access::new(&[plane.storage], &[plane.rows.storage()])?;
    let (cache, rows) = access.read_write(plane.storage, plane.rows.storage())?;
    let (cache, rows) = (elements::<T>(cache)?, elements_mut::<T>(rows)?);
    let ([_, heads, dim], [row_stride, head_stride, _]) = (dims(plane.rows), strides(plane.rows));
    let rotation = op.rotation.as_ref().filter(|_| keys);
    let mut rotator = rotation.map(|r| Rotator::new(&r.rope, [r.delta])).transpose()?;
    for (row, &slot) in op.slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
        let token = token_offset(op.arena.layout(), plane.strides, op.layer, slot as usize);
        for head in 0..heads {
            let from = token + head * plane.strides.head;
            let to = plane.rows.offset() + row * row_stride + head * head_stride;
            let out = &mut rows[to..to + dim];
            out.copy_from_slice(&cache[from..from + dim]);
            if let (Some(rotator), Some(rotation)) = (&mut rotator, rotation) {
                rotator.rotate_elements(out, rotation.delta, 1.0);
            }
        }
    }
    Ok(())
}

/// Extents of rows `[rows, heads, dim]`, whose rank has been checked.
fn dims(view: &TensorView) -> [usize; 3] {
    std::array::from_fn(|axis| view.shape()[axis])
}

fn strides(view: &TensorView) -> [usize; 3] {
    std::array::from_fn(|axis| view.strides()[axis])
}
