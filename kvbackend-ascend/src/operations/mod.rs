//! The contract's operations, composed of CANN's operators.
//!
//! | operation | operators |
//! |---|---|
//! | scatter, gather | `InplaceIndexCopy`, `IndexSelect` on the pool as a matrix of rows; `Cast` if types differ |
//! | `copy_blocks`, `swap_blocks`, `copy_tensor` | device copies; `InplaceCopy` if strides differ |
//! | rope, `rotate_keys`, rotations during copies | `Cast` to f32, `Mul`, `Add`, `Sub` on the halves of the rows, `Cast` back |
//! | attend, `attend_mla`, selections | f32 products, exponentials and sums for each run of tokens with one rotation; see `attend` |
//! | `attend_mass` | f32 products and exponentials, and products with ones that sum the softmax weights; see `attend/mass.rs` |

use kvcore::{Operation, Result};

mod angles;
mod attend;
mod blocks;
mod captured;
mod codes;
mod geometry;
mod matrix;
mod plans;
mod rope;
mod rows;
mod sent;
mod tensors;

pub(crate) use plans::{RecentPlans, StepWork};

// Decision: docs/decisions/backend-ascend.md#operations-are-composed-of-plain-operators
/// Enqueues an operation that has passed its checks.
pub(crate) fn run(work: &mut StepWork<'_, '_>, operation: Operation<'_>) -> Result<()> {
    match operation {
        Operation::Scatter(op) => rows::scatter(work, op),
        Operation::Gather(op) => rows::gather(work, op),
        Operation::CopyBlocks(op) => blocks::copy_blocks(work, op),
        Operation::SwapBlocks(op) => blocks::swap_blocks(work, op),
        Operation::CopyTensor(op) => tensors::copy_tensor(work, op),
        Operation::ApplyRope(op) => rope::apply_rope(work, op),
        Operation::RotateKeys(op) => blocks::rotate_keys(work, op),
        Operation::Attend(op) => attend::attend(work, op, None),
        Operation::AttendMla(op) => attend::attend(work, &op.attend, Some(&op.q_latent)),
        Operation::AttendMass(op) => attend::attend_mass(work, op),
        Operation::Quantize(op) => blocks::convert_all(work, &op.src, &op.dst, &op.pairs),
        Operation::Dequantize(op) => blocks::convert_all(work, &op.src, &op.dst, &op.pairs),
    }
}
