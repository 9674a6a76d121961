//! Attention: decode at the speed of reading the cache, prefill at the speed of its products.
//!
//! ```text
//!   plan      a call as items: some rows, some heads, some tokens
//!   part      an item's tokens, a tile of 64 at a time
//!     tile      rows where they lie, or widened once for many queries
//!     block     some queries against a tile:
//!       products  queries · keys, in registers
//!       softmax   logits to weights, the maximum so far kept
//!       products  weights · values
//!     matrix    the same by products of matrices, where the processor has them
//!   finish    items that share rows are merged, then merge groups; output
//! ```
//!
//! Between tiles, a softmax stays open as a *state*: largest logit, sum of weights, weighted sum of values.

mod block;
mod finish;
#[cfg(target_arch = "x86_64")]
mod matrix;
#[cfg(not(target_arch = "x86_64"))]
#[path = "no_matrix.rs"]
mod matrix;
mod part;
mod plan;
mod products;
mod softmax;
mod source;
mod tile;

use std::cell::RefCell;

use kvcore::{Attend, AttendMla, Result, TensorView};
use smallvec::SmallVec;

use self::finish::Finish;
use self::part::{ComputeItem, Inputs, ItemContext, QueryRows, Scratch};
use self::plan::{HeadUnits, Plan, PlanKey, Plans};
use self::source::SourcePlane;
use super::Fast;
use super::locked::with_locked;
use super::rotate::RotationTable;
use crate::raw::Target;

/// The layout of partial softmax states: each has the running maximum, the sum of weights and the weighted
/// sum of values of one query.
#[derive(Clone, Copy)]
struct StateLayout {
    v_dim: usize,
    /// Number of states of one merge group.
    count: usize,
}

impl StateLayout {
    /// Returns the number of elements of a state.
    #[inline(always)]
    fn stride(self) -> usize {
        self.v_dim + 2
    }

    /// Makes the states of `groups` merge groups empty.
    ///
    /// # Safety
    /// `states` is valid for writes of `groups * self.count` states of initialised elements, which nothing
    /// else accesses meanwhile.
    unsafe fn reset(self, states: *mut f32, groups: usize) {
        // SAFETY: by contract, `states` has `groups * count` states of `stride()` initialised elements, which
        // nothing else accesses meanwhile.
        let states = unsafe { std::slice::from_raw_parts_mut(states, groups * self.count * self.stride()) };
        states.fill(0.0);
        states.iter_mut().step_by(self.stride()).for_each(|max| *max = f32::NEG_INFINITY);
    }
}

/// The destinations of results.
struct Outputs<'a> {
    out: (&'a TensorView, Target<'a>),
    lse: Option<(&'a TensorView, Target<'a>)>,
}

/// Memory that a thread keeps between calls.
#[derive(Default)]
struct CallerMemory {
    plans: Plans,
    shared: Vec<f32>,
    /// Copies of queries that lie where results will be written.
    copies: [Vec<u8>; 2],
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    static CALLER_MEMORY: RefCell<CallerMemory> = RefCell::default();
}

impl Fast {
    pub(crate) fn attend(&self, op: &Attend) -> Result<()> {
        self.attend_rows(op, None)
    }

    pub(crate) fn attend_mla(&self, op: &AttendMla) -> Result<()> {
        self.attend_rows(&op.attend, Some(&op.q_latent))
    }

    fn attend_rows(&self, op: &Attend, latent: Option<&TensorView>) -> Result<()> {
        let s = op.arena.layout().shape();
        let units = HeadUnits::new(op.q.shape()[1], s.k_heads, s.v_heads);
        let queries = [Some(&op.q), latent].into_iter().flatten();
        let reads: SmallVec<[_; 8]> = op.arena.storages().chain(queries.map(TensorView::storage)).collect();
        let results = [Some(&op.out), op.lse.as_ref()].into_iter().flatten();
        let writes: SmallVec<[_; 2]> = results.map(TensorView::storage).collect();
        with_locked(&reads, &writes, |locked| {
            CALLER_MEMORY.with_borrow_mut(|CallerMemory { plans, shared, copies: [q, q_latent] }| {
                let q = QueryRows::new(&op.q, &op.out, locked, q)?;
                let latent_view = latent;
                let latent =
                    latent.map(|view| QueryRows::new(view, &op.out, locked, q_latent)).transpose()?;
                let keys = SourcePlane::new(&op.arena.k_plane(), locked)?;
                let values = SourcePlane::new(&op.arena.v_plane(), locked)?;
                let table = op.rope.as_deref().map(RotationTable::of_checked).transpose()?;
                let outputs = Outputs {
                    out: (&op.out, locked.target(op.out.storage())?),
                    lse: match &op.lse {
                        Some(view) => Some((view, locked.target(view.storage())?)),
                        None => None,
                    },
                };
                let matrices = matrix::MatrixForm::of(self.level.level(), op, latent_view, [&keys, &values]);
                let inputs = Inputs { op, units, keys, values, q, latent, table, matrices };
                self.run_plan(&inputs, &outputs, plans, shared);
                Ok(())
            })
        })
    }

    fn run_plan(&self, inputs: &Inputs, outputs: &Outputs, plans: &mut Plans, shared: &mut Vec<f32>) {
        let threads = self.workers.count();
        let plan = plans.get(PlanKey::of(inputs.op, inputs.units, threads), |plan| {
            plan.make(inputs.op, inputs.units, threads);
            if self.parts(plan.items.len(), plan.cost) == 1 && !plan.split.is_empty() {
                plan.make(inputs.op, inputs.units, 1);
            }
        });
        shared.resize(plan.shared.max(shared.len()), 0.0);
        let shared = Target::new(bytemuck::cast_slice_mut(shared));
        let work = |i: usize| {
            // The last rows of a prefill see the most tokens, so that they go first.
            let item = &plan.items[plan.items.len() - 1 - i];
            let context = ItemContext { inputs, item, runs: &plan.runs[item.runs.clone()], outputs, shared };
            // Outside of the task: a closure inside it would be compiled without the task's instructions.
            SCRATCH.with_borrow_mut(|scratch| self.level.run(ComputeItem { context, scratch }));
        };
        if self.parts(plan.items.len(), plan.cost) == 1 {
            (0..plan.items.len()).for_each(work);
        } else {
            self.workers.run(plan.items.len(), &work);
        }
        self.merge(inputs, plan, outputs, shared);
    }

    /// Merges the states of rows whose tokens were split, and writes their results.
    fn merge(&self, inputs: &Inputs, plan: &Plan, outputs: &Outputs, shared: Target<'_>) {
        let (op, units) = (inputs.op, inputs.units);
        for split in &plan.split {
            let item = &plan.items[split.item];
            let Some(start) = item.shared else { continue };
            let count = item.units.len() * units.size * item.rows.len();
            let layout = StateLayout { v_dim: inputs.values.dim, count };
            let part = op.work.groups().len() * count * layout.stride();
            let mut states = shared.at(start * 4, part * split.parts * 4).cast::<f32>();
            for unit in item.units.clone() {
                for row in item.rows.clone() {
                    for head in units.heads_of(unit) {
                        // All items have run, and each has left a state for every query.
                        let (at, parts) = ((row, head), (split.parts, part));
                        self.level.run(Finish { op, outputs, at, states, parts, layout });
                        states = states.wrapping_add(layout.stride());
                    }
                }
            }
        }
    }
}
