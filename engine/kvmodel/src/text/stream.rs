//! Decodes an answer's text while it grows, up to a stop string.

use std::ops::{ControlFlow, Range};

use super::TextCodec;
use super::decoding::IncrementalDecoder;
use crate::error::{Error, Result};
use crate::model::Observer;

// Decision: docs/decisions/models.md#stop-strings-belong-to-the-observer
/// A decoder for an answer's text, token by token, up to a stop string.
///
/// Text is held back as long as it may still change or may be the start of a stop string. A stop string
/// itself is never returned. If a stream is the [`Observer`] of a request, the request ends at a stop string.
/// Together, the returned pieces are the text that [`TextCodec::decode`] returns for the whole answer, up to
/// the stop string. If the text contains several stop strings, the one that ends first counts.
///
/// Byte tokens, such as `<0x0A>`, are held back until another token follows them, because an invalid byte
/// changes the text of all byte tokens next to it. A stop string in such tokens is then found a token later.
///
/// ```no_run
/// use kvmodel::Observer;
///
/// # fn print(codec: &kvmodel::TextCodec, tokens: impl Iterator<Item = u32>) -> kvmodel::Result<()> {
/// let mut stream = kvmodel::TextStream::new(codec, ["\n\n".to_owned()])?;
/// for token in tokens {
///     if stream.token(token).is_break() || stream.is_complete() {
///         break;
///     }
/// }
/// println!("{}", stream.finish()?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TextStream<'a> {
    decoder: IncrementalDecoder<'a>,
    stop: Vec<String>,
    /// Tokens whose whole text is a stop string, with the string's index. Any such token ends the answer.
    stop_tokens: Vec<(u32, usize)>,
    /// Special tokens whose text is shown.
    shown: Vec<(u32, String)>,
    /// The text so far, without the stop string. Until the stop string is found, the text only grows.
    text: String,
    /// The length of the text that was already returned.
    given: usize,
    /// The length of the prefix of the text in which no stop string starts.
    searched: usize,
    stopped: bool,
    /// The index of the stop string that was found.
    found: Option<usize>,
    failure: Option<Error>,
}

impl<'a> TextStream<'a> {
    /// Creates a stream for an answer that ends before the first occurrence of a string in `stop`. A stop
    /// string may also be a special token's text, although answers never contain it.
    ///
    /// # Errors
    /// Returns [`Error::EmptyStop`] if a stop string is empty.
    pub fn new(codec: &'a TextCodec, stop: impl IntoIterator<Item = String>) -> Result<Self> {
        let stop: Vec<String> = stop.into_iter().collect();
        Self::check_stop(&stop)?;
        let token = |(i, text): (usize, &String)| Some((codec.special_token(text)?, i));
        let stop_tokens = stop.iter().enumerate().filter_map(token).collect();
        Ok(Self {
            decoder: IncrementalDecoder::new(codec),
            stop,
            stop_tokens,
            shown: Vec::new(),
            text: String::new(),
            given: 0,
            searched: 0,
            stopped: false,
            found: None,
            failure: None,
        })
    }

