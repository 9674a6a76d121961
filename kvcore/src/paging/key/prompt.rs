//! A prompt and its block keys, which are computed only once.

use std::sync::Arc;

use super::{BlockKey, KeyScheme};

/// A prompt's tokens and the keys of its full blocks.
///
/// Hashing a long prompt takes longer than looking it up, so a request that waits for room, is computed in
/// pieces, or returns after a preemption should keep this value:
/// [`PagedKvCache::admit`](crate::PagedKvCache::admit) looks up the keys, and
/// [`commit`](crate::PagedKvCache::commit) registers the prompt's blocks under them.
///
/// ```
/// use kvcore::{KeyScope, PromptKeys};
/// let root = KeyScope::new("model", b"weights").root();
/// let mut prompt = PromptKeys::new(root, &[1, 2, 3, 4, 5], 2);
/// assert_eq!(prompt.keys(), root.chain(&[1, 2, 3, 4], 2));
/// prompt.extend(&[6]);                         // an answer to recompute after its prompt
/// assert_eq!(prompt.keys(), root.chain(&[1, 2, 3, 4, 5, 6], 2));
/// ```
#[derive(Debug, Clone)]
pub struct PromptKeys {
    scheme: KeyScheme,
    block_size: usize,
    tokens: Arc<[u32]>,
    keys: Arc<[BlockKey]>,
}

impl PromptKeys {
    /// Computes the keys of a prompt. A block size of 0 counts as 1.
    pub fn new(scheme: impl Into<KeyScheme>, tokens: &[u32], block_size: usize) -> Self {
        let (scheme, block_size) = (scheme.into(), block_size.max(1));
        let keys = scheme.keys(tokens, block_size).into();
        Self { scheme, block_size, tokens: tokens.into(), keys }
    }

    /// Appends tokens, and computes the keys of the blocks that they fill.
    pub fn extend(&mut self, tokens: &[u32]) {
        if tokens.is_empty() {
            return;
        }
        let start = self.keys.len() * self.block_size;
        let tokens: Arc<[u32]> = self.tokens.iter().chain(tokens).copied().collect();
        let fresh = self.scheme.extend(&self.last_key(), start, &tokens[start..], self.block_size);
        self.keys = self.keys.iter().copied().chain(fresh).collect();
        self.tokens = tokens;
    }

    /// Returns the tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the keys of the full blocks, in order.
    pub fn keys(&self) -> &[BlockKey] {
        &self.keys
    }

    /// Returns the scheme of the keys.
    pub fn scheme(&self) -> &KeyScheme {
        &self.scheme
    }

    /// Returns the number of tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    fn last_key(&self) -> BlockKey {
        self.keys.last().copied().unwrap_or_else(|| self.scheme.root())
    }

    /// Returns the keys to look up: all full blocks' keys, but at least one token is left to compute.
    pub(crate) fn findable(&self) -> &[BlockKey] {
        &self.keys[..self.tokens.len().saturating_sub(1) / self.block_size]
    }

    /// Returns this prompt's keys for the full blocks of `tokens`, starting at block `block`, or `None` if
    /// `parent` and `tokens` do not match the prompt there.
    pub(crate) fn of(&self, parent: &BlockKey, block: usize, tokens: &[u32]) -> Option<&[BlockKey]> {
        let (start, blocks) = (block * self.block_size, tokens.len() / self.block_size);
        let known = match block.checked_sub(1) {
            Some(before) => self.keys.get(before)? == parent,
            None => true,
        };
        let same = known && self.tokens.get(start..start + tokens.len())? == tokens;
        self.keys.get(block..block + blocks).filter(|_| same)
    }
}
