//! The tokens that end an answer: those that a file names, and those that are known by their text alone, as
//! in llama.cpp.

use super::failure::GgufFailure;
use super::fields::Header;

/// The fields with the IDs of end tokens, without the prefix `tokenizer.ggml.`: of a text, a turn and a
/// message, and of files in prompts for completing code.
const FIELDS: [&str; 6] = [
    "eos_token_id",
    "eot_token_id",
    "eom_token_id",
    "fim_pad_token_id",
    "fim_rep_token_id",
    "fim_sep_token_id",
];

/// The texts of end tokens. Many files name only one of several.
const TEXTS: [&str; 33] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    END,
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// The end of a message, which ends the answer in most vocabularies, but not in those of harmony and Solar,
/// in which an answer has several messages.
const END: &str = "<|end|>";

/// The end tokens of a vocabulary that are known by their text. The vocabulary is searched once, not for each of its
/// tokens.
pub(super) struct KnownEnds {
    /// True if an answer has several messages, so that the end of a message is no end.
    by_messages: bool,
    /// True if `<|tool_response>` takes the place of `</s>`.
    tool_responses: bool,
}

impl KnownEnds {
    /// Searches a vocabulary.
    pub(super) fn of(tokens: &[&str]) -> Self {
        let has = |text: &str| tokens.contains(&text);
        let (call, flush) = (has("<|call|>"), has("<|flush|>"));
        Self {
            by_messages: (has("<|return|>") && call) || ((call || has("<|calls|>")) && flush),
            tool_responses: has("<|tool_response>"),
        }
    }

    /// Returns true if a token ends an answer whatever its type is in the file. Such a token has no text.
    pub(super) fn has(&self, text: &str) -> bool {
        match text {
            END => !self.by_messages,
            "</s>" => !self.tool_responses,
            text => TEXTS.contains(&text),
        }
    }
}

/// Returns a sentence that names the end tokens outside the vocabulary, or `None` if there are none.
pub(super) fn outside(header: &Header) -> Result<Option<String>, GgufFailure> {
    let count = header.texts("tokenizer.ggml.tokens")?.map_or(0, |tokens| tokens.len() as u64);
    let mut outside = Vec::new();
    for field in FIELDS {
        let id = header.whole(&format!("tokenizer.ggml.{field}"))?.filter(|id| count > 0 && *id >= count);
        outside.extend(id.map(|id| format!("{field} {id}")));
    }
    let words =
        || format!("these end tokens are outside the vocabulary and are not used: {}", outside.join(", "));
    Ok((!outside.is_empty()).then(words))
}

/// Returns the IDs of all end tokens. IDs outside the vocabulary are left out.
pub(super) fn ends(header: &Header) -> Result<Vec<u64>, GgufFailure> {
    let tokens = header.texts("tokenizer.ggml.tokens")?.unwrap_or_default();
    let mut ends = Vec::new();
    for field in FIELDS {
        ends.extend(header.whole(&format!("tokenizer.ggml.{field}"))?);
    }
    // Files with scores that name no end have the usual one of such vocabularies.
    if ends.is_empty() && header.text("tokenizer.ggml.model")? == Some("llama") {
        ends.push(2);
    }
    if !tokens.is_empty() {
        ends.retain(|end| *end < tokens.len() as u64);
    }
    let known = KnownEnds::of(&tokens);
    ends.extend((0..).zip(&tokens).filter(|(_, text)| known.has(text)).map(|(id, _)| id));
    ends.sort_unstable();
    ends.dedup();
    ends.retain(|end| tokens.get(*end as usize).is_none_or(|text| *text != END || known.has(text)));
    Ok(ends)
}
