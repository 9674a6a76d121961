//! The command line.

use std::path::PathBuf;
use std::str::FromStr;

mod asking;
mod bench;
mod disk;
mod doctor;
mod eval;
mod prompt;
mod sampling;
mod serve;
mod size;
mod sleep;
mod tune;
mod way;

pub(crate) use asking::{AskingArgs, EngineArgs};
pub(crate) use bench::{BenchArgs, BenchKind, MeasuredArgs, RagArgs, ServeArgs};
pub(crate) use disk::{DiskArgs, InspectArgs, WarmArgs};
pub(crate) use doctor::{AnswersArgs, DoctorArgs, Examined};
pub(crate) use eval::EvalArgs;
pub(crate) use prompt::PromptArgs;
pub(crate) use sampling::{FormArgs, SamplingArgs};
pub(crate) use serve::{LogFormat, ServerArgs};
pub(crate) use size::SizeArgs;
pub(crate) use sleep::SleepArgs;
pub(crate) use tune::TuneArgs;
pub(crate) use way::{WayArgs, way};

use clap::error::ErrorKind;
use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use kvchunk::{ComputeMode, HashAlgorithm, PositionStrategy, Recompute};
use kvcore::{CacheKind, KeyForm, KvFormat, MaxLen};
use kvengine::DEFAULT_GRAPHS;
use kvmodel::dense::ComputeType;

/// Run a language model that computes the keys and values of documents once and reuses them at any position.
#[derive(Debug, Parser)]
#[command(name = "kvc", version, propagate_version = true)]
#[command(after_help = "\
A prompt can have parts: a system prompt, documents and a question. Give them one by one, or split the prompt at a separator:

    kvc run --system SYSTEM --document FILE --document FILE --prompt QUESTION
    kvc run --separator '##' --prompt 'SYSTEM ## DOCUMENT ## DOCUMENT ## QUESTION'

Documents do not see each other; the question sees everything. Each document's keys and values are
computed once and reused in other prompts, in any order and at any position, without being copied.
A prompt without parts is an ordinary prompt.

Start with:  kvc demo")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// Parses the command line. Exits with code 2 if the arguments are invalid.
    pub(crate) fn of_the_program() -> Self {
        let cli = Self::parse_with_file();
        let without_effect = match &cli.command {
            Command::Serve(args) => args.without_effect(),
            Command::Run(args) => args.without_effect().or_else(|| args.sampling.without_effect()),
            Command::Doctor(DoctorArgs { examined: Some(Examined::Answers(args)), .. }) => {
                args.asked.without_effect()
            }
            _ => None,
        };
        if let Some(what) = without_effect {
            Self::command().error(ErrorKind::ArgumentConflict, what).exit();
        }
        cli
    }
}

impl RunArgs {
    /// Returns an error message if a given option has no effect on the prompt or on the chosen kind of cache.
    fn without_effect(&self) -> Option<&'static str> {
        self.asked.without_effect().or(match self.cache {
            Cache::Paged | Cache::Grouped if self.max_len.is_some() => {
                Some("--max-len applies only to --cache static")
            }
            Cache::Static | Cache::Grouped if self.memory_share.is_some() => {
                Some("--memory-share applies only to --cache paged")
            }
            _ => None,
        })
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Ask the built-in model about a few documents, several times and in different orders.
    Demo(DemoArgs),
    /// Answer one prompt.
    Run(Box<RunArgs>),
    /// Measure the accuracy of answers with and without reuse, and the cost of each strategy.
    Eval(Box<EvalArgs>),
    /// Find the cheapest reuse settings whose loss compared with full attention is within a limit, and write
    /// them to a file for --reuse.
    Tune(Box<TuneArgs>),
    /// Answer requests over HTTP, as clients of existing APIs send them.
    Serve(Box<ServerArgs>),
    /// Compute documents ahead of time, and store their keys and values on a disk for later runs.
    Warm(Box<WarmArgs>),
    /// Describe what is stored on a disk.
    Inspect(InspectArgs),
    /// Examine a disk, a running server, or an answer that differs with reuse.
    Doctor(DoctorArgs),
    /// Measure a workload.
    Bench(Box<BenchArgs>),
    /// Compute how much memory a model's keys and values take, without its weights.
    Size(SizeArgs),
    /// List the devices of this machine that --backend accepts, with their limits and features.
    Devices(DevicesArgs),
    /// Print a script with which a shell completes commands and options.
    Completions(CompletionsArgs),
}

