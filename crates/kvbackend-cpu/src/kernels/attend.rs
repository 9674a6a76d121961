//! Attention over segments, one row and head after another.

use kvcore::Result;
use kvcore::kernels::{Attend, AttendRows, QueryRow, Segment};
use rayon::prelude::*;

use super::{Rotator, token_offset};
use crate::element::{Element, dispatch, elements, elements_mut};
use crate::memory::Access;

pub(crate) fn attend(op: &Attend) -> Result<()> {
    let results = dispatch!(op.arena.layout().shape().dtype, T => attend_rows::<T>(op))?;
    store(op, &results)
}

/// Output and log-sum-exp of one row and head.
struct Partial {
    row: usize,
    head: usize,
    out: Vec<f32>,
    lse: f32,
}

fn attend_rows<T: Element>(op: &Attend) -> Result<Vec<Partial>> {
    let access = Access::new(&[op.q.storage(), op.arena.k(), op.arena.v()], &[])?;
    let (k, v) = (elements::<T>(access.read(op.arena.k())?)?, elements::<T>(access.read(op.arena.v())?)?);
    let queries = queries(op, &access)?;
    let heads = op.q.shape()[1];
    let rows: Vec<(usize, &AttendRows)> =
        op.batch.iter().flat_map(|entry| entry.rows.clone().map(move |row| (row, entry))).collect();
    let one = |&(row, entry): &(usize, &AttendRows)| -> Result<Vec<Partial>> {
        (0..heads)
            .map(|head| {
                let q = &queries[(row * heads + head) * op.q.shape()[2]..][..op.q.shape()[2]];
                one_head(op, k, v, entry, row, head, q)
            })
            .collect()
    };
    let nested: Vec<Vec<Partial>> = rows.par_iter().map(one).collect::<Result<_>>()?;
    Ok(nested.into_iter().flatten().collect())
}

/// All queries as dense f32 `[rows, heads, k_dim]`.
fn queries(op: &Attend, access: &Access) -> Result<Vec<f32>> {
    let (shape, strides) = (op.q.shape(), op.q.strides());
    let mut out = Vec::with_capacity(op.q.len());
    dispatch!(op.q.dtype(), T => {
        let q = elements::<T>(access.read(op.q.storage())?)?;
        for row in 0..shape[0] {
            for head in 0..shape[1] {
                let at = op.q.offset() + row * strides[0] + head * strides[1];
                out.extend(q[at..at + shape[2]].iter().map(|x| x.to_f32()));
            }
        }
        Ok(out)
    })
}

/// A softmax that is still open: running maximum, sum of exponentials, weighted sum of values.
#[derive(Clone)]
struct Open {
    max: f32,
    sum: f32,
    values: Vec<f32>,
}

impl Open {
    fn new(dim: usize) -> Self {
        Self { max: f32::NEG_INFINITY, sum: 0.0, values: vec![0.0; dim] }
    }

    fn add<T: Element>(&mut self, logit: f32, value: &[T]) {
        if logit == f32::NEG_INFINITY {
            return;
        }
        if logit > self.max {
            let shrink = (self.max - logit).exp();
            self.sum *= shrink;
            self.values.iter_mut().for_each(|x| *x *= shrink);
            self.max = logit;
        }
        let weight = (logit - self.max).exp();
        self.sum += weight;
        for (x, y) in self.values.iter_mut().zip(value) {
            *x += weight * y.to_f32();
        }
    }

    /// Whether nothing was added. NaN is something: it must reach the output.
    fn is_empty(&self) -> bool {
        self.sum == 0.0
    }

    fn lse(&self) -> f32 {
        if self.is_empty() { f32::NEG_INFINITY } else { self.max + self.sum.ln() }
    }
}

