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

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};
    use std::time::Duration;

    use kvcore::{BlockId, KeyScope, Segment};

    use super::super::{PieceSource, PromptPiece, SystemPart};
    use super::*;
    use crate::config::ComputeMode;
    use crate::position::{ChunkPlace, PositionPlan};

    /// Everything that the key of a question may depend on.
    struct Before {
        root: BlockKey,
        system: Vec<u32>,
        decoys: Vec<Vec<u32>>,
        chunks: Vec<Vec<u32>>,
        question: Vec<u32>,
        assembly: Assembly,
    }

    impl Before {
        /// Returns two chunks of four tokens and two pieces each, behind a decoy.
        fn new() -> Self {
            let mode = ComputeMode::Behind(1);
            let piece = |stored_start| {
                let blocks = [BlockId(0)].into();
                PromptPiece { blocks, len: 2, stored_start, source: PieceSource::Private }
            };
            let chunk = |logical_start: usize| {
                let used_start = logical_start as i64;
                let place = ChunkPlace { logical_start, stored_start: 5, used_start, len: 4, mode, seen: 5 };
                let pieces = vec![piece(5), piece(7)];
                PromptChunk { place, pieces, tokens: 4, hit: true, exact: true, missed: None }
            };
            let chunks = vec![chunk(3), chunk(7)];
            let places = chunks.iter().map(|chunk| chunk.place).collect();
            let assembly = Assembly {
                block_size: 2,
                mode,
                system: SystemPart::Missing,
                decoys: SystemPart::Missing,
                has_decoys: true,
                system_len: 3,
                chunks,
                own: HashMap::new(),
                reserved: Vec::new(),
                saving: None,
                private: Vec::new(),
                waiting: Vec::new(),
                waited: Duration::ZERO,
                overdue: HashSet::new(),
                inputs: Vec::new(),
                segments: [Segment::new([BlockId(0)].into(), 2, 0, 0)].into(),
                plan: PositionPlan { chunks: places, question_logical: 11, question_position: 11, end: 12 },
                reused_tokens: 0,
            };
            Self {
                root: KeyScope::new("m", b"w").root(),
                system: vec![1, 2, 3],
                decoys: vec![vec![20, 21]],
                chunks: vec![vec![4, 5, 6, 7], vec![8, 9, 10, 11]],
                question: vec![12],
                assembly,
            }
        }

        fn key(self) -> Option<BlockKey> {
            let prompt = ChunkedPrompt::new(self.system, self.chunks, self.question).unwrap();
            let prompt = prompt.with_decoys(self.decoys.into()).unwrap();
            self.assembly.question_root(&self.root, &prompt).unwrap()
        }
    }

    /// Returns the key after one change.
    fn key(change: impl FnOnce(&mut Before)) -> Option<BlockKey> {
        let mut before = Before::new();
        change(&mut before);
        before.key()
    }

    #[test]
    fn everything_in_front_of_a_question_is_in_its_key() {
        let place =
            |change: fn(&mut ChunkPlace)| move |it: &mut Before| change(&mut it.assembly.chunks[1].place);
        let piece = |change: fn(&mut PromptPiece)| {
            move |it: &mut Before| change(&mut it.assembly.chunks[0].pieces[1])
        };
        let keys = [
            ("nothing", key(|_| ())),
            ("root", key(|it| it.root = KeyScope::new("m", b"x").root())),
            ("system prompt", key(|it| it.system[2] ^= 1)),
            ("end of the system prompt", key(|it| it.assembly.system_len -= 1)),
            ("decoy", key(|it| it.decoys[0][1] ^= 1)),
            ("first chunk", key(|it| it.chunks[0][3] ^= 1)),
            ("last chunk", key(|it| it.chunks[1][3] ^= 1)),
            ("order of the chunks", key(|it| it.chunks.swap(0, 1))),
            ("order of the places", key(|it| it.assembly.chunks.swap(0, 1))),
            ("logical start", key(place(|place| place.logical_start += 1))),
            ("used start", key(place(|place| place.used_start += 1))),
            ("used start far away", key(place(|place| place.used_start += 1 << 32))),
            ("tokens seen", key(place(|place| place.seen -= 1))),
            ("stored start", key(piece(|piece| piece.stored_start += 1))),
            ("length of a piece", key(piece(|piece| piece.len -= 1))),
            ("pieces of a chunk", key(|it| drop(it.assembly.chunks[1].pieces.pop()))),
            ("logical start of the question", key(|it| it.assembly.plan.question_logical += 1)),
            ("position of the question", key(|it| it.assembly.plan.question_position += 1)),
        ];
        let mut names = HashMap::new();
        for (name, key) in keys {
            let other = names.insert(key.unwrap(), name);
            assert_eq!(other, None, "the same key as with another {name}");
        }
        let same = key(|it| {
            it.question = vec![13, 14];
            it.assembly.chunks[0].hit = false;
            it.assembly.chunks[1].pieces[0].blocks = [BlockId(9)].into();
            it.assembly.reused_tokens = 4;
        });
        assert_eq!(names.get(&same.unwrap()), Some(&"nothing"));
    }

    #[test]
    fn an_approximate_or_incomplete_beginning_has_no_key() {
        assert_eq!(key(|it| it.assembly.chunks[1].exact = false), None);
        assert_eq!(key(|it| it.assembly.segments = [].into()), None);
    }
}
