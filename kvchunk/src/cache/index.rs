//! The index of stored pieces by hash.

use std::collections::HashMap;

use kvcore::BlockKey;

use crate::hash::ChunkHash;

/// A value that an index can hold. The trait is sealed: code outside the crate cannot name it.
pub trait Indexed {
    /// Returns the hash under which the value is stored.
    fn hash(&self) -> ChunkHash;
    /// Returns the hash of the value's tokens that does not depend on the system prompt, or `None` if the
    /// value cannot be found by such a hash.
    fn any_system(&self) -> Option<BlockKey>;
}

/// An index of stored pieces by hash. A piece can also be found by a second hash, which does not depend on
/// the system prompt; if several pieces have the same second hash, the latest is found.
///
/// A cache protects its index with a lock. Because every change also affects a tenant's account, code outside
/// the cache cannot insert or remove values. [`ChunkCacheManager::index`](super::ChunkCacheManager::index)
/// returns a copy for reading.
#[derive(Debug, Clone)]
pub struct ChunkHashIndex<T> {
    slots: Vec<Option<T>>,
    free: Vec<u32>,
    by_hash: HashMap<BlockKey, u32>,
    by_tokens: HashMap<BlockKey, u32>,
}

impl<T> ChunkHashIndex<T> {
    pub(crate) fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), by_hash: HashMap::new(), by_tokens: HashMap::new() }
    }

    /// Returns the number of pieces.
    pub fn len(&self) -> usize {
        self.by_hash.len()
    }

    /// Returns whether the index is empty.
    pub fn is_empty(&self) -> bool {
        self.by_hash.is_empty()
    }

    /// Returns the value stored under a hash.
    pub fn get(&self, hash: &ChunkHash) -> Option<&T> {
        self.at(self.slot_of(&hash.key)?)
    }

    /// Returns whether the index has a value under this hash.
    pub fn contains(&self, hash: &ChunkHash) -> bool {
        self.by_hash.contains_key(&hash.key)
    }

    /// Returns an iterator over all values, in arbitrary order.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().flatten()
    }

    /// Returns the number of slots, occupied or free.
    pub(crate) fn slots(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Returns an iterator over the values with their slots.
    pub(crate) fn with_slots(&self) -> impl Iterator<Item = (u32, &T)> {
        let numbered = (0..).zip(&self.slots);
        numbered.filter_map(|(slot, value)| Some((slot, value.as_ref()?)))
    }

    pub(crate) fn at(&self, slot: u32) -> Option<&T> {
        self.slots.get(slot as usize)?.as_ref()
    }

    pub(crate) fn at_mut(&mut self, slot: u32) -> Option<&mut T> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    pub(crate) fn slot_of(&self, key: &BlockKey) -> Option<u32> {
        self.by_hash.get(key).copied()
    }

    /// Returns the slot of the latest piece that has the same tokens with any system prompt.
    pub(crate) fn slot_under_any_system(&self, key: &BlockKey) -> Option<u32> {
        self.by_tokens.get(key).copied()
    }

    /// Returns an index with the same hashes, in which each value has been converted by `value`.
    pub(crate) fn map<U>(&self, value: impl Fn(&T) -> U) -> ChunkHashIndex<U> {
        ChunkHashIndex {
            slots: self.slots.iter().map(|slot| slot.as_ref().map(&value)).collect(),
            free: self.free.clone(),
            by_hash: self.by_hash.clone(),
            by_tokens: self.by_tokens.clone(),
        }
    }
}

impl<T: Indexed> ChunkHashIndex<T> {
    /// Inserts a value and returns its slot. The hash must not be in the index yet.
    pub(crate) fn insert(&mut self, value: T) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.by_hash.insert(value.hash().key, slot);
        if let Some(key) = value.any_system() {
            self.by_tokens.insert(key, slot);
        }
        self.slots[slot as usize] = Some(value);
        slot
    }

    /// Removes the value in a slot and returns it.
    pub(crate) fn remove(&mut self, slot: u32) -> Option<T> {
        let value = self.slots.get_mut(slot as usize)?.take()?;
        self.by_hash.remove(&value.hash().key);
        if let Some(key) = value.any_system()
            && self.by_tokens.get(&key) == Some(&slot)
        {
            self.by_tokens.remove(&key);
        }
        self.free.push(slot);
        Some(value)
    }

    /// Checks that the index is consistent. Returns a description of the first inconsistency as `Err`.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (slot, value) in self.with_slots() {
            if self.slot_of(&value.hash().key) != Some(slot) {
                return Err(format!("piece {slot} is not in the index"));
            }
        }
        if self.len() != self.iter().count() {
            return Err(format!("the index has {} pieces", self.len()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, PartialEq)]
    struct Numbered(u8, Option<u8>);

    fn key(n: u8) -> BlockKey {
        BlockKey::from_bytes([n; 32])
    }

    fn hash(n: u8) -> ChunkHash {
        ChunkHash { key: key(n), token_count: 1, num_blocks: 1 }
    }

    impl Indexed for Numbered {
        fn hash(&self) -> ChunkHash {
            hash(self.0)
        }

        fn any_system(&self) -> Option<BlockKey> {
            self.1.map(key)
        }
    }

    #[test]
    fn pieces_are_found_by_hash_and_the_latest_under_any_system() {
        let mut index = ChunkHashIndex::new();
        let first = index.insert(Numbered(1, Some(9)));
        let second = index.insert(Numbered(2, Some(9)));
        assert_eq!((index.get(&hash(1)), index.get(&hash(3))), (Some(&Numbered(1, Some(9))), None));
        assert_eq!(index.slot_under_any_system(&key(9)), Some(second));
        assert_eq!(index.remove(first), Some(Numbered(1, Some(9))));
        assert_eq!(index.slot_under_any_system(&key(9)), Some(second), "the latest is still there");
        assert_eq!(index.remove(first), None);
        assert_eq!(index.insert(Numbered(3, None)), first, "slots are used again");
        index.remove(second);
        assert_eq!(index.slot_under_any_system(&key(9)), None);
        let numbers = index.map(|piece| piece.0);
        assert_eq!((numbers.get(&hash(3)), numbers.len(), numbers.contains(&hash(2))), (Some(&3), 1, false));
        assert_eq!(numbers.iter().collect::<Vec<_>>(), [&3]);
        index.check().unwrap();
    }
}
