//! A lower bound on the number of a text's tokens, which needs no tokenisation.
//!
//! Tokenising a text takes a few hundred bytes of memory per byte. A text that cannot fit into the model's context
//! is therefore refused before it is tokenised.

use serde_json::Value;
use tokenizers::{ModelWrapper, NormalizedString, Normalizer, Tokenizer};

/// A bound that holds for every text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TokenBound {
    unit: Unit,
    /// Number of normalisers of which each leaves at least a quarter of the bytes that are not ASCII.
    shrinking: u32,
    /// True if whitespace always becomes a part of tokens.
    whitespace: bool,
}

/// A unit of text of which a token contains only so much.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    /// A token contains at most this many bytes.
    Bytes(usize),
    /// A token contains at most one word.
    Word,
}

/// The first byte's token in vocabularies that contain tokens for single bytes.
const FIRST_BYTE: &str = "<0x00>";

impl TokenBound {
    /// Returns the bound of a tokenizer, or `None` if the tokenizer can drop text, or tokens of any length exist.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let mut bound = Self { unit: Unit::Word, shrinking: 0, whitespace: true };
        let (mut bytes, mut words, mut grows) = (false, false, false);
        for step in steps(tokenizer.get_normalizer(), "normalizers")? {
            match kind(&step) {
                "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" => bound.shrinking += 1,
                "Prepend" => {}
                "ByteLevel" => bytes = true,
                "Strip" => bound.whitespace = false,
                "Replace" => {
                    let pattern = |of: &str| step["pattern"][of].as_str().unwrap_or_default();
                    let content = step["content"].as_str().unwrap_or_default();
                    if pattern("Regex") == r"\s+" && content == " " {
                        bound.whitespace = false;
                    } else if pattern("String").is_empty() || content.len() < pattern("String").len() {
                        return None;
                    } else {
                        grows = true;
                    }
                }
                _ => return None,
            }
        }
        for step in steps(tokenizer.get_pre_tokenizer(), "pretokenizers")? {
            match kind(&step) {
                "ByteLevel" => bytes = true,
                "Metaspace" | "Digits" | "UnicodeScripts" | "FixedLength" => {}
                "Split" | "Punctuation" if step["behavior"] != "Removed" => {}
                "Whitespace" | "WhitespaceSplit" | "BertPreTokenizer" => words = true,
                _ => return None,
            }
        }
        let added = tokenizer.get_added_tokens_decoder();
        bound.whitespace &= !words && !added.values().any(|token| token.lstrip || token.rstrip);
        match tokenizer.get_model() {
            ModelWrapper::BPE(model) => {
                if model.continuing_subword_prefix.is_some() || model.end_of_word_suffix.is_some() {
                    return None;
                }
                let vocabulary = model.get_vocab();
                if bytes && alphabet().all(|byte| vocabulary.contains_key(&byte)) {
                    bound.unit = Unit::Bytes(vocabulary.keys().map(|token| token.chars().count()).max()?);
                } else if !bytes && model.byte_fallback && has_bytes(|token| vocabulary.contains_key(token)) {
                    bound.unit = Unit::Bytes(vocabulary.keys().map(String::len).max()?);
                } else {
                    return None;
                }
            }
            // A word that is not in the vocabulary is a token, too.
            ModelWrapper::WordLevel(_) | ModelWrapper::WordPiece(_) if words && !grows && !bytes => {}
            _ => return None,
        }
        for token in added.values() {
            match &mut bound.unit {
                Unit::Bytes(longest) => {
                    let mut normal = NormalizedString::from(token.content.as_str());
                    if let Some(normalizer) = tokenizer.get_normalizer() {
                        normalizer.normalize(&mut normal).ok()?;
                    }
                    *longest = (*longest).max(token.content.len()).max(normal.get().len());
                }
                Unit::Word if token.content.contains(char::is_whitespace) => return None,
                Unit::Word => {}
            }
        }
        Some(bound)
    }

    /// Returns the number of tokens that a text has at least.
    pub(super) fn least(&self, text: &str) -> usize {
        let longest = match self.unit {
            Unit::Word => return text.split_whitespace().count(),
            Unit::Bytes(longest) => longest.max(1),
        };
        let (mut ascii, mut others) = (0, 0);
        for c in text.chars().filter(|c| self.whitespace || !c.is_whitespace()) {
            *(if c.is_ascii() { &mut ascii } else { &mut others }) += c.len_utf8();
        }
        (ascii + others / 4usize.saturating_pow(self.shrinking)).div_ceil(longest)
    }
}