    /// Shows special tokens, which answers do not contain otherwise, where their text is one of `marks`. Other strings
    /// have no effect.
    #[must_use]
    pub fn showing<'m>(mut self, marks: impl IntoIterator<Item = &'m str>) -> Self {
        let codec = self.decoder.codec();
        let special =
            marks.into_iter().filter_map(|mark| Some((codec.special_token(mark)?, mark.to_owned())));
        self.shown.extend(special);
        self
    }

    /// Checks stop strings before there is a text.
    ///
    /// # Errors
    /// Returns [`Error::EmptyStop`] if a stop string is empty.
    pub fn check_stop(stop: &[String]) -> Result<()> {
        if stop.iter().any(String::is_empty) { Err(Error::EmptyStop) } else { Ok(()) }
    }

    /// Adds the answer's next token. Returns the new text that has become final. After a stop string, the
    /// returned text is always empty.
    ///
    /// # Errors
    /// Returns [`Error::Tokenizer`] if the tokens cannot be decoded.
    pub fn push(&mut self, token: u32) -> Result<&str> {
        if self.stopped {
            return Ok("");
        }
        self.text += &self.decoder.push(token)?;
        let last = self.stop_tokens.iter().find(|(known, _)| *known == token).map(|(_, stop)| *stop);
        let shown = self.shown.iter().find(|(special, _)| *special == token).filter(|_| last.is_none());
        if last.is_some() || shown.is_some() {
            self.text += &self.decoder.rest()?;
        }
        if let Some((_, mark)) = shown {
            self.text += mark;
        }
        let fresh = self.settle(last.is_some());
        if last.is_some() && !self.stopped {
            (self.stopped, self.found) = (true, last);
        }
        Ok(&self.text[fresh])
    }

    /// Returns true once the answer contains a stop string.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Returns the stop string that the answer contains, if there is one.
    pub fn stop_string(&self) -> Option<&str> {
        self.found.and_then(|found| self.stop.get(found)).map(String::as_str)
    }

    /// Ends the answer, and returns the text that was held back, up to a stop string. A stop string that was
    /// held back is found here, and [`is_stopped`](Self::is_stopped) then returns true.
    ///
    /// # Errors
    /// Returns [`Error::Tokenizer`] if the tokens cannot be decoded.
    pub fn rest(&mut self) -> Result<&str> {
        if !self.stopped {
            self.text += &self.decoder.rest()?;
        }
        let fresh = self.settle(true);
        Ok(&self.text[fresh])
    }

    /// Returns the whole text of the answer, without the stop string.
    ///
    /// # Errors
    /// Returns the first decoding error that occurred while the stream was an observer, and
    /// [`Error::Tokenizer`] if the last tokens cannot be decoded.
    pub fn finish(mut self) -> Result<String> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        self.rest()?;
        Ok(self.text)
    }

    /// Looks for a stop string in the text that was appended last, and returns the range of the text to give
    /// out. If `last` is true, no text follows.
    fn settle(&mut self, last: bool) -> Range<usize> {
        if let Some((at, found)) = self.find_stop().filter(|_| !self.stopped) {
            self.text.truncate(at);
            (self.stopped, self.found) = (true, Some(found));
        }
        let held_back = if self.stopped || last { 0 } else { self.held_back() };
        let free = self.text.len() - held_back;
        self.searched = free;
        std::mem::replace(&mut self.given, free)..free
    }

    /// Returns the byte at which the stop string that ends first starts, and the string's index.
    fn find_stop(&self) -> Option<(usize, usize)> {
        let text = &self.text[self.searched..];
        let found = |(i, stop): (usize, &String)| text.find(stop.as_str()).map(|at| (at + stop.len(), at, i));
        let first = self.stop.iter().enumerate().filter_map(found).min();
        first.map(|(_, at, i)| (self.searched + at, i))
    }

    /// Returns the length of the longest suffix of the text that is a prefix of a stop string.
    fn held_back(&self) -> usize {
        let beginning = |stop: &String| {
            let longest = stop.len().min(self.text.len() + 1) - 1;
            (1..=longest).rev().find(|&n| stop.is_char_boundary(n) && self.text.ends_with(&stop[..n]))
        };
        self.stop.iter().filter_map(beginning).max().unwrap_or(0)
    }
}

