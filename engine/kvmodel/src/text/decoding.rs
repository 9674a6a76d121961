//! Decodes tokens one by one to text that only grows.
//!
//! A token's text depends on its neighbours: several tokens may form one character, a run of byte tokens is
//! text only if the whole run is valid UTF-8, and decoders treat the first token differently. Decoding the
//! whole answer after each token would be correct, but it would cost more for every token. An
//! [`IncrementalDecoder`] therefore decodes only the last few tokens, and lets the tokenizer's own decoder do
//! it.

use tokenizers::Decoder;
use tokenizers::decoders::DecoderWrapper;

use super::TextCodec;
use super::guard::guarded;
use crate::error::Result;

/// The text that stands for everything before the tokens that are being decoded. It is long enough for decoders
/// that remove characters from the start, and for UTF-8, in which a character has at most four bytes.
pub(super) const BEFORE: &str = "aaaa";
/// The maximum number of pending tokens if the tokens are bytes of text.
const MOST_PENDING: usize = 8;
/// The number of pending tokens to keep after that. Each has at least one byte. Three bytes after any byte,
/// the boundaries of characters no longer depend on the bytes before it.
const KEPT: usize = 4;

/// The tokens on which a token's text may depend, besides the first one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// None: each token has its own text.
    Token,
    /// The run of byte tokens, such as `<0x0A>`, that the token belongs to. If the bytes of a run are not valid
    /// UTF-8, every byte of the run becomes a replacement character.
    Run,
    /// The tokens whose bytes belong to the same character.
    Character,
    /// All tokens.
    Everything,
}

/// A decoder that returns each piece of an answer's text as soon as no later token can change it.
///
/// Together, the pieces are the text that [`TextCodec::decode`] returns for all tokens. The cost of a token does
/// not depend on the number of tokens before it.
#[derive(Debug)]
pub(super) struct IncrementalDecoder<'a> {
    codec: &'a TextCodec,
    reach: Reach,
    /// The length of the text of [`BEFORE`].
    before: usize,
    /// The tokens whose text may still change.
    pending: Vec<String>,
    /// The length of the pending tokens' text that was already returned.
    given: usize,
    /// True if other text comes before the pending tokens.
    begun: bool,
}

impl<'a> IncrementalDecoder<'a> {
    /// Creates a decoder for an answer without tokens.
    pub(super) fn new(codec: &'a TextCodec) -> Self {
        let before = codec.join(vec![BEFORE.to_owned()]).map_or(0, |text| text.len());
        // A decoder that removes the placeholder could not be told where the new text begins.
        let reach = if before == 0 { Reach::Everything } else { codec.reach() };
        Self { codec, reach, before, pending: Vec::new(), given: 0, begun: false }
    }

    pub(super) fn codec(&self) -> &'a TextCodec {
        self.codec
    }

    /// Adds the answer's next token. Returns the text that has become final.
    ///
    /// # Errors
    /// Returns [`Error::Tokenizer`](crate::Error::Tokenizer) if the tokens cannot be decoded.
    pub(super) fn push(&mut self, token: u32) -> Result<String> {
        let Some(token) = self.codec.shown(token) else { return Ok(String::new()) };
        let open = match self.reach {
            Reach::Everything => true,
            Reach::Run => byte_of(&token).is_some(),
            // A token without bytes does not belong to a character.
            Reach::Character if token.is_empty() => return Ok(String::new()),
            Reach::Character | Reach::Token => false,
        };
        self.pending.push(token);
        if open {
            return Ok(String::new());
        }
        let text = self.pending_text()?;
        let certain = match self.reach {
            // An incomplete character at the end decodes to one replacement character.
            Reach::Character => text.strip_suffix('\u{FFFD}').map_or(text.len(), str::len),
            _ => text.len(),
        };
        let piece = text.get(self.given..certain).unwrap_or_default().to_owned();
        self.given = certain;
        if certain > 0 && certain == text.len() {
            self.pending.clear();
            (self.given, self.begun) = (0, true);
        } else if self.reach == Reach::Character && self.pending.len() > MOST_PENDING {
            self.pending.drain(..self.pending.len() - KEPT);
            self.begun = true;
            self.given = self.pending_text()?.len().saturating_sub('\u{FFFD}'.len_utf8());
        }
        Ok(piece)
    }

    /// Ends the answer. Returns the rest of its text.
    ///
    /// # Errors
    /// Returns [`Error::Tokenizer`](crate::Error::Tokenizer) if the tokens cannot be decoded.
    pub(super) fn rest(&mut self) -> Result<String> {
        let text = self.pending_text()?;
        self.pending.clear();
        Ok(text.get(std::mem::take(&mut self.given)..).unwrap_or_default().to_owned())
    }

    /// Decodes the pending tokens.
    fn pending_text(&self) -> Result<String> {
        if self.pending.is_empty() {
            return Ok(String::new());
        }
        let before = self.begun.then(|| BEFORE.to_owned());
        let mut text = self.codec.join(before.into_iter().chain(self.pending.iter().cloned()).collect())?;
        if self.begun {
            text.drain(..self.before);
        }
        Ok(text)
    }
}

