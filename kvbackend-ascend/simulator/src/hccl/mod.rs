//! Groups of ranks: their handles, and the way in which ranks find one another.
//!
//! Ranks are threads of the caller. A collective is a task on each rank's stream. It is done when the tasks
//! of all its ranks have reached the front of their streams. As on a device, a task waits forever if the
//! other ranks never arrive.

use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use crate::state::{BrokenRule, CallResult, SimState, keep_rule, lock, refuse, wait_for_change};
use crate::types as sys;

mod calls;
mod meeting;

pub(crate) use meeting::{RankMeeting, RankPart};

/// The default time that a rank waits for the other ranks when it joins, in milliseconds, as in CANN.
pub(crate) const PATIENCE: u64 = 120_000;

/// The ranks that joined with the same root information.
#[derive(Default)]
pub(crate) struct RankGroup {
    /// For each rank, its handle once it has joined.
    ranks: Vec<Option<u64>>,
    pub(crate) meeting: RankMeeting,
}

/// The data of a rank's handle.
struct Comm {
    group: u64,
    rank: usize,
    device: usize,
}

/// All groups and handles.
pub(crate) struct Groups {
    all: HashMap<u64, RankGroup>,
    comms: HashMap<u64, Comm>,
    pub(crate) patience: u64,
}

impl Default for Groups {
    fn default() -> Self {
        Self { all: HashMap::new(), comms: HashMap::new(), patience: PATIENCE }
    }
}

impl Groups {
    /// Returns the number of a device's live handles.
    pub(crate) fn live(&self, device: usize) -> usize {
        self.comms.values().filter(|comm| comm.device == device).count()
    }

    /// Returns the meeting of a group's tasks.
    pub(crate) fn meeting(&mut self, group: u64) -> Option<&mut RankMeeting> {
        self.all.get_mut(&group).map(|group| &mut group.meeting)
    }

    /// Removes the parts that a destroyed stream has contributed to meetings.
    pub(crate) fn withdraw(&mut self, stream: u64) {
        self.all.values_mut().for_each(|group| group.meeting.withdraw(stream));
    }
}

/// Returns the error for an invalid argument.
fn wrong<T>(rule: impl Into<String>) -> CallResult<T> {
    refuse(sys::HCCL_E_PARA as i32, rule)
}

