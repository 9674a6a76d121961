//! A tokenizer for models with random weights.

use kvmodel::TextCodec;
use serde_json::json;

use crate::error::Result;

/// The chat template, which writes what messages contain.
const TEMPLATE: &str = "{% for message in messages %}{{ message['content'] }} {% endfor %}";

/// Returns a tokenizer whose tokens are words of four letters, divided by spaces.
pub(super) fn codec(vocabulary: usize) -> Result<TextCodec> {
    let letter = |token: usize, place: u32| char::from(b'a' + (token / 26_usize.pow(place) % 26) as u8);
    let word = |token: usize| (0..4).map(|place| letter(token, place)).collect::<String>();
    let words: serde_json::Map<_, _> = (0..vocabulary).map(|token| (word(token), json!(token))).collect();
    let tokenizer = json!({
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": words, "unk_token": word(0)},
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "added_tokens": [],
    });
    let config = json!({"chat_template": TEMPLATE});
    Ok(TextCodec::from_bytes(tokenizer.to_string().as_bytes(), Some(config.to_string().as_bytes()))?)
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_token_is_a_word_of_its_own() {
        let codec = super::codec(30).unwrap();
        assert_eq!(codec.decode(&[0, 27]).unwrap(), "aaaa bbaa");
        assert_eq!(codec.encode("aaaa bbaa\ncaaa", true).unwrap(), [0, 27, 2]);
    }
}
