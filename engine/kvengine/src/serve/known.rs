//! The blocks of prompts that were computed, so that an answer can say why the start of its prompt was not found.

use std::collections::{HashMap, HashSet, VecDeque};

use kvchunk::MissReason;
use kvcore::{BlockKey, KvPool};
use kvtier::RecordNote;

use super::disk::DiskFetch;
use super::live::LiveRequest;
use crate::request::PromptTokens;
use crate::runner::Runner;

/// The number of blocks that are remembered.
const MOST: usize = 1 << 16;

/// The blocks that were computed last.
#[derive(Debug, Default)]
pub(super) struct KnownPrefixes {
    /// Digests of keys and of texts, the oldest first.
    order: VecDeque<(u64, u64)>,
    keys: HashSet<u64>,
    /// The number of remembered blocks with each text.
    texts: HashMap<u64, usize>,
}

impl KnownPrefixes {
    fn insert(&mut self, chain: &Chain) {
        for (at, key) in chain.keys.iter().enumerate() {
            let (key, text) = (key_digest(key), chain.text(at));
            if !self.keys.insert(key) {
                continue;
            }
            *self.texts.entry(text).or_default() += 1;
            self.order.push_back((key, text));
            if self.order.len() > MOST
                && let Some((key, text)) = self.order.pop_front()
            {
                self.keys.remove(&key);
                if let Some(count) = self.texts.get_mut(&text) {
                    *count -= 1;
                    if *count == 0 {
                        self.texts.remove(&text);
                    }
                }
            }
        }
    }

    /// Returns why the block at index `at` of a chain is not in the pool.
    fn why_missing(&self, chain: &Chain, at: usize) -> MissReason {
        if self.keys.contains(&key_digest(&chain.keys[at])) {
            MissReason::Evicted
        } else if self.texts.contains_key(&chain.text(at)) {
            MissReason::OtherContext
        } else {
            MissReason::New
        }
    }
}

fn key_digest(key: &BlockKey) -> u64 {
    let [first, ..] = *key.as_bytes().as_chunks::<8>().0 else { return 0 };
    u64::from_le_bytes(first)
}

/// The start of a prompt, as blocks: an ordinary prompt, or the system prompt of a chunked one.
struct Chain {
    root: BlockKey,
    keys: Vec<BlockKey>,
    tokens: Vec<u32>,
    block_size: usize,
}

impl Chain {
    /// Returns a digest of a block's tokens that other tenants do not share.
    fn text(&self, at: usize) -> u64 {
        let start = at * self.block_size;
        let end = self.tokens.len().min(start + self.block_size);
        let text = RecordNote::text_of(self.tokens.get(start..end).unwrap_or_default());
        text.map_or(0, std::num::NonZeroU64::get) ^ key_digest(&self.root)
    }
}

impl LiveRequest {
    /// Returns the chain of the prompt's start and the pool that keeps its blocks, or `None` if they are not kept.
    fn chain(&mut self, runner: &Runner) -> Option<(Chain, KvPool)> {
        let [(_, cache)] = runner.caches.sequences.groups() else { return None };
        let (pool, root) = (cache.kv_pool().clone(), *self.prompt.keys().root());
        let block_size = pool.block_size();
        if self.finds_prefix() {
            let branch = self.branches.first_mut()?;
            let keys = branch.prompt_keys(root, block_size);
            let (keys, tokens) = (keys.keys().to_vec(), keys.tokens().to_vec());
            return Some((Chain { root, keys, tokens, block_size }, pool));
        }
        match &*self.request.prompt {
            PromptTokens::Chunked(prompt) if self.request.reuse && self.prompt.is_chunked() => {
                let tokens = prompt.system().to_vec();
                let keys = root.chain(&tokens, block_size);
                Some((Chain { root, keys, tokens, block_size }, pool))
            }
            _ => None,
        }
    }

    /// Finds out why the first block of the prompt's start that is missing was not found, when the prompt has been
    /// looked up for the first time.
    pub(super) fn note_missed(&mut self, runner: &Runner, known: &KnownPrefixes) {
        if std::mem::replace(&mut self.prompt.costs_mut().looked_up, true) {
            return;
        }
        let Some((chain, pool)) = self.chain(runner) else { return };
        let found = pool.blocks().cached_prefix(&chain.keys);
        let of_disk = |key| match &self.fetch {
            DiskFetch::Running(fetch) => fetch.reason(key),
            DiskFetch::Open | DiskFetch::Later(_) | DiskFetch::Done => None,
        };
        let why = |key| of_disk(key).unwrap_or_else(|| known.why_missing(&chain, found));
        let missed = chain.keys.get(found).map(why);
        self.prompt.costs_mut().prefix_missed = missed;
    }

    /// Remembers the blocks of the prompt's start, which has been computed.
    pub(super) fn remember(&mut self, runner: &Runner, known: &mut KnownPrefixes) {
        let computed = match self.branches.first() {
            Some(branch) if !branch.answer().is_empty() => branch.computed,
            _ => return,
        };
        let is_chunked = self.prompt.is_chunked();
        let Some((mut chain, _)) = self.chain(runner) else { return };
        if !is_chunked {
            chain.keys.truncate(computed / chain.block_size);
        }
        known.insert(&chain);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(root: u8, tokens: std::ops::Range<u32>) -> Chain {
        let (root, tokens) = (BlockKey::from_bytes([root; 32]), tokens.collect::<Vec<_>>());
        Chain { root, keys: root.chain(&tokens, 4), tokens, block_size: 4 }
    }

    #[test]
    fn blocks_are_remembered_with_their_texts_and_the_oldest_are_forgotten() {
        let mut known = KnownPrefixes::default();
        assert_eq!(known.why_missing(&chain(1, 0..8), 0), MissReason::New);
        known.insert(&chain(1, 0..8));
        known.insert(&chain(1, 0..8));
        assert_eq!(known.order.len(), 2);
        assert_eq!(known.why_missing(&chain(1, 0..8), 1), MissReason::Evicted);
        assert_eq!(known.why_missing(&chain(1, 4..8), 0), MissReason::OtherContext, "behind another block");
        assert_eq!(known.why_missing(&chain(2, 0..8), 0), MissReason::New, "another tenant's");
        known.insert(&chain(1, 100..100 + 4 * MOST as u32));
        assert_eq!(known.why_missing(&chain(1, 0..8), 0), MissReason::New, "it is forgotten");
        assert_eq!((known.order.len(), known.keys.len()), (MOST, MOST));
        assert_eq!(known.texts.values().sum::<usize>(), MOST);
    }
}
