//! Scatter, which copies rows to slots, and gather, which copies slots to rows.

use kvcore::{DType, Gather, KvFormat, Result, Rotation, RowRotation, Scatter};

use super::Rotator;
use crate::element::{Element, dispatch};
use crate::memory::Access;
use crate::movement::LayerMovement;
use crate::plane::{PlaneRows, PlaneRowsMut, RowAt};

impl LayerMovement<'_> {
    /// Calls `work` for each head of each row, with the index of its first element in the rows and its
    /// position in the plane. Padding slots are skipped.
    fn each(&self, mut work: impl FnMut(usize, RowAt) -> Result<()>) -> Result<()> {
        let strides = self.rows.strides();
        for (row, at) in self.tokens(0..self.slots.len()) {
            for head in 0..self.plane.heads {
                work(self.rows.offset() + row * strides[0] + head * strides[1], at.head(head))?;
            }
        }
        Ok(())
    }
}

pub(crate) fn scatter(op: &Scatter) -> Result<()> {
    for (plane, rows, rotation) in
        [(op.arena.k_plane(), &op.k, op.rotation.as_ref()), (op.arena.v_plane(), &op.v, None)]
    {
        let movement = LayerMovement::new(&op.arena, plane, rows, op.layer, &op.slots);
        if let Some(rotation) = rotation {
            dispatch!(rows.dtype(), S => scatter_rotated::<S>(&movement, rotation))?;
            continue;
        }
        match plane.format {
            KvFormat::Dense(dtype) => dispatch!(dtype, T => {
                if rows.dtype() == DType::F32 {
                    scatter_dense::<f32, T>(&movement, T::from_f32)
                } else {
                    scatter_dense::<T, T>(&movement, |x| x)
                }
            })?,
            _ => dispatch!(rows.dtype(), S => scatter_quantized::<S>(&movement))?,
        }
    }
    Ok(())
}

/// Scatters rows into a dense plane. Elements are copied bit for bit if both sides have the same type.
fn scatter_dense<S: Element, T: Element>(m: &LayerMovement, convert: impl Fn(S) -> T) -> Result<()> {
    let (from, to) = (m.span_of_rows()?, &m.spans.codes);
    let mut access = Access::new(&[&from], &[to])?;
    let mut parts = access.parts();
    let rows = parts.read(&from)?.elements::<S>()?;
    let mut cache = parts.write(to)?.elements::<T>()?;
    let dim = m.plane.dim;
    m.each(|from, at| {
        let to = m.plane.strides.at(at.layer, at.block, at.token, at.head);
        for (x, &y) in cache[to..to + dim].iter_mut().zip(&rows[from..from + dim]) {
            *x = convert(y);
        }
        Ok(())
    })
}

fn scatter_quantized<S: Element>(m: &LayerMovement) -> Result<()> {
    let from = m.span_of_rows()?;
    let mut access = Access::new(&[&from], &m.spans.all())?;
    let mut parts = access.parts();
    let rows = parts.read(&from)?.elements::<S>()?;
    let mut cache = PlaneRowsMut::new(&m.plane, &m.spans, &mut parts)?;
    let mut wide = vec![0.0; m.plane.dim];
    m.each(|from, at| {
        for (x, y) in wide.iter_mut().zip(&rows[from..from + m.plane.dim]) {
            *x = y.to_f32();
        }
        cache.write(at, &wide)
    })
}

/// Rotates rows in f32 and scatters them into a plane of any format.
fn scatter_rotated<S: Element>(m: &LayerMovement, rotation: &RowRotation) -> Result<()> {
    let from = m.span_of_rows()?;
    let mut access = Access::new(&[&from], &m.spans.all())?;
    let mut parts = access.parts();
    let rows = parts.read(&from)?.elements::<S>()?;
    let mut cache = PlaneRowsMut::new(&m.plane, &m.spans, &mut parts)?;
    let used = m.tokens(0..m.slots.len()).map(|(row, _)| rotation.positions[row]);
    let mut rotator = Rotator::new(&rotation.rope, used)?;
    let (factor, strides) = (rotation.rope.attention_factor(), m.rows.strides());
    let mut wide = vec![0.0; m.plane.dim];
    for (row, at) in m.tokens(0..m.slots.len()) {
        for head in 0..m.plane.heads {
            let from = m.rows.offset() + row * strides[0] + head * strides[1];
            for (x, y) in wide.iter_mut().zip(&rows[from..from + m.plane.dim]) {
                *x = y.to_f32();
            }
            rotator.rotate(&mut wide, rotation.positions[row], factor);
            cache.write(at.head(head), &wide)?;
        }
    }
    Ok(())
}

pub(crate) fn gather(op: &Gather) -> Result<()> {
    for (plane, rows, rotation) in
        [(op.arena.k_plane(), &op.k, op.rotation.as_ref()), (op.arena.v_plane(), &op.v, None)]
    {
        let movement = LayerMovement::new(&op.arena, plane, rows, op.layer, &op.slots);
        dispatch!(rows.dtype(), T => match plane.format {
            KvFormat::Dense(_) => gather_dense::<T>(&movement, rotation),
            _ => gather_quantized::<T>(&movement, rotation),
        })?;
    }
    Ok(())
}

/// Gathers rows from a dense plane. Elements that are not rotated are copied bit for bit.
fn gather_dense<T: Element>(m: &LayerMovement, rotation: Option<&Rotation>) -> Result<()> {
    let (from, to) = (&m.spans.codes, m.span_of_rows()?);
    let mut access = Access::new(&[from], &[&to])?;
    let mut parts = access.parts();
    let cache = parts.read(from)?.elements::<T>()?;
    let mut rows = parts.write(&to)?.elements::<T>()?;
    let mut rotator = rotation.map(Rotator::by).transpose()?;
    let dim = m.plane.dim;
    m.each(|to, at| {
        let from = m.plane.strides.at(at.layer, at.block, at.token, at.head);
        let out = &mut rows[to..to + dim];
        out.copy_from_slice(&cache[from..from + dim]);
        if let (Some(rotator), Some(rotation)) = (&mut rotator, rotation) {
            rotator.rotate_elements(out, rotation.delta, 1.0);
        }
        Ok(())
    })
}

fn gather_quantized<T: Element>(m: &LayerMovement, rotation: Option<&Rotation>) -> Result<()> {
    let to = m.span_of_rows()?;
    let mut access = Access::new(&m.spans.all(), &[&to])?;
    let mut parts = access.parts();
    let cache = PlaneRows::new(&m.plane, &m.spans, &mut parts)?;
    let mut rows = parts.write(&to)?.elements::<T>()?;
    let mut rotator = rotation.map(Rotator::by).transpose()?;
    let mut wide = vec![0.0; m.plane.dim];
    m.each(|to, at| {
        cache.read(at, &mut wide)?;
        if let (Some(rotator), Some(rotation)) = (&mut rotator, rotation) {
            rotator.rotate(&mut wide, rotation.delta, 1.0);
        }
        for (x, &y) in rows[to..to + m.plane.dim].iter_mut().zip(&wide) {
            *x = T::from_f32(y);
        }
        Ok(())
    })
}
