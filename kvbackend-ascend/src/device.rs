//! An NPU: opening it, making its context current on a thread, and its errors.

use std::collections::HashSet;
use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, OnceLock};

use kvcore::{Counters, Error, MemoryKind, Result};
use parking_lot::Mutex;

use crate::bindings::types as sys;
use crate::errors::{NAME, no_device};
use crate::library::{Library, Serves, library};
use crate::options::AscendOptions;

/// An open NPU. Its context stays retained until this value is dropped.
pub(crate) struct Npu {
    pub(crate) ordinal: i32,
    pub(crate) library: &'static Library,
    pub(crate) context: sys::aclrtContext,
    pub(crate) counters: Counters,
    /// If true, fused operators are never called.
    plain: bool,
    /// The stream on which memory is zeroed. Nothing else runs on it.
    setup: sys::aclrtStream,
    lost: OnceLock<String>,
    /// Indices of the devices whose memory this device has requested access to.
    pub(crate) peers: Mutex<HashSet<i32>>,
}

// SAFETY: contexts and streams may be used from any thread on which the context is current, and `bind` makes
// the context current.
unsafe impl Send for Npu {}
// SAFETY: the same condition as for `Send`; ACL locks the state that calls share.
unsafe impl Sync for Npu {}

impl fmt::Debug for Npu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Npu({})", self.ordinal)
    }
}

/// Returns the number of devices.
pub(crate) fn count() -> Result<usize> {
    let library = library()?;
    let mut count = 0;
    // SAFETY: `count` is valid for writes.
    match unsafe { library.acl.aclrtGetDeviceCount(&raw mut count) } {
        0 => Ok(count as usize),
        code => Err(no_device(library.text(code))),
    }
}

/// Returns whether an error means that the device is lost. Every execution error (507,000 to 507,999) means
/// this, except the codes for unfinished work, a wait that timed out, a full queue, an unsupported task type,
/// and a broken capture.
fn is_loss(code: i32) -> bool {
    const STREAM_TASKS_FULL: i32 = 507_002;
    const EVENT_NOT_COMPLETE: i32 = 507_006;
    const TASK_TYPE_NOT_SUPPORTED: i32 = 507_009;
    const STREAM_SYNC_TIMEOUT: i32 = 507_046;
    const EVENT_SYNC_TIMEOUT: i32 = 507_047;
    const CAPTURE_INVALIDATED: i32 = 507_903;
    const PASSING: [i32; 7] = [
        sys::ACL_ERROR_RT_STREAM_NOT_COMPLETE as i32,
        STREAM_TASKS_FULL,
        EVENT_NOT_COMPLETE,
        TASK_TYPE_NOT_SUPPORTED,
        STREAM_SYNC_TIMEOUT,
        EVENT_SYNC_TIMEOUT,
        CAPTURE_INVALIDATED,
    ];
    (507_000..508_000).contains(&code) && !PASSING.contains(&code)
}

fn is_out_of_memory(code: i32) -> bool {
    const DEVICE_OUT_OF_MEMORY: u32 = 207_018;
    [sys::ACL_ERROR_RT_MEMORY_ALLOCATION, sys::ACL_ERROR_BAD_ALLOC, DEVICE_OUT_OF_MEMORY]
        .contains(&(code as u32))
}

impl Npu {
    /// Opens the device with the given index.
    ///
    /// # Errors
    /// Returns [`Error::NoDevice`] if there is no such device, or if ACL refuses to open it.
    pub(crate) fn open(options: &AscendOptions) -> Result<Arc<Self>> {
        let (library, count) = (library()?, count()?);
        if options.device >= count {
            let reason = match count {
                0 => "ACL found no device".to_owned(),
                _ => format!("there is no device {}; the devices are 0 to {}", options.device, count - 1),
            };
            return Err(no_device(reason));
        }
        let ordinal = options.device as i32;
        let refused = |code: i32| no_device(format!("device {ordinal}: {}", library.text(code)));
        let before = current(library);
        let (mut context, mut setup) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: both pointers are valid for writes, and `aclrtSetDevice` sets the device before the calls
        // that need it.
        let made = unsafe {
            match library.acl.aclrtSetDevice(ordinal) {
                0 => match library.acl.aclrtGetCurrentContext(&raw mut context) {
                    0 => library.acl.aclrtCreateStreamWithConfig(&raw mut setup, 0, 0),
                    code => code,
                },
                code => return Err(refused(code)),
            }
        };
        let result = match made {
            0 => Ok(Arc::new(Self {
                ordinal,
                library,
                context,
                counters: Counters::default(),
                plain: options.plain,
                setup,
                lost: OnceLock::new(),
                peers: Mutex::default(),
            })),
            code => {
                let error = refused(code);
                // SAFETY: the device was set above.
                unsafe { library.acl.aclrtResetDevice(ordinal) };
                Err(error)
            }
        };
        restore(library, before);
        result
    }

    /// Returns whether the given part of the backend may call its fused operators.
    pub(crate) fn fuses(&self, what: Serves) -> bool {
        !self.plain && self.library.fused.contains(&what)
    }

