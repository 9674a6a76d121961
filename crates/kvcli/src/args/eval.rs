//! Options of `kvc eval`.

use std::path::PathBuf;

use clap::Args;
use kvchunk::Recompute;

use super::{
    BackendName, Chunks, Positions, WeightsFormat, at_least_one, backend, key_form, kv_format, points,
    positive, recompute,
};
use kvcore::{KeyForm, KvFormat};

/// Options of `kvc eval`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:

    kvc eval                                         the built-in model, all strategies
    kvc eval --gate                                  is reuse fit for it?
    kvc eval --model ./model --dataset questions.jsonl --strategy link:16 --strategy blend:0.15@2
    kvc eval --positions overlapped --context-temperature 0.9 --context-scale 0.9
    kvc eval --json --plot accuracy.svg

A dataset has a JSON object a line:

    {\"system\": \"…\", \"documents\": [\"…\", \"…\"], \"question\": \"…\", \"answer\": \"…\", \"kind\": \"local\"}

kind is local (the default), cross-start or cross-middle: what the answer needs to know.")]
pub(crate) struct EvalArgs {
    /// A Hugging Face directory. Without it: the built-in model.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,

    /// File of questions. Without it: dataset.jsonl in the model's directory, or questions drawn from its
    /// world.json.
    #[arg(long, value_name = "FILE")]
    pub(crate) dataset: Option<PathBuf>,

    /// Draws of questions, or parts of the dataset, from which confidence intervals of accuracies are
    /// computed.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub(crate) seeds: usize,

    /// Questions of each kind in a draw.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = at_least_one)]
    pub(crate) questions: usize,

    /// Recompute strategy, see `kvc run --help`; may be repeated. Without it: link, blend and random in
    /// several sizes, and full.
    #[arg(long = "strategy", value_name = "STRATEGY", value_parser = recompute, conflicts_with = "gate")]
    pub(crate) strategies: Vec<Recompute>,

    /// Check whether reuse is fit for this model: equalities that must hold, and local questions answered as
    /// well as under full attention. Exit code 1 if not.
    #[arg(long)]
    pub(crate) gate: bool,

    /// Positions of documents. By default overlapped for the gate, and sequential for answers with recompute
    /// strategies or a context scaling.
    #[arg(long, value_enum)]
    pub(crate) positions: Option<Positions>,

    /// Context temperature, see `kvc run --help`. This option and --context-scale add two rows, one per mode,
    /// in which the question sees documents with this scaling.
    #[arg(long, value_name = "T", default_value_t = 1.0, value_parser = positive, conflicts_with = "gate")]
    pub(crate) context_temperature: f32,

    /// Context scale, see --context-temperature.
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = positive, conflicts_with = "gate")]
    pub(crate) context_scale: f32,

    /// For the gate: tokens that documents see while they are computed.
    #[arg(long, value_enum, default_value = "with-system", requires = "gate")]
    pub(crate) chunks: Chunks,

    /// For the gate: most points of accuracy that reuse may lose.
    #[arg(long, value_name = "POINTS", default_value_t = 1.0, value_parser = points, requires = "gate")]
    pub(crate) floor: f64,

    /// Draw accuracy against the share of recomputed tokens.
    #[arg(long, value_name = "FILE.svg", conflicts_with = "gate")]
    pub(crate) plot: Option<PathBuf>,

    /// Storage format of keys and values, see `kvc run --help`.
    #[arg(long, value_name = "FORMAT", default_value = "f32", value_parser = kv_format)]
    pub(crate) dtype: KvFormat,

    /// Form of the keys in the cache, see `kvc run --help`.
    #[arg(long, value_name = "FORM", default_value = "rotated", value_parser = key_form)]
    pub(crate) keys: KeyForm,

    /// Memory for keys and values, in MiB. By default: eight prompts of the model's greatest length, at most
    /// 2048.
    #[arg(long, value_name = "MIB", value_parser = at_least_one)]
    pub(crate) kv_memory: Option<usize>,

    /// Storage format of weights: f32, or eight-bit blocks.
    #[arg(long, value_enum, default_value = "f32")]
    pub(crate) weights: WeightsFormat,

    /// Backend for keys, values and attention: cpu, cuda, cuda:NUMBER, ascend, ascend:NUMBER, wgpu or wgpu:ADAPTER (see kvc
    /// devices).
    #[arg(long, value_name = "NAME", default_value = "cpu", value_parser = backend)]
    pub(crate) backend: BackendName,

    /// Print one JSON object on standard output, and nothing else.
    #[arg(long)]
    pub(crate) json: bool,
}
