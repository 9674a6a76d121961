//! Attention over segments, one row and head after another.

use kvcore::Result;
use kvcore::kernels::{Attend, AttendRows, QueryRow, Segment};
use rayon::prelude::*;

use super::Rotator;
use crate::element::{Element, dispatch, elements, elements_mut};
use crate::memory::Access;
use crate::plane::{RowAt, Rows};

pub(crate) fn attend(op: &Attend) -> Result<()> {
    let results = attend_rows(op)?;
    store(op, &results)
}

/// Output and log-sum-exp of one row and head.
struct Partial {
    row: usize,
    head: usize,
    out: Vec<f32>,
    lse: f32,
}

fn attend_rows(op: &Attend) -> Result<Vec<Partial>> {
    let reads: Vec<_> = op.arena.storages().chain([op.q.storage()]).collect();
    let mut access = Access::new(&reads, &[])?;
    let queries = queries(op, &access)?;
    let mut parts = access.parts();
    let cache = Cache {
        keys: Rows::new(&op.arena.k_plane(), &mut parts)?,
        values: Rows::new(&op.arena.v_plane(), &mut parts)?,
    };
    let (heads, dim) = (op.q.shape()[1], op.q.shape()[2]);
    let rows: Vec<(usize, &AttendRows)> =
        op.batch.iter().flat_map(|entry| entry.rows.clone().map(move |row| (row, entry))).collect();
    let one = |&(row, entry): &(usize, &AttendRows)| -> Result<Vec<Partial>> {
        (0..heads)
            .map(|head| one_head(op, &cache, entry, row, head, &queries[(row * heads + head) * dim..][..dim]))
            .collect()
    };
    let nested: Vec<Vec<Partial>> = rows.par_iter().map(one).collect::<Result<_>>()?;
    Ok(nested.into_iter().flatten().collect())
}

/// What rows attend to.
struct Cache<'a> {
    keys: Rows<'a>,
    values: Rows<'a>,
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

    fn add(&mut self, logit: f32, value: &[f32]) {
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
            *x += weight * y;
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

fn one_head(
    op: &Attend,
    cache: &Cache,
    entry: &AttendRows,
    row: usize,
    head: usize,
    q: &[f32],
) -> Result<Partial> {
    let (s, heads) = (op.arena.layout().shape(), op.q.shape()[1]);
    let (k_head, v_head) = (head * s.k_heads / heads, head * s.v_heads / heads);
    let at = op.rows[row];
    let mut groups = vec![Open::new(s.v_dim); op.groups.len()];
    let mut turned = Turned { position: None, q: Vec::new() };
    let (mut key, mut value) = (vec![0.0; s.k_dim], vec![0.0; s.v_dim]);
    for segment in entry.segments.iter() {
        let q = turned.by(op, q, at.position - segment.position_offset)?;
        let group = &mut groups[segment.merge_group];
        for j in visible(op, segment, at) {
            let block = segment.blocks[j / s.block_size].index();
            let at = RowAt { layer: op.layer, block, token: j % s.block_size, head: k_head };
            let key = cache.keys.read(at, &mut key)?;
            let dot: f32 = q.iter().zip(key).map(|(a, b)| a * b).sum();
            let mut logit = dot * op.scale * segment.logit_scale;
            if let Some(cap) = op.softcap {
                logit = cap * (logit / cap).tanh();
            }
            group.add(logit, cache.values.read(at.head(v_head), &mut value)?);
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
    position: Option<i64>,
    q: Vec<f32>,
}

impl Turned {
    fn by<'a>(&'a mut self, op: &Attend, q: &'a [f32], position: i64) -> Result<&'a [f32]> {
        let Some(rope) = &op.rope else { return Ok(q) };
        if self.position != Some(position) {
            self.q.clear();
            self.q.extend_from_slice(q);
            Rotator::new(rope, [position])?.rotate(&mut self.q, position, rope.attention_factor());
            self.position = Some(position);
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
