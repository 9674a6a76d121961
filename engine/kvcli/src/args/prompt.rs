//! Options of `kvc run` that say what is asked.

use std::path::PathBuf;

use clap::Args;

use super::separator;

/// The prompt, its parts, and earlier prompts.
#[derive(Debug, Args)]
pub(crate) struct PromptArgs {
    /// The prompt; `-` reads it from standard input.
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompt: Option<String>,

    /// File that contains the prompt.
    #[arg(long, value_name = "FILE")]
    pub(crate) prompt_file: Option<PathBuf>,

    /// `-` reads the prompt from standard input.
    #[arg(value_name = "-", value_parser = ["-"])]
    pub(crate) stdin: Option<String>,

    /// File with a conversation whose last message is the prompt: a JSON list of objects with `role` (system, user
    /// or assistant) and `content`. Implies --chat.
    #[arg(long, value_name = "FILE")]
    pub(crate) messages: Option<PathBuf>,

    /// System prompt: with --chat the system message, otherwise the text before everything else.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "messages")]
    pub(crate) system: Option<String>,

    /// File with a document, computed once and found again in other prompts. Documents stand before the prompt and
    /// do not see each other. May be repeated.
    #[arg(long = "document", value_name = "FILE")]
    pub(crate) documents: Vec<PathBuf>,

    /// Cut the prompt at this text, usually ##, into SYSTEM, DOCUMENTS and QUESTION. Without the option a prompt is
    /// never cut.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = separator,
        conflicts_with_all = ["system", "documents", "messages"])]
    pub(crate) separator: Option<String>,

    /// Put the prompt into the model's chat template; otherwise it is raw text.
    #[arg(long)]
    pub(crate) chat: bool,

    /// An earlier prompt of the same form (with --document: another question about the documents), answered
    /// silently first so that its chunks are cached. May be repeated.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) warm: Vec<String>,

    /// File that contains an earlier prompt, which comes after those of --warm. May be repeated.
    #[arg(long, value_name = "FILE")]
    pub(crate) warm_file: Vec<PathBuf>,
}
