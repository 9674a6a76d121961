//! Options of `kvc bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use kvchunk::ComputeMode;
use kvcore::KvFormat;
use kvload::ServerUrl;
use kvmodel::dense::ComputeType;

use super::{
    BackendName, Positions, SleepArgs, WeightsFormat, at_least_one, backend, compute_type, disk::bytes,
    kv_format, mode, share,
};

/// Options of `kvc bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) what: BenchKind,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchKind {
    /// Answer prompts like the ones that a retrieval service sends, and report cache hits, times to first
    /// token and memory use.
    Rag(RagArgs),
    /// Answer requests that arrive while other requests are running, and report tokens per second, times to
    /// first token and times between tokens.
    Serve(ServeArgs),
}

/// Options for the model to measure and for its device.
#[derive(Debug, Args)]
pub(crate) struct MeasuredArgs {
    /// GGUF file or Hugging Face directory with the model. Default, unless --size is given: the built-in
    /// model.
    #[arg(long, value_name = "PATH", conflicts_with = "size")]
    pub(crate) model: Option<PathBuf>,

    /// Use a Llama with random weights, given as `LAYERSxWIDTH`, such as `8x1024`.
    #[arg(long, value_name = "LAYERSxWIDTH", value_parser = size)]
    pub(crate) size: Option<(usize, usize)>,

    /// Memory for keys and values, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = at_least_one)]
    pub(crate) kv_memory: usize,

    /// Storage format of keys and values (see `kvc run --help`).
    #[arg(long, value_name = "FORMAT", default_value = "f32", value_parser = kv_format)]
    pub(crate) dtype: KvFormat,

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

    /// Backend for keys, values and attention: cpu, cuda, cuda:INDEX, ascend, ascend:INDEX, wgpu or
    /// wgpu:ADAPTER (see `kvc devices`).
    #[arg(long, value_name = "NAME", default_value = "cpu", value_parser = backend)]
    pub(crate) backend: BackendName,
}

/// Options of `kvc bench rag`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:

    kvc bench rag                                        four workloads on the built-in model
    kvc bench rag --size 8x1024 --document-tokens 512    eight layers of 1024, random weights
    kvc bench rag --zipf 1.2 --documents 500 --plot ttft.svg
    kvc bench rag --repetition 0.5 --system-changes 0.1 --json
    kvc bench rag --http --size 8x1024 --document-tokens 512 --plot ttft.svg

Without --zipf and --repetition, four workloads are run: one draws documents by Zipf's
law; in the other three, 80, 50 and 10 % of the drawn documents were used before. With
--chunk-sleep, documents that were used fewer than five times are put to sleep after every
request; the times to first token include the time to wake them.")]
pub(crate) struct RagArgs {
    #[command(flatten)]
    pub(crate) on: MeasuredArgs,

    /// Number of requests per workload.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = at_least_one)]
    pub(crate) requests: usize,

    /// Number of documents in the library.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = at_least_one)]
    pub(crate) documents: usize,

    /// Number of tokens per document.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = at_least_one)]
    pub(crate) document_tokens: usize,

    /// Number of documents per request.
    #[arg(long, value_name = "K", default_value_t = 5, value_parser = at_least_one)]
    pub(crate) per_request: usize,

    /// Draw documents by Zipf's law with this exponent.
    #[arg(long, value_name = "S", conflicts_with = "repetition")]
    pub(crate) zipf: Option<f64>,

    /// Probability of drawing a document that an earlier request used instead of a new one.
    #[arg(long, value_name = "P")]
    pub(crate) repetition: Option<f64>,

    /// Fraction of requests whose system prompt differs from the previous request's.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub(crate) system_changes: f64,

    /// Random seed.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,

    /// Positions of documents (see `kvc run --help`).
    #[arg(long, value_enum, default_value = "overlapped")]
    pub(crate) positions: Positions,

    /// Tokens that documents see while they are computed (see `kvc run --help`).
    #[arg(long, value_name = "MODE", default_value = "with-system", value_parser = mode)]
    pub(crate) chunks: ComputeMode,

    /// Fraction of the KV memory to reserve for documents.
    #[arg(long, value_name = "SHARE", default_value_t = 0.5, value_parser = share)]
    pub(crate) memory_share: f64,

    #[command(flatten)]
    pub(crate) sleep: SleepArgs,

    /// Also measure documents that are on a disk and not in memory, as after a restart: with the disk of this
    /// folder as it is, and throttled to 200, 50, 10 and 5 MB/s. Also measure new documents while a disk of 5 MB/s
    /// stores them.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) disk: Option<PathBuf>,