impl Observer for TextStream<'_> {
    fn token(&mut self, token: u32) -> ControlFlow<()> {
        if let Err(error) = self.push(token) {
            self.failure.get_or_insert(error);
        }
        ControlFlow::Continue(())
    }

    fn is_complete(&self) -> bool {
        self.stopped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tokenizer with one token per byte, followed by a special token.
    fn codec() -> TextCodec {
        // ByteLevel writes bytes as characters: printable bytes as themselves, all other bytes as characters
        // starting at U+0100.
        let printable = |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || b >= 174;
        let mut next = 256;
        let vocabulary: serde_json::Map<String, serde_json::Value> = (0..256)
            .map(|byte| {
                let c = if printable(byte) {
                    byte
                } else {
                    next += 1;
                    next - 1
                };
                (char::from_u32(c).unwrap().to_string(), byte.into())
            })
            .collect();
        let tokenizer = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [{ "id": 256, "content": "<end>", "special": true, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false }],
            "normalizer": null, "post_processor": null,
            "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
            "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
            "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": vocabulary, "merges": [] },
        });
        TextCodec::from_bytes(tokenizer.to_string().as_bytes(), None).unwrap()
    }

    /// Streams a string byte by byte. Returns the pieces joined by `|`, with the remaining text after `/`,
    /// and true if the stream stopped.
    fn stream(text: &str, stop: &[&str]) -> (String, bool) {
        let codec = codec();
        let mut stream = TextStream::new(&codec, stop.iter().map(|&s| s.to_owned())).unwrap();
        let tokens = codec.encode(text, false).unwrap();
        let pieces: Vec<String> =
            tokens.into_iter().map(|token| stream.push(token).unwrap().to_owned()).collect();
        let given = format!("{}/{}", pieces.join("|"), stream.rest().unwrap());
        assert_eq!(given.replace(['|', '/'], ""), stream.text, "nothing is given out twice or lost");
        (given, stream.is_stopped())
    }

    #[test]
    fn without_stop_strings_text_is_given_out_as_soon_as_characters_are_complete() {
        assert_eq!(stream("aé😀b", &[]), ("a||é||||😀|b/".to_owned(), false));
    }

    #[test]
    fn a_stop_string_over_several_tokens_ends_the_text_before_it() {
        assert_eq!(stream("ab\n\ncd", &["\n\n"]), ("a|b||||/".to_owned(), true));
    }

    #[test]
    fn what_may_begin_a_stop_string_is_held_back_until_it_does_not() {
        assert_eq!(stream("ab\nc", &["\n\n"]), ("a|b||\nc/".to_owned(), false));
        assert_eq!(stream("aSTO", &["STOP"]), ("a||||/STO".replace("||||", "|||"), false));
        assert_eq!(stream("SSTOP", &["STOP"]), ("|S|||/".to_owned(), true));
        assert_eq!(stream("aé", &["éb"]), ("a||/é".to_owned(), false));
    }

    #[test]
    fn of_several_stop_strings_the_first_in_the_text_counts() {
        assert_eq!(stream("one two", &["two", "ne"]), ("o||".to_owned() + "||||/", true));
        let (given, stopped) = stream("abcd", &["bcd", "c"]);
        assert_eq!((given.replace('|', ""), stopped), ("ab/".to_owned(), true));
    }

    #[test]
    fn the_stop_string_that_ended_the_answer_is_known() {
        let codec = codec();
        let found = |text: &str, stop: &[&str]| {
            let mut stream = TextStream::new(&codec, stop.iter().map(|&stop| stop.to_owned())).unwrap();
            for byte in text.bytes() {
                stream.push(u32::from(byte)).unwrap();
            }
            stream.rest().unwrap();
            stream.stop_string().map(str::to_owned)
        };
        assert_eq!(found("one two", &["two", "ne"]), Some("ne".to_owned()));
        assert_eq!(found("abcd", &["bcd", "c"]), Some("c".to_owned()));
        assert_eq!(found("abcd", &["x", "abce"]), None);
        assert_eq!(found("", &["x"]), None);
    }

    #[test]
    fn a_special_token_may_be_a_stop_string() {
        let codec = codec();
        let mut stream = TextStream::new(&codec, ["<end>".to_owned()]).unwrap();
        assert_eq!(stream.push(u32::from(b'a')).unwrap(), "a");
        assert!(!stream.is_stopped());
        assert_eq!(stream.push(256).unwrap(), "");
        assert!(stream.is_stopped() && stream.is_complete());
        assert_eq!(stream.stop_string(), Some("<end>"));
    }

    #[test]
    fn a_special_token_is_shown_on_request() {
        let codec = codec();
        for (marks, text) in
            [(&["<end>", "<other>"][..], "aé<end>\u{FFFD}<end>b"), (&["<other>"], "aé\u{FFFD}b")]
        {
            let stream = TextStream::new(&codec, ["no".to_owned()]).unwrap();
            let mut stream = stream.showing(marks.iter().copied());
            let tokens = [u32::from(b'a'), 0xC3, 0xA9, 256, 0xC3, 256, u32::from(b'b')];
            let given: String = tokens.map(|token| stream.push(token).unwrap().to_owned()).concat();
            assert_eq!(given + stream.rest().unwrap(), text);
        }
    }

    #[test]
    fn bytes_that_never_become_a_character_are_the_rest() {
        let codec = codec();
        let mut stream = TextStream::new(&codec, []).unwrap();
        assert_eq!(stream.push(0xC3).unwrap(), "");
        assert_eq!(stream.rest().unwrap(), "\u{FFFD}");
    }

    #[test]
    fn an_empty_stop_string_is_refused() {
        assert!(matches!(TextStream::new(&codec(), [String::new()]), Err(Error::EmptyStop)));
    }
}
