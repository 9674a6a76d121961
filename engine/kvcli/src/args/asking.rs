//! Options that commands share which ask questions: `kvc eval` and `kvc tune`.

use std::path::PathBuf;

use clap::Args;
use kvcore::{KeyForm, KvFormat};
use kvlab::{Grader, QuestionKind, Texts};

use super::{BackendName, WeightsFormat, at_least_one, backend, key_form, kv_format};

/// Options of the questions, and of the model that is asked.
#[derive(Debug, Args)]
pub(crate) struct AskingArgs {
    /// A GGUF file or a Hugging Face directory. Without it: the built-in model.
    #[arg(long, value_name = "PATH")]
    pub(crate) model: Option<PathBuf>,

    /// File of questions. Without it: dataset.jsonl in the model's directory, questions drawn from its world.json, or
    /// those of --texts 2.
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

    /// Draws of questions, or parts of the dataset, from which confidence intervals of accuracies are
    /// computed.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub(crate) seeds: usize,

    /// Number of the first draw. A long evaluation goes on where another ended, with other questions.
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "dataset")]
    pub(crate) first_seed: usize,

    /// Questions of each kind in a draw; by default 30 where a loss is judged (tune, --gate), else 20. Of a dataset:
    /// questions in all; by default every one.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) questions: Option<usize>,
}

/// Options of the engine that answers: caches, weights and the backend.
#[derive(Debug, Args)]
pub(crate) struct EngineArgs {
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
