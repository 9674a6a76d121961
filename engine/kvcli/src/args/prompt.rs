//! Options of `kvc run` and `kvc doctor answers` for the prompt.

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

    /// File with a conversation that ends with the prompt: a JSON list of objects with `role` (system,
    /// developer, user, assistant or tool), `content` (a string, null, or parts with texts) and other fields
    /// for the chat template, such as `tool_calls`. If the last message is the assistant's, the model continues
    /// its text. Implies --chat.
    #[arg(long, value_name = "FILE")]
    pub(crate) messages: Option<PathBuf>,

    /// System prompt: the system message with --chat, otherwise text at the start of the prompt.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "messages")]
    pub(crate) system: Option<String>,

    /// File with a document, which is computed once and reused in other prompts. Documents come before the
    /// prompt and do not attend to each other. May be repeated.
    #[arg(long = "document", value_name = "FILE")]
    pub(crate) documents: Vec<PathBuf>,

    /// Folder with one document per file. Wherever one of them stands verbatim in the prompt, it is computed once and
    /// reused like a --document. Each must have at least 64 bytes.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["documents", "separator"])]
    pub(crate) library: Option<PathBuf>,

    /// Split the prompt at this string (usually ##) into SYSTEM, DOCUMENTS and QUESTION. Default: the prompt
    /// is not split.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = separator,
        conflicts_with_all = ["system", "documents", "messages"])]
    pub(crate) separator: Option<String>,

    /// Put the prompt into the model's chat template. Default: raw text.
    #[arg(long)]
    pub(crate) chat: bool,

    /// Variable of the chat template, such as `enable_thinking=false`, `date_string='1 May 2030'` or
    /// `tools=@FILE`. VALUE is JSON, or else a text; @FILE reads JSON from a file. May be repeated.
    #[arg(long = "template-arg", value_name = "NAME=VALUE", value_parser = template_arg)]
    pub(crate) template_args: Vec<(String, String)>,

    /// Prompt to answer first, without output, to fill the cache. It has the same form as the prompt; with
    /// --document, it is another question about the documents. May be repeated.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) warm: Vec<String>,

    /// File with a prompt to answer first, after all prompts from --warm. May be repeated.
    #[arg(long, value_name = "FILE")]
    pub(crate) warm_file: Vec<PathBuf>,
}

impl PromptArgs {
    /// Returns an error message if a given option has no effect on the prompt.
    pub(super) fn without_effect(&self) -> Option<&'static str> {
        let templated = self.chat || self.messages.is_some();
        (!self.template_args.is_empty() && !templated)
            .then_some("--template-arg applies only to --chat and --messages")
    }
}

/// Splits `NAME=VALUE`.
fn template_arg(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) => Ok((name.to_owned(), value.to_owned())),
        None => Err("must be NAME=VALUE, such as enable_thinking=false".to_owned()),
    }
}
