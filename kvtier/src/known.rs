//! What a carrier or a cache knows about contents that are not found: which keys it has evicted, and which texts
//! it has stored under other keys.

use std::collections::{HashMap, HashSet, VecDeque};
use std::num::NonZeroU64;

use kvcore::BlockKey;
use xxhash_rust::xxh3::xxh3_64;

/// The number of evicted keys that are remembered.
const MOST_EVICTED: usize = 1 << 16;

/// The keys that were evicted last, and the keys of each text. A text is a digest of tokens that does not depend
/// on the context, such as [`RecordNote::text_of`](crate::RecordNote::text_of).
#[derive(Debug, Default)]
pub struct KnownKeys {
    texts: HashMap<NonZeroU64, Vec<BlockKey>>,
    /// Digests of evicted keys. The first one is forgotten first.
    evicted: VecDeque<u64>,
    is_evicted: HashSet<u64>,
}

impl KnownKeys {
    /// Records that a text is stored under a key.
    pub fn insert(&mut self, text: Option<NonZeroU64>, key: BlockKey) {
        if let Some(text) = text {
            self.texts.entry(text).or_default().push(key);
        }
    }

    /// Records that a text is no longer stored under a key.
    pub fn remove(&mut self, text: Option<NonZeroU64>, key: &BlockKey) {
        let Some(text) = text else { return };
        if let Some(keys) = self.texts.get_mut(&text) {
            keys.retain(|other| other != key);
            if keys.is_empty() {
                self.texts.remove(&text);
            }
        }
    }

    /// Records that a key was evicted.
    pub fn evicted(&mut self, key: &BlockKey) {
        let digest = xxh3_64(key.as_bytes());
        if self.is_evicted.insert(digest) {
            self.evicted.push_back(digest);
        }
        if self.evicted.len() > MOST_EVICTED
            && let Some(first) = self.evicted.pop_front()
        {
            self.is_evicted.remove(&first);
        }
    }

    /// Returns whether a key was among the last ones that were evicted.
    pub fn was_evicted(&self, key: &BlockKey) -> bool {
        self.is_evicted.contains(&xxh3_64(key.as_bytes()))
    }

    /// Returns the keys of the records with a text.
    pub fn keys_of(&self, text: Option<NonZeroU64>) -> &[BlockKey] {
        text.and_then(|text| self.texts.get(&text)).map_or(&[], Vec::as_slice)
    }
}
