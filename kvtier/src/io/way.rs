//! The ways of I/O, and which of them is used.

use std::fmt;

use serde::Serialize;

/// How a file's requests reach the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum IoWay {
    /// `io_uring` with memory that the kernel has mapped in advance. A few MiB must be locked, which containers
    /// often do not allow (`ulimit -l`).
    RegisteredUring,
    /// `io_uring` with any memory. The default seccomp profile of container engines refuses it.
    Uring,
    /// Threads that call `pread` and `pwrite`, which always works.
    Threads,
}

impl IoWay {
    /// All ways, in the order in which they are tried.
    pub const ALL: [Self; 3] = [Self::RegisteredUring, Self::Uring, Self::Threads];
}

impl fmt::Display for IoWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RegisteredUring => "io_uring with registered buffers",
            Self::Uring => "io_uring",
            Self::Threads => "threads",
        })
    }
}

/// The way that is used, and why the ways before it are not. Prints as text for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IoChoice {
    /// The way that is used.
    pub way: IoWay,
    /// The ways that were tried before, each with the reason why it cannot be used here.
    pub refused: Vec<(IoWay, String)>,
}

impl fmt::Display for IoChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.way)?;
        self.refused.iter().try_for_each(|(way, reason)| write!(f, "; not {way}: {reason}"))
    }
}
