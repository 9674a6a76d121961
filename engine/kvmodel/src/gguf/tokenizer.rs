//! Converts a GGUF file's tokenizer to the `tokenizer.json` and `tokenizer_config.json` of a Hugging Face
//! model.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::failure::{GgufFailure, wrong};
use super::fields::{Header, required};
use super::scores;
use crate::error::Error;
use crate::files::{FileContents, SmallFile};
use crate::text::TextCodec;

/// GGUF's type ID for control tokens, which have no text.
const CONTROL: i64 = 3;
/// GGUF's type ID for tokens that users have added, which are never split.
const ADDED: i64 = 4;

/// The pattern by which Llama 3 and Qwen2 split text before byte pairs are merged. `DIGITS` stands for the
/// repetition count of digits, in which the two models differ.
const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The parts of a `tokenizer.json` that depend on how the tokenizer merges tokens.
pub(super) struct Merging {
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    pub(super) decoder: Value,
    /// The pairs of tokens to merge, in order of precedence.
    pub(super) merges: Value,
    /// True if a whole word that is a token is not merged from parts.
    pub(super) ignore_merges: bool,
    /// The token for characters that are not tokens, or null.
    pub(super) unknown: Value,
    /// True if a character that is not a token is split into tokens for its bytes.
    pub(super) byte_fallback: bool,
}

/// Returns three parts for the pre-tokenizer `name`: the pre-tokenizer, the normalizer, and true if a word
/// that is a token as a whole is kept without applying merges.
fn pre(name: &str) -> Result<(Value, Value, bool), GgufFailure> {
    let bytes = |by_words: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": by_words });
    let split = |digits: &str| {
        let pattern = WORDS.replace("DIGITS", digits);
        json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false })
    };
    let sequence = |steps: [Value; 2]| json!({ "type": "Sequence", "pretokenizers": steps });
    Ok(match name {
        "gpt-2" => (bytes(true), Value::Null, false),
        "smollm" | "starcoder" | "refact" | "codeshell" => (
            sequence([json!({ "type": "Digits", "individual_digits": true }), bytes(true)]),
            Value::Null,
            false,
        ),
        "llama-bpe" | "llama3" => (sequence([split("{1,3}"), bytes(false)]), Value::Null, true),
        "qwen2" => (sequence([split(""), bytes(false)]), json!({ "type": "NFC" }), false),
        other => {
            return wrong(format!(
                "field \"tokenizer.ggml.pre\" is {other:?} (supported: gpt-2, smollm, starcoder, refact, codeshell, \
                 llama-bpe and qwen2); put the model's tokenizer.json into the file's folder"
            ));
        }
    })
}

/// Returns the special tokens and the chat template in the format of `tokenizer_config.json`.
fn template(header: &Header) -> Result<Value, GgufFailure> {
    let tokens = header.texts("tokenizer.ggml.tokens")?.unwrap_or_default();
    let special = |field: &str| -> Result<Value, GgufFailure> {
        let Some(id) = header.whole(field)? else { return Ok(Value::Null) };
        match tokens.get(usize::try_from(id).unwrap_or(usize::MAX)) {
            Some(token) => Ok(json!(token)),
            None => wrong(format!("field {field:?} is {id}, but there are only {} tokens", tokens.len())),
        }
    };
    Ok(json!({
        "bos_token": special("tokenizer.ggml.bos_token_id")?,
        "eos_token": special("tokenizer.ggml.eos_token_id")?,
        "unk_token": special("tokenizer.ggml.unknown_token_id")?,
        "pad_token": special("tokenizer.ggml.padding_token_id")?,
        "chat_template": header.text("tokenizer.chat_template")?,
    }))
}

/// Returns the codec for the file at `path`. A `tokenizer.json` in the same folder takes precedence.
pub(super) fn codec(header: &Header, path: &Path) -> Result<TextCodec, GgufFailure> {
    let config = template(header)?;
    let place = format!("{}, field \"tokenizer.chat_template\"", path.display());
    if let Some(beside) = SmallFile::read_if_there(path.with_file_name("tokenizer.json"))? {
        return Ok(TextCodec::of(beside.contents(), &config, &place)?);
    }
    let tokenizer = tokenizer(header, config["bos_token"].as_str())?.to_string();
    TextCodec::of(FileContents { path, bytes: tokenizer.as_bytes() }, &config, &place).map_err(|error| {
        match error {
            Error::File { source, .. } => GgufFailure::Other(*source),
            other => other.into(),
        }
    })
}

