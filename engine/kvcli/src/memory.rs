//! The memory that a run used, and the memory that is free.

use std::fmt;

use kvengine::Engine;
use serde::Serialize;

use crate::error::{Error, Result};

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

/// Checks that this process can have `needed` bytes of memory for the weights of a model of the size
/// `layers` x `width`.
///
/// # Errors
/// Returns [`Error::ModelTooLarge`], with the memory that is free.
pub(crate) fn check_room((layers, width): (usize, usize), needed: u64) -> Result<()> {
    let free = free();
    // A limit of the process is not the machine's, and shows only when memory is asked for.
    let refused = || {
        let bytes = usize::try_from(needed).unwrap_or(usize::MAX);
        Vec::<u8>::new().try_reserve_exact(bytes).is_err()
    };
    if free.is_some_and(|free| needed > free) || refused() {
        return Err(Error::ModelTooLarge {
            layers,
            width,
            needed: needed >> 20,
            free: free.map(|free| free >> 20),
        });
    }
    Ok(())
}

/// Returns the bytes of memory that are free for this process: those of the machine, or fewer in a control group with
/// a limit. Returns `None` if the system does not say so.
fn free() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = info.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB"));
    let machine = kib?.trim().parse::<u64>().ok()?.saturating_mul(1024);
    let group = free_in_group(|name| std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok());
    Some(group.map_or(machine, |group| group.min(machine)))
}

/// Returns the bytes that a control group leaves, by the contents of its files. The group counts the pages of files,
/// and takes those that were not used lately before it refuses memory. Returns `None` for a group without a limit.
fn free_in_group(content: impl Fn(&str) -> Option<String>) -> Option<u64> {
    let number = |name: &str| content(name)?.trim().parse::<u64>().ok();
    let most = number("memory.max")?;
    let inactive = content("memory.stat").and_then(|stat| {
        let line = stat.lines().find_map(|line| line.strip_prefix("inactive_file "))?;
        line.trim().parse::<u64>().ok()
    });
    let used = number("memory.current").unwrap_or(0).saturating_sub(inactive.unwrap_or(0));
    Some(most.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_files_that_a_group_can_take_back_are_free() {
        let free = |most: &'static str, used: &'static str, stat: &'static str| {
            free_in_group(|name| {
                let text = match name {
                    "memory.max" => most,
                    "memory.current" => used,
                    "memory.stat" => stat,
                    _ => "",
                };
                (!text.is_empty()).then(|| text.to_owned())
            })
        };
        let stat = "anon 100\nfile 700\ninactive_file 600\nactive_file 50\n";
        assert_eq!(free("1000\n", "800\n", stat), Some(800));
        assert_eq!(free("1000\n", "800\n", "total_inactive_file 600\nanon 3\n"), Some(200));
        assert_eq!(free("1000\n", "800\n", ""), Some(200), "a group without statistics");
        assert_eq!(free("1000\n", "500\n", "inactive_file 600\n"), Some(1000), "numbers of two times");
        assert_eq!(free("1000\n", "1200\n", "inactive_file 100\n"), Some(0));
        assert_eq!(free("1000\n", "", stat), Some(1000));
        assert_eq!(free("max\n", "800\n", stat), None);
        assert_eq!(free("", "", ""), None);
    }
}
