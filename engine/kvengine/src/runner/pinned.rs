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

    /// Gives up the claim on the start of the prompt, and keeps the one on its documents.
    pub fn documents_only(self) -> Self {
        let parts = match self.pinned {
            Pinned::Start(_) => PinnedParts::default(),
            Pinned::Parts(parts) => parts.without_prefixes(),
        };
        Self { pinned: Pinned::Parts(parts), ..self }
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
        self.pieces().iter().map(PieceHold::num_tokens).sum()
    }

    /// Returns the number of blocks of documents that are pinned.
    pub fn document_blocks(&self) -> usize {
        self.pieces().iter().map(|piece| piece.block_ids().len()).sum()
    }

    fn pieces(&self) -> &[PieceHold] {
        match &self.pinned {
            Pinned::Start(_) => &[],
            Pinned::Parts(parts) => parts.pieces(),
        }
    }
}
