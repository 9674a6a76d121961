//! The contract's operations, as dispatches.
//!
//! | operation | shader |
//! |---|---|
//! | scatter, gather of rows in the arena's type; copy_blocks, swap_blocks, copy_tensor; V of rotate_keys | `copy_units`, or `copy_bytes` if an offset or length is not a multiple of 16 bytes |
//! | scatter and gather with another type or format, or with a rotation, rope, K of rotate_keys, quantize, dequantize | `convert_rows` |
//! | attend, attend_mla, with selections and in every format | `attend`, then `merge` |
//! | attend_mass, in every format | `sums`, `mass`, then `sums` |

use kvcore::{Operation, Result};

use crate::queue::{Dispatch, Queue};

mod angles;
mod attend;
mod convert;
pub(crate) mod copy;
mod places;
mod rows;

pub(crate) use attend::Plans;

/// Lowers an operation to dispatches. The operation must have passed its checks.
///
/// Attention uses the queue's scratch memory, and stores its plans in `plans`.
pub(crate) fn lower(queue: &Queue, plans: &Plans, operation: Operation<'_>) -> Result<Vec<Dispatch>> {
    let device = queue.device();
    match operation {
        Operation::Scatter(op) => rows::scatter(device, op),
        Operation::Gather(op) => rows::gather(device, op),
        Operation::CopyBlocks(op) => copy::copy_blocks(device, op),
        Operation::SwapBlocks(op) => copy::swap_blocks(device, op),
        Operation::CopyTensor(op) => copy::copy_tensor(device, op),
        Operation::ApplyRope(op) => convert::rope(device, op),
        Operation::RotateKeys(op) => convert::rotate_keys(device, op),
        Operation::Attend(op) => attend::attend(queue, plans, op),
        Operation::AttendMla(op) => attend::attend_mla(queue, plans, op),
        Operation::AttendMass(op) => attend::attend_mass(queue, op),
        Operation::Quantize(op) => convert::quantize(device, op),
        Operation::Dequantize(op) => convert::dequantize(device, op),
    }
}
