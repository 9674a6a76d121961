//! Tokenizers that merge characters by the scores of tokens, as `SentencePiece` does: GGUF's model `llama`.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::failure::{GgufFailure, wrong};
use super::fields::{Header, required};
use super::tokenizer::Merging;

/// GGUF's type ID for ordinary tokens.
const ORDINARY: i64 = 1;
/// The maximum number of bytes in a token. Each is tried as the end of a part.
const LONGEST: usize = 1024;
/// The character that stands for a space.
const SPACE: &str = "▁";

/// Returns the merging of a file whose tokens have the types `kinds`.
pub(super) fn merging(header: &Header, tokens: &[&str], kinds: &[i64]) -> Result<Merging, GgufFailure> {
    let prefix = header.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let scores = required("tokenizer.ggml.scores", header.reals("tokenizer.ggml.scores")?)?;
    if scores.len() != tokens.len() {
        return wrong(format!(
            "\"tokenizer.ggml.scores\" has {} entries for {} tokens",
            scores.len(),
            tokens.len()
        ));
    }
    if let Some(id) = tokens.iter().position(|token| token.len() > LONGEST) {
        return wrong(format!(
            "token {id} of \"tokenizer.ggml.tokens\" has {} bytes, more than {LONGEST}",
            tokens[id].len()
        ));
    }
    let unknown = header.whole("tokenizer.ggml.unknown_token_id")?.unwrap_or(0);
    let unknown = usize::try_from(unknown).ok().and_then(|id| tokens.get(id));
    let spaces = json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE });
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    // Llama 2 and its like write a space in front of a text, which its tokens then begin with.
    if prefix {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    Ok(Merging {
        normalizer: if prefix {
            json!({ "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": SPACE }, spaces] })
        } else {
            spaces
        },
        pre_tokenizer: Value::Null,
        decoder: json!({ "type": "Sequence", "decoders": decoders }),
        merges: merges(tokens, kinds, &scores),
        ignore_merges: false,
        begins: true,
        unknown: json!(unknown),
        byte_fallback: true,
    })
}

/// Returns all pairs of tokens whose concatenation is a token. The pairs with the highest score, which are merged
/// first, come first.
fn merges(tokens: &[&str], kinds: &[i64], scores: &[f64]) -> Value {
    let ordinary = || tokens.iter().zip(kinds).zip(scores).filter(|((_, kind), _)| **kind == ORDINARY);
    let known: HashSet<&str> = ordinary().map(|((token, _), _)| *token).collect();
    let mut pairs = Vec::new();
    for ((token, _), score) in ordinary() {
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let of_tokens = cuts.filter(|(left, right)| known.contains(left) && known.contains(right));
        pairs.extend(of_tokens.map(|pair| (*score, pair)));
    }
    // Of a token's pairs, the one with the longest first part comes first, as in transformers.
    pairs.sort_by(|(a, (left, _)), (b, (other, _))| b.total_cmp(a).then(other.len().cmp(&left.len())));
    pairs.into_iter().map(|(_, (left, right))| json!([left, right])).collect()
}
