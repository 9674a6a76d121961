//! Attention, computed one entry after another. An entry is a range of rows with the same segments.

use kvcore::Result;

use super::lists::{AttentionPlan, GroupTokens, PlanAngles, PlannedEntry};
use super::operands::{AttentionOperands, products};
use super::softmax::{FLOOR, Partial, TINY};
use crate::operations::plans::StepWork;
use crate::operators::Tensor;
use crate::queue::Work;

/// The maximum number of scores per tile of rows.
pub(super) const SCORES: usize = 8 << 20;

/// The keys and values of a run (a merge group's tokens in one entry), `[heads, tokens, dim]` in f32.
pub(super) struct RunKv {
    k: Tensor,
    v: Option<Tensor>,
}

/// An attention operation with its plan.
pub(super) struct Entries<'a> {
    pub(super) operands: &'a AttentionOperands<'a>,
    pub(super) plan: &'a AttentionPlan,
    /// The angles of the rotations, or `None` if queries and keys are not rotated.
    pub(super) angles: Option<&'a PlanAngles>,
}

impl Entries<'_> {
    /// Computes attention for all entries.
    pub(super) fn attend(&self, work: &mut StepWork<'_, '_>) -> Result<()> {
        let entries = self.plan.entries.iter().enumerate();
        for (number, entry) in entries.filter(|(_, entry)| !entry.rows.is_empty()) {
            let mark = work.mark();
            self.entry(work, number, entry)?;
            work.free_since(mark);
        }
        Ok(())
    }

    fn entry(&self, work: &mut StepWork<'_, '_>, number: usize, entry: &PlannedEntry) -> Result<()> {
        let mut kv = Vec::with_capacity(entry.runs.len());
        for (at, run) in entry.runs.iter().enumerate() {
            kv.push(self.read(work, (number, at), run, true)?);
        }
        let longest = entry.runs.iter().map(|run| run.tokens).max().unwrap_or(0);
        let most = (SCORES / (self.operands.heads * longest).max(1)).max(1);
        let mut first = 0;
        while first < entry.rows.len() {
            let count = most.min(entry.rows.len() - first);
            let mark = work.mark();
            let partial = self.tile(work, (number, entry), &kv, (first, count))?;
            self.store(work, &partial, entry.rows.start + first, count)?;
            work.free_since(mark);
            first += count;
        }
        Ok(())
    }

    /// Rotates a run's keys, `[heads, tokens, dim]` in f32, to the positions at which they are used.
    fn rotate(
        &self,
        work: &mut Work<'_>,
        (entry, at): (usize, usize),
        run: &GroupTokens,
        k: &Tensor,
    ) -> Result<()> {
        let angles = self.angles.and_then(|angles| angles.keys[entry][at].as_ref());
        let (Some(rotation), Some(angles)) = (&run.rotation, angles) else { return Ok(()) };
        let angles = angles.all();
        if rotation.distinct.len() == 1 {
            return angles.rotate(work, k, &[1, 1]);
        }
        angles.spread(work, &rotation.which)?.rotate(work, k, &[1, run.tokens])
    }

    /// Computes `count` rows of an entry, starting at row `first`.
    fn tile(
        &self,
        work: &mut StepWork<'_, '_>,
        (number, entry): (usize, &PlannedEntry),
        kv: &[RunKv],
        (first, count): (usize, usize),
    ) -> Result<Partial> {
        let operands = self.operands;
        let (floor, tiny) = (work.number(FLOOR)?, work.number(TINY)?);
        let scales = operands.op.work.groups();
        let mut groups: Vec<Option<Partial>> = scales.iter().map(|_| None).collect();
        let (q, latent) = self.queries(work, (number, entry), (first, count))?;
        for (run, kv) in entry.runs.iter().zip(kv) {
            let scores = self.scores(work, &q, latent.as_ref(), kv, run)?;
            let mask = run.mask.as_ref().map(|mask| mask.sliced(1, first, count));
            let Some(v) = &kv.v else { continue };
            groups[run.group] = Some(Partial::of(work, &scores, mask.as_ref(), v, &floor)?);
        }
        let several = groups.iter().flatten().count() > 1;
        let mut merged: Option<Partial> = None;
        for (group, scale) in groups.into_iter().zip(scales.iter()) {
            let Some(mut group) = group else { continue };
            if several || scale.lse_scale != 1.0 {
                group = group.into_one(work, scale.lse_scale, &floor, &tiny)?;
            }
            merged = Some(match merged {
                None => group,
                Some(before) => before.merged(work, &group)?,
            });
        }
        match merged {
            Some(merged) => Ok(merged),
            None => Partial::nothing(work, operands.heads, count, operands.out.dim(2), &floor),
        }
    }

    /// Returns the queries of `count` rows of an entry, starting at row `first`, as `[heads, rows, dim]` in f32,
    /// rotated to their positions, and the latent queries.
    pub(super) fn queries(
        &self,
        work: &mut StepWork<'_, '_>,
        (number, entry): (usize, &PlannedEntry),
        (first, count): (usize, usize),
    ) -> Result<(Tensor, Option<Tensor>)> {
        let operands = self.operands;
        let rows = |x: &Tensor| x.sliced(0, entry.rows.start + first, count).permuted(&[1, 0, 2]);
        let latent = operands.latent.as_ref().map(|x| work.in_f32(&rows(x))).transpose()?;
        let q = work.in_f32(&rows(&operands.q))?;
        if let Some(angles) = self.angles {
            angles.queries[number].rows(first, count).rotate(work, &q, &[1, count])?;
        }
        Ok((q, latent))
    }

    /// Reads the keys of run `at` of entry `number`, and the run's values if `values` is true.
    pub(super) fn read(
        &self,
        work: &mut Work<'_>,
        (number, at): (usize, usize),
        run: &GroupTokens,
        values: bool,
    ) -> Result<RunKv> {
        let read = |work: &mut Work<'_>, which: usize| -> Result<Tensor> {
            let plane = &self.operands.planes[which];
            let found = plane.read_by_head(work, &run.places[which], (1, run.tokens))?;
            Ok(found.reshaped(&[found.dim(1), found.dim(2), found.dim(3)]))
        };
        let k = read(work, 0)?;
        self.rotate(work, (number, at), run, &k)?;
        Ok(RunKv { k, v: values.then(|| read(work, 1)).transpose()? })
    }

    /// Returns a run's logits, `[heads, rows, tokens]`, before masking.
    pub(super) fn scores(
        &self,
        work: &mut Work<'_>,
        q: &Tensor,
        latent: Option<&Tensor>,
        kv: &RunKv,
        run: &GroupTokens,
    ) -> Result<Tensor> {
        let scores = products(work, q, &kv.k)?;
        if let (Some(latent), Some(v)) = (latent, &kv.v) {
            let of_latents = products(work, latent, v)?;
            work.add(&scores, &of_latents, &scores)?;
        }
        if let Some(factors) = &run.factors {
            work.mul(&scores, factors, &scores)?;
        }
        self.operands.scale(work, &scores)?;
        Ok(scores)
    }

    /// Writes the results of `count` rows of the operation, starting at row `first`.
    fn store(
        &self,
        work: &mut StepWork<'_, '_>,
        partial: &Partial,
        first: usize,
        count: usize,
    ) -> Result<()> {
        let tiny = work.number(TINY)?;
        let result = partial.values(work, &tiny)?;
        let AttentionOperands { out, lse, heads, .. } = self.operands;
        work.convert(&result, &out.sliced(0, first, count).permuted(&[1, 0, 2]))?;
        if let Some(lse) = lse {
            let sums = partial.lse(work)?.reshaped(&[*heads, count]);
            work.convert(&sums, &lse.sliced(0, first, count).permuted(&[1, 0]))?;
        }
        Ok(())
    }
}
