//! Chunk hashes, which identify the stored bytes of a chunk.
//!
//! A hash covers exactly what the bytes depend on. The root key covers the model, the tokenizer, the rotary
//! specification and regime, the element type, the layout, the adapter and the tenant. Under that root, a
//! chunk's hash covers:
//!
//! - the compute mode, with the tokens of the system prompt and of the decoys that the chunk saw;
//! - its position, but only with the absolute strategy;
//! - the preceding pieces, for a piece of an oversized chunk;
//! - its own tokens.
//!
//! The final position, other chunks, the question and the request are not part of the hash.

use std::sync::Arc;

use kvcore::BlockKey;

use crate::config::{ComputeMode, HashAlgorithm};

/// The identity of a piece's bytes, independent of the position where the piece is used. Two hashes are equal
/// if their keys are equal.
#[derive(Debug, Clone, Copy)]
pub struct ChunkHash {
    /// The 256-bit key. With [`HashAlgorithm::Xxh3`] its second half is zero.
    pub key: BlockKey,
    /// The number of tokens in the piece.
    pub token_count: usize,
    /// The number of blocks that the piece needs.
    pub num_blocks: usize,
}

impl PartialEq for ChunkHash {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl Eq for ChunkHash {}

impl std::hash::Hash for ChunkHash {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.key.hash(state);
    }
}

/// The context of a prompt's chunks: everything that a hash covers except chunk tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkContext {
    root: BlockKey,
    mode: ComputeMode,
    /// The system prompt tokens that chunks see.
    system: Arc<[u32]>,
    /// The chunk's position, if the hash covers it.
    position: Option<i64>,
}

impl ChunkContext {
    /// Creates the context for chunks that are computed in `mode` and hashed under the key `root`. Tokens of
    /// `system` that chunks do not see are ignored. In the mode [`ComputeMode::Behind`], `system` must end with
    /// the decoys that the chunks see.
    pub fn new(root: BlockKey, mode: ComputeMode, system: &[u32]) -> Self {
        let system = system[..mode.seen(system.len())].into();
        Self { root, mode, system, position: None }
    }

    /// Returns this context for a chunk that is used only at `position`.
    #[must_use]
    pub fn at(&self, position: i64) -> Self {
        Self { position: Some(position), ..self.clone() }
    }
}

/// A hasher for the pieces of chunks in one context.
///
/// ```
/// use kvchunk::{ChunkContext, ChunkHasher, ComputeMode, HashAlgorithm};
/// use kvcore::KeyScope;
/// let root = KeyScope::new("m", b"w").root();
/// let hash = |mode, system: &[u32]| {
///     let hasher = ChunkHasher::new(HashAlgorithm::Blake3, ChunkContext::new(root, mode, system), 16);
///     hasher.pieces(&[7, 8], 64).next().unwrap().hash()
/// };
/// assert_eq!(hash(ComputeMode::Alone, &[1]), hash(ComputeMode::Alone, &[2]));
/// assert_ne!(hash(ComputeMode::WithSystem, &[1]), hash(ComputeMode::WithSystem, &[2]));
/// assert_ne!(hash(ComputeMode::WithSystem, &[]), hash(ComputeMode::Alone, &[]));
/// ```
#[derive(Debug, Clone)]
pub struct ChunkHasher {
    algorithm: HashAlgorithm,
    context: Arc<ChunkContext>,
    base: BlockKey,
    /// The key at the start of the hash chains that leave out the system prompt.
    any_system: BlockKey,
    block_size: usize,
}

impl ChunkHasher {
    /// Creates a hasher for chunks in `context`, with `block_size` tokens per block.
    pub fn new(algorithm: HashAlgorithm, context: ChunkContext, block_size: usize) -> Self {
        let purpose = match context.mode {
            ComputeMode::WithSystem => "kvchunk with-system v2",
            ComputeMode::Alone => "kvchunk alone v2",
            ComputeMode::Sink(_) => "kvchunk sink v2",
            ComputeMode::Behind(_) | ComputeMode::Slots(_) => "kvchunk behind v2",
        };
        let mut base = algorithm.child(&context.root.derive(purpose), &context.system);
        let mut any_system = context.root.derive("kvchunk any system v2");
        if let Some(position) = context.position {
            let words = [position as u32, (position as u64 >> 32) as u32];
            (base, any_system) = (base.derive("kvchunk at v2"), any_system.derive("kvchunk at v2"));
            (base, any_system) = (algorithm.child(&base, &words), algorithm.child(&any_system, &words));
        }
        Self { algorithm, context: Arc::new(context), base, any_system, block_size: block_size.max(1) }
    }

    /// Returns the context of the chunks.
    pub fn context(&self) -> &Arc<ChunkContext> {
        &self.context
    }