/// Runs an HCCL call. HCCL has its own error codes.
fn call(name: &str, run: impl FnOnce(&mut MutexGuard<'static, SimState>) -> CallResult) -> sys::HcclResult {
    let mut state = lock();
    let outcome = match state.controls.verdict(name) {
        Some(0) => Ok(()),
        Some(code) => refuse(code, format!("{name} fails because a test asked for it")),
        None => run(&mut state),
    };
    // HCCL reports any ACL error as a runtime error.
    let own = |refusal: BrokenRule| match refusal.code {
        0..1000 => refusal,
        _ => BrokenRule { code: sys::HCCL_E_RUNTIME as i32, ..refusal },
    };
    keep_rule(outcome.map_err(own)) as sys::HcclResult
}

/// Adds a rank to a group, waits for the other ranks, and returns the rank's handle.
fn join(
    state: &mut MutexGuard<'static, SimState>,
    id: u64,
    rank: usize,
    ranks: usize,
    device: usize,
) -> CallResult<u64> {
    let handle = state.handle();
    let Some(group) = state.hccl.all.get_mut(&id) else { return wrong("no root information") };
    group.ranks.resize(ranks, None);
    match group.ranks.get_mut(rank) {
        Some(place @ None) => *place = Some(handle),
        _ => return wrong(format!("rank {rank} of {ranks}, or a rank that has joined")),
    }
    group.meeting.ranks = ranks;
    let until = Instant::now() + Duration::from_millis(state.hccl.patience);
    let whole = |state: &SimState| {
        state.hccl.all.get(&id).is_some_and(|group| group.ranks.iter().all(Option::is_some))
    };
    crate::state::changed();
    while !whole(state) {
        if !wait_for_change(state, until) {
            if let Some(group) = state.hccl.all.get_mut(&id) {
                group.ranks[rank] = None;
            }
            return refuse(sys::HCCL_E_TIMEOUT as i32, "ranks that never came");
        }
    }
    state.hccl.comms.insert(handle, Comm { group: id, rank, device });
    Ok(handle)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn HcclGetRootInfo(to: *mut sys::HcclRootInfo) -> sys::HcclResult {
    call("HcclGetRootInfo", |state| {
        state.alive()?;
        let id = state.handle();
        state.hccl.all.insert(id, RankGroup::default());
        let mut info = sys::HcclRootInfo { internal: [0; sys::HCCL_ROOT_INFO_BYTES as usize] };
        for (to, byte) in info.internal.iter_mut().zip(id.to_le_bytes()) {
            *to = byte as c_char;
        }
        *to = info;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn HcclCommInitRootInfo(
    ranks: u32,
    info: *const sys::HcclRootInfo,
    rank: u32,
    to: *mut sys::HcclComm,
) -> sys::HcclResult {
    call("HcclCommInitRootInfo", |state| {
        let device = state.alive()?;
        let mut id = [0; 8];
        for (to, &byte) in id.iter_mut().zip(&(*info).internal) {
            *to = byte as u8;
        }
        *to = join(state, u64::from_le_bytes(id), rank as usize, ranks as usize, device)? as *mut c_void;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn HcclCommInitAll(
    count: u32,
    devices: *mut i32,
    to: *mut sys::HcclComm,
) -> sys::HcclResult {
    call("HcclCommInitAll", |state| {
        let devices = std::slice::from_raw_parts(devices, count as usize);
        for (rank, &device) in devices.iter().enumerate() {
            let set = usize::try_from(device).ok().and_then(|device| state.devices.get(device));
            if !set.is_some_and(crate::device::SimDevice::is_set) || devices[..rank].contains(&device) {
                return wrong(format!("device {device}, which is not set or is named twice"));
            }
            state.check_alive(device as usize)?;
        }
        let id = state.handle();
        let handles: Vec<u64> = devices.iter().map(|_| state.handle()).collect();
        let mut group =
            RankGroup { ranks: handles.iter().copied().map(Some).collect(), ..RankGroup::default() };
        group.meeting.ranks = devices.len();
        state.hccl.all.insert(id, group);
        for (rank, (&device, &handle)) in devices.iter().zip(&handles).enumerate() {
            let device = device as usize;
            state.hccl.comms.insert(handle, Comm { group: id, rank, device });
            to.add(rank).write(handle as *mut c_void);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclCommDestroy(comm: sys::HcclComm) -> sys::HcclResult {
    call("HcclCommDestroy", |state| {
        SimState::current()?;
        let Some(known) = state.hccl.comms.remove(&(comm as u64)) else {
            return wrong(format!("{comm:p} is no communicator, or was destroyed"));
        };
        if let Some(group) = state.hccl.all.get_mut(&known.group) {
            group.ranks[known.rank] = None;
            if group.ranks.iter().all(Option::is_none) {
                state.hccl.all.remove(&known.group);
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn HcclGetCommAsyncError(
    comm: sys::HcclComm,
    to: *mut sys::HcclResult,
) -> sys::HcclResult {
    call("HcclGetCommAsyncError", |state| {
        let Some(group) = state.hccl.comms.get(&(comm as u64)).map(|comm| comm.group) else {
            return wrong(format!("{comm:p} is no communicator, or was destroyed"));
        };
        let failed = state.hccl.meeting(group).and_then(|meeting| meeting.failed);
        *to = failed.unwrap_or(sys::HCCL_SUCCESS);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclGetErrorString(code: sys::HcclResult) -> *const c_char {
    match code {
        sys::HCCL_SUCCESS => c"success",
        sys::HCCL_E_PARA => c"a wrong argument",
        sys::HCCL_E_TIMEOUT => c"a time-out",
        sys::HCCL_E_REMOTE => c"an error of another rank",
        sys::HCCL_E_RUNTIME => c"an error of the runtime",
        _ => c"an error",
    }
    .as_ptr()
}
