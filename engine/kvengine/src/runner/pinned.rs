//! Prompts whose cached parts are pinned.

use kvchunk::{PieceHold, PinnedParts};
use kvcore::PinnedBlocks;

/// A claim on the cached blocks at the start of a prompt, and on the documents of a prompt in parts. While it exists,
/// they are not evicted and do not expire. The pool that contains them cannot sleep.
///
/// # Drop behaviour
/// The blocks stay cached until their memory is needed.
#[derive(Debug)]
#[must_use = "dropping the claim allows the blocks to be evicted"]
pub struct PinnedPrompt {
    pinned: Pinned,
    block_size: usize,
}

#[derive(Debug)]
enum Pinned {
    Start(PinnedBlocks),
    Parts(PinnedParts),
}

impl PinnedPrompt {
    pub(super) fn start(blocks: PinnedBlocks, block_size: usize) -> Self {
        Self { pinned: Pinned::Start(blocks), block_size }
    }

    pub(crate) fn parts(parts: PinnedParts, block_size: usize) -> Self {
        Self { pinned: Pinned::Parts(parts), block_size }
    }

    /// Returns a claim on each document alone, in the prompt's order, and gives up the one on the start of the prompt. A
    /// claim is empty if nothing of its document is cached. An ordinary prompt has no documents.
    pub fn into_documents(self) -> Vec<Self> {
        let parts = match self.pinned {
            Pinned::Start(_) => PinnedParts::default(),
            Pinned::Parts(parts) => parts,
        };
        let block_size = self.block_size;
        parts.into_chunks().map(|parts| Self { pinned: Pinned::Parts(parts), block_size }).collect()
    }

    /// Returns the number of pinned tokens at the start of the prompt, in whole blocks.
    pub fn tokens(&self) -> usize {
        let blocks = match &self.pinned {
            Pinned::Start(blocks) => blocks.ids().len(),
            Pinned::Parts(parts) => parts.system_blocks(),
        };
        blocks * self.block_size
    }

    /// Returns the number of tokens in documents that are pinned.
    pub fn document_tokens(&self) -> usize {
        self.pieces().map(PieceHold::num_tokens).sum()
    }

    /// Returns the number of blocks of documents that are pinned.
    pub fn document_blocks(&self) -> usize {
        self.pieces().map(|piece| piece.block_ids().len()).sum()
    }

    fn pieces(&self) -> impl Iterator<Item = &PieceHold> {
        let parts = match &self.pinned {
            Pinned::Start(_) => None,
            Pinned::Parts(parts) => Some(parts),
        };
        parts.into_iter().flat_map(PinnedParts::pieces)
    }
}
