//! Tasks on streams (copies, fills, operators), and checks of the memory that they access.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use crate::clock::TaskMoment;
use crate::hccl::RankPart;
use crate::state::{CallResult, SimState, call, invalid, refuse};
use crate::types as sys;

/// A task's action. It runs once, or once per run of a graph, and returns the fault if there is one.
pub(crate) type Action = Arc<dyn Fn(&mut SimState, &TaskMoment) -> Result<(), String> + Send + Sync>;

/// The kind of work that a task does.
pub(crate) enum TaskWork {
    /// Reaches the given record of an event.
    Record(u64, u64),
    /// Waits for the given record of an event.
    Wait(u64, u64),
    /// Runs an action.
    Run(Action),
    /// Waits for the other ranks' tasks.
    Meet(RankPart),
}

/// A task.
pub(crate) struct StreamTask {
    pub(crate) moment: TaskMoment,
    pub(crate) work: TaskWork,
}

impl SimState {
    /// Returns the host pointer to bytes that a task accesses, in device memory or pinned memory.
    pub(crate) fn touch(
        &mut self,
        bytes: &Range<u64>,
        moment: &TaskMoment,
        writes: bool,
    ) -> Result<*mut u8, String> {
        match self.device_of(bytes.start) {
            Some(device) => self.devices[device].space.access(bytes, moment, writes),
            None => self.pinned.access(bytes, moment, writes),
        }
    }
}

fn range(at: *const c_void, bytes: usize) -> Range<u64> {
    at as u64..at as u64 + bytes as u64
}

/// Checks that the source and destination of a copy match its kind.
fn check_ends(
    state: &mut SimState,
    kind: sys::aclrtMemcpyKind,
    dst: &Range<u64>,
    src: &Range<u64>,
) -> CallResult {
    let on_device = [state.device_of(dst.start).is_some(), state.device_of(src.start).is_some()];
    let expected = match kind {
        sys::ACL_MEMCPY_HOST_TO_DEVICE => [true, false],
        sys::ACL_MEMCPY_DEVICE_TO_HOST => [false, true],
        sys::ACL_MEMCPY_DEVICE_TO_DEVICE => [true, true],
        _ => return refuse(sys::ACL_ERROR_RT_FEATURE_NOT_SUPPORT as i32, "a copy from host to host"),
    };
    if on_device != expected {
        return invalid(format!("a copy of kind {kind} whose ends are on the device: {on_device:?}"));
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtMemcpyAsync(
    dst: *mut c_void,
    most: usize,
    src: *const c_void,
    count: usize,
    kind: sys::aclrtMemcpyKind,
    stream: sys::aclrtStream,
) -> sys::aclError {
    call("aclrtMemcpyAsync", |state| {
        let stream = state.stream_here(stream)?;
        if count > most || count == 0 {
            return invalid(format!("a copy of {count} bytes into {most}"));
        }
        let (dst, src) = (range(dst, count), range(src, count));
        check_ends(state, kind, &dst, &src)?;
        let name = match kind {
            sys::ACL_MEMCPY_HOST_TO_DEVICE => "memcpy_h2d",
            sys::ACL_MEMCPY_DEVICE_TO_HOST => "memcpy_d2h",
            _ => "memcpy_d2d",
        };
        for end in [&dst, &src] {
            match state.device_of(end.start) {
                None if !state.pinned.has(end) => {
                    return invalid("an asynchronous copy of memory that is not pinned");
                }
                Some(device) if device != state.alive()? => {
                    let here = state.alive()?;
                    if !state.devices[here].peers.contains(&device) {
                        return invalid(format!("device {here} has no access to device {device}"));
                    }
                }
                _ => {}
            }
        }
        let action = move |state: &mut SimState, moment: &TaskMoment| {
            let from = state.touch(&src, moment, false)?;
            let to = state.touch(&dst, moment, true)?;
            // SAFETY: both ranges are alive for `count` bytes.
            unsafe { std::ptr::copy(from, to, count) };
            Ok(())
        };
        state.enqueue(stream, name, TaskWork::Run(Arc::new(action)))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtMemsetAsync(
    at: *mut c_void,
    most: usize,
    value: i32,
    count: usize,
    stream: sys::aclrtStream,
) -> sys::aclError {
    call("aclrtMemsetAsync", |state| {
        let stream = state.stream_here(stream)?;
        let bytes = range(at, count);
        if count > most || !(0..256).contains(&value) || state.device_of(bytes.start).is_none() {
            return invalid(format!("{count} bytes of {most} set to {value} at {at:p}"));
        }
        let action = move |state: &mut SimState, moment: &TaskMoment| {
            let to = state.touch(&bytes, moment, true)?;
            // SAFETY: the range is alive for `count` bytes.
            unsafe { to.write_bytes(value as u8, count) };
            Ok(())
        };
        state.enqueue(stream, "memset", TaskWork::Run(Arc::new(action)))
    })
}

/// Copies bytes immediately, without waiting for any stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMemcpy(
    dst: *mut c_void,
    most: usize,
    src: *const c_void,
    count: usize,
    kind: sys::aclrtMemcpyKind,
) -> sys::aclError {
    call("aclrtMemcpy", |state| {
        let device = state.alive()?;
        state.outside_strict_captures(device, "a copy by the host")?;
        if count > most {
            return invalid(format!("a copy of {count} bytes into {most}"));
        }
        let (to, from) = (range(dst, count), range(src, count));
        check_ends(state, kind, &to, &from)?;
        let moment = TaskMoment { stream: 0, tick: 1, before: state.host.clone() };
        let mut end = |bytes: &Range<u64>, at: *mut u8, writes| match state.device_of(bytes.start) {
            Some(device) => state.devices[device].space.access(bytes, &moment, writes),
            None => Ok(at),
        };
        let ends = (end(&from, src.cast_mut().cast(), false), end(&to, dst.cast(), true));
        // The host's later tasks and copies come after this one.
        state.host.set(0, 1);
        match ends {
            (Ok(from), Ok(to)) => {
                std::ptr::copy(from, to, count);
                Ok(())
            }
            (Err(fault), _) | (_, Err(fault)) => invalid(format!("a copy by the host: {fault}")),
        }
    })
}
