//! Options for documents on a disk.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use kvchunk::LoadRule;
use kvcore::PolicyKind;
use kvengine::Engine;
use kvtier::{Slab, SlabConfig};

use super::{EngineArgs, WayArgs, at_least_one};
use crate::error::Result;

/// Options for documents that outlive the program, shared by all commands that reuse documents.
#[derive(Debug, Args)]
pub(crate) struct DiskArgs {
    /// Folder in which documents outlive the program: computed documents are saved there, and missing documents
    /// are loaded instead of computed. One program at a time can use a folder.
    #[arg(long, value_name = "FOLDER")]
    disk: Option<PathBuf>,

    /// When to load from the disk. faster: if that is expected to take less time than computing. always: whatever
    /// is there.
    #[arg(long, value_enum, requires = "disk", default_value = "faster")]
    disk_loads: DiskLoads,

    /// Host memory for what was saved or loaded last, such as 4GiB. What leaves the device is then found there, without a
    /// read of the disk. Useful if the caches are in the memory of a GPU or NPU. Default: none.
    #[arg(long, value_name = "SIZE", requires = "disk", value_parser = bytes)]
    disk_memory: Option<u64>,

    #[command(flatten)]
    file: DiskFileArgs,
}

/// Options for the file in the folder, shared by all commands that fill it.
#[derive(Debug, Args)]
pub(crate) struct DiskFileArgs {
    /// The largest size of the folder, such as 50GiB or 800MB. Its file has the full size from the start. Default: the
    /// size that the folder has, or 10GiB for a new one. A smaller size than before empties the folder, and so does
    /// one that is many times larger.
    #[arg(long, value_name = "SIZE", requires = "disk", value_parser = bytes)]
    disk_limit: Option<u64>,

    /// Policy for what leaves the folder first when it is full. lru: those not used for the longest time. s3-fifo,
    /// tiny-lfu: those that were used only once, so that many new documents do not push out popular ones.
    #[arg(long, value_enum, requires = "disk", default_value = "lru")]
    disk_policy: DiskPolicy,
}

impl DiskFileArgs {
    /// Returns the settings of the file.
    pub(crate) fn config(&self, folder: &Path) -> SlabConfig {
        let policy = match self.disk_policy {
            DiskPolicy::Lru => PolicyKind::Lru,
            DiskPolicy::S3Fifo => PolicyKind::S3Fifo,
            DiskPolicy::TinyLfu => PolicyKind::TinyLfu,
        };
        let default = SlabConfig::default();
        let limit = self.disk_limit.or_else(|| Slab::size_in(folder)).unwrap_or(default.limit);
        SlabConfig { limit, policy, ..default }
    }
}

/// The policies for what leaves a full disk. Records have no priorities.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum DiskPolicy {
    Lru,
    S3Fifo,
    TinyLfu,
}

impl DiskArgs {
    /// Opens the folder, if there is one, below the engine's caches.
    pub(crate) fn open(&self, engine: &mut Engine) -> Result<()> {
        let Some(folder) = &self.disk else { return Ok(()) };
        let memory = self.disk_memory.unwrap_or_default();
        let memory_bytes = usize::try_from(memory).unwrap_or(usize::MAX);
        engine.open_disk(folder, SlabConfig { memory_bytes, ..self.file.config(folder) })?;
        engine.load_from_disk(match self.disk_loads {
            DiskLoads::Faster => LoadRule::IfFaster,
            DiskLoads::Always => LoadRule::Always(PATIENCE),
        });
        Ok(())
    }
}

/// The longest time that a prompt waits for a disk with `--disk-loads always`.
const PATIENCE: Duration = Duration::from_secs(60);

/// The rule for loading from the disk.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum DiskLoads {
    Faster,
    Always,
}

/// Options of `kvc warm`.
#[derive(Debug, Args)]
#[command(after_help = "\
Give the same --system, --chat, --model, --dtype, --block-size and options for the reuse of documents as to `kvc run`
later, because the keys and values of documents depend on them. What is on the disk already is not computed
again, so an interrupted `kvc warm` continues where it stopped:

    kvc warm ./handbook --disk ./kv --system 'You answer questions about the handbook.'
    kvc run --disk ./kv --system 'You answer questions about the handbook.' --document ./handbook/leave.txt -p 'How many days?'")]
pub(crate) struct WarmArgs {
    /// Documents: a folder of text files, a text file, or a .jsonl file whose lines are strings or objects with a
    /// field `text`.
    #[arg(required = true, value_name = "FOLDER|FILE")]
    pub(crate) sources: Vec<PathBuf>,

    /// Folder in which the documents' keys and values are stored.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) disk: PathBuf,

    #[command(flatten)]
    pub(crate) file: DiskFileArgs,

    /// GGUF file, or Hugging Face directory with config.json, safetensors and tokenizer.json. Default: the
    /// built-in model.
    #[arg(long, value_name = "PATH")]
    pub(crate) model: Option<PathBuf>,

    /// System prompt in front of the documents: the system message with --chat, otherwise text at the start of the
    /// prompt.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) system: Option<String>,

    /// Put the documents into the model's chat template. Default: raw text.
    #[arg(long)]
    pub(crate) chat: bool,

    #[command(flatten)]
    pub(crate) way: WayArgs,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,

    /// Tokens per block of the cache.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    pub(crate) block_size: usize,

    /// Print only one JSON object on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of `kvc inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// Folder that `--disk` has filled. Another program may be using it.
    #[arg(value_name = "FOLDER")]
    pub(crate) folder: PathBuf,

    /// Read every record, and count those whose bytes have changed.
    #[arg(long)]
    pub(crate) check: bool,

    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
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
pub(super) fn bytes(text: &str) -> std::result::Result<u64, String> {
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
