//! Prompts whose cached start is pinned.

use kvcore::PinnedBlocks;

/// A claim on the cached blocks at the start of a prompt. While it exists, these blocks are not evicted and
/// do not expire.
///
/// # Drop behaviour
/// The blocks stay cached until their memory is needed.
#[derive(Debug)]
#[must_use = "dropping the claim allows the blocks to be evicted"]
pub struct PinnedPrompt {
    blocks: PinnedBlocks,
    block_size: usize,
}

impl PinnedPrompt {
    pub(super) fn new(blocks: PinnedBlocks, block_size: usize) -> Self {
        Self { blocks, block_size }
    }

    /// Returns the number of pinned tokens.
    pub fn tokens(&self) -> usize {
        self.blocks.ids().len() * self.block_size
    }
}
