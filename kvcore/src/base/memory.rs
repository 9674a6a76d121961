//! Kinds of memory.

use std::fmt;

/// The kind of memory that a storage is in. Disks are not memory and are not listed here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// The device's own memory. For the CPU backend this is host memory.
    Device,
    /// Host memory that the device accesses directly.
    Pinned,
    /// Ordinary host memory.
    System,
}

impl MemoryKind {
    /// Returns whether the memory belongs to the host.
    pub const fn is_host(self) -> bool {
        !matches!(self, Self::Device)
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Device => "device",
            Self::Pinned => "pinned",
            Self::System => "system",
        })
    }
}