/// Returns the steps of a normalizer or pre-tokenizer, as in a `tokenizer.json`.
fn steps(part: Option<&impl serde::Serialize>, list: &str) -> Option<Vec<Value>> {
    let part = serde_json::to_value(part).ok()?;
    match (part.is_null(), kind(&part)) {
        (true, _) => Some(Vec::new()),
        (_, "Sequence") => part[list].as_array().cloned(),
        _ => Some(vec![part]),
    }
}

fn kind(step: &Value) -> &str {
    step["type"].as_str().unwrap_or_default()
}

/// Returns the characters that stand for bytes in vocabularies of GPT-2's kind.
fn alphabet() -> impl Iterator<Item = String> {
    tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().map(String::from)
}

fn has_bytes(contains: impl Fn(&str) -> bool) -> bool {
    contains(FIRST_BYTE) && (1..=255).all(|byte| contains(&format!("<0x{byte:02X}>")))
}

#[cfg(test)]
mod tests {
    use allocation_counter::measure;
    use rstest::rstest;
    use serde_json::json;

    use super::*;
    use crate::error::Error;
    use crate::text::TextCodec;

    const WORDS: &str = include_str!("../../tests/words.json");
    const BUILT_IN: &str = include_str!("../../../../models/tiny-rag/tokenizer.json");

    /// A tokenizer with tokens for all bytes, in the way of Llama 2.
    fn fallback() -> Value {
        let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
        let tokens = bytes.chain(["▁", "a", "b", "▁a", "é"].map(str::to_owned));
        let vocabulary: serde_json::Map<String, Value> =
            tokens.enumerate().map(|(id, token)| (token, json!(id))).collect();
        json!({
            "version": "1.0", "added_tokens": [],
            "normalizer": { "type": "Sequence", "normalizers": [
                { "type": "Prepend", "prepend": "▁" },
                { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
            ]},
            "model": { "type": "BPE", "vocab": vocabulary, "merges": [["▁", "a"]], "byte_fallback": true },
        })
    }

    /// A tokenizer with tokens for all bytes, in the way of GPT-2, and a token with spaces beside it.
    fn bytes() -> Value {
        let mut tokens: Vec<String> = alphabet().collect();
        tokens.sort();
        tokens.extend(["ab", "Ġa", "ĠĠĠĠĠĠĠĠ"].map(str::to_owned));
        let vocabulary: serde_json::Map<String, Value> =
            tokens.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
        json!({
            "version": "1.0",
            "added_tokens": [{
                "id": 300, "content": "<|end of all|>", "special": true, "normalized": false, "single_word": false,
                "lstrip": false, "rstrip": false,
            }],
            "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
            "model": { "type": "BPE", "vocab": vocabulary, "merges": [["a", "b"], ["Ġ", "a"]] },
        })
    }

    fn with(mut base: Value, part: &str, value: Value) -> String {
        base[part] = value;
        base.to_string()
    }

    fn striping(mut base: Value) -> String {
        base["added_tokens"][0]["rstrip"] = json!(true);
        base.to_string()
    }

    /// Texts that tokenizers shrink: compositions, signs of three bytes that become one, spaces, added tokens.
    fn texts() -> Vec<String> {
        let parts = [
            "a",
            "ab",
            " ",
            "\n\n",
            "        ",
            "e\u{301}",
            "\u{212A}",
            "\u{1D400}",
            "\u{390}",
            "\u{1100}\u{1161}\u{11A8}",
            "ΐ\u{308}",
            "<|end of all|>",
            "<s>",
            "語",
            "\u{1FEF}",
            "word",
            "ẞ",
            "\u{A0}",
            "💬",
            "\u{FDFA}",
            "?",
        ];
        let (mut state, mut texts) = (7u64, vec![String::new()]);
        for length in 1..200 {
            let mut text = String::new();
            for _ in 0..=length % 23 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let part = parts[(state >> 33) as usize % parts.len()];
                text += &part.repeat((state >> 50) as usize % 3 + 1);
            }
            texts.push(text);
        }
        texts.extend(parts.iter().map(|part| part.repeat(40)));
        texts
    }

