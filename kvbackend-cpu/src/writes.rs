//! A check of the storages that an operation writes to.

use std::sync::Arc;

use kvcore::{KvArena, Operation, Result, Storage, TensorView};

use crate::memory::cpu;

/// Checks that an operation may write to all of its destinations.
///
/// # Errors
/// Returns [`kvcore::Error::Unsupported`] for memory that was lent for reading only.
pub(crate) fn check(operation: Operation<'_>) -> Result<()> {
    let arena = |arena: &KvArena| arena.storages().try_for_each(storage);
    let view = |view: &TensorView| storage(view.storage());
    match operation {
        Operation::Scatter(op) => arena(&op.arena),
        Operation::Gather(op) => view(&op.k).and_then(|()| view(&op.v)),
        Operation::CopyBlocks(op) => arena(&op.arena),
        Operation::SwapBlocks(op) => arena(&op.dst),
        Operation::CopyTensor(op) => view(&op.dst),
        Operation::ApplyRope(op) => view(&op.rows),
        Operation::RotateKeys(op) => arena(&op.dst),
        Operation::Attend(op) => view(&op.out).and_then(|()| op.lse.iter().try_for_each(view)),
        Operation::AttendMla(op) => {
            view(&op.attend.out).and_then(|()| op.attend.lse.iter().try_for_each(view))
        }
        Operation::AttendMass(op) => view(&op.sums),
        Operation::Quantize(op) => arena(&op.dst),
        Operation::Dequantize(op) => arena(&op.dst),
    }
}

fn storage(storage: &Arc<dyn Storage>) -> Result<()> {
    cpu(storage)?.check_writable()
}
