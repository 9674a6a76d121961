//! Devices: their number and properties, and a thread's current device.

use std::collections::VecDeque;
use std::ffi::{c_char, c_void};

use crate::address::Space;
use crate::state::{DEVICES, SimState, call, invalid, keep_rule, last_rule, lock, refuse, set_current};
use crate::types as sys;

/// The small device's memory size, in bytes.
const SMALL: u64 = 64 << 20;
/// All other devices' memory size, in bytes.
const LARGE: u64 = 8 << 30;

/// The device that runs nothing before a wait.
const LAZY_DEVICE: usize = 1;
/// The device with little memory.
const SMALL_DEVICE: usize = 2;

/// A device.
pub(crate) struct SimDevice {
    pub(crate) space: Space,
    pub(crate) lazy: bool,
    pub(crate) limit: u64,
    /// The reason why the device is lost, if it is.
    pub(crate) lost: Option<String>,
    /// The number of times that threads have set the device without resetting it.
    set: usize,
    pub(crate) peers: Vec<usize>,
    /// The most recently enqueued tasks.
    pub(crate) trace: VecDeque<String>,
}

impl SimDevice {
    pub(crate) fn new(number: usize) -> Self {
        Self {
            space: Space::default(),
            lazy: number == LAZY_DEVICE,
            limit: usual_limit(number),
            lost: None,
            set: 0,
            peers: Vec::new(),
            trace: VecDeque::new(),
        }
    }
}

impl SimDevice {
    /// Returns whether a thread has set the device and not reset it.
    pub(crate) fn is_set(&self) -> bool {
        self.set > 0
    }
}

/// Returns a device's default memory size in bytes.
pub(crate) fn usual_limit(number: usize) -> u64 {
    if number == SMALL_DEVICE { SMALL } else { LARGE }
}

/// Returns the handle of a device's context.
fn context(device: usize) -> sys::aclrtContext {
    (0xC000 + 16 * device) as *mut c_void
}

fn number(device: i32) -> Option<usize> {
    usize::try_from(device).ok().filter(|&device| device < DEVICES)
}

#[unsafe(no_mangle)]
pub extern "C" fn aclInit(_: *const c_char) -> sys::aclError {
    let mut state = lock();
    if let Some(code) = state.controls.verdict("aclInit") {
        return keep_rule(refuse(code, "aclInit fails because a test asked for it"));
    }
    if std::mem::replace(&mut state.started, true) {
        return keep_rule(refuse(sys::ACL_ERROR_REPEAT_INITIALIZE as i32, "aclInit was called before"));
    }
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn aclGetRecentErrMsg() -> *const c_char {
    last_rule()
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetSocName() -> *const c_char {
    c"Ascend910B, simulated".as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetVersion(major: *mut i32, minor: *mut i32, patch: *mut i32) -> sys::aclError {
    call("aclrtGetVersion", |_| {
        (*major, *minor, *patch) = (1, 12, 0);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetDeviceCount(count: *mut u32) -> sys::aclError {
    call("aclrtGetDeviceCount", |_| {
        *count = DEVICES as u32;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSetDevice(device: i32) -> sys::aclError {
    call("aclrtSetDevice", |state| {
        let Some(number) = number(device) else {
            return refuse(sys::ACL_ERROR_RT_INVALID_DEVICEID as i32, format!("there is no device {device}"));
        };
        state.devices[number].set += 1;
        set_current(Some(number));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtResetDevice(device: i32) -> sys::aclError {
    call("aclrtResetDevice", |state| {
        let Some(number) = number(device).filter(|&number| state.devices[number].set > 0) else {
            return invalid(format!("device {device} was not set so often"));
        };
        let streams = state.streams.values().any(|stream| stream.device == number);
        let known = &mut state.devices[number];
        known.set -= 1;
        if known.set == 0 && !streams {
            // A device that is opened again is no longer lost.
            known.lost = None;
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetDevice(device: *mut i32) -> sys::aclError {
    call("aclrtGetDevice", |_| {
        *device = SimState::current()? as i32;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetCurrentContext(to: *mut sys::aclrtContext) -> sys::aclError {
    call("aclrtGetCurrentContext", |_| {
        *to = context(SimState::current()?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSetCurrentContext(wanted: sys::aclrtContext) -> sys::aclError {
    call("aclrtSetCurrentContext", |state| {
        let known = (0..DEVICES).find(|&device| context(device) == wanted && state.devices[device].set > 0);
        match known {
            Some(device) => {
                set_current(Some(device));
                Ok(())
            }
            None => invalid(format!("{wanted:p} is no context of a device that is set")),
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetMemInfo(
    _: sys::aclrtMemAttr,
    free: *mut usize,
    total: *mut usize,
) -> sys::aclError {
    call("aclrtGetMemInfo", |state| {
        let device = &state.devices[SimState::current()?];
        *total = device.limit as usize;
        *free = device.limit.saturating_sub(device.space.used()) as usize;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtDeviceCanAccessPeer(can: *mut i32, device: i32, peer: i32) -> sys::aclError {
    call("aclrtDeviceCanAccessPeer", |_| {
        *can = i32::from(number(device).is_some() && number(peer).is_some() && device != peer);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtDeviceEnablePeerAccess(peer: i32, flags: u32) -> sys::aclError {
    call("aclrtDeviceEnablePeerAccess", |state| {
        let device = state.alive()?;
        match number(peer).filter(|&peer| peer != device && flags == 0) {
            Some(peer) => {
                state.devices[device].peers.push(peer);
                Ok(())
            }
            None => invalid(format!("peer {peer} of device {device}, flags {flags}")),
        }
    })
}
