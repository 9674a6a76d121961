//! Reasons why contents are not found: the keys that a carrier or a cache has lost, and the keys under which it has
//! stored each text.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU64;

use kvcore::BlockKey;
use xxhash_rust::xxh3::xxh3_64;

/// The number of keys that are gone and are remembered.
const MOST_GONE: usize = 1 << 16;

/// The reason why contents are gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    /// The contents had to make room.
    Evicted,
    /// The contents could not be read back as they were written.
    Damaged,
}

/// The keys that have left last, and the keys of each text. A text is a digest of tokens that does not depend
/// on the context, such as [`RecordNote::text_of`](crate::RecordNote::text_of).
#[derive(Debug, Default)]
pub struct KnownKeys {
    texts: HashMap<NonZeroU64, Vec<BlockKey>>,
    /// Digests of keys that are gone. The first one is forgotten first.
    order: VecDeque<u64>,
    gone: HashMap<u64, Gone>,
}

impl KnownKeys {
    /// Records that contents are stored under a key.
    pub fn insert(&mut self, text: Option<NonZeroU64>, key: BlockKey) {
        if !self.gone.is_empty() {
            self.gone.remove(&xxh3_64(key.as_bytes()));
        }
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
        self.left(key, Gone::Evicted);
    }

    /// Records that the contents of a key were damaged, and are gone.
    pub fn damaged(&mut self, key: &BlockKey) {
        self.left(key, Gone::Damaged);
    }

    fn left(&mut self, key: &BlockKey, why: Gone) {
        let digest = xxh3_64(key.as_bytes());
        if self.gone.insert(digest, why).is_none() {
            self.order.push_back(digest);
        }
        if self.order.len() > MOST_GONE
            && let Some(first) = self.order.pop_front()
        {
            self.gone.remove(&first);
        }
    }

    /// Returns why a key is gone, if it was among the last ones.
    pub fn why_gone(&self, key: &BlockKey) -> Option<Gone> {
        self.gone.get(&xxh3_64(key.as_bytes())).copied()
    }

    /// Returns the keys of the records with a text.
    pub fn keys_of(&self, text: Option<NonZeroU64>) -> &[BlockKey] {
        text.and_then(|text| self.texts.get(&text)).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u32) -> BlockKey {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        BlockKey::from_bytes(bytes)
    }

    #[test]
    fn the_last_keys_that_left_are_known_with_the_latest_reason() {
        let mut known = KnownKeys::default();
        known.evicted(&key(0));
        known.damaged(&key(1));
        known.evicted(&key(1));
        assert_eq!(
            (known.why_gone(&key(0)), known.why_gone(&key(1))),
            (Some(Gone::Evicted), Some(Gone::Evicted))
        );
        known.damaged(&key(0));
        assert_eq!((known.why_gone(&key(0)), known.why_gone(&key(2))), (Some(Gone::Damaged), None));
        known.insert(None, key(0));
        assert_eq!(known.why_gone(&key(0)), None, "it is stored again");
        known.damaged(&key(0));
        for number in 2..=MOST_GONE as u32 {
            known.evicted(&key(number));
        }
        assert_eq!(known.why_gone(&key(0)), None, "the first one is forgotten");
        assert!(known.gone.len() <= MOST_GONE && known.order.len() <= MOST_GONE);
        assert_eq!(known.why_gone(&key(MOST_GONE as u32)), Some(Gone::Evicted));
    }

    #[test]
    fn texts_have_the_keys_under_which_they_are_stored() {
        let (mut known, text) = (KnownKeys::default(), NonZeroU64::new(7));
        known.insert(text, key(1));
        known.insert(text, key(2));
        known.insert(None, key(3));
        known.remove(text, &key(1));
        assert_eq!((known.keys_of(text), known.keys_of(None)), (&[key(2)][..], &[][..]));
        known.remove(text, &key(2));
        assert!(known.keys_of(text).is_empty() && known.texts.is_empty());
    }
}
