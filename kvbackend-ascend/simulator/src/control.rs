//! The controls for tests: calls that fail or do nothing, the number of live objects, and a trace of enqueued
//! work.

use std::collections::HashMap;
use std::ffi::{CStr, c_char};

use crate::device::usual_limit;
use crate::state::lock;
use crate::virtual_memory::Reservations;

/// The behaviour that tests have requested.
#[derive(Default)]
pub(crate) struct Controls {
    /// For each function with a call that will fail: the number of calls until then, and the error code.
    fails: HashMap<String, (u64, i32)>,
    ignored: Vec<String>,
    pub(crate) reservations: Reservations,
}

impl Controls {
    /// Returns the code that a call must return instead of running, if a test requested one.
    pub(crate) fn verdict(&mut self, name: &str) -> Option<i32> {
        if self.ignored.iter().any(|known| known == name) {
            return Some(0);
        }
        let (after, code) = self.fails.get_mut(name)?;
        *after -= 1;
        if *after > 0 {
            return None;
        }
        let code = *code;
        self.fails.remove(name);
        Some(code)
    }
}

unsafe fn text(name: *const c_char) -> String {
    CStr::from_ptr(name).to_string_lossy().into_owned()
}

/// Returns the number of live bytes on a device, or in pinned memory if `device` is negative.
#[unsafe(no_mangle)]
pub extern "C" fn kv_sim_live_bytes(device: i32) -> u64 {
    let state = lock();
    match usize::try_from(device) {
        Ok(device) => state.devices[device].space.used(),
        Err(_) => state.pinned.used(),
    }
}

/// Returns the number of live objects: a device's streams, events, reservations, physical memories, rank
/// handles, captures and graphs, plus all tensors, scalars, arrays, lists and executors.
#[unsafe(no_mangle)]
pub extern "C" fn kv_sim_live_objects(device: i32) -> u64 {
    let state = lock();
    let Ok(device) = usize::try_from(device) else { return 0 };
    let shared = state.tensors.len()
        + state.scalars.len()
        + state.arrays.len()
        + state.lists.len()
        + state.executors.len();
    let own = state.streams_of(device)
        + state.events_of(device)
        + state.controls.reservations.live(device)
        + state.hccl.live(device)
        + state.graphs.live(device);
    (shared + own) as u64
}

/// Sets a device's memory size in bytes.
#[unsafe(no_mangle)]
pub extern "C" fn kv_sim_limit(device: i32, bytes: u64) {
    if let Ok(device) = usize::try_from(device) {
        lock().devices[device].limit = bytes;
    }
}

/// Makes the `after`-th call of a function from now return an error code and do nothing. If `after` is 0,
/// cancels this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_sim_fail(name: *const c_char, after: u64, code: i32) {
    let (name, mut state) = (text(name), lock());
    if after == 0 {
        state.controls.fails.remove(&name);
    } else {
        state.controls.fails.insert(name, (after, code));
    }
}

/// Sets the time that ranks wait for one another when they join a group, in milliseconds.
#[unsafe(no_mangle)]
pub extern "C" fn kv_sim_patience(milliseconds: u64) {
    lock().hccl.patience = milliseconds;
}

/// Makes a function do nothing and report success, or makes it work again if `on` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_sim_ignore(name: *const c_char, on: i32) {
    let (name, mut state) = (text(name), lock());
    state.controls.ignored.retain(|known| *known != name);
    if on != 0 {
        state.controls.ignored.push(name);
    }
}

/// Makes all functions work again, and resets the limits. Lost devices that no thread has set work again.
#[unsafe(no_mangle)]
pub extern "C" fn kv_sim_reset() {
    let mut state = lock();
    state.controls.fails.clear();
    state.controls.ignored.clear();
    state.hccl.patience = crate::hccl::PATIENCE;
    for (number, device) in state.devices.iter_mut().enumerate() {
        device.limit = usual_limit(number);
        if !device.is_set() {
            device.lost = None;
        }
    }
}

/// Writes the tasks that were enqueued on a device since the last successful call, one per line. Returns the
/// number of bytes needed; if the buffer is smaller, the tasks are kept for the next call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_sim_trace(device: i32, buffer: *mut c_char, len: usize) -> usize {
    let mut state = lock();
    let Ok(device) = usize::try_from(device) else { return 0 };
    let text = state.devices[device].trace.iter().map(String::as_str).collect::<Vec<_>>().join("\n");
    if text.len() < len {
        std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), text.len());
        buffer.add(text.len()).write(0);
        state.devices[device].trace.clear();
    }
    text.len() + 1
}
