//! A group's ID, which its ranks use to find one another.

use std::ffi::c_char;

use cudarc::nccl::sys::ncclUniqueId;
use kvcore::Result;

use super::library::library;

/// The ID of a group of ranks. One rank creates it, and the caller passes it to the other ranks: in a file,
/// through a socket, or through the process launcher. It contains the address at which the creating process
/// waits for the other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NcclId([u8; Self::LEN]);

impl NcclId {
    /// Length of an ID in bytes.
    pub const LEN: usize = 128;

    /// Creates a unique ID. The calling process must stay alive until all ranks have joined.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::NoDevice`] if NCCL is missing or too old, and [`kvcore::Error::Device`] if
    /// NCCL finds no network interface.
    pub fn new() -> Result<Self> {
        let nccl = library()?;
        let mut id = ncclUniqueId { internal: [0; Self::LEN] };
        // SAFETY: `id` is valid for writes.
        let code = unsafe { (nccl.unique_id)(&raw mut id) };
        nccl.check("a name for a group", std::ptr::null_mut(), code)?;
        Ok(Self(id.internal.map(|byte| byte as u8)))
    }

    /// Creates the ID from bytes that another process sent.
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes to send to other processes.
    pub fn as_bytes(&self) -> &[u8; Self::LEN] {
        &self.0
    }

    pub(super) fn raw(&self) -> ncclUniqueId {
        ncclUniqueId { internal: self.0.map(|byte| byte as c_char) }
    }
}
