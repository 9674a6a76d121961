//! The root of a question's block keys, which covers everything that the bytes behind the chunks depend on.

use kvcore::BlockKey;

use super::{Assembly, PromptChunk};
use crate::error::Result;
use crate::prompt::ChunkedPrompt;
use crate::recompute::TokenSelection;

/// The purpose of the roots. No chain of tokens below another root has these keys.
const PURPOSE: &str = "kvchunk question v1";

impl Assembly {
    /// Returns the root for the block keys of tokens that follow the chunks and see them as they are stored. `root` is the
    /// root of the prompt's other keys, and `prompt` the assembled prompt. Returns `None` if the assembly is not
    /// [ready](Self::is_ready), or if the bytes of a chunk are not exactly what its hash describes.
    ///
    /// The root covers the system prompt, the decoys, and of each chunk in its order: the tokens, the tokens that the chunk
    /// saw, the positions where it is used, and the pieces with the positions at which they are stored. Two prompts with
    /// the same root therefore have the same bytes in front of their questions. Recomputed tokens are not covered; see
    /// [`recomputed_root`].
    ///
    /// # Errors
    /// Returns [`crate::Error::FewDecoys`] if the prompt has fewer decoys than the mode needs.
    pub fn question_root(&self, root: &BlockKey, prompt: &ChunkedPrompt) -> Result<Option<BlockKey>> {
        if !self.is_ready() || self.chunks.iter().any(|chunk| !chunk.exact) {
            return Ok(None);
        }
        let before =
            [self.system_len as u64, self.plan.question_logical as u64, self.plan.question_position as u64];
        let mut key = root.derive(PURPOSE).child(&words(before)).child(&prompt.before(self.mode)?);
        for (chunk, tokens) in self.chunks.iter().zip(prompt.chunks()) {
            key = key.child(tokens).child(&words(places(chunk)));
        }
        Ok(Some(key.derive(PURPOSE)))
    }
}

/// Returns the root for the keys of a question that sees chunks of which the tokens in `selection` were recomputed. `root`
/// is the root of a question that sees the same chunks as they are stored.
pub fn recomputed_root(root: &BlockKey, selection: &TokenSelection) -> BlockKey {
    let chosen = |key: BlockKey, tokens: &Vec<u32>| key.child(tokens);
    selection
        .chunks()
        .iter()
        .fold(root.derive("kvchunk recomputed v1"), chosen)
        .derive("kvchunk recomputed v1")
}

/// Returns the numbers that tell where a chunk is used, what it saw, and where its pieces are stored.
fn places(chunk: &PromptChunk) -> impl Iterator<Item = u64> {
    let place = &chunk.place;
    let pieces = chunk.pieces.iter().flat_map(|piece| [piece.len as u64, piece.stored_start as u64]);
    [place.logical_start as u64, place.used_start as u64, place.seen as u64].into_iter().chain(pieces)
}

/// Returns numbers as words of 32 bits, which are hashed like tokens.
fn words(numbers: impl IntoIterator<Item = u64>) -> Vec<u32> {
    numbers.into_iter().flat_map(|number| [number as u32, (number >> 32) as u32]).collect()
}