/// Options of `kvc completions`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:

    kvc completions bash > ~/.local/share/bash-completion/completions/kvc
    kvc completions zsh > ~/.zfunc/_kvc
    kvc completions fish > ~/.config/fish/completions/kvc.fish")]
pub(crate) struct CompletionsArgs {
    /// The shell.
    #[arg(value_name = "SHELL", value_enum)]
    pub(crate) shell: Shell,
}

/// Options of `kvc devices`.
#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// Print JSON instead of a table: devices under `devices`, backends without a device under `missing`.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of `kvc demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Backend for keys, values and attention: cpu, cuda, cuda:INDEX, ascend, ascend:INDEX, wgpu or
    /// wgpu:ADAPTER (see `kvc devices`).
    #[arg(long, value_name = "NAME", default_value = "cpu", value_parser = backend)]
    pub(crate) backend: BackendName,

    /// Storage format of keys and values (see `kvc run --help`).
    #[arg(long, value_name = "FORMAT", default_value = "f32", value_parser = kv_format)]
    pub(crate) dtype: KvFormat,

    /// Print a JSON array with one object per request instead of tables.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of `kvc run`.
#[allow(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:

    kvc run --system 'you answer questions' --document a.txt --document b.txt -p 'alba ?'
    kvc run --separator '##' -p 'you answer questions ## alba is red . ## bora is blue . ## alba ?'
    kvc run --model ./Qwen3-0.6B --chat -p 'Why is the sky blue?'
    kvc run --model ./Qwen3-0.6B --messages chat.json --temperature 0.7 --top-p 0.9
    cat prompt.txt | kvc run --model ./model --json -

With --chunk-sleep, all documents are put to sleep after each --warm prompt, and a prompt wakes the documents that it
contains. With --disk, documents are found again when the program is started again:

    kvc run --disk ./kv --document a.txt --document b.txt -p 'alba ?'

With --prompt-cache, the prompt alone is kept in a file that can be copied elsewhere:

    kvc run --prompt-cache alba.kv --document a.txt --document b.txt -p 'alba ?'")]
