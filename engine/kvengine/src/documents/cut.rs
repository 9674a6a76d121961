//! Cuts a text at the documents that were found in it.

use std::ops::Range;

use kvchunk::ChunkedPrompt;
use kvmodel::TextCodec;

use crate::error::Result;
use crate::request::PromptTokens;

/// A prompt that was cut at the documents in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CutPrompt {
    /// The tokens of the prompt's parts.
    pub tokens: PromptTokens,
    /// For each chunk, the index of the found document that it is, or `None` if it is text between documents.
    pub chunks: Vec<Option<usize>>,
}

impl PromptTokens {
    // Decision: docs/decisions/chunks.md#text-between-found-documents-is-a-chunk
    /// Cuts a text at documents that stand in it, and encodes each part separately. If `special` is true, special
    /// tokens are added, but only before the text.
    ///
    /// `found` are the places of the documents, in ascending order and without overlaps, such as those of
    /// [`DocumentLibrary::find`](crate::DocumentLibrary::find). The parts are:
    ///
    /// - The text before the first document is the system prompt, with the special tokens. It may be empty.
    /// - Each document is a chunk. Text between two documents is a chunk of its own, unless it is only white space,
    ///   which separates documents and is left out.
    /// - The text behind the last document is the question. If it has no tokens, the last document is the question.
    /// - If no document is left to be a chunk, the text is an ordinary prompt.
    ///
    /// # Errors
    /// Returns the errors of [`TextCodec::encode`].
    pub fn around(codec: &TextCodec, text: &str, found: &[Range<usize>], special: bool) -> Result<CutPrompt> {
        let plain =
            || Ok(CutPrompt { tokens: Self::Plain(codec.encode(text, special)?), chunks: Vec::new() });
        let (mut parts, mut end): (Vec<(Range<usize>, Option<usize>)>, _) = (Vec::new(), 0);
        for (number, range) in found.iter().enumerate() {
            let between = end..range.start;
            if number > 0 && !text[between.clone()].trim().is_empty() {
                parts.push((between, None));
            }
            parts.push((range.clone(), Some(number)));
            end = range.end;
        }
        let before = found.first().map_or(0, |first| first.start);
        let system = codec.encode(&text[..before], special)?;
        let mut question = codec.encode(&text[end..], false)?;
        if question.is_empty()
            && let Some((last, _)) = parts.pop()
        {
            question = codec.encode(&text[last], false)?;
        }
        if parts.is_empty() {
            return plain();
        }
        let (mut tokens, mut chunks) = (Vec::new(), Vec::new());
        for (range, document) in parts {
            let encoded = codec.encode(&text[range], false)?;
            if !encoded.is_empty() {
                tokens.push(encoded);
                chunks.push(document);
            }
        }
        Ok(CutPrompt { tokens: Self::Chunked(ChunkedPrompt::new(system, tokens, question)?), chunks })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// A tokenizer with whole words as tokens (`a` is 3, `b` is 4, `c` is 5), and a begin token, 0.
    const WORDS: &str = include_str!("../../../kvmodel/tests/words.json");

    /// Cuts a text at the parts in brackets, which stand for documents.
    fn cut(marked: &str, special: bool) -> CutPrompt {
        let codec = TextCodec::from_bytes(WORDS.as_bytes(), None).unwrap();
        let (mut text, mut found) = (String::new(), Vec::new());
        for c in marked.chars() {
            match c {
                '[' => found.push(text.len()..text.len()),
                ']' => found.last_mut().unwrap().end = text.len(),
                c => text.push(c),
            }
        }
        PromptTokens::around(&codec, &text, &found, special).unwrap()
    }

    #[rstest]
    #[case::usual("a [b b][c] a", &[0, 3], vec![(vec![4, 4], Some(0)), (vec![5], Some(1))], 3)]
    #[case::text("a [b] c a [c] a", &[0, 3], vec![(vec![4], Some(0)), (vec![5, 3], None), (vec![5], Some(1))], 3)]
    #[case::white_space("a [b] \n\n [c] a", &[0, 3], vec![(vec![4], Some(0)), (vec![5], Some(1))], 3)]
    #[case::nothing_before("[b] [c] a", &[0], vec![(vec![4], Some(0)), (vec![5], Some(1))], 3)]
    #[case::nothing_behind("a [b] [c]", &[0, 3], vec![(vec![4], Some(0))], 5)]
    #[case::twice("a [b] [b] a", &[0, 3], vec![(vec![4], Some(0)), (vec![4], Some(1))], 3)]
    fn everything_but_white_space_between_documents_is_in_one_part(
        #[case] marked: &str,
        #[case] system: &[u32],
        #[case] chunks: Vec<(Vec<u32>, Option<usize>)>,
        #[case] question: u32,
    ) {
        let (tokens, documents): (Vec<_>, Vec<_>) = chunks.into_iter().unzip();
        let expected = ChunkedPrompt::new(system.to_vec(), tokens, vec![question]).unwrap();
        let cut = cut(marked, true);
        assert_eq!(cut.tokens, PromptTokens::Chunked(expected));
        assert_eq!(cut.chunks, documents);
    }

    #[test]
    fn a_text_without_other_tokens_is_cut_as_far_as_it_can_be() {
        let of = |chunks: &[u32], question: u32| {
            let chunks = chunks.iter().map(|&token| vec![token]).collect();
            PromptTokens::Chunked(ChunkedPrompt::new(Vec::new(), chunks, vec![question]).unwrap())
        };
        // Without a begin token, the first document is the beginning of the prompt.
        let three = cut("[a][b][c]", false);
        assert_eq!((three.tokens, three.chunks), (of(&[3, 4], 5), vec![Some(0), Some(1)]));
        assert_eq!(cut("[a] b", false).tokens, of(&[3], 4));
        assert_eq!(cut("[a][b]", false).tokens, of(&[3], 4));
        for plain in ["[a]", "a b", ""] {
            let whole = plain.replace(['[', ']'], "");
            let codec = TextCodec::from_bytes(WORDS.as_bytes(), None).unwrap();
            let expected = PromptTokens::Plain(codec.encode(&whole, false).unwrap());
            assert_eq!((cut(plain, false).tokens, cut(plain, false).chunks), (expected, vec![]), "{plain}");
        }
        let between = cut("[a] b [c]", false);
        assert_eq!((between.tokens, between.chunks), (of(&[3, 4], 5), vec![Some(0), None]));
    }
}