/// Converts the fields to a `tokenizer.json`. `begin` is the token that marks the start of a text.
fn tokenizer(header: &Header, begin: Option<&str>) -> Result<Value, GgufFailure> {
    let kind = required("tokenizer.ggml.model", header.text("tokenizer.ggml.model")?)?;
    let tokens = required("tokenizer.ggml.tokens", header.texts("tokenizer.ggml.tokens")?)?;
    let kinds = header.wholes("tokenizer.ggml.token_type")?.unwrap_or_else(|| vec![1; tokens.len()]);
    if kinds.len() != tokens.len() {
        return wrong(format!(
            "\"tokenizer.ggml.token_type\" has {} entries for {} tokens",
            kinds.len(),
            tokens.len()
        ));
    }
    if let Some(embeddings) = header.tensors.iter().find(|place| place.name == "token_embd.weight")
        && embeddings.shape[0] < tokens.len()
    {
        let rows = embeddings.shape[0];
        return wrong(format!(
            "\"tokenizer.ggml.tokens\" has {} tokens, but \"token_embd.weight\" has {rows} embeddings",
            tokens.len()
        ));
    }
    let added: Vec<Value> = (0..)
        .zip(tokens.iter().zip(&kinds))
        .filter(|(_, (_, kind))| [CONTROL, ADDED].contains(kind))
        .map(|(id, (token, kind)): (u32, _)| {
            json!({
                "id": id, "content": token, "special": *kind == CONTROL, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false,
            })
        })
        .collect();
    let vocabulary: Map<String, Value> =
        tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect();
    if vocabulary.len() != tokens.len() {
        return wrong(format!(
            "{} of the {} tokens are duplicates",
            tokens.len() - vocabulary.len(),
            tokens.len()
        ));
    }
    let merging = match kind {
        "gpt2" => byte_pairs(header, &vocabulary)?,
        "llama" => scores::merging(header, &tokens, &kinds)?,
        other => {
            return wrong(format!(
                "field \"tokenizer.ggml.model\" is {other:?} (supported: gpt2, which merges bytes, and llama, which merges \
                 by score); put the model's tokenizer.json into the file's folder"
            ));
        }
    };
    let default = merging.ignore_merges || merging.byte_fallback;
    let begins = header.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(default);
    let processor = match (begins, header.whole("tokenizer.ggml.bos_token_id")?, begin) {
        (true, Some(id), Some(begin)) => json!({
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": begin, "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { begin: { "id": begin, "ids": [id], "tokens": [begin] } },
        }),
        _ => Value::Null,
    };
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added,
        "normalizer": merging.normalizer,
        "pre_tokenizer": merging.pre_tokenizer,
        "post_processor": processor,
        "decoder": merging.decoder,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": merging.unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": merging.byte_fallback, "byte_fallback": merging.byte_fallback,
            "ignore_merges": merging.ignore_merges, "vocab": vocabulary, "merges": merging.merges,
        },
    }))
}

/// Returns the merging of a file that lists the pairs of byte strings to merge.
fn byte_pairs(header: &Header, vocabulary: &Map<String, Value>) -> Result<Merging, GgufFailure> {
    let merges = required("tokenizer.ggml.merges", header.texts("tokenizer.ggml.merges")?)?;
    let name = required("tokenizer.ggml.pre", header.text("tokenizer.ggml.pre")?)?;
    let (pre_tokenizer, normalizer, ignore_merges) = pre(name)?;
    check_merges(&merges, vocabulary)?;
    Ok(Merging {
        normalizer,
        pre_tokenizer,
        decoder: json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true }),
        merges: json!(merges),
        ignore_merges,
        unknown: Value::Null,
        byte_fallback: false,
    })
}

/// Checks that each merge joins two tokens into another token.
fn check_merges(merges: &[&str], vocabulary: &Map<String, Value>) -> Result<(), GgufFailure> {
    for (number, merge) in merges.iter().enumerate() {
        let problem = match merge.split_once(' ') {
            Some((left, right)) if !right.contains(' ') => {
                let joined = format!("{left}{right}");
                let unknown = [left, right, &joined].into_iter().find(|text| !vocabulary.contains_key(*text));
                unknown.map(|text| format!("{text:?} is not a token"))
            }
            _ => Some("it is not two strings separated by a space".to_owned()),
        };
        if let Some(problem) = problem {
            return wrong(format!(
                "merge {number} of \"tokenizer.ggml.merges\" is {merge:?}: {problem}; put the model's tokenizer.json \
                 into the file's folder"
            ));
        }
    }
    Ok(())
}
