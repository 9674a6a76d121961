//! Translates collectives to HCCL calls.

use std::ffi::c_void;
use std::sync::Arc;

use kvcore::{Collective, DType, MemoryKind, ReduceOp, Result, Storage, TensorView, Transfer};

use super::handle::RankHandle;
use super::library::HcclLibrary;
use crate::bindings::types as sys;
use crate::device::Npu;
use crate::errors::unsupported;
use crate::memory::AscendStorage;
use crate::queue::{CopyDirection, copy};

/// The element type for collectives that only move values: plain bytes.
const BYTES: sys::HcclDataType = sys::HCCL_DATA_TYPE_INT8;

/// The handle and the stream for a rank's collectives.
pub(super) struct CollectiveLine<'a> {
    pub(super) loaded: &'static HcclLibrary,
    pub(super) npu: &'a Arc<Npu>,
    /// The rank's handle, or `None` if the rank is the only one in its group.
    pub(super) handle: Option<&'a RankHandle>,
    pub(super) stream: sys::aclrtStream,
    /// Memory that a collective needs besides its views. It must be kept until the work is done.
    pub(super) staged: &'a mut Option<AscendStorage>,
}

/// Returns the address and size in bytes of a dense view.
fn place(view: &TensorView) -> Result<(*mut c_void, usize)> {
    let range = view.host_range(view.dtype().bytes_for(view.len())?)?;
    Ok(((view.storage().address() + range.start as u64) as *mut c_void, range.len()))
}

/// Returns whether a collective moves no data, in which case no rank calls HCCL.
pub(super) fn is_empty(collective: Collective<'_>) -> bool {
    collective.views().iter().all(|view| view.is_empty())
}

/// Checks that HCCL can access the views.
///
/// # Errors
/// Returns [`kvcore::Error::Unsupported`] if a view is in pinned memory.
pub(super) fn reaches(collective: Collective<'_>) -> Result<()> {
    match collective.views().iter().find(|view| view.storage().kind() != MemoryKind::Device) {
        None => Ok(()),
        Some(view) => {
            let what =
                format!("collectives of {} memory; copy it to the device first", view.storage().kind());
            Err(unsupported(what))
        }
    }
}

impl CollectiveLine<'_> {
    /// Passes a collective to HCCL.
    ///
    /// # Safety
    /// The device's context must be current. The views must be in the device's memory, and stay alive until
    /// the work is done.
    pub(super) unsafe fn collective(&mut self, rank: usize, collective: Collective<'_>) -> Result<()> {
        let Some(comm) = self.handle.map(|handle| handle.raw) else { return self.alone(collective) };
        let (hccl, stream) = (&self.loaded.hccl, self.stream);
        match collective {
            Collective::Broadcast { view, root } => {
                let (at, bytes) = place(view)?;
                // SAFETY: `at` is valid for `bytes` bytes, as the caller guarantees.
                let code = unsafe { hccl.HcclBroadcast(at, bytes as u64, BYTES, root as u32, comm, stream) };
                self.loaded.check("a broadcast", code)
            }
            Collective::AllGather { src, dst } => {
                let ((mut from, bytes), (to, _)) = (place(src)?, place(dst)?);
                // The source may be the rank's own part of the destination, and HCCL may write there before
                // it reads the source.
                if place(&dst.select(0, rank)?)?.0 == from {
                    let made = AscendStorage::uninitialised(self.npu, MemoryKind::Device, bytes)?;
                    let staged = self.staged.insert(made);
                    copy(self.npu, stream, staged.address(), from as u64, bytes, CopyDirection::OnDevice)?;
                    from = staged.address() as *mut c_void;
                }
                // SAFETY: the caller guarantees that `from` is valid for `bytes` bytes and `to` for `bytes`
                // bytes per rank; the collective's check has verified the sizes.
                let code = unsafe { hccl.HcclAllGather(from, to, bytes as u64, BYTES, comm, stream) };
                self.loaded.check("an all-gather", code)
            }
            Collective::AllReduce { view, op } => {
                let (dtype, op, (at, _)) = (element(view.dtype())?, operator(op), place(view)?);
                // SAFETY: `at` is valid for the view's elements of this type, as the caller guarantees.
                let code = unsafe { hccl.HcclAllReduce(at, at, view.len() as u64, dtype, op, comm, stream) };
                self.loaded.check("an all-reduce", code)
            }
            Collective::Exchange { sends, receives } => {
                for mut round in rounds(sends, receives)? {
                    let count = round.len() as u32;
                    // SAFETY: each item's buffer is valid for its bytes, as the caller guarantees.
                    let code = unsafe { hccl.HcclBatchSendRecv(round.as_mut_ptr(), count, comm, stream) };
                    self.loaded.check("an exchange", code)?;
                }
                Ok(())
            }
        }
    }

    /// Runs a collective in a group of one rank: an all-gather copies, and all other collectives do nothing.
    fn alone(&self, collective: Collective<'_>) -> Result<()> {
        if let Collective::AllGather { src, dst } = collective {
            let ((from, bytes), (to, _)) = (place(src)?, place(dst)?);
            if from != to {
                copy(self.npu, self.stream, to as u64, from as u64, bytes, CopyDirection::OnDevice)?;
            }
        }
        Ok(())
    }
}

// Decision: docs/decisions/backend-ascend.md#an-exchange-runs-in-rounds
/// Splits an exchange into rounds, each with at most one send to and one receive from every other rank. Both
/// ranks of a transfer put it into the same round.
fn rounds(sends: &[Transfer<'_>], receives: &[Transfer<'_>]) -> Result<Vec<Vec<sys::HcclSendRecvItem>>> {
    let mut rounds: Vec<Vec<sys::HcclSendRecvItem>> = Vec::new();
    for (kind, transfers) in [(sys::HCCL_SEND, sends), (sys::HCCL_RECV, receives)] {
        for (view, peer) in transfers.iter().filter(|(view, _)| !view.is_empty()) {
            let (buf, bytes) = place(view)?;
            let peer = *peer as u32;
            let item = sys::HcclSendRecvItem {
                sendRecvType: kind,
                buf,
                count: bytes as u64,
                dataType: BYTES,
                remoteRank: peer,
            };
            let has = |round: &Vec<sys::HcclSendRecvItem>| {
                round.iter().any(|known| (known.sendRecvType, known.remoteRank) == (kind, peer))
            };
            match rounds.iter_mut().find(|round| !has(round)) {
                Some(round) => round.push(item),
                None => rounds.push(vec![item]),
            }
        }
    }
    Ok(rounds)
}

/// Returns HCCL's constant for an element type, which differs from ACL's.
fn element(dtype: DType) -> Result<sys::HcclDataType> {
    Ok(match dtype {
        DType::F32 => sys::HCCL_DATA_TYPE_FP32,
        DType::F16 => sys::HCCL_DATA_TYPE_FP16,
        DType::BF16 => sys::HCCL_DATA_TYPE_BFP16,
        DType::I8 => sys::HCCL_DATA_TYPE_INT8,
        other => return Err(unsupported(format!("a reduction of {other}"))),
    })
}

fn operator(op: ReduceOp) -> sys::HcclReduceOp {
    match op {
        ReduceOp::Sum => sys::HCCL_REDUCE_SUM,
        ReduceOp::Min => sys::HCCL_REDUCE_MIN,
        ReduceOp::Max => sys::HCCL_REDUCE_MAX,
    }
}
