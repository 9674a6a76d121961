//! Options that `kvc eval` and `kvc tune` share, for the questions and the model.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kvcore::{KeyForm, KvFormat};
use kvlab::{Grader, QuestionKind, TextForm, Texts};
use kvmodel::dense::ComputeType;

use super::{BackendName, WeightsFormat, at_least_one, backend, compute_type, key_form, kv_format, number};

/// Options for the questions and the model.
#[derive(Debug, Args)]
pub(crate) struct AskingArgs {
    /// GGUF file or Hugging Face directory with the model. Default: the built-in model.
    #[arg(long, value_name = "PATH")]
    pub(crate) model: Option<PathBuf>,

    /// File with questions. Default: dataset.jsonl in the model's directory if it exists, otherwise questions
    /// drawn from world.json in that directory; if neither file exists, --texts 2.
    #[arg(long, value_name = "FILE")]
    pub(crate) dataset: Option<PathBuf>,

    /// Ask about this many documents per prompt, all written by kvc, each with several facts.
    #[arg(long, value_name = "N", value_parser = documents, conflicts_with = "dataset")]
    pub(crate) texts: Option<usize>,

    /// With --texts: the form of the documents.
    #[arg(long, value_enum, value_name = "FORM", default_value = "firms", requires = "texts")]
    pub(crate) form: Form,

    /// With --texts: approximate length of each document, in tokens. Longer documents contain more facts,
    /// about which nothing is asked.
    #[arg(long, value_name = "TOKENS", value_parser = length, default_value_t = 100, requires = "texts")]
    pub(crate) length: usize,

    /// Kind of question to ask: local, cross-start, cross-middle, comparison or reference. May be repeated.
    /// Default: all kinds.
    #[arg(long = "kind", value_name = "KIND", value_parser = kind)]
    pub(crate) kinds: Vec<QuestionKind>,

    /// Put each prompt into the model's chat template, as instruct models expect.
    #[arg(long)]
    pub(crate) chat: bool,

    /// Text after the system prompt and after each document; \n is a line break. Default: an empty line with
    /// --chat, otherwise nothing.
    #[arg(long, value_name = "TEXT")]
    pub(crate) separator: Option<String>,

    /// File with a decoy, or directory of such files. A decoy is a document that the other documents see
    /// while they are computed, but that the question never sees (see --arm sequential,behind:N,none). May be
    /// repeated. Default: with --texts, other documents of the same form; otherwise built-in, the generic
    /// documents that `kvc run` uses.
    #[arg(long, value_name = "FILE|DIR|built-in")]
    pub(crate) decoys: Vec<PathBuf>,

    /// Rule that decides whether an answer is right. Overrides the dataset's own rule.
    #[arg(long, value_name = "NAME", value_parser = grader)]
    pub(crate) grader: Option<Grader>,

    /// Maximum number of tokens per answer. Default: slightly more than the right answer has.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) answer_tokens: Option<usize>,

    /// Number of random draws of questions, or number of parts that the dataset is divided into. Several
    /// draws give confidence intervals for accuracy.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = draws)]
    pub(crate) seeds: usize,

    /// Index of the first draw. Use a higher index to continue an evaluation with new questions.
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "dataset")]
    pub(crate) first_seed: usize,

    /// Number of questions of each kind per draw; default: 30 for kvc tune and --gate, otherwise 20. With a
    /// dataset, the total number of questions; default: all of them.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) questions: Option<usize>,
}

/// Options for the engine that answers the questions: caches, weights and backend.
#[derive(Debug, Args)]
pub(crate) struct EngineArgs {
    /// Storage format of keys and values (see `kvc run --help`).
    #[arg(long, value_name = "FORMAT", default_value = "f32", value_parser = kv_format)]
    pub(crate) dtype: KvFormat,

    /// Form of keys in the cache (see `kvc run --help`).
    #[arg(long, value_name = "FORM", default_value = "rotated", value_parser = key_form)]
    pub(crate) keys: KeyForm,

    /// Memory for keys and values, in MiB. Default: enough for eight prompts of the model's maximum length,
    /// at most 2048.
    #[arg(long, value_name = "MIB", value_parser = at_least_one)]
    pub(crate) kv_memory: Option<usize>,

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

/// The form of the texts that kvc writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Form {
    /// Notes about invented firms, which all contain the same kinds of facts.
    Firms,
    /// Documents of several kinds in one prompt: procedures, mails, product pages, settings of programs,
    /// minutes, recipes, travel notes and fault reports.
    Mixed,
}

impl From<Form> for TextForm {
    fn from(form: Form) -> Self {
        match form {
            Form::Firms => Self::Firms,
            Form::Mixed => Self::Mixed,
        }
    }
}

fn length(text: &str) -> Result<usize, String> {
    number(text, |tokens| (100..=10_000).contains(tokens), "a whole number from 100 to 10000")
}

fn kind(text: &str) -> Result<QuestionKind, String> {
    serde_json::from_value(text.into())
        .map_err(|_| "must be local, cross-start, cross-middle, comparison or reference".to_owned())
}

fn grader(text: &str) -> Result<Grader, String> {
    serde_json::from_value(text.into())
        .map_err(|_| "must be begins, exact, contains, numbers or token-f1".to_owned())
}

/// Parses a number of random draws. Each draw takes memory.
fn draws(text: &str) -> Result<usize, String> {
    number(text, |n| (1..=100_000).contains(n), "a whole number from 1 to 100000")
}

fn documents(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (2..=Texts::MOST).contains(&n) => Ok(n),
        _ => Err(format!("must be a whole number from 2 to {}", Texts::MOST)),
    }
}