fn one_head<T: Element>(
    op: &Attend,
    k: &[T],
    v: &[T],
    entry: &AttendRows,
    row: usize,
    head: usize,
    q: &[f32],
) -> Result<Partial> {
    let layout = op.arena.layout();
    let s = layout.shape();
    let kv_head = head / (op.q.shape()[1] / s.kv_heads);
    let at = op.rows[row];
    let mut groups = vec![Open::new(s.v_dim); op.groups.len()];
    let mut turned = Turned { offset: None, q: Vec::new() };
    for segment in entry.segments.iter() {
        let q = turned.by(op, q, at.position - segment.position_offset)?;
        let group = &mut groups[segment.merge_group];
        for j in visible(op, segment, at) {
            let slot = segment.blocks[j / s.block_size].index() * s.block_size + j % s.block_size;
            let key =
                token_offset(layout, layout.k_strides(), op.layer, slot) + kv_head * layout.k_strides().head;
            let value =
                token_offset(layout, layout.v_strides(), op.layer, slot) + kv_head * layout.v_strides().head;
            let dot: f32 = q.iter().zip(&k[key..key + s.k_dim]).map(|(a, b)| a * b.to_f32()).sum();
            let mut logit = dot * op.scale * segment.logit_scale;
            if let Some(cap) = op.softcap {
                logit = cap * (logit / cap).tanh();
            }
            group.add(logit, &v[value..value + s.v_dim]);
        }
    }
    let (out, lse) = merge(op, groups);
    Ok(Partial { row, head, out, lse })
}

/// Indices of a segment's tokens that a row sees: by logical order, then by the window.
fn visible(op: &Attend, segment: &Segment, row: QueryRow) -> impl Iterator<Item = usize> {
    let count = row.logical.saturating_add(1).saturating_sub(segment.logical_start).min(segment.len);
    let first_position = segment.stored_start + segment.position_offset;
    let window = op.window.map(|window| i64::try_from(window).unwrap_or(i64::MAX));
    (0..count).filter(move |&j| {
        window.is_none_or(|window| row.position.saturating_sub(first_position + j as i64) < window)
    })
}

/// The query rotated for one offset, kept while segments share it.
struct Turned {
    offset: Option<i64>,
    q: Vec<f32>,
}

impl Turned {
    fn by<'a>(&'a mut self, op: &Attend, q: &'a [f32], position: i64) -> Result<&'a [f32]> {
        let Some(rope) = &op.rope else { return Ok(q) };
        if self.offset != Some(position) {
            self.q.clear();
            self.q.extend_from_slice(q);
            Rotator::new(rope, [position])?.rotate(&mut self.q, position, rope.attention_factor());
            self.offset = Some(position);
        }
        Ok(&self.q)
    }
}

/// Merges groups by their scaled log-sum-exps.
fn merge(op: &Attend, groups: Vec<Open>) -> (Vec<f32>, f32) {
    let mut all = Open::new(op.arena.layout().shape().v_dim);
    for (mut open, group) in groups.into_iter().zip(op.groups.iter()) {
        if !open.is_empty() {
            let lse = open.lse() * group.lse_scale;
            open.values.iter_mut().for_each(|x| *x /= open.sum);
            all.add(lse, &open.values);
        }
    }
    if !all.is_empty() {
        all.values.iter_mut().for_each(|x| *x /= all.sum);
    }
    let lse = all.lse();
    (all.values, lse)
}

fn store(op: &Attend, results: &[Partial]) -> Result<()> {
    let strides = op.out.strides();
    let mut access = Access::new(&[], &[op.out.storage()])?;
    dispatch!(op.out.dtype(), T => {
        let out = elements_mut::<T>(access.write(op.out.storage())?)?;
        for p in results {
            let at = op.out.offset() + p.row * strides[0] + p.head * strides[1];
            for (x, &y) in out[at..at + p.out.len()].iter_mut().zip(&p.out) {
                *x = T::from_f32(y);
            }
        }
        Ok(())
    })?;
    drop(access);
    if let Some(lse) = &op.lse {
        let mut access = Access::new(&[], &[lse.storage()])?;
        let rows = elements_mut::<f32>(access.write(lse.storage())?)?;
        for p in results {
            rows[lse.offset() + p.row * lse.strides()[0] + p.head * lse.strides()[1]] = p.lse;
        }
    }
    Ok(())
}
