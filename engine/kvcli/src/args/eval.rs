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
    kvc eval --gate                                  does reuse suit it?
    kvc eval --model ./model --dataset questions.jsonl --strategy link:16 --strategy blend:0.15@2
    kvc eval --model smollm2.gguf --chat --texts 4 --questions 60 --measure divergence
    kvc eval --model smollm2.gguf --chat --texts 2 --arm full --arm sequential,with-system,link:16 --show 3
    kvc eval --model smollm2.gguf --chat --texts 4 --form mixed --length 500 --answers mixed.jsonl
    kvc eval --read monday.jsonl --read tuesday.jsonl
    kvc eval --texts 4 --form mixed --save-questions example.jsonl
    kvc eval --positions overlapped --context-temperature 0.9 --context-scale 0.9
    kvc eval --json --plot accuracy.svg

A dataset has one JSON object per line:

    {\"system\": \"…\", \"documents\": [\"…\", \"…\"], \"question\": \"…\", \"answer\": \"…\", \"kind\": \"local\", \"grader\": \"contains\"}

kind says which documents the answer needs: local (the default), cross-start, cross-middle, comparison or reference.
grader says when an answer is right: begins (the default), exact, contains, numbers or token-f1.")]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) asking: AskingArgs,

    /// Quantity to measure: the number of right answers; the divergence from full attention along the answers
    /// of full attention, which ranks strategies with only a few dozen questions; or both.
    #[arg(long, value_enum, default_value = "answers", conflicts_with = "gate")]
    pub(crate) measure: MeasureName,

    /// Strategy to evaluate: full, or POSITIONS,MODE,STRATEGY. May be repeated. Default: full attention,
    /// every combination of positions and mode, and the strategies of --strategy.
    #[arg(long = "arm", value_name = "ARM", value_parser = arm, conflicts_with_all = ["gate", "strategies", "positions"])]
    pub(crate) arms: Vec<Arm>,

    /// File that `kvc tune` wrote for this model. Its strategy is added to the others or, with --gate,
    /// judged.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["strategies", "positions", "chunks"])]
    pub(crate) reuse: Option<PathBuf>,

    /// Show the answers to the first questions of each kind side by side.
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "gate")]
    pub(crate) show: usize,

    /// Write each answer to this file as soon as it is given, one JSON object per line. If the file exists, the
    /// evaluation continues: answers in the file are not asked for again. The file must come from an evaluation
    /// with the same model, options and questions; draws, questions and arms may be added.
    #[arg(long, value_name = "FILE", conflicts_with = "gate")]
    pub(crate) answers: Option<PathBuf>,

    /// Instead of asking, score answers that earlier evaluations wrote with --answers. May be repeated.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["gate", "answers", "show", "arms", "reuse", "strategies"])]
    pub(crate) read: Vec<PathBuf>,

    /// Write the questions to this file as a dataset, and ask nothing: an example for a dataset of your own, or
    /// questions for another program.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["gate", "answers", "show", "arms", "reuse", "strategies", "read", "plot"])]
    pub(crate) save_questions: Option<PathBuf>,

    /// Recompute strategy (see `kvc run --help`). May be repeated. Default: link, blend, question, joint and
    /// random in several sizes, and full. With --gate: the one strategy to judge.
    #[arg(long = "strategy", value_name = "STRATEGY", value_parser = recompute)]
    pub(crate) strategies: Vec<Recompute>,

    /// Check whether reuse suits this model: results that should be equal must be equal, and local questions
    /// must be answered as well as with full attention. Exits with code 1 if they are not.
    #[arg(long)]
    pub(crate) gate: bool,

    /// Positions of documents. Default: sequential. Without this option, --strategy and --chunks, the gate
    /// judges what `kvc run` does by default.
    #[arg(long, value_enum)]
    pub(crate) positions: Option<Positions>,

    /// Context temperature (see `kvc run --help`). This option and --context-scale add one row per mode, in
    /// which the question's attention to documents is scaled.
    #[arg(long, value_name = "T", default_value_t = 1.0, value_parser = positive, conflicts_with = "gate")]
    pub(crate) context_temperature: f32,

    /// Context scale (see `kvc run --help` and --context-temperature).
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = positive, conflicts_with = "gate")]
    pub(crate) context_scale: f32,

    /// With --gate: tokens that documents see while they are computed.
    #[arg(long, value_name = "MODE", value_parser = mode, requires = "gate")]
    pub(crate) chunks: Option<ComputeMode>,

    /// With --gate: maximum loss of accuracy, in percentage points. Reuse passes if the answers show with 95
    /// % confidence that the loss is not larger.
    #[arg(long, value_name = "POINTS", default_value_t = 2.0, value_parser = points, requires = "gate")]
    pub(crate) within: f64,

    /// With --gate: minimum percentage of questions that full attention must answer correctly for the loss to
    /// be judged.
    #[arg(long, value_name = "PERCENT", default_value_t = 50.0, value_parser = points, requires = "gate")]
    pub(crate) floor: f64,

    /// Plot right answers (or divergence, if only that is measured) against the prefill's operation count to
    /// this SVG file, with one line per family of strategies.
    #[arg(long, value_name = "FILE.svg", conflicts_with = "gate")]
    pub(crate) plot: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,

    /// Print only one JSON object on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The quantity that `kvc eval` measures.
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
