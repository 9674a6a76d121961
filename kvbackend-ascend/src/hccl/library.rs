//! HCCL, loaded at run time, and its errors.

use std::ffi::CStr;
use std::sync::OnceLock;

use kvcore::{Error, Result};

use crate::bindings::{Hccl, types as sys};
use crate::errors::{NAME, no_device};
use crate::library::{Library, library, missing, open};

/// HCCL, and the CANN libraries that it relies on.
pub(super) struct HcclLibrary {
    pub(super) hccl: Hccl,
    pub(super) base: &'static Library,
}

/// Returns HCCL, which is loaded on the first call.
///
/// # Errors
/// Returns [`Error::NoDevice`] if CANN or HCCL is missing, or if HCCL lacks a function.
pub(super) fn loaded() -> Result<&'static HcclLibrary> {
    static LOADED: OnceLock<std::result::Result<HcclLibrary, String>> = OnceLock::new();
    let base = library()?;
    LOADED.get_or_init(|| HcclLibrary::load(base)).as_ref().map_err(|reason| no_device(reason.clone()))
}

impl HcclLibrary {
    fn load(base: &'static Library) -> std::result::Result<Self, String> {
        let library = open("libhccl.so")?;
        // SAFETY: the functions have the types that `ascend.h` declares, which `cargo xtask ascend-headers`
        // compares with HCCL's headers.
        let hccl = unsafe { Hccl::from_library(library) };
        let mut lacks = missing!(
            hccl,
            HcclGetRootInfo,
            HcclCommInitRootInfo,
            HcclCommInitAll,
            HcclCommDestroy,
            HcclGetCommAsyncError,
            HcclGetErrorString,
            HcclBroadcast,
            HcclAllGather,
            HcclAllReduce,
            HcclBatchSendRecv,
        );
        lacks.extend(missing!(base.acl, aclrtSynchronizeStreamWithTimeout, aclrtDestroyStreamForce));
        if lacks.is_empty() {
            return Ok(Self { hccl, base });
        }
        Err(format!("HCCL lacks {}; install CANN 8.0 or later", lacks.join(", ")))
    }

    /// Checks the return code of a call.
    ///
    /// # Errors
    /// Returns [`Error::Device`] for any code except success.
    pub(super) fn check(&self, what: &str, code: sys::HcclResult) -> Result<()> {
        if code == sys::HCCL_SUCCESS {
            return Ok(());
        }
        // SAFETY: the string belongs to HCCL and is never freed.
        let message = unsafe {
            let message = self.hccl.HcclGetErrorString(code);
            if message.is_null() { c"" } else { CStr::from_ptr(message) }.to_string_lossy()
        };
        let reason = format!("HCCL: {what}: {message} ({})", self.base.text(code as i32));
        Err(Error::Device { backend: NAME, reason })
    }
}