#[command(group = clap::ArgGroup::new("input").required(true).args(["prompt", "prompt_file", "stdin", "messages"]))]
pub(crate) struct RunArgs {
    /// GGUF file, or Hugging Face directory with config.json, safetensors and tokenizer.json. Default: the
    /// built-in model.
    #[arg(long, value_name = "PATH")]
    pub(crate) model: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) asked: PromptArgs,

    #[command(flatten)]
    pub(crate) sleep: SleepArgs,

    #[command(flatten)]
    pub(crate) disk: DiskArgs,

    /// File for the keys and values of this prompt alone: if it exists, they are restored from it before the prompt is
    /// computed, and they are saved there after the answer. For a folder of many documents, use --disk.
    #[arg(long, value_name = "FILE")]
    pub(crate) prompt_cache: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) way: WayArgs,

    /// Hash function for document keys. Every hit compares the document's tokens; with xxh3-128, it also
    /// compares everything else that the key covers.
    #[arg(long, value_enum, default_value = "blake3")]
    pub(crate) hash: Hash,

    /// If a document is not cached for this system prompt, use a copy that was computed with another system
    /// prompt of at most the same length. Faster, but the error is unbounded.
    #[arg(long)]
    pub(crate) cross_system_reuse: bool,

    /// Compute everything from scratch with the same attention mask. The answer is the same but takes longer.
    #[arg(long, conflicts_with_all = ["chunk_sleep", "prompt_cache"])]
    pub(crate) no_chunk_cache: bool,

    /// Let documents attend to each other, as in an ordinary prompt.
    #[arg(long, conflicts_with_all = ["recompute", "positions", "chunks", "chunk_sleep", "reuse"])]
    pub(crate) full_attention: bool,

    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,

    /// Storage format of keys and values: f32, f16, bf16, int8, int4, fp8-e4m3 or fp8-e5m2. `int8:16` stores
    /// one scale per 16 elements of a head instead of 32.
    #[arg(long, value_name = "FORMAT", default_value = "f32", value_parser = kv_format)]
    pub(crate) dtype: KvFormat,

    /// Form of keys in the cache. rotated: keys are rotated to a position when they are stored, so they
    /// are read without rotation. unrotated: each key is rotated whenever it is read.
    #[arg(long, value_name = "FORM", default_value = "rotated", value_parser = key_form)]
    pub(crate) keys: KeyForm,

    /// Format of weights in memory: unchanged, f32, or eight-bit blocks. On an Ascend NPU, weights are
    /// always f32. Unchanged weights of large files stay in the files, which must not change; `copy` copies
    /// them into memory.
    #[arg(long, value_enum, default_value = "stored")]
    pub(crate) weights: WeightsFormat,

    /// Precision of matrix products on the host. exact: only sums are rounded. bf16: for weights in bf16,
    /// activations are rounded to bf16, as in other programs; faster on processors with bf16 dot products
    /// (AVX-512 BF16). int8: for weights in ggml blocks, activations are rounded to eight bits, as llama.cpp
    /// does; faster on processors with eight-bit dot products (VNNI). Keys and values of one type are not
    /// found by the others.
    #[arg(long, value_name = "TYPE", default_value = "exact", value_parser = compute_type)]
    pub(crate) compute: ComputeType,

    /// Tokens per block of the cache.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    pub(crate) block_size: usize,

    /// Kind of cache. paged: blocks on demand, with chunks and shared prefixes. static: one contiguous run of
    /// slots for the prompt and its answer. grouped: blocks on demand, with one pool per group of layers;
    /// layers with a sliding window free the blocks that have left the window. Only a paged cache keeps
    /// documents: with other kinds, prompts in parts need `--full-attention`.
    #[arg(long, value_enum, default_value = "paged")]
    pub(crate) cache: Cache,

    /// Maximum length of a sequence in a static cache; `max` or 0 means the model's limit. Default: max.
    #[arg(long, value_name = "TOKENS", value_parser = max_len)]
    pub(crate) max_len: Option<MaxLen>,

    /// Memory for keys and values, in MiB. Default: enough for eight prompts of the model's maximum length,
    /// at most 2048.
    #[arg(long, value_name = "MIB", value_parser = at_least_one)]
    pub(crate) kv_memory: Option<usize>,

    /// Fraction of --kv-memory to reserve for documents; prompts use the rest. Default: 0.5.
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) memory_share: Option<f64>,

    /// Backend for keys, values and attention: cpu, cuda, cuda:INDEX, ascend, ascend:INDEX, wgpu or
    /// wgpu:ADAPTER (see `kvc devices`).
    #[arg(long, value_name = "NAME", default_value = "cpu", value_parser = backend)]
    pub(crate) backend: BackendName,

    /// Number of graphs of decode steps to keep, on a backend that can capture them (ascend; cuda with
    /// cuBLAS). A captured step is a single launch; with 0, every kernel is launched separately. The answer
    /// is the same. Other backends ignore the option.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_GRAPHS)]
    pub(crate) graphs: usize,

    /// Number of threads for the CPU backend and for matrix products. Default: one per logical processor for
    /// the backend, and one per physical core for matrix products.
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,

    /// Show a breakdown of the time spent.
    #[arg(long)]
    pub(crate) profile: bool,

    /// Print only one JSON object on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Positions {
    Overlapped,
    Sequential,
    Absolute,
}

