//! Options of `kvc tune`.

use std::path::PathBuf;

use clap::Args;
use kvlab::Arm;

use super::asking::{AskingArgs, EngineArgs};
use super::eval::arm;
use super::{at_least_one, points};

/// Options of `kvc tune`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:

    kvc tune --model ./SmolLM2-135M-Instruct --chat --within 2
    kvc tune --model ./model --chat --dataset questions.jsonl --out reuse.json
    kvc run --model ./model --chat --reuse reuse.json --document a.txt --document b.txt -p 'Who leads?'

First, a few questions rank all candidates by their divergence from full attention. Then every candidate that diverges less
than all cheaper candidates answers the local questions, cheapest first, until the answers of one show that its loss is
within the limit. If no candidate passes, the file contains the one with the lowest upper bound on its loss, and says so.
If full attention answers too few questions correctly to judge a loss, no file is written.")]
pub(crate) struct TuneArgs {
    #[command(flatten)]
    pub(crate) asking: AskingArgs,

    /// Maximum loss of accuracy compared with full attention, in percentage points. A candidate passes if its
    /// answers show with 95 % confidence that its loss is not larger.
    #[arg(long, value_name = "POINTS", default_value_t = 2.0, value_parser = points)]
    pub(crate) within: f64,

    /// Minimum percentage of questions that full attention must answer correctly for a loss to be judged.
    #[arg(long, value_name = "PERCENT", default_value_t = 50.0, value_parser = points)]
    pub(crate) floor: f64,

    /// Number of questions used to rank the candidates by divergence.
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = at_least_one)]
    pub(crate) screen: usize,

    /// Candidate, as POSITIONS,MODE,STRATEGY. May be repeated. Default: every mode without recomputation, and
    /// link, blend, question and joint in several sizes.
    #[arg(long = "candidate", value_name = "ARM", value_parser = arm)]
    pub(crate) candidates: Vec<Arm>,

    /// File to write.
    #[arg(long, value_name = "FILE", default_value = "reuse.json")]
    pub(crate) out: PathBuf,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,

    /// Print only one JSON object on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}
