//! Options for documents on a disk.

use std::path::PathBuf;

use clap::Args;
use kvengine::Engine;
use kvtier::SlabConfig;

use crate::error::Result;

/// Options for documents that outlive the program, shared by all commands that reuse documents.
#[derive(Debug, Args)]
pub(crate) struct DiskArgs {
    /// Folder in which documents outlive the program: computed documents are saved there, and missing documents
    /// are loaded instead of computed. One program at a time can use a folder.
    #[arg(long, value_name = "FOLDER")]
    disk: Option<PathBuf>,

    /// The largest size of the folder, such as 50GiB or 800MB. Its file has the full size from the start.
    #[arg(long, value_name = "SIZE", requires = "disk", default_value = "10GiB", value_parser = bytes)]
    disk_limit: u64,
}

impl DiskArgs {
    /// Opens the folder, if there is one, below the engine's caches.
    pub(crate) fn open(&self, engine: &mut Engine) -> Result<()> {
        let Some(folder) = &self.disk else { return Ok(()) };
        let config = SlabConfig { limit: self.disk_limit, ..SlabConfig::default() };
        Ok(engine.open_disk(folder, config)?)
    }
}

/// The units of sizes. Longer names come first, because some end with another unit.
const UNITS: [(&str, u64); 9] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("b", 1),
];

/// Reads a size with a unit, or in bytes.
fn bytes(text: &str) -> std::result::Result<u64, String> {
    let lower = text.trim().to_ascii_lowercase();
    let unit = UNITS.iter().find_map(|&(unit, scale)| Some((lower.strip_suffix(unit)?, scale)));
    let (number, scale) = unit.unwrap_or((&lower, 1));
    let number: f64 =
        number.trim().parse().map_err(|_| format!("{text:?} is not a size; write 50GiB or 800MB"))?;
    let bytes = number * scale as f64;
    if (1.0..=u64::MAX as f64 / 2.0).contains(&bytes) {
        Ok(bytes as u64)
    } else {
        Err(format!("{text:?} is not a possible size of a file"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, expected) in
            [("1", 1), ("4096", 4096), ("1.5KiB", 1536), ("50GiB", 50 << 30), (" 800 MB", 800_000_000)]
        {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for text in ["", "GiB", "ten", "-1GiB", "0", "nan", "inf", "1e300TiB", "5 apples"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
