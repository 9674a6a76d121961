//! A tokenizer for models with random weights.

use kvmodel::TextCodec;
use serde_json::json;

use crate::error::Result;

/// Returns a tokenizer whose tokens are words of four letters, each behind a space.
pub(super) fn codec(vocabulary: usize) -> Result<TextCodec> {
    let letter = |token: usize, place: u32| char::from(b'a' + (token / 26_usize.pow(place) % 26) as u8);
    // Byte-level tokenizers write a space in this form.
    let word = |token: usize| "Ġ".chars().chain((0..4).map(|place| letter(token, place))).collect::<String>();
    let words: serde_json::Map<_, _> = (0..vocabulary).map(|token| (word(token), json!(token))).collect();
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0",
        "model": {"type": "BPE", "vocab": words, "merges": []},
        "pre_tokenizer": bytes,
        "decoder": bytes,
        "added_tokens": [],
    });
    Ok(TextCodec::from_bytes(tokenizer.to_string().as_bytes(), None)?)
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_token_is_a_word_of_its_own() {
        let codec = super::codec(30).unwrap();
        assert_eq!(codec.decode(&[0, 27]).unwrap(), " aaaa bbaa");
    }
}
