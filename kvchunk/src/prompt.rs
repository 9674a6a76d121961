//! Chunked prompts: a system prompt, chunks that do not see each other, and a question.

use std::sync::Arc;

use crate::config::ComputeMode;
use crate::error::{Error, Result};

/// The default separator between the parts of a prompt.
pub const DEFAULT_SEPARATOR: &str = "##";

/// The token IDs of a chunked prompt: system prompt, chunks and question. The system prompt may be empty. In that case,
/// a chunk sees only itself, and the decoys of its mode.
///
/// The separator does not belong to any part and has no position. Each part is tokenised separately, because
/// a tokenizer would otherwise merge characters across the boundaries into one token.
///
/// ```
/// use kvchunk::ChunkedPrompt;
/// let prompt = ChunkedPrompt::new(vec![1, 2], vec![vec![3, 4], vec![5]], vec![6])?;
/// assert_eq!(prompt.total_tokens(), 6);
/// assert!(ChunkedPrompt::new(vec![1], vec![vec![]], vec![6]).is_err());
/// # Ok::<(), kvchunk::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkedPrompt {
    system: Vec<u32>,
    chunks: Vec<Vec<u32>>,
    question: Vec<u32>,
    decoys: Arc<[Vec<u32>]>,
}

impl ChunkedPrompt {
    /// Creates a prompt from token IDs.
    ///
    /// # Errors
    /// Returns [`Error::EmptyPart`] if a chunk or the question is empty, or if there are no chunks.
    pub fn new(system: Vec<u32>, chunks: Vec<Vec<u32>>, question: Vec<u32>) -> Result<Self> {
        let empty = |part: String| Err(Error::EmptyPart { part });
        if chunks.is_empty() {
            return empty("list of chunks".to_owned());
        }
        if let Some(i) = chunks.iter().position(Vec::is_empty) {
            return empty(format!("chunk {}", i + 1));
        }
        if question.is_empty() {
            return empty("question".to_owned());
        }
        Ok(Self { system, chunks, question, decoys: Arc::default() })
    }

    /// Returns this prompt with documents that its chunks may see while they are computed, but that the
    /// question never sees; see [`ComputeMode::Behind`] and [`ComputeMode::Slots`].
    ///
    /// # Errors
    /// Returns [`Error::EmptyPart`] if a decoy is empty.
    pub fn with_decoys(self, decoys: Arc<[Vec<u32>]>) -> Result<Self> {
        match decoys.iter().position(Vec::is_empty) {
            Some(i) => Err(Error::EmptyPart { part: format!("decoy {}", i + 1) }),
            None => Ok(Self { decoys, ..self }),
        }
    }

    /// Returns the tokens of each decoy, in order.
    pub fn decoys(&self) -> &Arc<[Vec<u32>]> {
        &self.decoys
    }

    /// Returns the tokens of each decoy that any chunk sees in `mode`, in order.
    ///
    /// # Errors
    /// Returns [`Error::FewDecoys`] if the prompt has fewer decoys than the mode needs.
    pub fn decoys_in(&self, mode: ComputeMode) -> Result<&[Vec<u32>]> {
        let few = || Error::FewDecoys { mode, given: self.decoys.len() };
        self.decoys.get(..mode.num_decoys()).ok_or_else(few)
    }

    /// Returns the tokens of the system prompt, followed by the tokens of the decoys that any chunk sees in
    /// `mode`.
    ///
    /// # Errors
    /// Returns the errors of [`decoys_in`](Self::decoys_in).
    pub(crate) fn before(&self, mode: ComputeMode) -> Result<Vec<u32>> {
        Ok(self.system.iter().chain(self.decoys_in(mode)?.iter().flatten()).copied().collect())
    }

    /// Returns the tokens of the system prompt, which may be none.
    pub fn system(&self) -> &[u32] {
        &self.system
    }

    /// Returns the tokens of each chunk, in the prompt's order.
    pub fn chunks(&self) -> &[Vec<u32>] {
        &self.chunks
    }

    /// Returns the tokens of the question.
    pub fn question(&self) -> &[u32] {
        &self.question
    }

    /// Returns the total number of tokens in all parts.
    pub fn total_tokens(&self) -> usize {
        self.system.len() + self.chunks.iter().map(Vec::len).sum::<usize>() + self.question.len()
    }

