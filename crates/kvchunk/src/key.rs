//! Chunk keys: what the stored bytes of a chunk are a function of.

use kvcore::BlockKey;

use crate::config::ComputeMode;

/// The identity of a chunk's bytes, independent of where it is used.
///
/// Under the root key (model, tokenizer, rotary specification, element type, layout, adapter,
/// tenant) it covers the computing mode with, when the chunk saw one, the system prompt's tokens;
/// the piece before it, for a piece of an oversized chunk; and its own tokens. The final position,
/// other chunks, the question and the request are not in it.
pub type ChunkKey = BlockKey;

/// Keys of the pieces of chunks computed in one mode under one system prompt.
#[derive(Debug, Clone, Copy)]
pub struct ChunkKeys {
    base: BlockKey,
}

impl ChunkKeys {
    /// Keys under `root`, in `mode`; `system` counts only when chunks see it.
    ///
    /// ```
    /// use kvchunk::{ChunkKeys, ComputeMode};
    /// use kvcore::KeyScope;
    /// let root = KeyScope::new("m", b"w").root();
    /// let keys = |mode, system: &[u32]| ChunkKeys::new(root, mode, system).pieces(&[7, 8], 64)[0];
    /// assert_eq!(keys(ComputeMode::Alone, &[1]), keys(ComputeMode::Alone, &[2]));
    /// assert_ne!(keys(ComputeMode::WithSystem, &[1]), keys(ComputeMode::WithSystem, &[2]));
    /// assert_ne!(keys(ComputeMode::WithSystem, &[]), keys(ComputeMode::Alone, &[]));
    /// ```
    pub fn new(root: BlockKey, mode: ComputeMode, system: &[u32]) -> Self {
        let base = match mode {
            ComputeMode::WithSystem => root.derive("kvchunk with-system v1").child(system),
            ComputeMode::Alone => root.derive("kvchunk alone v1"),
        };
        Self { base }
    }

    /// Keys of a chunk's pieces of at most `max_tokens` tokens, each chained to the one before.
    pub fn pieces(&self, tokens: &[u32], max_tokens: usize) -> Vec<ChunkKey> {
        self.base.chain(tokens, max_tokens)
    }
}
