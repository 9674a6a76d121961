//! Plans: the division of a step's attention, with its records on the device. Layers that share an
//! [`AttendWork`](kvcore::AttendWork) share its plans.

use std::sync::Arc;

use kvcore::{Attend, Counters, Result, TensorView};

use super::captured;
use super::division::{part_bytes, records};
use super::tiling::KernelTiling;
use crate::queue::{AttendPlan, AttendPlanKey, Lowering};

/// Returns a call's plan, which is built on first use.
pub(super) fn of(
    to: &mut Lowering<'_>,
    op: &Attend,
    latent: Option<&TensorView>,
    tiling: &KernelTiling,
) -> Result<Arc<AttendPlan>> {
    let latent_over = latent.map_or(Ok(false), |latent| latent.overlaps(&op.out))?;
    let key = AttendPlanKey {
        work: op.work.id(),
        window: op.window,
        tiling: [tiling.heads, tiling.units, tiling.rows, tiling.tokens, tiling.resident],
        block_size: op.arena.layout().shape().block_size,
        part_bytes: part_bytes(op),
        over_queries: latent_over || op.q.overlaps(&op.out)?,
    };
    if let Some(plan) = to.plans().get(&key) {
        return Ok(Arc::clone(plan));
    }
    let plan = Arc::new(if to.recording().is_some() {
        captured::plan(to, op, latent, tiling, key)?
    } else {
        let (bytes, chunks) = records(op, tiling, &key, to.device().facts.multiprocessors as usize, None)?;
        let upload = to.send(&bytes.all)?;
        Counters::add(&to.device().counters.plan_bytes, bytes.all.len());
        AttendPlan { chunks, address: upload.address(), upload: Some(upload) }
    });
    to.plans().keep(key, Arc::clone(&plan));
    Ok(plan)
}
