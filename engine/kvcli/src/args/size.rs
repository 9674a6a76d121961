//! Options of `kvc size`.

use std::path::PathBuf;

use clap::Args;
use kvcore::KvFormat;

use super::{at_least_one, kv_format};

/// Options of `kvc size`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:

    kvc size ./Qwen3-0.6B --context 32768 --requests 16
    kvc size config.json --kv-memory 40960 --dtype fp8-e4m3
    kvc size model.gguf --json

The weights need not be there: a config.json, or the beginning of a GGUF file, is enough.")]
pub(crate) struct SizeArgs {
    /// Hugging Face directory, config.json or GGUF file.
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,

    /// Tokens of each request: its prompt and its answer. Default: the model's maximum.
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one)]
    pub(crate) context: Option<usize>,

    /// Number of requests at the same time.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub(crate) requests: usize,

    /// Storage format of keys and values (see `kvc run --help`). May be repeated. Default: the usual ones.
    #[arg(long = "dtype", value_name = "FORMAT", value_parser = kv_format)]
    pub(crate) formats: Vec<KvFormat>,

    /// Tokens per block of the cache. Requests take whole blocks.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    pub(crate) block_size: usize,

    /// Memory for keys and values, in MiB: also show how many requests fit into it.
    #[arg(long, value_name = "MIB", value_parser = at_least_one)]
    pub(crate) kv_memory: Option<usize>,

    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}
