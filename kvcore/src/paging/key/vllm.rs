//! Block keys as vLLM computes them with `--prefix-caching-hash-algo sha256_cbor`, so that a router can query
//! both engines for the same prefix.
//!
//! A key is the SHA-256 hash of the canonical CBOR (RFC 8949 § 4.2) of `[parent, tokens, extra]`. The keys
//! are tested against digests computed by vLLM 0.33 (`proof/vllm/traces`).

use sha2::{Digest, Sha256};

use super::BlockKey;

/// The inputs of a request's keys besides its tokens. Prompts given as embeddings, for which vLLM hashes each
/// block's embeddings instead of its tokens, are not supported.
///
/// ```
/// use kvcore::{VllmChain, VllmExtras};
/// let tokens: Vec<u32> = (0..32).collect();
/// let keys = |extras: &VllmExtras| VllmChain::default().keys(&tokens, 16, extras);
/// let salted = VllmExtras { cache_salt: Some("alice".to_owned()), ..VllmExtras::default() };
/// let pictured = VllmExtras { inputs: vec![("image-1".to_owned(), 20, 8)], ..VllmExtras::default() };
/// let plain = keys(&VllmExtras::default());
/// assert!(keys(&salted).iter().zip(&plain).all(|(a, b)| a != b));       // another first block, another chain
/// assert_eq!(keys(&pictured)[0], plain[0]);                              // the image begins in the second
/// assert_ne!(keys(&pictured)[1], plain[1]);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VllmExtras {
    /// The tenant's salt, which is hashed only with the first block. An empty salt counts as no salt. Later
    /// blocks of two tenants have different keys only because their parent keys differ.
    pub cache_salt: Option<String>,
    /// Name and path of the `LoRA` adapter, which are hashed with every block.
    pub lora: Option<(String, String)>,
    /// Images and similar inputs, in order: the identifier, the index of the first token, and the number of
    /// tokens of each.
    pub inputs: Vec<(String, usize, usize)>,
}

/// The start of vLLM's chains, which depends on its hash seed.
///
/// ```
/// use kvcore::{VllmChain, VllmExtras};
/// let chain = VllmChain::default();
/// let tokens: Vec<u32> = (0..40).collect();
/// let keys = chain.keys(&tokens, 16, &VllmExtras::default());
/// assert_eq!(keys.len(), 2); // only full blocks have keys
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VllmChain {
    none_hash: BlockKey,
}

impl Default for VllmChain {
    /// Returns the chain start of an engine that runs without `PYTHONHASHSEED`.
    fn default() -> Self {
        Self::with_seed("vllm-none-hash")
    }
}

impl VllmChain {
    /// Creates the chain start of an engine that runs with `PYTHONHASHSEED=seed`.
    pub fn with_seed(seed: &str) -> Self {
        let mut cbor = Cbor::default();
        cbor.text(seed);
        Self { none_hash: cbor.digest() }
    }

    /// Returns the parent key of the first block.
    pub fn none_hash(&self) -> BlockKey {
        self.none_hash
    }

    /// Returns the keys of the full blocks of a prompt. A block size of 0 counts as 1.
    pub fn keys(&self, tokens: &[u32], block_size: usize, extras: &VllmExtras) -> Vec<BlockKey> {
        Self::extend(&self.none_hash, 0, tokens, block_size.max(1), extras)
    }

    /// Returns the keys of the full blocks of `tokens`, which start at token `start` of the prompt, after the
    /// block with key `parent`.
    pub(super) fn extend(
        parent: &BlockKey,
        start: usize,
        tokens: &[u32],
        block_size: usize,
        extras: &VllmExtras,
    ) -> Vec<BlockKey> {
        let next = |parent: &mut BlockKey, (i, block): (usize, &[u32])| {
            *parent = Self::child(parent, block, start.saturating_add(i * block_size), extras);
            Some(*parent)
        };
        tokens.chunks_exact(block_size).enumerate().scan(*parent, next).collect()
    }

    /// Returns the key of the block that contains `tokens` and starts at token `start` of the prompt.
    pub fn child(parent: &BlockKey, tokens: &[u32], start: usize, extras: &VllmExtras) -> BlockKey {
        let end = start.saturating_add(tokens.len());
        let salt = extras.cache_salt.as_deref().filter(|salt| start == 0 && !salt.is_empty());
        let touching = || {
            extras.inputs.iter().filter(|(_, first, len)| *first < end && first.saturating_add(*len) > start)
        };
        let count = usize::from(extras.lora.is_some()) + touching().count() + usize::from(salt.is_some());

        let mut cbor = Cbor::default();
        cbor.head(ARRAY, 3);
        cbor.bytes(parent.as_bytes());
        cbor.head(ARRAY, tokens.len() as u64);
        for &token in tokens {
            cbor.head(UNSIGNED, token.into());
        }
        if count == 0 {
            cbor.0.push(NULL);
            return cbor.digest();
        }
        cbor.head(ARRAY, count as u64);
        if let Some((name, path)) = &extras.lora {
            cbor.head(ARRAY, 3);
            for text in ["lora", name, path] {
                cbor.text(text);
            }
        }
        for (identifier, first, _) in touching() {
            cbor.head(ARRAY, 3);
            cbor.text("mm");
            cbor.text(identifier);
            match first.checked_sub(start) {
                Some(after) => cbor.head(UNSIGNED, after as u64),
                None => cbor.head(NEGATIVE, (start - first - 1) as u64),
            }
        }
        if let Some(salt) = salt {
            cbor.head(ARRAY, 2);
            cbor.text("cache_salt");
            cbor.text(salt);
        }
        cbor.digest()
    }
}

const UNSIGNED: u8 = 0 << 5;
const NEGATIVE: u8 = 1 << 5;
const BYTES: u8 = 2 << 5;
const TEXT: u8 = 3 << 5;
const ARRAY: u8 = 4 << 5;
const NULL: u8 = 0xf6;

/// An encoder for the subset of canonical CBOR that keys need, with shortest heads and definite lengths.
#[derive(Default)]
struct Cbor(Vec<u8>);

impl Cbor {
    fn head(&mut self, major: u8, value: u64) {
        let bytes = value.to_be_bytes();
        match value {
            0..24 => self.0.push(major | bytes[7]),
            24..0x100 => self.0.extend([major | 0x18, bytes[7]]),
            0x100..0x1_0000 => {
                self.0.push(major | 0x19);
                self.0.extend(&bytes[6..]);
            }
            0x1_0000..0x1_0000_0000 => {
                self.0.push(major | 0x1a);
                self.0.extend(&bytes[4..]);
            }
            _ => {
                self.0.push(major | 0x1b);
                self.0.extend(bytes);
            }
        }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.head(BYTES, bytes.len() as u64);
        self.0.extend(bytes);
    }

    fn text(&mut self, text: &str) {
        self.head(TEXT, text.len() as u64);
        self.0.extend(text.as_bytes());
    }

    fn digest(&self) -> BlockKey {
        BlockKey::from_bytes(Sha256::digest(&self.0).into())
    }
}
