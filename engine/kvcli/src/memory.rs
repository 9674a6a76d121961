//! The memory that a run used.

use std::fmt;

use kvengine::Engine;
use serde::Serialize;

/// The peak memory of the process, and the memory of the model and its caches, in bytes.
#[derive(Debug, Clone, Copy, Serialize)]
#[allow(clippy::struct_field_names, reason = "the names of the JSON")]
pub(crate) struct MemoryJson {
    /// The process's maximum resident size in bytes, if the system reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_bytes: Option<usize>,
    weight_bytes: usize,
    kv_bytes: usize,
}

impl MemoryJson {
    pub(crate) fn of(engine: &Engine) -> Self {
        let (weight_bytes, kv_bytes) = (engine.model().weight_bytes(), engine.report().kv_bytes);
        Self { peak_bytes: peak(), weight_bytes, kv_bytes }
    }
}

impl fmt::Display for MemoryJson {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: usize| bytes as f64 / 1_048_576.0;
        write!(f, "{:.1} MiB of weights, {:.1} MiB for KV", mib(self.weight_bytes), mib(self.kv_bytes))?;
        match self.peak_bytes {
            Some(peak) => write!(f, "; peak memory {:.1} MiB", mib(peak)),
            None => Ok(()),
        }
    }
}

/// Returns the maximum resident size so far, as Linux reports it.
fn peak() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