    /// The largest size of the folder.
    #[arg(long, value_name = "SIZE", requires = "disk", default_value = "2GiB", value_parser = bytes)]
    pub(crate) disk_limit: u64,

    /// Measure something else: one prompt through a server in this process, with its documents found in the same
    /// order and in others, beside a server with prefix caching alone.
    #[arg(long, conflicts_with_all = ["requests", "documents", "zipf", "repetition", "system_changes", "disk", "chunk_sleep"])]
    pub(crate) http: bool,

    /// Plot the time to first token of each request to this SVG file: of the first workload, in order of
    /// arrival, or with --http, of each server.
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,

    /// Print only one JSON object on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of `kvc bench serve`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:

    kvc bench serve                                            64 requests at once, on the built-in model
    kvc bench serve --model model.gguf --running 16            your own model, 16 answers at a time
    kvc bench serve --size 8x1024 --rate 2 --requests 200      two requests per second on average
    kvc bench serve --trace trace.jsonl --plot ttft.svg
    kvc bench serve --size 8x1024 --http                       the engine alone, and through `kvc serve`
    kvc bench serve --url http://127.0.0.1:8080 --vocabulary 32000    any server with /v1/completions

With --http, a server answers the same requests at a free port of this machine, with a fresh
engine. Both are measured --rounds times, in turn, and the medians are compared. Processor time
includes the client's. With --url, options for the model and its engine have no effect.

A trace has one JSON object per line: {\"at\": 0.25, \"prompt_tokens\": 300, \"answer_tokens\": 80}. Prompts
are random tokens. Every answer has the requested number of tokens, even if the model would stop
earlier. Without a trace, lengths are drawn from half to one and a half times their averages.")]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) on: MeasuredArgs,

    /// Read arrivals from this file instead of drawing them.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["requests", "rate", "prompt_tokens", "answer_tokens"])]
    pub(crate) trace: Option<PathBuf>,

    /// Number of requests.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one)]
    pub(crate) requests: usize,

    /// Average number of requests per second; arrivals are a Poisson process. Default: all requests arrive at
    /// the start.
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub(crate) rate: Option<f64>,

    /// Average number of tokens per prompt.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    pub(crate) prompt_tokens: usize,

    /// Average number of tokens per answer.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one)]
    pub(crate) answer_tokens: usize,

    /// Number of tokens, such as instructions, at the start of every prompt that all prompts share. They come
    /// in addition to the prompt's own tokens.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) shared_prefix: usize,

    /// Compute the shared prefix first, and keep it cached even when requests need its memory.
    #[arg(long, requires = "shared_prefix", conflicts_with_all = ["http", "url"])]
    pub(crate) pin: bool,

    /// Also send the requests over HTTP to a server in this process, and compare the times with those of the
    /// engine alone.
    #[arg(long)]
    pub(crate) http: bool,

    /// Number of measurements of the engine alone and of the server, in turn.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = at_least_one, requires = "http")]
    pub(crate) rounds: usize,

    /// Send the requests to this server, and measure nothing else.
    #[arg(long, value_name = "URL", conflicts_with_all = ["http", "model", "size"])]
    pub(crate) url: Option<ServerUrl>,

    /// Name of the model in requests to --url. Default: the first name in its /v1/models.
    #[arg(long, value_name = "NAME", requires = "url")]
    pub(crate) model_name: Option<String>,

    /// Number of tokens to draw prompts from for --url: those with smaller numbers.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..), requires = "url")]
    pub(crate) vocabulary: u32,

    /// Maximum number of answers that run at once.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    pub(crate) running: usize,

    /// Maximum number of tokens per pass. Longer prompts are computed in pieces.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_one)]
    pub(crate) step_tokens: usize,

    /// Host memory, in MiB, for requests that are paused when memory for keys and values runs out. With 0,
    /// paused requests are recomputed.
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    pub(crate) swap_memory: usize,

    /// Random seed.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,

    /// Plot the time to first token of each request, in order of arrival, to this SVG file.
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,

    /// Print only one JSON object on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

fn size(text: &str) -> Result<(usize, usize), String> {
    let parts =
        text.split_once('x').and_then(|(layers, width)| Some((layers.parse().ok()?, width.parse().ok()?)));
    parts.ok_or_else(|| "must be LAYERSxWIDTH, such as 8x1024".to_owned())
}
