//! Records in host memory above the disk: the ones that were stored or used last. A load finds them without a read.

use std::collections::{BTreeMap, HashMap};

use kvcore::BlockKey;
use parking_lot::Mutex;

use crate::buffer::RecordBuffer;
use crate::record::RecordId;

/// Records in host memory, up to a number of bytes. The least recently used ones leave first.
pub(super) struct MemoryTier {
    limit: usize,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    records: HashMap<BlockKey, Kept>,
    /// The keys by their last use.
    order: BTreeMap<u64, BlockKey>,
    /// The number of uses.
    uses: u64,
    bytes: usize,
    hits: u64,
}

struct Kept {
    id: RecordId,
    buffers: Vec<RecordBuffer>,
    /// The number of the last use.
    used: u64,
}

/// What the memory contains, and what it has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MemoryUsage {
    pub(super) bytes: usize,
    pub(super) hits: u64,
}

impl MemoryTier {
    /// Creates an empty tier that keeps at most `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, held: Mutex::default() }
    }

    /// Returns whether the tier keeps anything.
    pub(super) fn is_used(&self) -> bool {
        self.limit > 0
    }

    /// Keeps a record, in place of one with the same key. Returns the buffers that are not kept: those of the records that
    /// leave, or of this one if it is too large.
    pub(super) fn keep(&self, id: RecordId, buffers: Vec<RecordBuffer>) -> Vec<RecordBuffer> {
        let bytes = bytes_of(&buffers);
        if bytes > self.limit {
            return buffers;
        }
        let mut held = self.held.lock();
        let mut left = held.remove(&id.key).unwrap_or_default();
        while held.bytes + bytes > self.limit
            && let Some((_, oldest)) = held.order.first_key_value()
        {
            let oldest = *oldest;
            left.extend(held.remove(&oldest).unwrap_or_default());
        }
        held.uses += 1;
        let used = held.uses;
        held.order.insert(used, id.key);
        held.bytes += bytes;
        held.records.insert(id.key, Kept { id, buffers, used });
        left
    }

    /// Removes and returns a record with this identity.
    pub(super) fn take(&self, id: &RecordId) -> Option<Vec<RecordBuffer>> {
        let mut held = self.held.lock();
        held.records.get(&id.key).filter(|kept| kept.id == *id)?;
        held.hits += 1;
        held.remove(&id.key)
    }

    /// Returns whether a record with this key is here.
    pub(super) fn contains(&self, key: &BlockKey) -> bool {
        self.held.lock().records.contains_key(key)
    }

    /// Removes everything.
    pub(super) fn clear(&self) {
        let mut held = self.held.lock();
        (held.records, held.order, held.bytes) = Default::default();
    }

    pub(super) fn usage(&self) -> MemoryUsage {
        let held = self.held.lock();
        MemoryUsage { bytes: held.bytes, hits: held.hits }
    }
}

impl Held {
    fn remove(&mut self, key: &BlockKey) -> Option<Vec<RecordBuffer>> {
        let Kept { buffers, used, .. } = self.records.remove(key)?;
        self.order.remove(&used);
        self.bytes -= bytes_of(&buffers);
        Some(buffers)
    }
}

fn bytes_of(buffers: &[RecordBuffer]) -> usize {
    buffers.iter().map(|buffer| buffer.len()).sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(number: u8, token: u32) -> RecordId {
        let key = BlockKey::from_bytes([number; 32]);
        RecordId { key, tokens: [token].into(), stored_start: 0, label: "test".into() }
    }

    fn buffers(len: usize, byte: u8) -> Vec<RecordBuffer> {
        vec![vec![byte; len].into()]
    }

    #[test]
    fn a_record_with_another_identity_is_not_taken() {
        let memory = MemoryTier::new(100);
        assert!(memory.keep(id(1, 7), buffers(40, 7)).is_empty());
        assert!(memory.take(&id(1, 8)).is_none());
        assert_eq!(
            memory.keep(id(1, 8), buffers(50, 8)),
            buffers(40, 7),
            "the one before gives its memory back"
        );
        assert_eq!(memory.usage(), MemoryUsage { bytes: 50, hits: 0 });
        assert_eq!(memory.take(&id(1, 8)), Some(buffers(50, 8)));
        assert_eq!(memory.usage(), MemoryUsage { bytes: 0, hits: 1 });
    }

    #[test]
    fn what_is_too_large_pushes_out_nothing() {
        let memory = MemoryTier::new(100);
        memory.keep(id(1, 1), buffers(100, 1));
        assert_eq!(memory.keep(id(2, 2), buffers(101, 2)), buffers(101, 2));
        assert!(memory.contains(&id(1, 1).key));
        memory.clear();
        assert_eq!((memory.usage().bytes, memory.contains(&id(1, 1).key)), (0, false));
    }

    proptest! {
        #[test]
        fn the_least_recently_kept_leave_first(uses in prop::collection::vec((0u8..12, 1usize..60, any::<bool>()), 1..80)) {
            let memory = MemoryTier::new(100);
            // The plain model: records with their sizes, the last one used at the end.
            let mut model: Vec<(u8, usize)> = Vec::new();
            for (number, len, is_kept) in uses {
                let before = model.iter().position(|(other, _)| *other == number).map(|at| model.remove(at));
                if is_kept {
                    memory.keep(id(number, 0), buffers(len, number));
                    model.push((number, len));
                    while model.iter().map(|(_, len)| len).sum::<usize>() > 100 {
                        model.remove(0);
                    }
                } else {
                    let expected = before.map(|(_, len)| buffers(len, number));
                    prop_assert_eq!(memory.take(&id(number, 0)), expected);
                }
                prop_assert_eq!(memory.usage().bytes, model.iter().map(|(_, len)| len).sum::<usize>());
                for number in 0..12 {
                    let is_here = model.iter().any(|(other, _)| *other == number);
                    prop_assert_eq!(memory.contains(&id(number, 0).key), is_here);
                }
            }
        }
    }
}
