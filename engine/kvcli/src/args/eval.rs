//! Options of `kvc eval`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kvchunk::{ComputeMode, Recompute};
use kvlab::{Arm, Measure};

use super::asking::{AskingArgs, EngineArgs};
use super::{Positions, mode, points, positive, recompute};

/// Options of `kvc eval`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:

    kvc eval                                         the built-in model, all strategies
    kvc eval --gate                                  is reuse fit for it?
    kvc eval --model ./model --dataset questions.jsonl --strategy link:16 --strategy blend:0.15@2
    kvc eval --model smollm2.gguf --chat --texts 4 --questions 60 --measure divergence
    kvc eval --model smollm2.gguf --chat --texts 2 --arm full --arm sequential,with-system,link:16 --show 3
    kvc eval --read monday.jsonl --read tuesday.jsonl
    kvc eval --positions overlapped --context-temperature 0.9 --context-scale 0.9
    kvc eval --json --plot accuracy.svg

A dataset has a JSON object a line:

    {\"system\": \"…\", \"documents\": [\"…\", \"…\"], \"question\": \"…\", \"answer\": \"…\", \"kind\": \"local\", \"grader\": \"contains\"}

kind is local (the default), cross-start, cross-middle, comparison or reference: what the answer needs to know.
grader is begins (the default), exact, contains, numbers or token-f1: when an answer is right.")]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) asking: AskingArgs,

    /// What to measure: right answers; the divergence from full attention along its own answer, which orders strategies by a
    /// few dozen questions; or both.
    #[arg(long, value_enum, default_value = "answers", conflicts_with = "gate")]
    pub(crate) measure: MeasureName,

    /// Way to answer: full, or positions, mode and strategy with commas between them; may be repeated. Without it: full
    /// attention, every cell, and the strategies.
    #[arg(long = "arm", value_name = "ARM", value_parser = arm, conflicts_with_all = ["gate", "strategies", "positions"])]
    pub(crate) arms: Vec<Arm>,

    /// Way to answer that kvc tune wrote for this model: one more arm, or what the gate judges.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["strategies", "positions", "chunks"])]
    pub(crate) reuse: Option<PathBuf>,

    /// Show the answers to the first questions of each kind side by side.
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "gate")]
    pub(crate) show: usize,

    /// Write every answer to a file, with a JSON object a line.
    #[arg(long, value_name = "FILE", conflicts_with = "gate")]
    pub(crate) answers: Option<PathBuf>,

    /// Score the answers that earlier evaluations wrote by --answers, and ask nothing; may be repeated.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["gate", "answers", "show", "arms", "reuse", "strategies"])]
    pub(crate) read: Vec<PathBuf>,

    /// Recompute strategy, see `kvc run --help`; may be repeated. Without it: link, blend, question, joint and
    /// random in several sizes, and full. For the gate: the one strategy to judge.
    #[arg(long = "strategy", value_name = "STRATEGY", value_parser = recompute)]
    pub(crate) strategies: Vec<Recompute>,

    /// Check whether reuse is fit for this model: equalities that must hold, and local questions answered as
    /// well as under full attention. Exit code 1 if not.
    #[arg(long)]
    pub(crate) gate: bool,

    /// Positions of documents, sequential without the option. Without this one, --strategy and --chunks, the gate judges what kvc
    /// run does by default.
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
    #[arg(long, value_name = "MODE", value_parser = mode, requires = "gate")]
    pub(crate) chunks: Option<ComputeMode>,

    /// For the gate: most points of accuracy that reuse may lose. The gate opens if the answers bound the loss by that, with
    /// 95 % confidence.
    #[arg(long, value_name = "POINTS", default_value_t = 2.0, value_parser = points, requires = "gate")]
    pub(crate) within: f64,

    /// For the gate: least percentage of questions that full attention must answer for the loss to be judged.
    #[arg(long, value_name = "PERCENT", default_value_t = 50.0, value_parser = points, requires = "gate")]
    pub(crate) floor: f64,

    /// Draw right answers (without them, divergence) against the operations of the prefill, a line for each family of strategies.
    #[arg(long, value_name = "FILE.svg", conflicts_with = "gate")]
    pub(crate) plot: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,

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

pub(super) fn arm(text: &str) -> Result<Arm, String> {
    text.parse().map_err(|error: kvlab::Error| error.to_string())
}