    #[rstest]
    #[case::words(WORDS.to_owned(), true)]
    #[case::built_in(BUILT_IN.to_owned(), true)]
    #[case::fallback(fallback().to_string(), true)]
    #[case::bytes(bytes().to_string(), true)]
    #[case::composed(with(bytes(), "normalizer", json!({ "type": "NFC" })), true)]
    #[case::compatible(with(bytes(), "normalizer", json!({ "type": "NFKC" })), true)]
    #[case::lower(with(bytes(), "normalizer", json!({ "type": "Sequence", "normalizers": [
        { "type": "NFKC" }, { "type": "Lowercase" }, { "type": "Strip", "strip_left": true, "strip_right": true }] })), true)]
    #[case::spaces_of_an_added_token(striping(bytes()), true)]
    #[case::removed(with(bytes(), "pre_tokenizer", json!({ "type": "Sequence", "pretokenizers": [
        { "type": "Split", "pattern": { "String": "a" }, "behavior": "Removed", "invert": false },
        { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false }] })), false)]
    #[case::shortened(with(bytes(), "normalizer", json!(
        { "type": "Replace", "pattern": { "String": "word" }, "content": "" })), false)]
    #[case::accents(with(bytes(), "normalizer", json!({ "type": "StripAccents" })), false)]
    fn no_text_has_fewer_tokens(#[case] tokenizer: String, #[case] known: bool) {
        let codec = TextCodec::from_bytes(tokenizer.as_bytes(), None).unwrap();
        assert_eq!(codec.bound.is_some(), known, "{:?}", codec.bound);
        let Some(bound) = &codec.bound else { return };
        let mut largest = 0;
        for text in texts() {
            let (least, tokens) = (bound.least(&text), codec.encode(&text, false).unwrap().len());
            assert!(least <= tokens, "{text:?} has {tokens} tokens, not {least} or more: {bound:?}");
            largest = largest.max(least);
        }
        assert!(largest > 10, "a bound that tells nothing: {largest}");
    }

    #[rstest]
    #[case::words(WORDS.to_owned(), "a ")]
    #[case::built_in(BUILT_IN.to_owned(), "who is the owner of the garden ? ")]
    #[case::fallback(fallback().to_string(), "abé")]
    #[case::bytes(bytes().to_string(), "a line of text\n")]
    #[case::composed(with(bytes(), "normalizer", json!({ "type": "NFC" })), "語 e\u{301}")]
    fn a_text_that_is_too_long_is_refused_without_memory(#[case] tokenizer: String, #[case] line: &str) {
        let codec = TextCodec::from_bytes(tokenizer.as_bytes(), None).unwrap().with_limit(4096);
        let text = line.repeat((11 << 20) / line.len());
        let used = measure(|| {
            let error = codec.encode(&text, true).unwrap_err();
            assert!(matches!(error, Error::TextTooLong { limit: 4096, least: 4097.., .. }), "{error}");
            assert!(error.to_string().contains("at most 4096 positions"), "{error}");
        });
        assert!(used.bytes_max < 1 << 16, "{} bytes for {}", used.bytes_max, text.len());
        let text = &text[..text.char_indices().nth(400).unwrap().0];
        assert!(codec.encode(text, true).is_ok(), "a text that fits");
    }
}
