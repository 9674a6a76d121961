//! Converts a GGUF file's tokenizer to the `tokenizer.json` and `tokenizer_config.json` of a Hugging Face
//! model.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::ends::KnownEnds;
use super::failure::{GgufFailure, wrong};
use super::fields::{Header, required};
use super::pretokenize::{SplitText, splitting};
use super::scores;
use crate::error::Error;
use crate::files::{FileContents, SmallFile};
use crate::text::TextCodec;

/// GGUF's type ID for control tokens, which have no text.
const CONTROL: i64 = 3;
/// GGUF's type ID for tokens that users have added, which are never split.
const ADDED: i64 = 4;

/// The ID of the token for the beginning of a text in vocabularies with scores that name none.
const BEGIN: u64 = 1;

/// The parts of a `tokenizer.json` that depend on how the tokenizer merges tokens.
pub(super) struct Merging {
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    pub(super) decoder: Value,
    /// The pairs of tokens to merge, in order of precedence.
    pub(super) merges: Value,
    /// True if a whole word that is a token is not merged from parts.
    pub(super) ignore_merges: bool,
    /// True if prompts begin with the token for the beginning of a text, unless the file says otherwise.
    pub(super) begins: bool,
    /// The token for characters that are not tokens, or null.
    pub(super) unknown: Value,
    /// True if a character that is not a token is split into tokens for its bytes.
    pub(super) byte_fallback: bool,
}

/// Returns the special tokens and the chat template in the format of `tokenizer_config.json`.
fn template(header: &Header) -> Result<Value, GgufFailure> {
    let tokens = header.texts("tokenizer.ggml.tokens")?.unwrap_or_default();
    // An ID outside the vocabulary names no token. Whoever needs the token says so.
    let special = |field: &str, usual: Option<u64>| -> Result<Value, GgufFailure> {
        let id = header.whole(field)?.or(usual).and_then(|id| usize::try_from(id).ok());
        Ok(json!(id.and_then(|id| tokens.get(id))))
    };
    let usual = |id: u64| (header.text("tokenizer.ggml.model").ok().flatten() == Some("llama")).then_some(id);
    Ok(json!({
        "bos_token": special("tokenizer.ggml.bos_token_id", usual(BEGIN))?,
        "eos_token": special("tokenizer.ggml.eos_token_id", usual(2))?,
        "unk_token": special("tokenizer.ggml.unknown_token_id", usual(0))?,
        "pad_token": special("tokenizer.ggml.padding_token_id", None)?,
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
    let ends = KnownEnds::of(&tokens);
    let added: Vec<Value> = (0..)
        .zip(tokens.iter().zip(&kinds))
        .map(|(id, (token, kind)): (u32, _)| (id, token, *kind == CONTROL || ends.has(token), *kind))
        .filter(|(_, _, control, kind)| *control || *kind == ADDED)
        .map(|(id, token, control, _)| {
            json!({
                "id": id, "content": token, "special": control, "normalized": false,
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
    let asked = header.bool("tokenizer.ggml.add_bos_token")?;
    let id = header.whole("tokenizer.ggml.bos_token_id")?.or((kind == "llama").then_some(BEGIN));
    if let (Some(true), Some(id), None) = (asked, id, begin) {
        return wrong(format!(
            "field \"tokenizer.ggml.bos_token_id\" is {id}, but there are only {} tokens, and every prompt begins with this \
             one",
            tokens.len()
        ));
    }
    let processor = match (asked.unwrap_or(merging.begins), id, begin) {
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
    let name = header.text("tokenizer.ggml.pre")?.unwrap_or("default");
    let SplitText { pre_tokenizer, normalizer, ignore_merges, begins } = splitting(name)?;
    let merges = usable(merges, vocabulary)?;
    Ok(Merging {
        normalizer,
        pre_tokenizer,
        decoder: json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true }),
        merges: json!(merges),
        ignore_merges,
        begins,
        unknown: Value::Null,
        byte_fallback: false,
    })
}

/// Returns the merges that join two tokens into another token. Some files have others, which their makers'
/// vocabularies no longer contain.
fn usable<'a>(merges: Vec<&'a str>, vocabulary: &Map<String, Value>) -> Result<Vec<&'a str>, GgufFailure> {
    let mut kept = Vec::with_capacity(merges.len());
    for (number, merge) in merges.into_iter().enumerate() {
        match merge.split_once(' ') {
            Some((left, right)) if !right.contains(' ') => {
                let joined = format!("{left}{right}");
                let known = [left, right, &joined].iter().all(|text| vocabulary.contains_key(*text));
                kept.extend(known.then_some(merge));
            }
            _ => {
                return wrong(format!(
                    "merge {number} of \"tokenizer.ggml.merges\" is {merge:?}: it is not two strings separated by a space; \
                     put the model's tokenizer.json into the file's folder"
                ));
            }
        }
    }
    Ok(kept)
}
