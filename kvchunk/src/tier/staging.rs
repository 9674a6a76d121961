//! The memory of records that are being loaded, or are loaded and not yet used.

use std::collections::HashSet;
use std::sync::Arc;

use kvcore::BlockKey;
use parking_lot::Mutex;

/// A limit on the bytes that all requests load together, and the keys that they load.
#[derive(Debug)]
pub(super) struct Staging {
    limit: usize,
    loading: Mutex<Loaded>,
}

#[derive(Debug, Default)]
struct Loaded {
    bytes: usize,
    /// The number of bytes that a disk reads.
    read: usize,
    keys: HashSet<BlockKey>,
}

impl Staging {
    pub(super) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, loading: Mutex::default() })
    }

    /// Returns the number of bytes that a disk reads, or has read for records that are not used yet.
    pub(super) fn read(&self) -> usize {
        self.loading.lock().read
    }

    /// Takes memory for records of so many `bytes`, of which a disk reads `read`. Returns `None` if other requests use too
    /// much of it, or are loading one of the records. A request that is alone gets all that it needs.
    pub(super) fn take(self: &Arc<Self>, keys: Vec<BlockKey>, bytes: usize, read: usize) -> Option<Staged> {
        let mut loading = self.loading.lock();
        let full = loading.bytes > 0 && loading.bytes + bytes > self.limit;
        if full || keys.iter().any(|key| loading.keys.contains(key)) {
            return None;
        }
        loading.bytes += bytes;
        loading.read += read;
        loading.keys.extend(&keys);
        drop(loading);
        Some(Staged { staging: Arc::clone(self), keys, bytes, read })
    }
}

/// The memory of one request's records.
///
/// # Drop behaviour
/// Gives the memory back.
#[derive(Debug)]
pub(super) struct Staged {
    staging: Arc<Staging>,
    keys: Vec<BlockKey>,
    bytes: usize,
    read: usize,
}

impl Drop for Staged {
    fn drop(&mut self) {
        let mut loading = self.staging.loading.lock();
        loading.bytes -= self.bytes;
        loading.read -= self.read;
        for key in &self.keys {
            loading.keys.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_share_the_memory_and_load_nothing_twice() {
        let staging = Staging::new(100);
        let key = |number| BlockKey::from_bytes([number; 32]);
        let large = staging.take(vec![key(1)], 500, 500).expect("a request that is alone");
        assert!(staging.take(vec![key(2)], 1, 0).is_none());
        drop(large);
        let first = staging.take(vec![key(1), key(2)], 60, 10).unwrap();
        assert!(staging.take(vec![key(2)], 10, 10).is_none(), "another request loads it");
        assert!(staging.take(vec![key(3)], 50, 50).is_none(), "no room");
        let second = staging.take(vec![key(3)], 40, 40).unwrap();
        assert_eq!(staging.read(), 50);
        assert_eq!(staging.loading.lock().bytes, 100);
        drop(first);
        assert!(staging.take(vec![key(2)], 10, 10).is_some());
        drop(second);
        let loading = staging.loading.lock();
        assert_eq!((loading.bytes, loading.read, loading.keys.len()), (0, 0, 0));
    }
}
