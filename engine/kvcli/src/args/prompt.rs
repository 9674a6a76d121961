//! Options of `kvc run` for the prompt.

use std::path::PathBuf;

use clap::Args;

use super::separator;

/// Options for the prompt, its parts, and earlier prompts.
#[derive(Debug, Args)]
pub(crate) struct PromptArgs {
    /// Prompt; `-` reads it from standard input.
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompt: Option<String>,

    /// File that contains the prompt.
    #[arg(long, value_name = "FILE")]
    pub(crate) prompt_file: Option<PathBuf>,

    /// `-` reads the prompt from standard input.
    #[arg(value_name = "-", value_parser = ["-"])]
    pub(crate) stdin: Option<String>,

    /// File with a conversation that ends with the prompt: a JSON list of objects with `role` (system, user
    /// or assistant) and `content`. Implies --chat.
    #[arg(long, value_name = "FILE")]
    pub(crate) messages: Option<PathBuf>,

    /// System prompt: the system message with --chat, otherwise text at the start of the prompt.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "messages")]
    pub(crate) system: Option<String>,

    /// File with a document, which is computed once and reused in other prompts. Documents come before the
    /// prompt and do not attend to each other. May be repeated.
    #[arg(long = "document", value_name = "FILE")]
    pub(crate) documents: Vec<PathBuf>,

    /// Split the prompt at this string (usually ##) into SYSTEM, DOCUMENTS and QUESTION. Default: the prompt
    /// is not split.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = separator,
        conflicts_with_all = ["system", "documents", "messages"])]
    pub(crate) separator: Option<String>,

    /// Put the prompt into the model's chat template. Default: raw text.
    #[arg(long)]
    pub(crate) chat: bool,

    /// Prompt to answer first, without output, to fill the cache. It has the same form as the prompt; with
    /// --document, it is another question about the documents. May be repeated.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) warm: Vec<String>,

    /// File with a prompt to answer first, after all prompts from --warm. May be repeated.
    #[arg(long, value_name = "FILE")]
    pub(crate) warm_file: Vec<PathBuf>,
}
