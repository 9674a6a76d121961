//! The texts and bytes of single tokens, for log-probabilities.

use std::sync::{Arc, OnceLock};

use kvmodel::TextCodec;

use crate::refusal::Refusal;

/// The bytes of all tokens, once they are asked for.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenTexts(Arc<OnceLock<Vec<Vec<u8>>>>);

impl TokenTexts {
    /// Reads the bytes of all tokens, which takes up to a second for a large vocabulary.
    pub(crate) fn prepare(&self, codec: &TextCodec) {
        // Some tokenizers have no bytes for single tokens, which are decoded alone then.
        self.0.get_or_init(|| codec.token_bytes().unwrap_or_default());
    }

    /// Returns the text of a token and its bytes. The bytes of an answer's tokens joined are its text, also if a token is a
    /// part of a character. Such a token's text names its bytes.
    pub(crate) fn of(&self, codec: &TextCodec, token: u32) -> Result<(String, Vec<u8>), Refusal> {
        self.prepare(codec);
        let bytes = self.0.get().and_then(|all| all.get(token as usize)).filter(|bytes| !bytes.is_empty());
        let Some(bytes) = bytes else {
            // The name of a special token.
            let text = codec.token_text(token)?;
            let bytes = text.as_bytes().to_vec();
            return Ok((text, bytes));
        };
        let text = if let Ok(text) = std::str::from_utf8(bytes) {
            text.to_owned()
        } else {
            let each = bytes.iter().map(|byte| format!("\\x{byte:02x}"));
            format!("bytes:{}", each.collect::<String>())
        };
        Ok((text, bytes.clone()))
    }
}

/// Returns the number of characters that begin in some bytes.
pub(crate) fn characters(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&byte| byte & 0xC0 != 0x80).count()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tokens_that_are_parts_of_a_character_join_to_it() {
        // The letters of GPT-2's vocabularies for a space and for the bytes C3 and A9 of `é`.
        let vocabulary = json!({"Ġa": 0, "Ã": 1, "©": 2});
        let bytes =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let end = json!({"id": 3, "content": "<end>", "special": true, "normalized": false, "single_word": false,
            "lstrip": false, "rstrip": false});
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [end], "normalizer": null,
            "post_processor": null, "pre_tokenizer": bytes, "decoder": bytes,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        });
        let codec = TextCodec::from_bytes(tokenizer.to_string().as_bytes(), None).unwrap();
        let texts = TokenTexts::default();
        let all: Vec<(String, Vec<u8>)> = (0..4).map(|token| texts.of(&codec, token).unwrap()).collect();
        let shown: Vec<&str> = all.iter().map(|(text, _)| text.as_str()).collect();
        assert_eq!(shown, [" a", "bytes:\\xc3", "bytes:\\xa9", "<end>"]);
        let joined: Vec<u8> = all[..3].iter().flat_map(|(_, bytes)| bytes.clone()).collect();
        assert_eq!((String::from_utf8(joined).unwrap().as_str(), all.len()), (" aé", 4));
        let counted: usize = all[..3].iter().map(|(_, bytes)| characters(bytes)).sum();
        assert_eq!(counted, 3);
    }
}