    /// Returns whether the device is lost. Work enqueued on a lost device never runs.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    /// Makes the device's context current on this thread.
    ///
    /// # Errors
    /// Returns [`Error::DeviceLost`] if the device is lost.
    pub(crate) fn bind(&self) -> Result<ContextGuard> {
        if let Some(reason) = self.lost.get() {
            return Err(Error::DeviceLost { backend: NAME, reason: reason.clone() });
        }
        self.bind_lost()
    }

    /// Makes the device's context current on this thread, even if the device is lost, so that its memory and
    /// handles can still be freed.
    pub(crate) fn bind_lost(&self) -> Result<ContextGuard> {
        let before = current(self.library);
        if before == Some(self.context) {
            return Ok(ContextGuard { library: self.library, before: None });
        }
        // SAFETY: the device retains its context.
        self.check(unsafe { self.library.acl.aclrtSetCurrentContext(self.context) })?;
        Ok(ContextGuard { library: self.library, before })
    }

    /// Checks the return code of a call.
    ///
    /// # Errors
    /// Returns the [error](Self::error) for any code except 0.
    pub(crate) fn check(&self, code: i32) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.error(code)) }
    }

    /// Checks the return code of an allocation.
    ///
    /// # Errors
    /// Returns the [error](Self::memory_error) for any code except 0.
    pub(crate) fn check_memory(&self, code: i32, kind: MemoryKind, bytes: usize) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.memory_error(code, kind, bytes)) }
    }

    /// Returns the error for a failed call, with ACL's message. If the code means that the device is lost,
    /// marks it as lost.
    pub(crate) fn error(&self, code: i32) -> Error {
        let reason = self.library.text(code);
        if is_loss(code) {
            let _ = self.lost.set(reason.clone());
            return Error::DeviceLost { backend: NAME, reason };
        }
        Error::Device { backend: NAME, reason }
    }

    /// Returns the error for a failed allocation. If device memory has run out, the error reports how much is
    /// free.
    pub(crate) fn memory_error(&self, code: i32, kind: MemoryKind, bytes: usize) -> Error {
        if !is_out_of_memory(code) {
            return self.error(code);
        }
        let text = self.library.text(code);
        let reason = match self.memory() {
            Ok((free, total)) if kind == MemoryKind::Device => format!(
                "{free} of the device's {total} bytes are free; use fewer blocks, or stop other programs on the device"
            ),
            _ => text,
        };
        Error::Allocation { bytes, kind, reason }
    }

    /// Returns the free and total bytes of device memory. The device's context must be current.
    pub(crate) fn memory(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are valid for writes.
        self.check(unsafe {
            self.library.acl.aclrtGetMemInfo(sys::ACL_HBM_MEM, &raw mut free, &raw mut total)
        })?;
        Ok((free, total))
    }

    /// Zeroes bytes on the device, and waits until they are zero. The device's context must be current.
    ///
    /// # Safety
    /// The `bytes` bytes at `address` must belong to the caller, and no enqueued work may use them.
    pub(crate) unsafe fn zero(&self, address: u64, bytes: usize) -> Result<()> {
        let at = address as *mut c_void;
        // SAFETY: the caller guarantees that it owns the range.
        self.check(unsafe { self.library.acl.aclrtMemsetAsync(at, bytes, 0, bytes, self.setup) })?;
        // SAFETY: the device owns the stream.
        self.check(unsafe { self.library.acl.aclrtSynchronizeStream(self.setup) })
    }
}

impl Drop for Npu {
    fn drop(&mut self) {
        if let Ok(_current) = self.bind_lost() {
            // SAFETY: storages and streams hold the device, so nothing uses the stream anymore.
            unsafe { self.library.acl.aclrtDestroyStream(self.setup) };
        }
        // SAFETY: `open` set the device once.
        unsafe { self.library.acl.aclrtResetDevice(self.ordinal) };
    }
}

/// A context that is current on this thread until the value is dropped.
///
/// A host engine may use another device on the same thread. Dropping the guard makes that device's context
/// current again.
pub(crate) struct ContextGuard {
    library: &'static Library,
    /// The thread's previous context, if it had one.
    before: Option<sys::aclrtContext>,
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        restore(self.library, self.before);
    }
}

/// Returns the context that is current on this thread, if there is one.
fn current(library: &Library) -> Option<sys::aclrtContext> {
    let mut context = std::ptr::null_mut();
    // SAFETY: `context` is valid for writes. The call fails if the thread has no context.
    let code = unsafe { library.acl.aclrtGetCurrentContext(&raw mut context) };
    (code == 0 && !context.is_null()).then_some(context)
}

/// Makes the previous context current again. If there was no previous context, the current context stays: ACL
/// has no call to remove it.
fn restore(library: &Library, before: Option<sys::aclrtContext>) {
    if let Some(before) = before {
        // SAFETY: the context was current on this thread.
        unsafe { library.acl.aclrtSetCurrentContext(before) };
    }
}