    /// Splits a chunk into pieces of at most `max_tokens` tokens and hashes them. Each hash covers the
    /// preceding pieces. If `max_tokens` is 0, a limit of 1 is used.
    pub fn pieces<'t>(
        &'t self,
        tokens: &'t [u32],
        max_tokens: usize,
    ) -> impl Iterator<Item = ChunkPiece<'t>> {
        let max_tokens = max_tokens.max(1);
        let mut key = self.base;
        tokens.chunks(max_tokens).enumerate().map(move |(i, piece)| {
            key = self.algorithm.child(&key, piece);
            let (token_count, num_blocks) = (piece.len(), piece.len().div_ceil(self.block_size));
            ChunkPiece {
                hasher: self,
                hash: ChunkHash { key, token_count, num_blocks },
                before: &tokens[..i * max_tokens],
                tokens: piece,
            }
        })
    }
}

/// A piece of a chunk to look up: its hash, and everything that the hash covers.
#[derive(Debug, Clone, Copy)]
pub struct ChunkPiece<'t> {
    hasher: &'t ChunkHasher,
    hash: ChunkHash,
    before: &'t [u32],
    tokens: &'t [u32],
}

impl ChunkPiece<'_> {
    /// Returns the piece's hash.
    pub fn hash(&self) -> ChunkHash {
        self.hash
    }

    /// Returns the piece's tokens.
    pub fn tokens(&self) -> &[u32] {
        self.tokens
    }

    /// Returns whether collisions are infeasible, so that the hash alone proves the contents to a cache that
    /// has not computed them.
    pub(crate) fn resists_collisions(&self) -> bool {
        self.hasher.algorithm.resists_collisions()
    }

    /// Returns this piece with another hash, to test how a cache treats colliding hashes.
    #[must_use]
    pub fn with_hash(self, hash: ChunkHash) -> Self {
        Self { hash, ..self }
    }

    /// Returns the hash of the same tokens with any system prompt, for approximate hits. Returns `None` for
    /// chunks that do not see a system prompt.
    pub(crate) fn any_system(&self) -> Option<BlockKey> {
        let algorithm = self.hasher.algorithm;
        let hash = || algorithm.child(&algorithm.child(&self.hasher.any_system, self.before), self.tokens);
        (self.hasher.context.mode == ComputeMode::WithSystem).then(hash)
    }

    /// Returns the evidence to store, so that later hits can be compared with it.
    pub(crate) fn evidence(&self) -> PieceEvidence {
        let whole = !self.hasher.algorithm.resists_collisions();
        PieceEvidence {
            tokens: self.tokens.into(),
            rest: whole.then(|| (Arc::clone(&self.hasher.context), self.before.into())),
        }
    }
}

// Decision: docs/decisions/chunks.md#a-hit-compares-tokens-or-the-whole-context
/// The evidence for a stored piece's contents. It is compared on every hit, because a hash alone is never
/// trusted.
#[derive(Debug, Clone)]
pub(crate) struct PieceEvidence {
    tokens: Arc<[u32]>,
    /// The context and the tokens of earlier pieces, if the hash is not collision-resistant.
    rest: Option<(Arc<ChunkContext>, Arc<[u32]>)>,
}

impl PieceEvidence {
    /// Returns the evidence of a piece whose hash is collision-resistant.
    pub(crate) fn of_tokens(tokens: &Arc<[u32]>) -> Self {
        Self { tokens: Arc::clone(tokens), rest: None }
    }

    /// Returns whether `piece`, which must have the same hash, is the stored piece.
    pub(crate) fn proves(&self, piece: &ChunkPiece<'_>) -> bool {
        let same = |(context, before): &(Arc<ChunkContext>, Arc<[u32]>)| {
            **before == *piece.before
                && (Arc::ptr_eq(context, &piece.hasher.context) || *context == piece.hasher.context)
        };
        *self.tokens == *piece.tokens && self.rest.as_ref().is_none_or(same)
    }

    /// Returns whether `piece`, which must have the same hash, is the stored piece, ignoring the system
    /// prompt.
    pub(crate) fn proves_under_any_system(&self, piece: &ChunkPiece<'_>) -> bool {
        let same = |(context, before): &(Arc<ChunkContext>, Arc<[u32]>)| {
            let asked = &piece.hasher.context;
            (context.root, context.mode, context.position) == (asked.root, asked.mode, asked.position)
                && **before == *piece.before
        };
        *self.tokens == *piece.tokens && self.rest.as_ref().is_none_or(same)
    }

    /// Returns whether the evidence consists of the tokens alone.
    pub(crate) fn is_tokens_alone(&self) -> bool {
        self.rest.is_none()
    }

