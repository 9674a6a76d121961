//! Pinned host memory.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ops::Range;

use crate::clock::{Accesses, TaskMoment};
use crate::state::{SimState, call, invalid};
use crate::types as sys;

const ALIGN: usize = 4096;

/// Live pinned memory.
#[derive(Default)]
pub(crate) struct Pinned {
    memories: BTreeMap<u64, (usize, Accesses)>,
    used: u64,
}

impl Pinned {
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    fn find(&mut self, bytes: &Range<u64>) -> Option<&mut Accesses> {
        let (&start, (len, accesses)) = self.memories.range_mut(..=bytes.start).next_back()?;
        (bytes.end <= start + *len as u64).then_some(accesses)
    }

    /// Returns whether a range of bytes is in pinned memory.
    pub(crate) fn has(&mut self, bytes: &Range<u64>) -> bool {
        self.find(bytes).is_some()
    }

    /// Records a task's access to pinned memory, or returns the fault that it causes.
    pub(crate) fn access(
        &mut self,
        bytes: &Range<u64>,
        moment: &TaskMoment,
        writes: bool,
    ) -> Result<*mut u8, String> {
        let Some(accesses) = self.find(bytes) else {
            return Err(format!("{:#x} is no pinned memory, or was freed", bytes.start));
        };
        match accesses.note(bytes, moment, writes) {
            Some(other) => Err(format!("race with stream {other:#x} on pinned memory at {:#x}", bytes.start)),
            None => Ok(bytes.start as *mut u8),
        }
    }
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes, ALIGN).ok()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMallocHost(to: *mut *mut c_void, size: usize) -> sys::aclError {
    call("aclrtMallocHost", |state| {
        state.alive()?;
        let Some(layout) = layout(size).filter(|_| size > 0) else {
            return invalid("an allocation of 0 bytes");
        };
        let at = alloc(layout);
        at.write_bytes(0xFF, size);
        state.pinned.memories.insert(at as u64, (size, Accesses::default()));
        state.pinned.used += size as u64;
        *to = at.cast();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtFreeHost(at: *mut c_void) -> sys::aclError {
    call("aclrtFreeHost", |state| {
        SimState::current()?;
        match state.pinned.memories.remove(&(at as u64)) {
            Some((size, _)) => {
                state.pinned.used -= size as u64;
                if let Some(layout) = layout(size) {
                    dealloc(at.cast(), layout);
                }
                Ok(())
            }
            None => invalid(format!("{at:p} is no pinned memory")),
        }
    })
}
