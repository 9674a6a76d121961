//! The operations in f64, written independently of all backends and of `kvcore`'s own arithmetic.

use kvcore::{
    Attend, AttendMass, AttendMla, AttendRows, KeyForm, KvLayout, KvPlane, Pairing, PlaneStrides, Rope,
    Segment, SelectionUnit, TensorView,
};

mod quant;

pub use quant::{dequantized, error_bound, fp8};

/// Returns the index of the first element of a head's row of K or V, in a slot of a layer.
pub fn index(layout: &KvLayout, s: PlaneStrides, layer: usize, slot: usize, head: usize) -> usize {
    let block_size = layout.shape().block_size;
    layer * s.layer + (slot / block_size) * s.block + (slot % block_size) * s.token + head * s.head
}

/// Returns `row` rotated to `position`: each pair is rotated by `position * frequency` and scaled by
/// `factor`.
pub fn rotate(row: &[f32], rope: &Rope, position: i64, factor: f64) -> Vec<f64> {
    let mut out: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
    let half = rope.config().rotary_dim / 2;
    for (i, &frequency) in rope.frequencies().iter().enumerate() {
        let (x, y) = if rope.pairing() == Pairing::HalfSplit { (i, i + half) } else { (2 * i, 2 * i + 1) };
        let (sin, cos) = (position as f64 * f64::from(frequency)).sin_cos();
        let (a, b) = (out[x], out[y]);
        out[x] = (a * cos - b * sin) * factor;
        out[y] = (a * sin + b * cos) * factor;
    }
    out
}

/// Returns the output rows `[rows, heads, v_dim]` and the log-sum-exps `[rows, heads]` of an [`Attend`],
/// computed from the values of its queries and of all of K and V. Rows without a batch entry keep the value
/// `untouched`.
pub fn attend(op: &Attend, q: &[f32], k: &[f32], v: &[f32], untouched: f32) -> (Vec<f32>, Vec<f32>) {
    rows(op, q, None, k, v, untouched)
}

/// Returns the results of an [`AttendMla`], in the same form as [`attend`]. `q_latent` contains the latent
/// queries.
pub fn attend_mla(
    op: &AttendMla,
    q: &[f32],
    q_latent: &[f32],
    k: &[f32],
    v: &[f32],
    untouched: f32,
) -> (Vec<f32>, Vec<f32>) {
    rows(&op.attend, q, Some(q_latent), k, v, untouched)
}

fn rows(
    op: &Attend,
    q: &[f32],
    q_latent: Option<&[f32]>,
    k: &[f32],
    v: &[f32],
    untouched: f32,
) -> (Vec<f32>, Vec<f32>) {
    let s = op.arena.layout().shape();
    let heads = op.q.shape()[1];
    let mut out = vec![untouched; op.work.rows().len() * heads * s.v_dim];
    let mut lse = vec![untouched; op.work.rows().len() * heads];
    for entry in op.work.batch() {
        for row in entry.rows.clone() {
            for head in 0..heads {
                let at = row * heads + head;
                let query = OracleQuery::new(op, (q, q_latent), row, head);
                let (values, total) = one(op, &seen(op, &query, entry, k, v));
                lse[at] = total as f32;
                for (o, x) in out[at * s.v_dim..][..s.v_dim].iter_mut().zip(values) {
                    *o = x as f32;
                }
            }
        }
    }
    (out, lse)
}

/// One row and head of an attention call.
struct OracleQuery<'a> {
    q: &'a [f32],
    latent: Option<&'a [f32]>,
    row: usize,
    head: usize,
}

impl<'a> OracleQuery<'a> {
    fn new(op: &Attend, (q, latent): (&'a [f32], Option<&'a [f32]>), row: usize, head: usize) -> Self {
        let (s, at) = (op.arena.layout().shape(), row * op.q.shape()[1] + head);
        let latent = latent.map(|latent| &latent[at * s.v_dim..][..s.v_dim]);
        Self { q: &q[at * s.k_dim..][..s.k_dim], latent, row, head }
    }
}

/// Returns the tokens' sums after an `attend_mass`, given their sums `before` it. `q_latent` contains the
/// latent queries, if there are any.
pub fn attend_mass(
    mass: &AttendMass,
    (q, q_latent): (&[f32], Option<&[f32]>),
    (k, v): (&[f32], &[f32]),
    before: &[f32],
) -> Vec<f32> {
    let op = &mass.attend;
    let mut sums: Vec<f64> = before.iter().map(|&x| f64::from(x)).collect();
    let entry = &op.work.batch()[mass.entry];
    for row in entry.rows.clone() {
        for head in 0..op.q.shape()[1] {
            let seen = seen(op, &OracleQuery::new(op, (q, q_latent), row, head), entry, k, v);
            let (_, lse) = one(op, &seen);
            for token in &seen {
                if let Some(sum) = sums.get_mut(token.index) {
                    *sum += (token.logit - lse).exp();
                }
            }
        }
    }
    sums.into_iter().map(|x| x as f32).collect()
}