impl From<Positions> for PositionStrategy {
    fn from(positions: Positions) -> Self {
        match positions {
            Positions::Overlapped => Self::Overlapped,
            Positions::Sequential => Self::Sequential,
            Positions::Absolute => Self::Absolute,
        }
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Hash {
    Blake3,
    Sha256,
    #[value(name = "xxh3-128")]
    Xxh3,
}

impl From<Hash> for HashAlgorithm {
    fn from(hash: Hash) -> Self {
        match hash {
            Hash::Blake3 => Self::Blake3,
            Hash::Sha256 => Self::Sha256,
            Hash::Xxh3 => Self::Xxh3,
        }
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Cache {
    Paged,
    Static,
    Grouped,
}

impl From<Cache> for CacheKind {
    fn from(cache: Cache) -> Self {
        match cache {
            Cache::Paged => Self::Paged,
            Cache::Static => Self::Static,
            Cache::Grouped => Self::Grouped,
        }
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum WeightsFormat {
    Stored,
    F32,
    Q8,
    Copy,
}

/// A backend, by name. The program's Cargo features determine which backends are built in.
#[derive(Debug, Clone)]
pub(crate) enum BackendName {
    Cpu,
    /// The wgpu backend, with the adapter's index or a part of its name.
    #[cfg_attr(not(feature = "wgpu"), expect(dead_code, reason = "this build only reports what it lacks"))]
    Wgpu(Option<String>),
    /// The CUDA backend, with the device's index.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "this build only reports what it lacks"))]
    Cuda(usize),
    /// The Ascend backend.
    #[cfg_attr(not(feature = "ascend"), expect(dead_code, reason = "this build only reports what it lacks"))]
    Ascend {
        /// The index of the device.
        device: usize,
        /// True if fused operators must not be called.
        plain: bool,
    },
}

fn backend(text: &str) -> Result<BackendName, String> {
    match text.split_once(':') {
        None if text == "cpu" => Ok(BackendName::Cpu),
        None if text == "wgpu" => Ok(BackendName::Wgpu(None)),
        Some(("wgpu", adapter)) if !adapter.is_empty() => Ok(BackendName::Wgpu(Some(adapter.to_owned()))),
        None if text == "cuda" => Ok(BackendName::Cuda(0)),
        Some(("cuda", number)) => device_number("a CUDA device", number).map(BackendName::Cuda),
        None if text == "ascend" => Ok(BackendName::Ascend { device: 0, plain: false }),
        Some(("ascend", rest)) => {
            let (number, plain) = rest.strip_suffix(":plain").map_or((rest, false), |number| (number, true));
            device_number("an Ascend device", number).map(|device| BackendName::Ascend { device, plain })
        }
        _ => Err("must be cpu, cuda (an NVIDIA GPU), cuda:INDEX, ascend (an NPU), ascend:INDEX, wgpu (any GPU, including \
                  NVIDIA's) or wgpu:ADAPTER; kvc devices lists the devices"
            .to_owned()),
    }
}

fn device_number(what: &str, number: &str) -> Result<usize, String> {
    let number_of = number.parse::<u16>().map(usize::from);
    number_of.map_err(|_| format!("{number:?} is not the index of {what}; kvc devices lists the devices"))
}

fn separator(text: &str) -> Result<String, String> {
    if text.is_empty() {
        Err("an empty separator would split the prompt everywhere".to_owned())
    } else {
        Ok(text.to_owned())
    }
}

fn number<T: FromStr>(text: &str, fits: impl Fn(&T) -> bool, needed: &str) -> Result<T, String> {
    text.parse().ok().filter(fits).ok_or_else(|| format!("must be {needed}"))
}

/// Parses a number of threads. Each has a stack of its own.
fn threads(text: &str) -> Result<usize, String> {
    number(text, |&n| (1..=1024).contains(&n), "a whole number from 1 to 1024")
}

fn at_least_one(text: &str) -> Result<usize, String> {
    number(text, |&n| n > 0, "a whole number, 1 or more")
}

fn mode(text: &str) -> Result<ComputeMode, String> {
    text.parse().map_err(|error: kvchunk::Error| error.to_string())
}

fn recompute(text: &str) -> Result<Recompute, String> {
    text.parse().map_err(|error: kvchunk::Error| error.to_string())
}

/// Parses a fraction above 0 and below 1.
fn share(text: &str) -> Result<f64, String> {
    number(text, |&share| share > 0.0 && share < 1.0, "a number above 0 and below 1")
}

/// Parses a number of percentage points, from 0 to 100.
fn points(text: &str) -> Result<f64, String> {
    number(text, |points| (0.0..=100.0).contains(points), "a number from 0 to 100")
}

fn positive(text: &str) -> Result<f32, String> {
    number(text, |x: &f32| x.is_finite() && *x > 0.0, "a number above 0")
}

fn kv_format(text: &str) -> Result<KvFormat, String> {
    text.parse().map_err(|error: kvcore::Error| error.to_string())
}

fn key_form(text: &str) -> Result<KeyForm, String> {
    text.parse().map_err(|error: kvcore::Error| error.to_string())
}

fn compute_type(text: &str) -> Result<ComputeType, String> {
    text.parse().map_err(|error: kvcore::Error| error.to_string())
}

fn max_len(text: &str) -> Result<MaxLen, String> {
    match text.parse::<usize>() {
        Ok(tokens) => Ok(tokens.into()),
        Err(_) if text == "max" => Ok(MaxLen::Model),
        Err(_) => Err("must be a number of tokens, or max".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
