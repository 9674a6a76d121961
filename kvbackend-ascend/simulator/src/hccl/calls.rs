//! Collective calls: their checks, and their tasks.

use std::ffi::c_void;
use std::ops::Range;

use super::meeting::{RankPart, RankTransfer, What};
use super::{call, wrong};
use crate::state::{CallResult, SimState};
use crate::task::TaskWork;
use crate::types as sys;

fn size_of_type(dtype: sys::HcclDataType) -> CallResult<u64> {
    Ok(match dtype {
        sys::HCCL_DATA_TYPE_INT8 | sys::HCCL_DATA_TYPE_UINT8 => 1,
        sys::HCCL_DATA_TYPE_FP16 | sys::HCCL_DATA_TYPE_BFP16 => 2,
        sys::HCCL_DATA_TYPE_FP32 => 4,
        other => return wrong(format!("elements of type {other}")),
    })
}

/// A collective's caller: its group, its rank, and its stream.
struct RankCaller {
    group: u64,
    rank: usize,
    ranks: usize,
    stream: u64,
    device: usize,
}

impl RankCaller {
    fn new(state: &mut SimState, comm: sys::HcclComm, stream: sys::aclrtStream) -> CallResult<Self> {
        let stream = state.stream_here(stream)?;
        state.outside_captures(stream, "a collective")?;
        let Some(known) = state.hccl.comms.get(&(comm as u64)) else {
            return wrong(format!("{comm:p} is no communicator, or was destroyed"));
        };
        let (group, rank, device) = (known.group, known.rank, known.device);
        if device != state.alive()? {
            return wrong("a communicator of another device");
        }
        let ranks = state.hccl.meeting(group).map_or(0, |meeting| meeting.ranks);
        Ok(Self { group, rank, ranks, stream, device })
    }

    /// Returns the address range of a buffer, which must be on the device.
    fn buffer(
        &self,
        state: &SimState,
        at: *const c_void,
        count: u64,
        dtype: sys::HcclDataType,
    ) -> CallResult<Range<u64>> {
        let (at, bytes) = (at as u64, count * size_of_type(dtype)?);
        if count == 0 || state.device_of(at) != Some(self.device) {
            return wrong(format!("{count} elements at {at:#x}, which are not on device {}", self.device));
        }
        Ok(at..at + bytes)
    }

    /// Adds the collective's task to the stream.
    fn enqueue(self, state: &mut SimState, name: &str, what: What) -> CallResult {
        let Some(meeting) = state.hccl.meeting(self.group) else { return wrong("no group") };
        let number = meeting.number(self.rank, &what);
        let part = RankPart { group: self.group, rank: self.rank, number, what: Some(what) };
        state.enqueue(self.stream, name, TaskWork::Meet(part))
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclBroadcast(
    at: *mut c_void,
    count: u64,
    dtype: sys::HcclDataType,
    root: u32,
    comm: sys::HcclComm,
    stream: sys::aclrtStream,
) -> sys::HcclResult {
    call("HcclBroadcast", |state| {
        let caller = RankCaller::new(state, comm, stream)?;
        if root as usize >= caller.ranks {
            return wrong(format!("root {root} of {} ranks", caller.ranks));
        }
        let bytes = caller.buffer(state, at, count, dtype)?;
        caller.enqueue(state, "broadcast", What::Broadcast { bytes, root: root as usize })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclAllGather(
    send: *mut c_void,
    receive: *mut c_void,
    count: u64,
    dtype: sys::HcclDataType,
    comm: sys::HcclComm,
    stream: sys::aclrtStream,
) -> sys::HcclResult {
    call("HcclAllGather", |state| {
        let caller = RankCaller::new(state, comm, stream)?;
        let from = caller.buffer(state, send, count, dtype)?;
        let to = caller.buffer(state, receive, count * caller.ranks as u64, dtype)?;
        if from.start < to.end && to.start < from.end {
            return wrong("an all-gather in place");
        }
        caller.enqueue(state, "all_gather", What::Gather { from, to })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclAllReduce(
    send: *mut c_void,
    receive: *mut c_void,
    count: u64,
    dtype: sys::HcclDataType,
    op: sys::HcclReduceOp,
    comm: sys::HcclComm,
    stream: sys::aclrtStream,
) -> sys::HcclResult {
    call("HcclAllReduce", |state| {
        let caller = RankCaller::new(state, comm, stream)?;
        if dtype == sys::HCCL_DATA_TYPE_UINT8
            || ![sys::HCCL_REDUCE_SUM, sys::HCCL_REDUCE_MAX, sys::HCCL_REDUCE_MIN].contains(&op)
        {
            return wrong(format!("a reduction {op} of type {dtype}"));
        }
        let from = caller.buffer(state, send, count, dtype)?;
        let to = caller.buffer(state, receive, count, dtype)?;
        caller.enqueue(state, "all_reduce", What::Reduce { from, to, dtype, op })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn HcclBatchSendRecv(
    items: *mut sys::HcclSendRecvItem,
    count: u32,
    comm: sys::HcclComm,
    stream: sys::aclrtStream,
) -> sys::HcclResult {
    call("HcclBatchSendRecv", |state| {
        let caller = RankCaller::new(state, comm, stream)?;
        let mut transfers: Vec<RankTransfer> = Vec::new();
        for item in std::slice::from_raw_parts(items, count as usize) {
            let (peer, sends) = (item.remoteRank as usize, item.sendRecvType == sys::HCCL_SEND);
            if peer >= caller.ranks || peer == caller.rank {
                return wrong(format!("a transfer between ranks {} and {peer}", caller.rank));
            }
            if transfers.iter().any(|known| known.peer == peer && known.sends == sends) {
                return wrong(format!("two transfers of one way between ranks {} and {peer}", caller.rank));
            }
            transfers.push(RankTransfer {
                peer,
                sends,
                bytes: caller.buffer(state, item.buf, item.count, item.dataType)?,
            });
        }
        if transfers.is_empty() {
            return wrong("no transfers");
        }
        caller.enqueue(state, "send_receive", What::Exchange(transfers))
    })
}
