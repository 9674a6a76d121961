//! Attention. The speed of decode is limited by reading the cache, and the speed of prefill by matrix
//! products.
//!
//! ```text
//!   mod       a call: locks the bytes of its layer, lets threads take items, merges the states of split rows
//!    │
//!    ├─► plan    the division of a call into items: some rows, some heads, some tokens
//!    ▼
//!   item      one item: processes its tokens in tiles of 64
//!    │
//!    ├─► matrix  attention over a tile with AMX, if available; falls back to block and products
//!    ▼
//!   block     attention over a tile, in registers: logits, weights, weighted values
//!    ▼
//!   scales    the scales of a tile of codes, as f32
//!    ▼
//!   tile      tokens of a segment: rows in place, or widened or transposed once for many queries
//!    ▼
//!   inputs    the operation, its queries, and both planes
//!    ▼
//!   source    K or V as rows, in place or decoded
//! ────────────────────────────────────────────────────────────────────────────────────────────────────────
//!   products  queries · keys, and weights · values        finish    merges a query's states, writes output
//!   elements  floats and codes as vectors, without scales
//!   pointers  addresses of rows    softmax  states, logits to weights    heads  heads that share K and V
//! ```
//!
//! A file imports only from files below it. The files below the line import only from `pointers`, `softmax`
//! and `elements`. All files above the line may import from them.
//!
//! Between tiles, a query's softmax is stored as a *partial softmax state*: the running maximum, the sum of
//! weights, and the weighted sum of values.

mod block;
mod elements;
mod finish;
mod heads;
mod inputs;
mod item;
mod mass;
#[cfg(target_arch = "x86_64")]
mod matrix;
#[cfg(not(target_arch = "x86_64"))]
#[path = "no_matrix.rs"]
mod matrix;
mod plan;
mod pointers;
mod products;
mod scales;
mod softmax;
mod source;
mod tile;

use std::cell::RefCell;

use kvcore::{Attend, AttendMla, Result, TensorView};
use smallvec::SmallVec;

use self::finish::{Finish, Outputs};
use self::heads::HeadUnits;
use self::inputs::{CallInputs, QueryRows};
use self::item::{ComputeItem, ItemContext, ItemScratch};
use self::matrix::MatrixForm;
use self::plan::{ItemPlan, ItemPlanKey, ItemPlans};
use self::softmax::StateLayout;
use self::source::SourcePlane;
use super::Fast;
use super::locked::with_locked;
use super::rotate::RotationTable;
use crate::memory::ByteSpan;
use crate::plane::PlaneSpans;
use crate::raw::Destination;

/// Buffers that a calling thread keeps between calls.
#[derive(Default)]
struct CallerMemory {
    plans: ItemPlans,
    shared: Vec<f32>,
    /// Copies of queries that overlap the output.
    copies: [Vec<u8>; 2],
}

thread_local! {
    static SCRATCH: RefCell<ItemScratch> = RefCell::default();
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
        let (k, v) = (op.arena.k_plane(), op.arena.v_plane());
        let planes = [k, v].map(|plane| PlaneSpans::of_layer(&op.arena, &plane, op.layer));
        let (q, q_latent) = (ByteSpan::of(&op.q)?, latent.map(ByteSpan::of).transpose()?);
        let (out, lse) = (ByteSpan::of(&op.out)?, op.lse.as_ref().map(ByteSpan::of).transpose()?);
        let mut reads: SmallVec<[&ByteSpan; 8]> = planes.iter().flat_map(PlaneSpans::all).collect();
        reads.extend(std::iter::once(&q).chain(&q_latent));
        let writes: SmallVec<[&ByteSpan; 2]> = std::iter::once(&out).chain(&lse).collect();
        with_locked(&reads, &writes, |locked| {
            CALLER_MEMORY.with_borrow_mut(|CallerMemory { plans, shared, copies: [q, q_latent] }| {
                let q = QueryRows::new(&op.q, &op.out, locked, q)?;
                let latent_view = latent;
                let latent =
                    latent.map(|view| QueryRows::new(view, &op.out, locked, q_latent)).transpose()?;
                let keys = SourcePlane::new(&k, &planes[0], locked)?;
                let values = SourcePlane::new(&v, &planes[1], locked)?;
                let table = op.rope.as_deref().map(RotationTable::of_checked).transpose()?;
                let outputs = Outputs {
                    out: (&op.out, locked.target(&out)?),
                    lse: match (&op.lse, &lse) {
                        (Some(view), Some(span)) => Some((view, locked.target(span)?)),
                        _ => None,
                    },
                };
                let matrix_form = MatrixForm::of(self.level.level(), op, latent_view, [&keys, &values]);
                let inputs = CallInputs { op, units, keys, values, q, latent, table };
                self.run_plan(&inputs, matrix_form, &outputs, plans, shared);
                Ok(())
            })
        })
    }

    fn run_plan(
        &self,
        inputs: &CallInputs,
        matrix_form: Option<MatrixForm>,
        outputs: &Outputs,
        plans: &mut ItemPlans,
        shared: &mut Vec<f32>,
    ) {
        let threads = self.workers.count();
        let plan = plans.get(ItemPlanKey::of(inputs.op, inputs.units, threads), |plan| {
            plan.make(inputs.op, inputs.units, threads);
            if self.parts(plan.items.len(), plan.cost) == 1 && !plan.split.is_empty() {
                plan.make(inputs.op, inputs.units, 1);
            }
        });
        shared.resize(plan.shared.max(shared.len()), 0.0);
        let shared = Destination::new(bytemuck::cast_slice_mut(shared));
        let work = |i: usize| {
            // The last rows of a prefill attend to the most tokens, so they are computed first.
            let item = &plan.items[plan.items.len() - 1 - i];
            let context = ItemContext {
                inputs,
                item,
                runs: &plan.runs[item.runs.clone()],
                matrix_form,
                outputs,
                shared,
            };
            // The closure is outside of the task, because a closure inside a task is compiled without the
            // task's instruction set.
            SCRATCH.with_borrow_mut(|scratch| {
                // SAFETY: `plan` was made for this operation, and each of its items is computed only once, so
                // no other thread writes the rows and heads of `item`, or its states in `shared`.
                // `matrix_form` was made from these inputs for the level of `self`.
                unsafe { self.level.run(ComputeItem { context, scratch }) };
            });
        };
        if self.parts(plan.items.len(), plan.cost) == 1 {
            (0..plan.items.len()).for_each(work);
        } else {
            self.workers.run(plan.items.len(), &work);
        }
        self.merge(inputs, plan, outputs, shared);
    }

    /// Merges the states of rows whose tokens were split, and writes their results.
    fn merge(&self, inputs: &CallInputs, plan: &ItemPlan, outputs: &Outputs, shared: Destination<'_>) {
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
                        let (at, parts) = ((row, head), (split.parts, part));
                        // SAFETY: all items have run, and each has left a state for every query of `split` in
                        // `shared`, starting at `start`. No other split has this row and head, and
                        // `layout.v_dim` is the output's width.
                        unsafe { self.level.run(Finish { op, outputs, at, states, parts, layout }) };
                        states = states.wrapping_add(layout.stride());
                    }
                }
            }
        }
    }
}