    /// Returns the stored tokens.
    pub(crate) fn tokens(&self) -> &Arc<[u32]> {
        &self.tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcore::KeyScope;

    fn root(salt: &[u8]) -> BlockKey {
        KeyScope::new("m", b"w").tenant_salt(salt).root()
    }

    fn hasher(algorithm: HashAlgorithm, context: ChunkContext) -> ChunkHasher {
        ChunkHasher::new(algorithm, context, 4)
    }

    fn keys(hasher: &ChunkHasher, tokens: &[u32], max: usize) -> Vec<ChunkHash> {
        hasher.pieces(tokens, max).map(|piece| piece.hash()).collect()
    }

    #[test]
    fn a_hash_depends_on_all_that_the_bytes_depend_on() {
        use ComputeMode::{Alone, WithSystem};
        for algorithm in HashAlgorithm::ALL {
            let contexts = [
                ChunkContext::new(root(b""), WithSystem, &[1, 2]),
                ChunkContext::new(root(b""), WithSystem, &[1, 3]),
                ChunkContext::new(root(b""), WithSystem, &[]),
                ChunkContext::new(root(b""), Alone, &[1, 2]),
                ChunkContext::new(root(b"alice"), Alone, &[1, 2]),
                ChunkContext::new(root(b""), Alone, &[]).at(5),
                ChunkContext::new(root(b""), Alone, &[]).at(6),
                ChunkContext::new(root(b""), WithSystem, &[1, 2]).at(5),
            ];
            let mut seen: Vec<BlockKey> = Vec::new();
            for context in contexts {
                let hasher = hasher(algorithm, context);
                seen.extend(keys(&hasher, &[1, 2, 3, 4, 5], 2).iter().map(|hash| hash.key));
                seen.extend(keys(&hasher, &[1, 2, 3, 4, 6], 5).iter().map(|hash| hash.key));
            }
            let all = seen.len();
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), all, "{algorithm:?}");
        }
    }

    #[test]
    fn rule_7_pieces_are_chained_and_counted() {
        let hasher = hasher(HashAlgorithm::Blake3, ChunkContext::new(root(b""), ComputeMode::Alone, &[]));
        let hashes = keys(&hasher, &[1, 2, 3, 4, 5, 6, 7], 6);
        assert_eq!(
            hashes.iter().map(|h| (h.token_count, h.num_blocks)).collect::<Vec<_>>(),
            [(6, 2), (1, 1)]
        );
        assert_ne!(hashes[1], keys(&hasher, &[7], 6)[0], "a later piece is not the same tokens alone");
        assert_eq!(keys(&hasher, &[1, 2, 3], 0).len(), 3, "a limit of 0 is taken as 1");
    }

    #[test]
    fn weak_hashes_are_proved_by_everything_strong_ones_by_their_tokens() {
        let context = |salt: &[u8]| ChunkContext::new(root(salt), ComputeMode::WithSystem, &[1, 2]);
        let tokens = [5, 6, 7, 8];
        for algorithm in HashAlgorithm::ALL {
            let (a, b) = (hasher(algorithm, context(b"a")), hasher(algorithm, context(b"b")));
            let stored = a.pieces(&tokens, 2).nth(1).unwrap();
            let evidence = stored.evidence();
            assert!(
                evidence.proves(&stored) && evidence.proves(&a.clone().pieces(&tokens, 2).nth(1).unwrap())
            );
            assert!(!evidence.proves(&a.pieces(&[5, 6, 7, 9], 2).nth(1).unwrap()), "other tokens");
            let elsewhere = b.pieces(&tokens, 2).nth(1).unwrap();
            let before = [5, 9, 7, 8];
            let after_others = a.pieces(&before, 2).nth(1).unwrap();
            let weak = algorithm == HashAlgorithm::Xxh3;
            assert_eq!(evidence.proves(&elsewhere), !weak, "another tenant has another hash already");
            assert_eq!(evidence.proves(&after_others), !weak, "so have other tokens before");
        }
    }

    #[test]
    fn hashes_under_any_system_differ_by_tokens_and_place_only() {
        let of = |system: &[u32], tokens: &[u32], at: Option<i64>| {
            let context = ChunkContext::new(root(b""), ComputeMode::WithSystem, system);
            let context = at.map_or(context.clone(), |at| context.at(at));
            hasher(HashAlgorithm::Blake3, context).pieces(tokens, 2).last().unwrap().any_system().unwrap()
        };
        let alone = hasher(HashAlgorithm::Blake3, ChunkContext::new(root(b""), ComputeMode::Alone, &[]));
        assert!(alone.pieces(&[1], 2).all(|piece| piece.any_system().is_none()), "it has seen none");
        assert_eq!(of(&[1], &[4, 5, 6], None), of(&[2, 3], &[4, 5, 6], None));
        assert_ne!(of(&[1], &[4, 5, 6], None), of(&[1], &[4, 7, 6], None));
        assert_ne!(of(&[1], &[4, 5, 6], Some(1)), of(&[1], &[4, 5, 6], Some(2)));
    }
}
