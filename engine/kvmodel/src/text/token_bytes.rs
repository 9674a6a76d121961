//! The bytes of each token's text, for grammars over tokens.

use std::collections::HashMap;

use super::TextCodec;
use super::decoding::{BEFORE, Reach, byte_of};
use crate::error::{Error, Result};

impl TextCodec {
    /// Returns the bytes that each token adds to a text, in the order of their IDs. Special tokens, and IDs without a
    /// token, add none. The bytes are those behind other text: some decoders leave out a space at the beginning.
    ///
    /// # Errors
    /// Returns [`Error::Tokenizer`] if the tokenizer's decoder treats a token according to its neighbours, other than as
    /// bytes of one character.
    pub fn token_bytes(&self) -> Result<Vec<Vec<u8>>> {
        let reach = self.reach();
        let before = self.join(vec![BEFORE.to_owned()])?.len();
        if reach == Reach::Everything || before == 0 {
            return Err(Error::Tokenizer(
                "the text of a token depends on its neighbours with this tokenizer's decoder, so answers cannot be \
                 bound to a grammar"
                    .to_owned(),
            ));
        }
        let most = self.tokenizer.get_vocab(true).into_values().max().map_or(0, |last| last as usize + 1);
        let bytes: HashMap<char, u8> = byte_letters().zip(0..=u8::MAX).collect();
        (0..most as u32)
            .map(|id| {
                let Some(token) = self.shown(id) else { return Ok(Vec::new()) };
                match reach {
                    // As in the library, a token with any other character stands for its own text.
                    Reach::Character => Ok(token
                        .chars()
                        .map(|c| bytes.get(&c).copied())
                        .collect::<Option<Vec<u8>>>()
                        .unwrap_or_else(|| token.into_bytes())),
                    _ => match byte_of(&token).filter(|_| reach == Reach::Run) {
                        Some(byte) => Ok(vec![byte]),
                        None => Ok(self.join(vec![BEFORE.to_owned(), token])?.into_bytes().split_off(before)),
                    },
                }
            })
            .collect()
    }
}

/// Returns the characters that stand for the bytes in vocabularies of GPT-2's kind, in the order of the bytes: printable
/// ones for themselves, and characters from U+0100 on for the others.
fn byte_letters() -> impl Iterator<Item = char> {
    let is_printable = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = (0x100..).filter_map(char::from_u32);
    (0..=255u32).map(move |byte| {
        let printable = char::from_u32(byte).filter(|_| is_printable(&byte));
        printable.or_else(|| others.next()).unwrap_or_default()
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rstest::rstest;
    use serde_json::{Value, json};
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    use super::*;

    const BUILT_IN: &str = include_str!("../../../../models/tiny-rag/tokenizer.json");

    fn codec(decoder: &Value, tokens: &[&str], added: &Value) -> TextCodec {
        let vocabulary: serde_json::Map<String, Value> =
            tokens.iter().zip(0..).map(|(token, id)| ((*token).to_owned(), id.into())).collect();
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
            "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": true, "ignore_merges": false,
                "vocab": vocabulary, "merges": [] },
        });
        TextCodec::from_bytes(tokenizer.to_string().as_bytes(), None).unwrap()
    }

    fn added(id: u32, content: &str, special: bool) -> Value {
        json!({ "id": id, "content": content, "special": special, "normalized": false, "single_word": false,
            "lstrip": false, "rstrip": false })
    }

    #[test]
    fn the_letters_of_bytes_are_the_librarys() {
        let letters: HashSet<char> = byte_letters().collect();
        assert_eq!(letters, ByteLevel::alphabet().into_iter().collect());
        assert_eq!(byte_letters().nth(b' '.into()), Some('Ġ'));
        assert_eq!(byte_letters().nth(b'\n'.into()), Some('Ċ'));
    }

    #[test]
    fn tokens_of_bytes_may_be_parts_of_characters() {
        let decoder = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
        let more = json!([
            added(4, "<end>", true),
            added(5, "<tool call>", false),
            added(6, "<｜call▁begin｜>", false)
        ]);
        let codec = codec(&decoder, &["Ġa", "Ã", "©Ċ", "b"], &more);
        let bytes = codec.token_bytes().unwrap();
        let expected: [&[u8]; 7] =
            [b" a", b"\xC3", b"\xA9\n", b"b", b"", b"<tool call>", "<｜call▁begin｜>".as_bytes()];
        assert_eq!(bytes, expected);
        assert_eq!(codec.decode(&[0, 1, 2, 5, 6]).unwrap(), " aé\n<tool call><｜call▁begin｜>");
    }

    #[test]
    fn tokens_that_fall_back_to_bytes_have_them() {
        let decoder = json!({ "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " }, { "type": "ByteFallback" },
            { "type": "Fuse" }, { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
        ]});
        let codec = codec(&decoder, &["▁a", "<0x0A>", "é▁", "<0xFF>"], &json!([added(4, "</s>", true)]));
        let expected: [&[u8]; 5] = [b" a", b"\n", "é ".as_bytes(), b"\xFF", b""];
        assert_eq!(codec.token_bytes().unwrap(), expected);
    }

    #[rstest]
    #[case::built_in(BUILT_IN)]
    fn joined_bytes_are_the_decoded_text(#[case] tokenizer: &str) {
        let codec = TextCodec::from_bytes(tokenizer.as_bytes(), None).unwrap();
        let bytes = codec.token_bytes().unwrap();
        let tokens = codec.encode("alba is red . cedo is blue . alba ?", false).unwrap();
        for some in tokens.windows(4) {
            let joined = some.iter().flat_map(|&token| bytes[token as usize].clone()).collect();
            let (joined, text) = (String::from_utf8(joined).unwrap(), codec.decode(some).unwrap());
            assert_eq!(joined.trim_start(), text.trim_start());
        }
    }

    #[test]
    fn a_decoder_that_looks_at_neighbours_is_refused() {
        let decoder =
            json!({ "type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true });
        let error = codec(&decoder, &["a", "b"], &json!([])).token_bytes().unwrap_err().to_string();
        assert!(error.contains("cannot be bound to a grammar"), "{error}");
    }
}
