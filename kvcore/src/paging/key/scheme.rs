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
    /// A root, a number of tokens, and a key that nobody else has. As [`Chained`](Self::Chained), but blocks that end after
    /// that many tokens follow the key, so that only its owner finds them: their contents do not follow from their tokens,
    /// as with approximate attention.
    Private(BlockKey, usize, BlockKey),
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
            Self::Chained(root) | Self::Private(root, ..) => *root,
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
            Self::Private(_, shared, own) => {
                let end = shared / block_size * block_size;
                let (before, after) = full.split_at(full.len().min(end.saturating_sub(start)));
                let next = if start <= end { own } else { parent };
                [parent.chain(before, block_size), next.chain(after, block_size)].concat()
            }
            Self::Vllm(_, extras) => VllmChain::extend(parent, start, full, block_size, extras),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_keys_begin_at_the_first_block_that_is_not_shared_whole() {
        let tokens: Vec<u32> = (0..40).collect();
        let [root, one, other] = [1, 2, 3].map(|byte| BlockKey([byte; 32]));
        let exact = KeyScheme::from(root).keys(&tokens, 4);
        for shared in 0..=45 {
            let of = |own| KeyScheme::Private(root, shared, own);
            let (of_one, of_other) = (of(one).keys(&tokens, 4), of(other).keys(&tokens, 4));
            let whole = (shared / 4).min(10);
            assert_eq!(
                (&of_one[..whole], &of_other[..whole]),
                (&exact[..whole], &exact[..whole]),
                "{shared}"
            );
            for block in whole..10 {
                assert!(
                    of_one[block] != exact[block] && of_one[block] != of_other[block],
                    "{shared}, {block}"
                );
            }
            // The same keys, whatever was known before.
            for known in 1..10 {
                let rest = of(one).extend(&of_one[known - 1], 4 * known, &tokens[4 * known..], 4);
                assert_eq!(rest, of_one[known..], "{shared}, {known}");
            }
        }
    }
}
