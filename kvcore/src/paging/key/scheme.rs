//! The schemes for a sequence's block keys: this crate's chain, or vLLM's.

use std::sync::Arc;

use super::{BlockKey, VllmChain, VllmExtras};

/// The root of a sequence's key chain, and the function that continues the chain.
///
/// ```
/// use kvcore::{KeyScheme, KeyScope, VllmChain, VllmExtras};
/// let tokens: Vec<u32> = (0..32).collect();
/// let ours = KeyScheme::from(KeyScope::new("model", b"weights").root());
/// let theirs = KeyScheme::vllm(VllmChain::default(), VllmExtras::default());
/// assert_eq!(ours.keys(&tokens, 16).len(), 2);
/// assert_eq!(theirs.keys(&tokens, 16), VllmChain::default().keys(&tokens, 16, &VllmExtras::default()));
/// ```
#[derive(Debug, Clone)]
pub enum KeyScheme {
    /// BLAKE3, chained from a root that covers everything except the tokens; see [`crate::KeyScope`].
    Chained(BlockKey),
    /// vLLM's `sha256_cbor` chain, for routers that query both engines. Its keys cover only the tokens, the
    /// salt, the adapter and the inputs. A caller that shares a pool between models or layouts MUST give each
    /// model and layout its own salt.
    Vllm(VllmChain, Arc<VllmExtras>),
}

impl From<BlockKey> for KeyScheme {
    fn from(root: BlockKey) -> Self {
        Self::Chained(root)
    }
}

impl KeyScheme {
    /// Creates the scheme that computes a request's keys as vLLM does.
    pub fn vllm(chain: VllmChain, extras: VllmExtras) -> Self {
        Self::Vllm(chain, Arc::new(extras))
    }

    /// Returns the parent key of the first block.
    pub fn root(&self) -> BlockKey {
        match self {
            Self::Chained(root) => *root,
            Self::Vllm(chain, _) => chain.none_hash(),
        }
    }

    /// Returns the keys of the full blocks of a prompt. A block size of 0 counts as 1.
    pub fn keys(&self, tokens: &[u32], block_size: usize) -> Vec<BlockKey> {
        self.extend(&self.root(), 0, tokens, block_size)
    }

    /// Returns the keys of the full blocks of `tokens`, which start at token `start` of the prompt, after the
    /// block with key `parent`.
    pub(crate) fn extend(
        &self,
        parent: &BlockKey,
        start: usize,
        tokens: &[u32],
        block_size: usize,
    ) -> Vec<BlockKey> {
        let block_size = block_size.max(1);
        let full = &tokens[..tokens.len() / block_size * block_size];
        match self {
            Self::Chained(_) => parent.chain(full, block_size),
            Self::Vllm(_, extras) => VllmChain::extend(parent, start, full, block_size, extras),
        }
    }
}
