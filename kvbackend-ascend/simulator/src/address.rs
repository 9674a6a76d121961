//! Device memory: its addresses, which the host cannot access, its bytes, and the state of each allocation.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ops::Range;

use crate::clock::{Accesses, TaskMoment};
use crate::state::{CallResult, SimState, call, invalid, refuse};
use crate::types as sys;

/// The size of a device's address range, in bytes. Each address is used only once, so that freed memory can
/// be told apart from new memory.
const ADDRESSES: usize = 256 << 30;

/// The number of unused bytes after each allocation, which is also the allocations' alignment.
const GAP: u64 = 4096;

/// The byte that fills new and freed memory. It yields NaN in every floating-point type.
const POISON: u8 = 0xFF;

/// An allocation, either live or freed.
#[derive(Debug)]
pub(crate) struct SimMemory {
    pub(crate) len: u64,
    pub(crate) alive: bool,
    accesses: Accesses,
}

/// A device's memory.
#[derive(Default)]
pub(crate) struct Space {
    /// The first device address, and the host pointer to its bytes. Both ranges are mapped on first use.
    maps: Option<(u64, *mut u8)>,
    next: u64,
    memories: BTreeMap<u64, SimMemory>,
    used: u64,
}

// SAFETY: the bytes are accessed only under the state's lock.
unsafe impl Send for Space {}

fn map(protection: i32) -> *mut c_void {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: this creates a new mapping at an address that the system chooses.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), ADDRESSES, protection, flags, -1, 0) };
    assert!(at != libc::MAP_FAILED, "the system refuses {ADDRESSES} bytes of addresses");
    at
}

impl Space {
    fn maps(&mut self) -> (u64, *mut u8) {
        *self.maps.get_or_insert_with(|| {
            let (public, bytes) = (map(libc::PROT_NONE), map(libc::PROT_READ | libc::PROT_WRITE));
            (public as u64, bytes.cast())
        })
    }

    /// Returns the number of bytes that count against the limit.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// Increases the number of bytes that count against the limit by `bytes`.
    pub(crate) fn count(&mut self, bytes: u64) {
        self.used += bytes;
    }

    /// Decreases the number of bytes that count against the limit by `bytes`.
    pub(crate) fn uncount(&mut self, bytes: u64) {
        self.used -= bytes;
    }

    /// Returns the start of a range of `bytes` addresses that were never used before, or `None` if no
    /// addresses are left.
    pub(crate) fn addresses(&mut self, bytes: u64, align: u64) -> Option<u64> {
        let (first, _) = self.maps();
        let at = (first + self.next).next_multiple_of(align);
        let end = at + bytes.next_multiple_of(GAP) + GAP;
        if end > first + ADDRESSES as u64 {
            return None;
        }
        self.next = end - first;
        Some(at)
    }

    /// Creates live memory at an address, and fills it with the poison byte.
    pub(crate) fn enliven(&mut self, at: u64, len: u64) {
        self.memories.insert(at, SimMemory { len, alive: true, accesses: Accesses::default() });
        let bytes = self.bytes(at);
        // SAFETY: the range is in the mapping, and nothing else writes there.
        unsafe { bytes.write_bytes(POISON, len as usize) };
    }

    /// Frees the memory at an address, and gives its pages back to the system. Returns the memory's length.
    pub(crate) fn end(&mut self, at: u64) -> Option<u64> {
        let memory = self.memories.get_mut(&at).filter(|memory| memory.alive)?;
        memory.alive = false;
        let len = memory.len;
        let bytes = self.bytes(at);
        let pages = (bytes as usize).next_multiple_of(GAP as usize)..(bytes as usize + len as usize);
        if pages.start + GAP as usize <= pages.end {
            // SAFETY: the pages belong to the private mapping, and nothing in them is alive.
            unsafe { libc::madvise(pages.start as *mut c_void, pages.len(), libc::MADV_DONTNEED) };
        }
        Some(len)
    }

    /// Returns the host pointer to the bytes at an address.
    fn bytes(&mut self, at: u64) -> *mut u8 {
        let (first, bytes) = self.maps();
        // SAFETY: the address is in the device's mapped range.
        unsafe { bytes.add((at - first) as usize) }
    }

    /// Returns whether an address belongs to this device.
    pub(crate) fn has(&self, at: u64) -> bool {
        self.maps.is_some_and(|(first, _)| (first..first + ADDRESSES as u64).contains(&at))
    }

    /// Returns the live allocations that contain a range of bytes: one, or several at consecutive addresses.
    fn alive(&self, bytes: &Range<u64>) -> Result<Vec<(u64, Range<u64>)>, String> {
        let (mut parts, mut at) = (Vec::new(), bytes.start);
        while at < bytes.end {
            let known =
                self.memories.range(..=at).next_back().filter(|(start, memory)| at < *start + memory.len);
            let Some((&start, memory)) = known else {
                let over = bytes.end - at;
                return Err(format!("{over} bytes from {at:#x} on are no memory of the device"));
            };
            if !memory.alive {
                return Err(format!("the memory at {start:#x} was freed"));
            }
            let end = bytes.end.min(start + memory.len);
            parts.push((start, at..end));
            at = end;
        }
        Ok(parts)
    }

    /// Returns the host pointer to bytes that a task reads or writes, or the fault that the access causes.
    pub(crate) fn access(
        &mut self,
        bytes: &Range<u64>,
        moment: &TaskMoment,
        writes: bool,
    ) -> Result<*mut u8, String> {
        for (start, part) in self.alive(bytes)? {
            if let Some(memory) = self.memories.get_mut(&start)
                && let Some(other) = memory.accesses.note(&part, moment, writes)
            {
                return Err(format!(
                    "race between streams {other:#x} and {:#x} on {} bytes at {:#x}",
                    moment.stream,
                    part.end - part.start,
                    part.start
                ));
            }
        }
        Ok(self.bytes(bytes.start))
    }
}

impl SimState {
    /// Allocates memory on a device.
    fn allocate(&mut self, device: usize, size: u64) -> CallResult<u64> {
        let device = &mut self.devices[device];
        if device.space.used() + size > device.limit {
            return refuse(
                sys::ACL_ERROR_RT_MEMORY_ALLOCATION as i32,
                format!("{size} bytes wanted, {} of {} in use", device.space.used(), device.limit),
            );
        }
        match device.space.addresses(size, 64) {
            Some(at) => {
                device.space.enliven(at, size);
                device.space.count(size);
                Ok(at)
            }
            None => refuse(sys::ACL_ERROR_RT_MEMORY_ALLOCATION as i32, "no addresses are left"),
        }
    }

    /// Returns the device that an address belongs to, if there is one.
    pub(crate) fn device_of(&self, at: u64) -> Option<usize> {
        self.devices.iter().position(|device| device.space.has(at))
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMalloc(
    to: *mut *mut c_void,
    size: usize,
    _: sys::aclrtMemMallocPolicy,
) -> sys::aclError {
    call("aclrtMalloc", |state| {
        let device = state.alive()?;
        if size == 0 {
            return invalid("an allocation of 0 bytes");
        }
        *to = state.allocate(device, size as u64)? as *mut c_void;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtFree(at: *mut c_void) -> sys::aclError {
    call("aclrtFree", |state| {
        SimState::current()?;
        let at = at as u64;
        let space = state.device_of(at).map(|device| &mut state.devices[device].space);
        match space.and_then(|space| space.end(at).map(|len| space.uncount(len))) {
            Some(()) => Ok(()),
            None => invalid(format!("{at:#x} is no memory that can be freed")),
        }
    })
}