impl TextCodec {
    /// Returns the token as its tokenizer writes it, or `None` if the token is special or unknown, so that it
    /// has no text.
    pub(super) fn shown(&self, token: u32) -> Option<String> {
        let text = self.tokenizer.id_to_token(token)?;
        let special = self.tokenizer.get_added_vocabulary().is_special_token(&text);
        (!special).then_some(text)
    }

    /// Decodes tokens as their tokenizer writes them.
    pub(super) fn join(&self, tokens: Vec<String>) -> Result<String> {
        match self.tokenizer.get_decoder() {
            Some(decoder) => guarded(|| decoder.decode(tokens)),
            None => Ok(tokens.join(" ")),
        }
    }

    /// Returns the tokens on which a token's text may depend.
    pub(super) fn reach(&self) -> Reach {
        let mut steps = Vec::new();
        if let Some(decoder) = self.tokenizer.get_decoder() {
            flatten(decoder, &mut steps);
        }
        let (mut reach, mut joined) = (Reach::Token, false);
        for step in steps {
            use DecoderWrapper::{ByteFallback, ByteLevel, Fuse, Metaspace, Replace, Strip, WordPiece};
            match step {
                // Joined text can only lose characters at its start, which later tokens do not change.
                Strip(strip) if joined && strip.stop == 0 && strip.content != '\u{FFFD}' => (),
                Fuse(_) => joined = true,
                _ if joined => return Reach::Everything,
                Replace(_) | Strip(_) | Metaspace(_) | WordPiece(_) => (),
                ByteFallback(_) => reach = Reach::Run,
                ByteLevel(_) if reach == Reach::Token => (reach, joined) = (Reach::Character, true),
                // The others treat the last token differently, or drop tokens that are repeated.
                _ => return Reach::Everything,
            }
        }
        reach
    }
}

/// Appends the steps of a decoder, in order.
fn flatten<'a>(decoder: &'a DecoderWrapper, steps: &mut Vec<&'a DecoderWrapper>) {
    match decoder {
        DecoderWrapper::Sequence(sequence) => {
            sequence.get_decoders().iter().for_each(|decoder| flatten(decoder, steps));
        }
        decoder => steps.push(decoder),
    }
}

/// Returns the byte that a token such as `<0x0A>` stands for.
pub(super) fn byte_of(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.filter(|digits| digits.len() == 2).and_then(|digits| u8::from_str_radix(digits, 16).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A codec whose tokens are `tokens`, in order of their IDs.
    fn codec(decoder: &serde_json::Value, tokens: &[&str]) -> TextCodec {
        let vocabulary: serde_json::Map<String, serde_json::Value> =
            tokens.iter().zip(0..).map(|(token, id)| ((*token).to_owned(), id.into())).collect();
        let tokenizer = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
            "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": true, "ignore_merges": false,
                "vocab": vocabulary, "merges": [] },
        });
        TextCodec::from_bytes(tokenizer.to_string().as_bytes(), None).unwrap()
    }

    #[test]
    fn a_character_that_never_starts_at_a_token_leaves_few_tokens_pending() {
        // Each token ends one character and begins the next: é is Ã ©.
        let codec = codec(
            &serde_json::json!({ "type": "ByteLevel", "add_prefix_space": false,
            "trim_offsets": true, "use_regex": false }),
            &["Ã", "©Ã", "ÿ"],
        );
        for again in [1, 2] {
            let mut decoder = IncrementalDecoder::new(&codec);
            let mut tokens = vec![0];
            tokens.extend(std::iter::repeat_n(again, 500));
            let mut text = String::new();
            for &token in &tokens {
                text += &decoder.push(token).unwrap();
                assert!(decoder.pending.len() <= MOST_PENDING, "{}", decoder.pending.len());
            }
            text += &decoder.rest().unwrap();
            assert_eq!(text, codec.decode(&tokens).unwrap());
        }
    }

    #[test]
    fn bytes_are_recognised_as_the_decoder_recognises_them() {
        for (token, byte) in [
            ("<0x0A>", true),
            ("<0xff>", true),
            ("<0x+1>", true),
            ("<0xGG>", false),
            ("<0xA>", false),
            ("<0xé>", false),
        ] {
            assert_eq!(byte_of(token).is_some(), byte, "{token}");
        }
    }
}
