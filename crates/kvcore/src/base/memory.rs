//! Kinds of memory.

use std::fmt;

/// Which memory a storage lies in. A disk is a tier below, not a memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// The device's own memory (for the CPU backend: host memory).
    Device,
    /// Host memory that the device reaches directly; zeroed on allocation.
    Pinned,
    /// Ordinary host memory.
    System,
}

impl MemoryKind {
    /// Whether it is memory of the host.
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
