//! The driver library: loading it, its errors, and making a context current on a thread.

use std::sync::OnceLock;

use cudarc::driver::result;
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUcontext, CUresult};
use kvcore::{Error, MemoryKind, Result};

/// The backend's name in errors and on command lines.
pub(crate) const NAME: &str = "cuda";

/// The oldest supported driver version, CUDA 12.0. It has every entry point that the backend calls.
const OLDEST: i32 = 12_000;

// Decision: docs/decisions/backend-cuda.md#the-driver-is-called-without-cudarcs-safe-layer
/// Loads the driver once, and returns the CUDA version that it supports, for example 13000.
///
/// # Errors
/// Returns [`Error::NoDevice`] if the driver library is missing, fails to start, or is too old.
pub(crate) fn version() -> Result<i32> {
    static VERSION: OnceLock<Result<i32, String>> = OnceLock::new();
    let found = VERSION.get_or_init(|| {
        // SAFETY: loading a library runs its initialisers; the driver's have no other effect.
        if !unsafe { sys::is_culib_present() } {
            return Err(
                "the driver library (libcuda.so.1 or nvcuda.dll) was not found; install NVIDIA's driver, or add its \
                        folder to LD_LIBRARY_PATH"
                    .to_owned(),
            );
        }
        result::init().map_err(|error| format!("the driver cannot start: {}", text(error)))?;
        let mut version = 0;
        // SAFETY: `version` is valid for writes.
        let status = unsafe { sys::cuDriverGetVersion(&raw mut version) };
        status.result().map_err(|error| format!("the driver does not report its version: {}", text(error)))?;
        if version < OLDEST {
            return Err(format!(
                "the driver supports CUDA {}.{}; update it to a driver for CUDA {}.{} or later",
                version / 1000,
                version % 1000 / 10,
                OLDEST / 1000,
                OLDEST % 1000 / 10
            ));
        }
        Ok(version)
    });
    found.clone().map_err(no_device)
}

/// Returns the error for a device that cannot be used.
pub(crate) fn no_device(reason: String) -> Error {
    Error::NoDevice { backend: NAME, reason }
}

/// Returns the driver's name and message for an error.
pub(crate) fn text(error: DriverError) -> String {
    let part = |part: std::result::Result<&std::ffi::CStr, _>| {
        part.map_or_else(
            |_: DriverError| format!("{:?}", error.0),
            |text| text.to_string_lossy().into_owned(),
        )
    };
    format!("{} ({})", part(error.error_string()), part(error.error_name()))
}

/// Returns whether an error destroys the context, which makes every later call on the device fail.
pub(crate) fn is_loss(status: CUresult) -> bool {
    use CUresult::{
        CUDA_ERROR_ASSERT, CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_DEINITIALIZED,
        CUDA_ERROR_ECC_UNCORRECTABLE, CUDA_ERROR_HARDWARE_STACK_ERROR, CUDA_ERROR_ILLEGAL_ADDRESS,
        CUDA_ERROR_ILLEGAL_INSTRUCTION, CUDA_ERROR_INVALID_ADDRESS_SPACE, CUDA_ERROR_INVALID_PC,
        CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_LAUNCH_TIMEOUT, CUDA_ERROR_MISALIGNED_ADDRESS,
        CUDA_ERROR_NVLINK_UNCORRECTABLE, CUDA_ERROR_UNKNOWN,
    };
    matches!(
        status,
        CUDA_ERROR_ASSERT
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_DEINITIALIZED
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_UNKNOWN
    )
}

/// Returns the error for a failed call.
pub(crate) fn refused(error: DriverError) -> Error {
    let reason = text(error);
    if is_loss(error.0) {
        Error::DeviceLost { backend: NAME, reason }
    } else {
        Error::Device { backend: NAME, reason }
    }
}

/// Returns the error for a failed allocation of `bytes` bytes. If device memory has run out, the error states
/// how many bytes are free.
pub(crate) fn no_memory(error: DriverError, kind: MemoryKind, bytes: usize) -> Error {
    if error.0 != CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return refused(error);
    }
    let reason = match result::mem_get_info() {
        Ok((free, total)) if kind == MemoryKind::Device && free >= bytes => format!(
            "{free} of the device's {total} bytes are free, but not contiguously or not for this process; use fewer \
             blocks, or stop other programs on the device"
        ),
        Ok((free, total)) if kind == MemoryKind::Device => format!(
            "{free} of the device's {total} bytes are free; use fewer blocks, or stop other programs on the device"
        ),
        _ => text(error),
    };
    Error::Allocation { bytes, kind, reason }
}

// Decision: docs/decisions/backend-cuda.md#a-context-is-current-for-one-call
/// A context that is current on this thread until the value is dropped.
///
/// A host engine may use another device on the same thread. Dropping the value makes that engine's context
/// current again.
#[derive(Debug)]
pub(crate) struct CurrentContext {
    before: Option<CUcontext>,
}

impl CurrentContext {
    /// Makes `context` current on this thread. The caller must keep it retained for as long as it is current.
    pub(crate) fn new(context: CUcontext) -> Result<Self> {
        let before = result::ctx::get_current().map_err(refused)?;
        if before == Some(context) {
            return Ok(Self { before: None });
        }
        // SAFETY: the caller keeps `context` retained until after this call.
        unsafe { result::ctx::set_current(context) }.map_err(refused)?;
        Ok(Self { before: Some(before.unwrap_or(std::ptr::null_mut())) })
    }
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: `before` was current on this thread, or is null, which leaves no context current.
            let _ = unsafe { result::ctx::set_current(before) };
        }
    }
}