    /// Returns the tokens of all parts in the prompt's order, to compute the prompt as an ordinary one.
    pub fn flatten(&self) -> Vec<u32> {
        let chunks = self.chunks.iter().flatten();
        self.system.iter().chain(chunks).chain(&self.question).copied().collect()
    }
}

/// A string split at its separators, before it is tokenised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SplitPrompt<'a> {
    /// An ordinary prompt, with fewer than two separators. The string is unchanged.
    Plain(&'a str),
    /// A chunked prompt, with two or more separators.
    Chunked {
        /// The string before the first separator, which may be empty.
        system: &'a str,
        /// The strings between separators, in the prompt's order.
        chunks: Vec<&'a str>,
        /// The string after the last separator.
        question: &'a str,
    },
}

impl<'a> SplitPrompt<'a> {
    /// Splits `text` at every exact match of `separator`.
    ///
    /// ```
    /// use kvchunk::SplitPrompt;
    /// let split = SplitPrompt::new("be brief## a doc ##why?", "##")?;
    /// assert_eq!(split, SplitPrompt::Chunked { system: "be brief", chunks: vec![" a doc "], question: "why?" });
    /// assert_eq!(SplitPrompt::new("no ## here", "##")?, SplitPrompt::Plain("no ## here"));
    /// # Ok::<(), kvchunk::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::EmptySeparator`] if the separator is empty. Returns [`Error::EmptyPart`] if there are
    /// two or more separators and a part behind the first one is empty or contains only white space.
    pub fn new(text: &'a str, separator: &str) -> Result<Self> {
        if separator.is_empty() {
            return Err(Error::EmptySeparator);
        }
        let parts: Vec<&str> = text.split(separator).collect();
        let [system, chunks @ .., question] = parts.as_slice() else { return Ok(Self::Plain(text)) };
        if chunks.is_empty() {
            return Ok(Self::Plain(text));
        }
        let last = parts.len() - 1;
        if let Some(i) = (1..=last).find(|&i| parts[i].trim().is_empty()) {
            let part = if i == last { "question".to_owned() } else { format!("chunk {i}") };
            return Err(Error::EmptyPart { part });
        }
        Ok(Self::Chunked { system, chunks: chunks.to_vec(), question })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_1_the_separator_delimits_and_belongs_to_no_part() {
        let split = SplitPrompt::new("sys##one##two##ask", "##").unwrap();
        assert_eq!(
            split,
            SplitPrompt::Chunked { system: "sys", chunks: vec!["one", "two"], question: "ask" }
        );
        assert_eq!(SplitPrompt::new("a#b", "##").unwrap(), SplitPrompt::Plain("a#b"));
        assert_eq!(SplitPrompt::new("", "##").unwrap(), SplitPrompt::Plain(""));
        let odd = SplitPrompt::new("a###b##c", "##").unwrap();
        assert_eq!(odd, SplitPrompt::Chunked { system: "a", chunks: vec!["#b"], question: "c" });
        let bare = SplitPrompt::new("##a##b", "##").unwrap();
        assert_eq!(bare, SplitPrompt::Chunked { system: "", chunks: vec!["a"], question: "b" });
    }

    #[test]
    fn rule_1_empty_parts_are_named() {
        for (text, part) in
            [("####", "chunk 1"), ("a####b", "chunk 1"), ("a##b## ##c", "chunk 2"), ("a##b##", "question")]
        {
            assert_eq!(
                SplitPrompt::new(text, "##"),
                Err(Error::EmptyPart { part: part.to_owned() }),
                "{text}"
            );
        }
        assert_eq!(SplitPrompt::new("a", ""), Err(Error::EmptySeparator));
    }

    #[test]
    fn parts_from_token_ids_are_checked_too() {
        for (chunks, question) in
            [(vec![], vec![2]), (vec![vec![1], vec![]], vec![2]), (vec![vec![1]], vec![])]
        {
            assert!(matches!(ChunkedPrompt::new(vec![1], chunks, question), Err(Error::EmptyPart { .. })));
        }
        let bare = ChunkedPrompt::new(vec![], vec![vec![1], vec![2]], vec![3]).unwrap();
        assert_eq!((bare.total_tokens(), bare.flatten()), (3, vec![1, 2, 3]));
    }
}
