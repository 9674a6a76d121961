//! The name of a group, by which its ranks find one another.

use std::ffi::c_char;

use cudarc::nccl::sys::ncclUniqueId;
use kvcore::Result;

use super::library::library;

/// The name of a group of ranks. One rank makes it, and the caller carries it to the others: by a file, a
/// socket or the launcher of the processes. It holds the address at which the process that made it waits for
/// the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NcclId([u8; Self::LEN]);

impl NcclId {
    /// Number of bytes of a name.
    pub const LEN: usize = 128;

    /// Makes a name that no other group has. The calling process stays alive until all ranks have joined.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::NoDevice`] if NCCL is missing or too old, and [`kvcore::Error::Device`] if it
    /// finds no network interface.
    pub fn new() -> Result<Self> {
        let nccl = library()?;
        let mut id = ncclUniqueId { internal: [0; Self::LEN] };
        // SAFETY: `id` is a valid place for the answer.
        let code = unsafe { (nccl.unique_id)(&raw mut id) };
        nccl.check("a name for a group", std::ptr::null_mut(), code)?;
        Ok(Self(id.internal.map(|byte| byte as u8)))
    }

    /// Returns a name that another process has made.
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes to carry.
    pub fn as_bytes(&self) -> &[u8; Self::LEN] {
        &self.0
    }

    pub(super) fn raw(&self) -> ncclUniqueId {
        ncclUniqueId { internal: self.0.map(|byte| byte as c_char) }
    }
}
