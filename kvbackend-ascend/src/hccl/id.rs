//! A group's ID, which its ranks use to find one another.

use std::ffi::c_char;
use std::fmt;

use kvcore::Result;

use super::library::loaded;
use crate::backend::AscendBackend;
use crate::bindings::types as sys;

/// The root information of a group of ranks. One rank creates it, and the caller passes it to the other
/// ranks: in a file, through a socket, or through the process launcher. It contains the address at which the
/// creating process waits for the other ranks.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct HcclId([u8; Self::LEN]);

impl fmt::Debug for HcclId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HcclId")
    }
}

impl HcclId {
    /// Length of an ID in bytes.
    pub const LEN: usize = sys::HCCL_ROOT_INFO_BYTES as usize;

    /// Creates a unique ID. `backend` must be rank 0's backend. The calling process must stay alive until all
    /// ranks have joined.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::NoDevice`] if HCCL is missing, or [`kvcore::Error::Device`] if HCCL reports
    /// an error.
    pub fn new(backend: &AscendBackend) -> Result<Self> {
        let loaded = loaded()?;
        let _current = backend.npu.bind()?;
        let mut info = sys::HcclRootInfo { internal: [0; Self::LEN] };
        // SAFETY: `info` is valid for writes, and the context of rank 0's device is current.
        let code = unsafe { loaded.hccl.HcclGetRootInfo(&raw mut info) };
        loaded.check("a name for a group", code)?;
        Ok(Self(info.internal.map(|byte| byte as u8)))
    }

    /// Creates the ID from bytes that another process sent.
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes to send to other processes.
    pub fn as_bytes(&self) -> &[u8; Self::LEN] {
        &self.0
    }

    pub(super) fn raw(&self) -> sys::HcclRootInfo {
        sys::HcclRootInfo { internal: self.0.map(|byte| byte as c_char) }
    }
}
