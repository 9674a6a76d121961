//! Options of `kvc doctor`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use kvload::ServerUrl;

use super::{DiskArgs, EngineArgs, PromptArgs, WayArgs, at_least_one};

/// Options of `kvc doctor`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "\
Examples:

    kvc doctor ./kv                                            how a disk is read and written, and how fast
    kvc doctor --url http://127.0.0.1:8000                     what a server's numbers say
    kvc doctor --url http://127.0.0.1:8000 --api-key KEY       if the server has keys
    kvc doctor answers --document a.txt -p 'alba ?'            why an answer with reuse differs from others")]
pub(crate) struct DoctorArgs {
    /// Folder on the disk to examine. 100 MB are written there and removed.
    #[arg(value_name = "FOLDER", default_value = ".")]
    pub(crate) folder: PathBuf,

    /// Examine a running `kvc serve` instead: few documents found, no room for them, requests that wait.
    #[arg(long, value_name = "URL", conflicts_with = "folder")]
    pub(crate) url: Option<ServerUrl>,

    /// Key of the tenant `operator`, if the server has keys.
    #[arg(long, value_name = "KEY", requires = "url")]
    pub(crate) api_key: Option<String>,

    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(subcommand)]
    pub(crate) examined: Option<Examined>,
}

/// The things to examine besides a disk and a server.
#[derive(Debug, Subcommand)]
pub(crate) enum Examined {
    /// Find out why an answer with reuse differs from others: from a wrong cache, from documents that do not see each
    /// other, or not from reuse.
    Answers(Box<AnswersArgs>),
}

/// Options of `kvc doctor answers`.
#[derive(Debug, Args)]
#[command(after_help = "\
Give the options for the model, the prompt, a disk and reuse of the `kvc run` whose answer surprises you. The prompt is
answered four times: twice with reuse, where the second answer finds the documents in the cache, once with the same attention
without a cache, and once with full attention. If the strategy chooses the tokens to recompute and an answer differs by more
than rounding, three answers without recomputed tokens follow. Each token is the most likely one. The exit code is 1 if the
cache is wrong.

    kvc doctor answers --document a.txt --document b.txt -p 'alba ?'
    kvc doctor answers --model ./Qwen3-0.6B --chat --document a.txt -p 'What is alba?' --recompute none")]
#[command(group = clap::ArgGroup::new("input").required(true).args(["prompt", "prompt_file", "stdin", "messages"]))]
pub(crate) struct AnswersArgs {
    /// GGUF file, or Hugging Face directory with config.json, safetensors and tokenizer.json. Default: the
    /// built-in model.
    #[arg(long, value_name = "PATH")]
    pub(crate) model: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) asked: PromptArgs,

    #[command(flatten)]
    pub(crate) disk: DiskArgs,

    #[command(flatten)]
    pub(crate) way: WayArgs,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,

    /// Maximum number of tokens in each answer.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one)]
    pub(crate) max_new_tokens: usize,

    /// Print only one JSON object on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}
