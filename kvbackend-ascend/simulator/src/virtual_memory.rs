//! Reserved address ranges, and the physical memory that is mapped to them.

use std::ffi::c_void;

use crate::state::{SimState, call, invalid, refuse};
use crate::types as sys;

/// The granularity in bytes. Sizes and addresses must be multiples of it.
const GRANULE: u64 = 2 << 20;

/// All devices' virtual memory.
#[derive(Default)]
pub(crate) struct Reservations {
    /// The reserved ranges: device, first address, number of bytes.
    ranges: Vec<(usize, u64, u64)>,
    /// The physical allocations: handle, device, number of bytes, and the address at which they are mapped.
    physical: Vec<(u64, usize, u64, Option<u64>)>,
}

impl Reservations {
    /// Returns the number of a device's live ranges and handles.
    pub(crate) fn live(&self, device: usize) -> usize {
        self.ranges.iter().filter(|range| range.0 == device).count()
            + self.physical.iter().filter(|physical| physical.1 == device).count()
    }
}

fn reservations(state: &mut SimState) -> &mut Reservations {
    &mut state.controls.reservations
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMemGetAllocationGranularity(
    properties: *mut sys::aclrtPhysicalMemProp,
    _: sys::aclrtMemGranularityOptions,
    to: *mut usize,
) -> sys::aclError {
    call("aclrtMemGetAllocationGranularity", |state| {
        state.alive()?;
        if properties.is_null() {
            return invalid("no properties");
        }
        *to = GRANULE as usize;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtReserveMemAddress(
    to: *mut *mut c_void,
    size: usize,
    alignment: usize,
    expected: *mut c_void,
    flags: u64,
) -> sys::aclError {
    call("aclrtReserveMemAddress", |state| {
        let (device, size) = (state.alive()?, size as u64);
        if size == 0 || !size.is_multiple_of(GRANULE) || alignment != 0 || !expected.is_null() || flags != 0 {
            return invalid(format!("a reservation of {size} bytes, alignment {alignment}, flags {flags}"));
        }
        let Some(at) = state.devices[device].space.addresses(size, GRANULE) else {
            return refuse(sys::ACL_ERROR_RT_MEMORY_ALLOCATION as i32, "no addresses are left");
        };
        reservations(state).ranges.push((device, at, size));
        *to = at as *mut c_void;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtReleaseMemAddress(at: *mut c_void) -> sys::aclError {
    call("aclrtReleaseMemAddress", |state| {
        let at = at as u64;
        let known = reservations(state);
        let Some(place) = known.ranges.iter().position(|range| range.1 == at) else {
            return invalid(format!("{at:#x} is no reservation"));
        };
        let (_, first, len) = known.ranges[place];
        if known.physical.iter().any(|p| p.3.is_some_and(|at| (first..first + len).contains(&at))) {
            return invalid(format!("the reservation at {at:#x} has mappings"));
        }
        known.ranges.remove(place);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMallocPhysical(
    to: *mut sys::aclrtDrvMemHandle,
    size: usize,
    properties: *const sys::aclrtPhysicalMemProp,
    flags: u64,
) -> sys::aclError {
    call("aclrtMallocPhysical", |state| {
        let size = size as u64;
        state.alive()?;
        let device = (*properties).location.id as usize;
        let on_device = (*properties).location.type_ == sys::ACL_MEM_LOCATION_TYPE_DEVICE;
        if size == 0
            || !size.is_multiple_of(GRANULE)
            || flags != 0
            || !on_device
            || device >= state.devices.len()
        {
            return invalid(format!("{size} bytes of physical memory, flags {flags}"));
        }
        let known = &mut state.devices[device];
        if known.space.used() + size > known.limit {
            return refuse(
                sys::ACL_ERROR_RT_MEMORY_ALLOCATION as i32,
                format!("{size} bytes wanted, {} of {} in use", known.space.used(), known.limit),
            );
        }
        known.space.count(size);
        let handle = state.handle();
        reservations(state).physical.push((handle, device, size, None));
        *to = handle as *mut c_void;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtFreePhysical(handle: sys::aclrtDrvMemHandle) -> sys::aclError {
    call("aclrtFreePhysical", |state| {
        let handle = handle as u64;
        let known = reservations(state);
        match known.physical.iter().position(|p| p.0 == handle) {
            Some(place) if known.physical[place].3.is_none() => {
                let (_, device, size, _) = known.physical.remove(place);
                state.devices[device].space.uncount(size);
                Ok(())
            }
            Some(_) => invalid("physical memory that is mapped"),
            None => invalid(format!("{handle:#x} is no physical memory")),
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtMapMem(
    at: *mut c_void,
    size: usize,
    offset: usize,
    handle: sys::aclrtDrvMemHandle,
    flags: u64,
) -> sys::aclError {
    call("aclrtMapMem", |state| {
        let (at, size, handle) = (at as u64, size as u64, handle as u64);
        state.alive()?;
        let known = reservations(state);
        let range = known.ranges.iter().find(|&&(_, first, len)| first <= at && at + size <= first + len);
        let Some(&(device, ..)) = range.filter(|_| at.is_multiple_of(GRANULE) && offset == 0 && flags == 0)
        else {
            return invalid(format!("a mapping of {size} bytes at {at:#x}, offset {offset}, flags {flags}"));
        };
        if known.physical.iter().any(|p| p.3.is_some_and(|other| other < at + size && at < other + p.2)) {
            return invalid(format!("{at:#x} is mapped already"));
        }
        let physical = known.physical.iter_mut().find(|p| p.0 == handle && p.2 == size && p.3.is_none());
        let Some(physical) = physical.filter(|p| p.1 == device) else {
            return invalid(format!("{handle:#x} is no free physical memory of {size} bytes on this device"));
        };
        physical.3 = Some(at);
        state.devices[device].space.enliven(at, size);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtUnmapMem(at: *mut c_void) -> sys::aclError {
    call("aclrtUnmapMem", |state| {
        let at = at as u64;
        let Some(physical) = reservations(state).physical.iter_mut().find(|p| p.3 == Some(at)) else {
            return invalid(format!("{at:#x} is no mapping"));
        };
        physical.3 = None;
        let device = physical.1;
        state.devices[device].space.end(at);
        Ok(())
    })
}
