//! Options of `kvc eval`.

use std::path::PathBuf;

use clap::Args;
use clap::ValueEnum;
use kvchunk::{ComputeMode, Recompute};
use kvlab::{Arm, Grader, Measure, QuestionKind, Texts};

use super::{
    BackendName, Positions, WeightsFormat, at_least_one, backend, key_form, kv_format, mode, points,
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
    kvc eval --model smollm2.gguf --chat --texts 4 --questions 60 --measure divergence
    kvc eval --model smollm2.gguf --chat --texts 2 --arm full --arm sequential,with-system,link:16 --show 3
    kvc eval --positions overlapped --context-temperature 0.9 --context-scale 0.9
    kvc eval --json --plot accuracy.svg

A dataset has a JSON object a line:

    {\"system\": \"…\", \"documents\": [\"…\", \"…\"], \"question\": \"…\", \"answer\": \"…\", \"kind\": \"local\", \"grader\": \"contains\"}

kind is local (the default), cross-start, cross-middle, comparison or reference: what the answer needs to know.
grader is begins (the default), exact, contains, numbers or token-f1: when an answer is right.")]
pub(crate) struct EvalArgs {
    /// A Hugging Face directory or a GGUF file. Without it: the built-in model.
    #[arg(long, value_name = "PATH")]
    pub(crate) model: Option<PathBuf>,

    /// File of questions. Without it: dataset.jsonl in the model's directory, or questions drawn from its
    /// world.json.
    #[arg(long, value_name = "FILE")]
    pub(crate) dataset: Option<PathBuf>,

    /// Ask about this many short texts that kvc writes: notes about invented firms, with several facts each.
    #[arg(long, value_name = "N", value_parser = documents, conflicts_with = "dataset")]
    pub(crate) texts: Option<usize>,

    /// Kind of question to ask: local, cross-start, cross-middle, comparison or reference; may be repeated. Without it: all.
    #[arg(long = "kind", value_name = "KIND", value_parser = kind)]
    pub(crate) kinds: Vec<QuestionKind>,

    /// Put each prompt into the model's chat template, as instruct models want it.
    #[arg(long)]
    pub(crate) chat: bool,

    /// Text behind the system prompt and behind each document; \n is a line's end. By default an empty line with --chat, and
    /// nothing without it.
    #[arg(long, value_name = "TEXT")]
    pub(crate) separator: Option<String>,

    /// When an answer is right, whatever the dataset says.
    #[arg(long, value_name = "NAME", value_parser = grader)]
    pub(crate) grader: Option<Grader>,

    /// Most tokens of an answer. By default a few more than the right one has.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) answer_tokens: Option<usize>,

    /// What to measure: right answers; the divergence from full attention along its own answer, which orders strategies by a
    /// few dozen questions; or both.
    #[arg(long, value_enum, default_value = "answers", conflicts_with = "gate")]
    pub(crate) measure: MeasureName,

    /// Way to answer: full, or positions, mode and strategy with commas between them; may be repeated. Without it: full
    /// attention, every cell, and the strategies.
    #[arg(long = "arm", value_name = "ARM", value_parser = arm, conflicts_with_all = ["gate", "strategies", "positions"])]
    pub(crate) arms: Vec<Arm>,

    /// Show the answers to the first questions of each kind side by side.
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "gate")]
    pub(crate) show: usize,

    /// Write every answer to a file, with a JSON object a line.
    #[arg(long, value_name = "FILE", conflicts_with = "gate")]
    pub(crate) answers: Option<PathBuf>,

    /// Draws of questions, or parts of the dataset, from which confidence intervals of accuracies are
    /// computed.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub(crate) seeds: usize,

    /// Number of the first draw. A long evaluation goes on where another ended, with other questions.
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "dataset")]
    pub(crate) first_seed: usize,

    /// Questions of each kind in a draw; 20 by default. Of a dataset: questions in all; by default every one.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) questions: Option<usize>,

    /// Recompute strategy, see `kvc run --help`; may be repeated. Without it: link, blend and random in
    /// several sizes, and full. For the gate: the one strategy to judge, none by default.
    #[arg(long = "strategy", value_name = "STRATEGY", value_parser = recompute)]
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
    #[arg(long, value_name = "MODE", default_value = "with-system", value_parser = mode, requires = "gate")]
    pub(crate) chunks: ComputeMode,

    /// For the gate: most points of accuracy that reuse may lose. The gate opens if the answers bound the loss by that, with
    /// 95 % confidence.
    #[arg(long, value_name = "POINTS", default_value_t = 2.0, value_parser = points, requires = "gate")]
    pub(crate) within: f64,

    /// For the gate: least percentage of questions that full attention must answer for the loss to be judged.
    #[arg(long, value_name = "PERCENT", default_value_t = 50.0, value_parser = points, requires = "gate")]
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

    /// Format in which weights are held: as they are stored (f32 for f32, f16 and bf16; blocks for blocks), f32, or
    /// eight-bit blocks.
    #[arg(long, value_enum, default_value = "stored")]
    pub(crate) weights: WeightsFormat,

    /// Backend for keys, values and attention: cpu, cuda, cuda:NUMBER, ascend, ascend:NUMBER, wgpu or wgpu:ADAPTER (see kvc
    /// devices).
    #[arg(long, value_name = "NAME", default_value = "cpu", value_parser = backend)]
    pub(crate) backend: BackendName,

    /// Print one JSON object on standard output, and nothing else.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What `kvc eval` measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum MeasureName {
    Answers,
    Divergence,
    Both,
}

impl From<MeasureName> for Measure {
    fn from(measure: MeasureName) -> Self {
        match measure {
            MeasureName::Answers => Self::Answers,
            MeasureName::Divergence => Self::Divergence,
            MeasureName::Both => Self::Both,
        }
    }
}

fn arm(text: &str) -> Result<Arm, String> {
    text.parse().map_err(|error: kvlab::Error| error.to_string())
}

fn kind(text: &str) -> Result<QuestionKind, String> {
    serde_json::from_value(text.into())
        .map_err(|_| "local, cross-start, cross-middle, comparison or reference is needed".to_owned())
}

fn grader(text: &str) -> Result<Grader, String> {
    serde_json::from_value(text.into())
        .map_err(|_| "begins, exact, contains, numbers or token-f1 is needed".to_owned())
}

fn documents(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (2..=Texts::MOST).contains(&n) => Ok(n),
        _ => Err(format!("a whole number from 2 to {} is needed", Texts::MOST)),
    }
}
