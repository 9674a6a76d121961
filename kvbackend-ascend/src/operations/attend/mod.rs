//! Attention: by CANN's fused operator where it is one, else composed of operators in f32.
//!
//! ```text
//!   for each entry:   keys and values of its tokens, gathered once            IndexSelect, Cast
//!                     keys turned from where they are stored to their place   IndexSelect, Mul, Add, Sub
//!   for each tile of rows: queries turned to their place                      Mul, Add, Sub
//!   and each merge group:
//!     scores, factors, mask                                                   BatchMatMul, Mul, Add
//!     maximum m, sum l of exponentials, weighted values o                     Amax, Exp, ReduceSum, BatchMatMul
//!   partial results (m, l, o) of groups are merged by their log-sum-exps
//! ```
//!
//! A row that sees none of a group's tokens has m = −10³⁰, l = 0 and o = 0 there.

use kvcore::{Attend, Result, TensorView};

use super::places::{PlaneRows, on_device};
use super::plans::Sent;
use super::turn::in_f32;
use crate::bindings::types as sys;
use crate::operators::Tensor;
use crate::stream::Work;

mod fused;
mod plan;
mod rows;
mod softmax;

use plan::{Entry, Plan, PlanAngles, Run};
use softmax::Partial;

/// Most scores of a tile of rows.
const SCORES: usize = 8 << 20;

/// The tensors of a call.
struct Call<'a> {
    op: &'a Attend,
    q: Tensor,
    latent: Option<Tensor>,
    out: Tensor,
    lse: Option<Tensor>,
    planes: [PlaneRows; 2],
    angles: Option<std::sync::Arc<PlanAngles>>,
    heads: usize,
}

/// The keys and values of a run, `[heads, tokens, dim]` in f32.
struct RunKv {
    k: Tensor,
    v: Tensor,
}

pub(super) fn attend(work: &mut Work<'_>, op: &Attend, latent: Option<&TensorView>) -> Result<()> {
    for view in [Some(&op.q), latent, Some(&op.out), op.lse.as_ref()].into_iter().flatten() {
        on_device("operands of attention", view.storage())?;
    }
    let shape = op.arena.layout().shape();
    let extents = (shape.num_blocks, shape.block_size);
    let planes = [
        PlaneRows::new(&op.arena.k_plane(), op.layer, extents)?,
        PlaneRows::new(&op.arena.v_plane(), op.layer, extents)?,
    ];
    let mut call = Call {
        q: Tensor::of(&op.q)?,
        latent: latent.map(Tensor::of).transpose()?,
        out: Tensor::of(&op.out)?,
        lse: op.lse.as_ref().map(Tensor::of).transpose()?,
        heads: op.q.shape()[1],
        op,
        planes,
        angles: None,
    };
    if call.out.is_empty() {
        return Ok(());
    }
    // The check of a capture has seen that the work is the step's.
    if work.captured_step().is_some() {
        return call.side_by_side(work);
    }
    if call.fused(work)? {
        return Ok(());
    }
    if call.is_a_batch() {
        return call.side_by_side(work);
    }
    let plan = plan::plan(work, op, &call.planes[0], &call.planes[1])?;
    call.angles = match &op.rope {
        Some(rope) => Some(PlanAngles::of(work, &plan, rope, op)?),
        None => None,
    };
    let Plan { entries, .. } = &*plan;
    for (number, entry) in entries.iter().enumerate().filter(|(_, entry)| !entry.rows.is_empty()) {
        let mark = work.mark();
        call.entry(work, number, entry)?;
        work.release(mark);
    }
    Ok(())
}

