//! The contract's operations, as kernel launches.
//!
//! | operation | kernels |
//! |---|---|
//! | scatter and gather in the arena's type; copy_blocks, swap_blocks, copy_tensor; V of rotate_keys | `copy.cu` |
//! | scatter and gather with another type or format, or with a rotation, rope, K of rotate_keys, quantize, dequantize | `convert.cu` |
//! | attend, attend_mla, with selections and in every format | `attend_*.cu`; see `attend/` |

use kvcore::{Operation, Result};

use crate::queue::Lowering;

mod attend;
mod convert;
mod copy;
mod places;
mod rows;

/// Lowers an operation to kernel launches. The operation must have passed its checks.
pub(crate) fn lower(to: &mut Lowering<'_>, operation: Operation<'_>) -> Result<()> {
    match operation {
        Operation::Scatter(op) => rows::scatter(to, op),
        Operation::Gather(op) => rows::gather(to, op),
        Operation::CopyBlocks(op) => copy::copy_blocks(to, op),
        Operation::SwapBlocks(op) => copy::swap_blocks(to, op),
        Operation::CopyTensor(op) => copy::copy_tensor(to, op),
        Operation::ApplyRope(op) => convert::rope(to, op),
        Operation::RotateKeys(op) => convert::rotate_keys(to, op),
        Operation::Attend(op) => attend::attend(to, op),
        Operation::AttendMla(op) => attend::attend_mla(to, op),
        Operation::AttendMass(op) => attend::attend_mass(to, op),
        Operation::Quantize(op) => convert::quantize(to, op),
        Operation::Dequantize(op) => convert::dequantize(to, op),
    }
}
