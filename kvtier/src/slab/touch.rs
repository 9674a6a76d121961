//! Renews records that somebody uses without loading them.

use kvcore::BlockKey;

use super::Slab;

impl Slab {
    /// Records a use of each of these records, in this order, as if they had been loaded: with LRU, they are the last
    /// ones to leave. Does not read the disk.
    /// Keys without a record are skipped. Returns the number of records that were renewed.
    pub fn touch<'a>(&self, keys: impl IntoIterator<Item = &'a BlockKey>) -> usize {
        // The lock is taken for each key, so that loads never wait for a long list.
        keys.into_iter().filter(|key| self.shared.state.lock().touch(key)).count()
    }
}