impl Call<'_> {
    fn entry(&self, work: &mut Work<'_>, number: usize, entry: &Entry) -> Result<()> {
        let mut kv = Vec::with_capacity(entry.runs.len());
        for (at, run) in entry.runs.iter().enumerate() {
            let read = |work: &mut Work<'_>, which: usize| -> Result<Tensor> {
                let found = self.planes[which].read_by_head(work, &run.places[which], (1, run.tokens))?;
                Ok(found.reshaped(&[found.dim(1), found.dim(2), found.dim(3)]))
            };
            let k = read(work, 0)?;
            let angles = self.angles.as_ref().and_then(|angles| angles.keys[number][at].as_ref());
            run.turn(work, &k, angles)?;
            kv.push(RunKv { k, v: read(work, 1)? });
        }
        let most = (SCORES / (self.heads * entry.longest()).max(1)).max(1);
        let mut first = 0;
        while first < entry.rows.len() {
            let count = most.min(entry.rows.len() - first);
            let mark = work.mark();
            let partial = self.tile(work, (number, entry), &kv, (first, count))?;
            self.store(work, &partial, entry.rows.start + first, count)?;
            work.release(mark);
            first += count;
        }
        Ok(())
    }

    /// Computes `count` rows of an entry from its row `first` on.
    fn tile(
        &self,
        work: &mut Work<'_>,
        (number, entry): (usize, &Entry),
        kv: &[RunKv],
        (first, count): (usize, usize),
    ) -> Result<Partial> {
        let rows = |x: &Tensor| x.sliced(0, entry.rows.start + first, count).permuted(&[1, 0, 2]);
        let latent = self.latent.as_ref().map(|x| in_f32(work, &rows(x))).transpose()?;
        let floor = Sent::one(work, softmax::FLOOR)?;
        let tiny = Sent::one(work, softmax::TINY)?;
        let mut groups: Vec<Option<Partial>> = self.op.work.groups().iter().map(|_| None).collect();
        let q = in_f32(work, &rows(&self.q))?;
        if let Some(angles) = &self.angles {
            angles.queries[number].rows(first, count).turn(work, &q, &[1, count])?;
        }
        for (run, kv) in entry.runs.iter().zip(kv) {
            let scores = self.scores(work, &q, latent.as_ref(), kv, run)?;
            let mask = run.mask.as_ref().map(|mask| mask.sliced(1, first, count));
            groups[run.group] = Some(Partial::of(work, &scores, mask.as_ref(), &kv.v, &floor)?);
        }
        let plain = |scale: f32| scale == 1.0;
        let several = groups.iter().flatten().count() > 1;
        let mut all: Option<Partial> = None;
        for (group, scale) in groups.into_iter().zip(self.op.work.groups().iter()) {
            let Some(mut group) = group else { continue };
            if several || !plain(scale.lse_scale) {
                group = group.into_one(work, scale.lse_scale, &floor, &tiny)?;
            }
            all = Some(match all {
                None => group,
                Some(known) => known.merged(work, &group)?,
            });
        }
        match all {
            Some(all) => Ok(all),
            None => Partial::nothing(work, self.heads, count, self.out.dim(2), &floor),
        }
    }

    /// Returns the logits of a run, `[heads, rows, tokens]`, without its mask.
    fn scores(
        &self,
        work: &mut Work<'_>,
        q: &Tensor,
        latent: Option<&Tensor>,
        kv: &RunKv,
        run: &Run,
    ) -> Result<Tensor> {
        let scores = products(work, q, &kv.k)?;
        if let Some(latent) = latent {
            let of_latents = products(work, latent, &kv.v)?;
            work.add(&scores, &of_latents, &scores)?;
        }
        if let Some(factors) = &run.factors {
            work.mul(&scores, factors, &scores)?;
        }
        factored(work, self.op, &scores)?;
        Ok(scores)
    }

    /// Writes the results of `count` rows.
    fn store(&self, work: &mut Work<'_>, partial: &Partial, first: usize, count: usize) -> Result<()> {
        let tiny = Sent::one(work, softmax::TINY)?;
        let result = partial.values(work, &tiny)?;
        work.convert(&result, &self.out.sliced(0, first, count).permuted(&[1, 0, 2]))?;
        if let Some(lse) = &self.lse {
            let sums = partial.lse(work)?.reshaped(&[self.heads, count]);
            work.convert(&sums, &lse.sliced(0, first, count).permuted(&[1, 0]))?;
        }
        Ok(())
    }
}

/// Returns the products of queries `[heads, rows, dim]` and keys `[kv_heads, tokens, dim]`, `[heads, rows, tokens]`.
fn products(work: &mut Work<'_>, q: &Tensor, k: &Tensor) -> Result<Tensor> {
    let (heads, rows) = (q.dim(0), q.dim(1));
    let (kv_heads, tokens, dim) = (k.dim(0), k.dim(1), k.dim(2));
    let each = heads / kv_heads * rows;
    let scores = work.temporary(sys::ACL_FLOAT, &[kv_heads, each, tokens])?;
    work.multiply(&q.reshaped(&[kv_heads, each, dim]), &k.permuted(&[0, 2, 1]), &scores)?;
    Ok(scores.reshaped(&[heads, rows, tokens]))
}

/// Scales logits, and caps them if the operation asks for it.
fn factored(work: &mut Work<'_>, op: &Attend, scores: &Tensor) -> Result<()> {
    match op.softcap {
        None if op.scale == 1.0 => Ok(()),
        None => work.scale(scores, op.scale, scores),
        Some(cap) => {
            work.scale(scores, op.scale / cap, scores)?;
            work.tanh(scores, scores)?;
            work.scale(scores, cap, scores)
        }
    }
}
