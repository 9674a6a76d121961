//! Translates collectives to NCCL calls.

use std::ffi::{c_int, c_void};

use cudarc::driver::sys::CUstream;
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t};
use kvcore::{Collective, DType, Error, ReduceOp, Result, TensorView, Transfer};

use super::library::Nccl;
use crate::driver::NAME;

// Decision: docs/decisions/backend-cuda.md#everything-but-a-reduction-is-sent-as-bytes
/// The element type of all collectives except reductions: plain bytes. Only reductions need the tensors'
/// types.
const BYTES: ncclDataType_t = ncclDataType_t::ncclUint8;

/// Returns the address and size in bytes of a dense view.
fn place(view: &TensorView) -> Result<(*mut c_void, usize)> {
    let range = view.host_range(view.dtype().bytes_for(view.len())?)?;
    Ok(((view.storage().address() + range.start as u64) as *mut c_void, range.len()))
}

/// Returns whether a collective moves no bytes, in which case no rank calls NCCL.
pub(super) fn is_empty(collective: Collective<'_>) -> bool {
    collective.views().iter().all(|view| view.is_empty())
}

/// Passes a collective to NCCL.
///
/// # Safety
/// The handle must be alive. The views must be in memory that the current context's device can read and
/// write, and must stay alive until the work is done.
pub(super) unsafe fn collective(
    nccl: &Nccl,
    comm: ncclComm_t,
    stream: CUstream,
    rank: usize,
    collective: Collective<'_>,
) -> Result<()> {
    match collective {
        Collective::Broadcast { view, root } => {
            let (at, bytes) = place(view)?;
            // SAFETY: `at` is valid for `bytes` bytes, as the caller guarantees.
            let code = unsafe { (nccl.broadcast)(at, at, bytes, BYTES, root as c_int, comm, stream) };
            nccl.check("a broadcast", comm, code)
        }
        Collective::AllGather { src, dst } => {
            let ((from, bytes), (to, _)) = (place(src)?, place(dst)?);
            debug_assert_eq!(place(&dst.select(0, rank)?)?.1, bytes);
            // SAFETY: the caller guarantees that `from` is valid for `bytes` bytes and `to` for `bytes` bytes
            // per rank; the collective's check has verified the sizes.
            let code = unsafe { (nccl.all_gather)(from, to, bytes, BYTES, comm, stream) };
            nccl.check("an all-gather", comm, code)
        }
        Collective::AllReduce { view, op } => {
            let (dtype, op, (at, _)) = (element(view.dtype())?, operator(op), place(view)?);
            // SAFETY: `at` is valid for the view's elements of this type, as the caller guarantees.
            let code = unsafe { (nccl.all_reduce)(at, at, view.len(), dtype, op, comm, stream) };
            nccl.check("an all-reduce", comm, code)
        }
        Collective::Exchange { sends, receives } => {
            // SAFETY: every `group_start` is followed by a `group_end`, even after a failed call.
            nccl.check("a start of calls", comm, unsafe { (nccl.group_start)() })?;
            // SAFETY: the caller guarantees the conditions of `exchange`, which are the same as for this
            // function.
            let issued = unsafe { exchange(nccl, comm, stream, sends, receives) };
            // SAFETY: the group of calls was started above, on this thread.
            let ended = nccl.check("an exchange", comm, unsafe { (nccl.group_end)() });
            issued.and(ended)
        }
    }
}

/// # Safety
/// The conditions are the same as for [`collective`].
unsafe fn exchange(
    nccl: &Nccl,
    comm: ncclComm_t,
    stream: CUstream,
    sends: &[Transfer<'_>],
    receives: &[Transfer<'_>],
) -> Result<()> {
    let moves = |(view, _): &&Transfer<'_>| !view.is_empty();
    for (view, to) in sends.iter().filter(moves) {
        let (at, bytes) = place(view)?;
        // SAFETY: `at` is valid for `bytes` bytes, as the caller guarantees.
        let code = unsafe { (nccl.send)(at, bytes, BYTES, *to as c_int, comm, stream) };
        nccl.check("a send", comm, code)?;
    }
    for (view, from) in receives.iter().filter(moves) {
        let (at, bytes) = place(view)?;
        // SAFETY: `at` is valid for `bytes` bytes, as the caller guarantees.
        let code = unsafe { (nccl.receive)(at, bytes, BYTES, *from as c_int, comm, stream) };
        nccl.check("a receive", comm, code)?;
    }
    Ok(())
}

fn element(dtype: DType) -> Result<ncclDataType_t> {
    Ok(match dtype {
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
        DType::I8 => ncclDataType_t::ncclInt8,
        other => return Err(Error::Unsupported { backend: NAME, what: format!("a reduction of {other}") }),
    })
}

fn operator(op: ReduceOp) -> ncclRedOp_t {
    match op {
        ReduceOp::Sum => ncclRedOp_t::ncclSum,
        ReduceOp::Min => ncclRedOp_t::ncclMin,
        ReduceOp::Max => ncclRedOp_t::ncclMax,
    }
}
