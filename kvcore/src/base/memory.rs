//! Kinds of memory.

use std::fmt;

/// The kind of memory of a storage. Disks are a tier below memory and have no kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// The device's own memory. For the CPU backend this is host memory.
    Device,
    /// Host memory that the device accesses directly. Zeroed on allocation.
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
