//! Attention over segments, computed one row and one head at a time.

use std::num::NonZero;
use std::ops::Range;
use std::panic::resume_unwind;

use kvcore::{Attend, AttendMla, AttendRows, Error, KeyForm, Result, Segment, TensorView};

use super::Rotator;
use crate::element::{Element, dispatch};
use crate::memory::{Access, ByteSpan};
use crate::plane::{PlaneRows, PlaneSpans, RowAt};

pub(crate) fn attend(op: &Attend) -> Result<()> {
    let results = attend_rows(op, None)?;
    store(op, &results)
}

pub(crate) fn attend_mla(op: &AttendMla) -> Result<()> {
    let results = attend_rows(&op.attend, Some(&op.q_latent))?;
    store(&op.attend, &results)
}

/// Minimum number of rows per thread.
const ROWS_PER_THREAD: usize = 8;

/// The output and the log-sum-exp of one row and head.
struct RowResult {
    row: usize,
    head: usize,
    out: Vec<f32>,
    lse: f32,
}

/// Calls `work` with the inputs of an attention call, whose memory stays locked until `work` returns.
pub(super) fn with_inputs<R>(
    op: &Attend,
    q_latent: Option<&TensorView>,
    work: impl FnOnce(&ReferenceInputs<'_>) -> Result<R>,
) -> Result<R> {
    let (k, v) = (op.arena.k_plane(), op.arena.v_plane());
    let planes = [k, v].map(|plane| PlaneSpans::of_layer(&op.arena, &plane, op.layer));
    let (q, latent) = (ByteSpan::of(&op.q)?, q_latent.map(ByteSpan::of).transpose()?);
    let mut reads: Vec<&ByteSpan> = planes.iter().flat_map(PlaneSpans::all).collect();
    reads.extend(std::iter::once(&q).chain(&latent));
    let mut access = Access::new(&reads, &[])?;
    let (queries, latents) =
        (DenseQueries::new(&op.q, &access)?, q_latent.map(|q| DenseQueries::new(q, &access)));
    let mut parts = access.parts();
    work(&ReferenceInputs {
        op,
        queries,
        latents: latents.transpose()?,
        keys: PlaneRows::new(&k, &planes[0], &mut parts)?,
        values: PlaneRows::new(&v, &planes[1], &mut parts)?,
    })
}

fn attend_rows(op: &Attend, q_latent: Option<&TensorView>) -> Result<Vec<RowResult>> {
    with_inputs(op, q_latent, all_rows)
}

fn all_rows(inputs: &ReferenceInputs<'_>) -> Result<Vec<RowResult>> {
    let rows: Vec<(usize, &AttendRows)> = inputs
        .op
        .work
        .batch()
        .iter()
        .flat_map(|entry| entry.rows.clone().map(move |row| (row, entry)))
        .collect();
    let part = |rows: &[(usize, &AttendRows)]| -> Result<Vec<Vec<RowResult>>> {
        rows.iter().map(|&(row, entry)| inputs.one_row(row, entry)).collect()
    };
    // The threads belong to this call, and end when it returns.
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    let nested: Vec<Vec<RowResult>> = if rows.len() < ROWS_PER_THREAD * 2 || threads == 1 {
        part(&rows)?
    } else {
        let each = rows.len().div_ceil(threads).max(ROWS_PER_THREAD);
        std::thread::scope(|scope| {
            let parts: Vec<_> = rows.chunks(each).map(|rows| scope.spawn(move || part(rows))).collect();
            let parts = parts.into_iter().map(|part| part.join().unwrap_or_else(|e| resume_unwind(e)));
            Ok::<_, Error>(parts.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
        })?
    };
    Ok(nested.into_iter().flatten().collect())
}

/// A contiguous f32 copy of a view `[rows, heads, dim]`.
struct DenseQueries {
    heads: usize,
    dim: usize,
    values: Vec<f32>,
}

impl DenseQueries {
    fn new(view: &TensorView, access: &Access) -> Result<Self> {
        let (shape, strides) = (view.shape(), view.strides());
        let mut values = Vec::with_capacity(view.len());
        dispatch!(view.dtype(), T => {
            let q = access.read(&ByteSpan::of(view)?)?.elements::<T>()?;
            for row in 0..shape[0] {
                for head in 0..shape[1] {
                    let at = view.offset() + row * strides[0] + head * strides[1];
                    values.extend(q[at..at + shape[2]].iter().map(|x| x.to_f32()));
                }
            }
            Ok(Self { heads: shape[1], dim: shape[2], values })
        })
    }

    fn of(&self, row: usize, head: usize) -> &[f32] {
        &self.values[(row * self.heads + head) * self.dim..][..self.dim]
    }
}

/// The inputs of one attention call.
pub(super) struct ReferenceInputs<'a> {
    pub(super) op: &'a Attend,
    queries: DenseQueries,
    latents: Option<DenseQueries>,
    keys: PlaneRows<'a>,
    values: PlaneRows<'a>,
}

/// The state of a softmax in progress: the running maximum, the sum of exponentials, and the weighted sum of
/// values.
#[derive(Clone)]
struct PartialSoftmax {
    max: f32,
    sum: f32,
    values: Vec<f32>,
}

impl PartialSoftmax {
    fn new(dim: usize) -> Self {
        Self { max: f32::NEG_INFINITY, sum: 0.0, values: vec![0.0; dim] }
    }

    fn add(&mut self, logit: f32, value: &[f32]) {
        if logit == f32::NEG_INFINITY {
            // A weight of 0 times an infinite value is NaN, and −∞ minus −∞ would be NaN for every value.
            self.values.iter_mut().zip(value).for_each(|(x, y)| *x += 0.0 * y);
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

    /// Returns whether nothing has been added. A NaN counts as added, because the output must be NaN in that
    /// case.
    fn is_empty(&self) -> bool {
        self.sum == 0.0
    }

    fn lse(&self) -> f32 {
        if self.is_empty() { f32::NEG_INFINITY } else { self.max + self.sum.ln() }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

impl ReferenceInputs<'_> {
    fn one_row(&self, row: usize, entry: &AttendRows) -> Result<Vec<RowResult>> {
        let seen = self.op.seen(entry, row);
        (0..self.queries.heads).map(|head| self.one_head(row, head, &seen)).collect()
    }

    fn one_head(&self, row: usize, head: usize, seen: &[(&Segment, Range<usize>)]) -> Result<RowResult> {
        let op = self.op;
        let mut groups = vec![PartialSoftmax::new(op.arena.layout().shape().v_dim); op.work.groups().len()];
        self.logits(row, head, seen, |run, _, logit, value| {
            groups[seen[run].0.merge_group].add(logit, value);
        })?;
        let (out, lse) = merge(op, groups);
        Ok(RowResult { row, head, out, lse })
    }

    /// Calls `take` for each token that a row and head attends to, with the index of the token's run in
    /// `seen`, the token's index in its segment, its logit, and its value.
    pub(super) fn logits(
        &self,
        row: usize,
        head: usize,
        seen: &[(&Segment, Range<usize>)],
        mut take: impl FnMut(usize, usize, f32, &[f32]),
    ) -> Result<()> {
        let (op, s, heads) = (self.op, self.op.arena.layout().shape(), self.queries.heads);
        let (k_head, v_head) = (head * s.k_heads / heads, head * s.v_heads / heads);
        let latent = self.latents.as_ref().map(|latents| latents.of(row, head));
        let (mut query, mut rotated) = (RotatedRow::default(), RotatedRow::default());
        let (mut key, mut value) = (vec![0.0; s.k_dim], vec![0.0; s.v_dim]);
        for (run, (segment, tokens)) in seen.iter().enumerate().filter(|(_, (_, tokens))| !tokens.is_empty())
        {
            let moved = if op.keys == KeyForm::Rotated { segment.position_offset } else { 0 };
            let q = query.by(op, self.queries.of(row, head), op.work.rows()[row].position - moved)?;
            for j in tokens.clone() {
                let block = segment.blocks[j / s.block_size].index();
                let at = RowAt { layer: op.layer, block, token: j % s.block_size, head: k_head };
                let key = self.keys.read(at, &mut key)?;
                let key = match op.keys {
                    KeyForm::Rotated => key,
                    KeyForm::Unrotated => rotated.once(op, key, segment.position(j as i64))?,
                };
                let value = self.values.read(at.head(v_head), &mut value)?;
                let product = dot(q, key) + latent.map_or(0.0, |latent| dot(latent, value));
                let mut logit = product * op.scale * segment.logit_scale;
                if let Some(cap) = op.softcap {
                    logit = cap * (logit / cap).tanh();
                }
                take(run, j, logit, value);
            }
        }
        Ok(())
    }
}

/// A query or key, rotated to the position of the last call.
#[derive(Default)]
struct RotatedRow {
    position: Option<i64>,
    row: Vec<f32>,
}

impl RotatedRow {
    /// Returns `row` rotated to `position`. The result is cached, so consecutive calls with the same position
    /// must pass the same row.
    fn by<'a>(&'a mut self, op: &Attend, row: &'a [f32], position: i64) -> Result<&'a [f32]> {
        if self.position == Some(position) && op.rope.is_some() {
            return Ok(&self.row);
        }
        self.position = Some(position);
        self.once(op, row, position)
    }

    fn once<'a>(&'a mut self, op: &Attend, row: &'a [f32], position: i64) -> Result<&'a [f32]> {
        let Some(rope) = &op.rope else { return Ok(row) };
        self.row.clear();
        self.row.extend_from_slice(row);
        Rotator::new(rope, [position])?.rotate(&mut self.row, position, rope.attention_factor());
        Ok(&self.row)
    }
}

/// Merges the results of all groups, weighted by their scaled log-sum-exps.
fn merge(op: &Attend, groups: Vec<PartialSoftmax>) -> (Vec<f32>, f32) {
    let mut all = PartialSoftmax::new(op.arena.layout().shape().v_dim);
    for (mut softmax, group) in groups.into_iter().zip(op.work.groups().iter()) {
        // A group without weights has zeros, or NaN from infinite values.
        let lse = if softmax.is_empty() { f32::NEG_INFINITY } else { softmax.lse() * group.lse_scale };
        if !softmax.is_empty() {
            softmax.values.iter_mut().for_each(|x| *x /= softmax.sum);
        }
        all.add(lse, &softmax.values);
    }
    if !all.is_empty() {
        all.values.iter_mut().for_each(|x| *x /= all.sum);
    }
    let lse = all.lse();
    (all.values, lse)
}

fn store(op: &Attend, results: &[RowResult]) -> Result<()> {
    let strides = op.out.strides();
    let span = ByteSpan::of(&op.out)?;
    let mut access = Access::new(&[], &[&span])?;
    dispatch!(op.out.dtype(), T => {
        let mut out = access.parts().write(&span)?.elements::<T>()?;
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
        let span = ByteSpan::of(lse)?;
        let mut access = Access::new(&[], &[&span])?;
        let mut rows = access.parts().write(&span)?.elements::<f32>()?;
        for p in results {
            let at = lse.offset() + p.row * lse.strides()[0] + p.head * lse.strides()[1];
            rows[at..at + 1].fill(p.lse);
        }
    }
    Ok(())
}