/// Returns whether a row of an entry may see a token. The indices of the token and of its block are counted
/// across all segments.
fn selected(entry: &AttendRows, row: usize, token: usize, block: usize) -> bool {
    let Some(selection) = &entry.selection else { return true };
    let i = row - entry.rows.start;
    let range = selection.offsets[i] as usize..selection.offsets[i + 1] as usize;
    let wanted = match selection.unit {
        SelectionUnit::Tokens => token,
        SelectionUnit::Blocks => block,
    };
    selection.indices[range].iter().any(|&index| index as usize == wanted)
}

/// A token that a query attends to.
struct SeenToken<'a> {
    /// The token's index in its entry, counted across all segments.
    index: usize,
    logit: f64,
    group: usize,
    value: &'a [f32],
}

fn seen<'a>(
    op: &Attend,
    query: &OracleQuery,
    entry: &AttendRows,
    k: &'a [f32],
    v: &'a [f32],
) -> Vec<SeenToken<'a>> {
    let layout = op.arena.layout();
    let (q, row, block_size) = (query.q, op.work.rows()[query.row], layout.shape().block_size);
    let (mut tokens_before, mut blocks_before) = (0, 0);
    // For each visible token: its logit, its group and its value.
    let mut seen = Vec::new();
    for segment in entry.segments.iter() {
        let turned = match &op.rope {
            Some(rope) => {
                let factor = f64::from(rope.attention_factor());
                let moved = if op.keys == KeyForm::Rotated { segment.position_offset } else { 0 };
                rotate(q, rope, row.position - moved, factor)
            }
            None => q.iter().map(|&x| f64::from(x)).collect(),
        };
        for j in 0..segment.len {
            let position = segment.stored_start + segment.position_offset + j as i64;
            let inside =
                op.window.is_none_or(|w| i128::from(row.position) - i128::from(position) < w as i128);
            let chosen = selected(entry, query.row, tokens_before + j, blocks_before + j / block_size);
            if segment.logical_start + j <= row.logical && inside && chosen {
                let row = |plane: &KvPlane, values: &'a [f32]| {
                    token(
                        layout,
                        plane,
                        segment,
                        j,
                        op.layer,
                        query.head * plane.heads / op.q.shape()[1],
                        values,
                    )
                };
                let (key, value) = (row(&op.arena.k_plane(), k), row(&op.arena.v_plane(), v));
                let key = match (&op.rope, op.keys) {
                    (Some(rope), KeyForm::Unrotated) => {
                        rotate(key, rope, position, f64::from(rope.attention_factor()))
                    }
                    _ => key.iter().map(|&x| f64::from(x)).collect(),
                };
                let dot: f64 = turned.iter().zip(key).map(|(a, b)| a * b).sum();
                let latent = query.latent.unwrap_or_default().iter().zip(value);
                let dot = dot + latent.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
                let mut logit = dot * f64::from(op.scale) * f64::from(segment.logit_scale);
                if let Some(cap) = op.softcap.map(f64::from) {
                    logit = cap * (logit / cap).tanh();
                }
                let (index, group) = (tokens_before + j, segment.merge_group);
                seen.push(SeenToken { index, logit, group, value });
            }
        }
        tokens_before += segment.len;
        blocks_before += segment.len.div_ceil(block_size);
    }
    seen
}

/// Returns the output and the log-sum-exp of one row and head.
fn one(op: &Attend, seen: &[SeenToken]) -> (Vec<f64>, f64) {
    // A token's weight is exp(logit − group lse) · exp(scaled group lse), normalised over all tokens.
    let group_lse: Vec<f64> = (0..op.work.groups().len())
        .map(|g| lse(seen.iter().filter(|x| x.group == g).map(|x| x.logit)))
        .collect();
    let scaled = |g: usize| group_lse[g] * f64::from(op.work.groups()[g].lse_scale);
    let weights: Vec<f64> = seen.iter().map(|x| x.logit - group_lse[x.group] + scaled(x.group)).collect();
    let total = lse(weights.iter().copied());
    let mut out = vec![0.0; op.arena.layout().shape().v_dim];
    for (weight, token) in weights.iter().zip(seen) {
        for (o, &x) in out.iter_mut().zip(token.value) {
            *o += (weight - total).exp() * f64::from(x);
        }
    }
    (out, total)
}

/// Returns the index of each element of a view in the view's storage. The elements are in row-major order.
pub fn elements(view: &TensorView) -> Vec<usize> {
    view.shape().iter().zip(view.strides()).fold(vec![view.offset()], |places, (&n, &stride)| {
        places.into_iter().flat_map(|at| (0..n).map(move |i| at + i * stride)).collect()
    })
}

fn lse(logits: impl Iterator<Item = f64> + Clone) -> f64 {
    let max = logits.clone().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY { max } else { max + logits.map(|x| (x - max).exp()).sum::<f64>().ln() }
}

/// Returns one head's row of a token in a segment.
fn token<'a>(
    layout: &KvLayout,
    plane: &KvPlane,
    segment: &Segment,
    j: usize,
    layer: usize,
    head: usize,
    values: &'a [f32],
) -> &'a [f32] {
    let block_size = layout.shape().block_size;
    let slot = segment.blocks[j / block_size].index() * block_size + j % block_size;
    &values[index(layout, plane.strides, layer, slot, head)..][..plane.dim]
}
