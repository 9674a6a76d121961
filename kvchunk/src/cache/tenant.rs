//! Tenants: the owners of pieces, their quotas, and the order in which their pieces are evicted.

use kvcore::{BlockKey, EvictionPolicy, PolicyEntry, PolicyKind};
use kvtier::KnownKeys;

use super::metrics::ChunkCacheMetrics;

/// The ID of a tenant in a chunk cache. The default tenant always exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct TenantId(pub(crate) u32);

/// A tenant and the root of its keys. Only
/// [`ChunkCacheManager::tenant_keys`](crate::ChunkCacheManager::tenant_keys) combines the two, so that a
/// request never looks for one tenant's chunks with another tenant's keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TenantKeys {
    pub(crate) id: TenantId,
    pub(crate) root: BlockKey,
}

impl TenantKeys {
    /// Returns the default tenant, whose keys start at the root that all tenants share.
    pub fn shared(root: BlockKey) -> Self {
        Self { id: TenantId::default(), root }
    }

    /// Returns the tenant's ID.
    pub fn id(&self) -> TenantId {
        self.id
    }

    /// Returns the root of the tenant's keys.
    pub fn root(&self) -> &BlockKey {
        &self.root
    }

    /// Returns the keys below the tenant's for contents that only requests with the same salt may find. A client may
    /// choose the salt, because it only divides what the tenant has.
    #[must_use]
    pub fn salted(self, salt: &[u8]) -> Self {
        let bytes: Vec<u32> = salt.iter().map(|&byte| u32::from(byte)).collect();
        Self { root: self.root.derive("kvchunk client salt v1").child(&bytes), ..self }
    }
}

/// A user of a chunk cache, with a human-readable tag, a salt that keeps its keys apart from the keys of
/// other tenants, and a quota.
///
/// The server's operator must choose the salt, because a salt chosen by clients protects no one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    /// The tenant's name, unique in a cache.
    pub tag: String,
    /// The salt, which is part of every key of the tenant.
    pub salt: Vec<u8>,
    /// The maximum number of blocks for the tenant's pieces. `None` allows the whole pool.
    pub max_blocks: Option<usize>,
    /// The maximum number of bytes for the tenant's records on a disk below the cache. `None` allows the whole
    /// disk.
    pub max_disk_bytes: Option<u64>,
}

impl Tenant {
    /// The tag of the default tenant.
    pub const DEFAULT_TAG: &'static str = "chunk_cache";

    /// Creates a tenant that may use the whole pool. Its salt is its tag.
    pub fn new(tag: &str) -> Self {
        Self { tag: tag.to_owned(), salt: tag.as_bytes().to_vec(), max_blocks: None, max_disk_bytes: None }
    }

    /// Derives the root of this tenant's keys from a root that all tenants share. For a tenant without a
    /// salt, this is the shared root itself.
    #[must_use]
    pub fn root(&self, root: &BlockKey) -> BlockKey {
        if self.salt.is_empty() {
            return *root;
        }
        let bytes: Vec<u32> = self.salt.iter().map(|&byte| u32::from(byte)).collect();
        root.derive("kvchunk tenant v1").child(&bytes)
    }
}

/// A tenant's account in a cache.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) tenant: Tenant,
    /// The maximum number of blocks that the tenant may use.
    pub(crate) quota: usize,
    /// Number of blocks in the tenant's pieces and reservations, including pieces that are held but can no
    /// longer be found.
    pub(crate) used: usize,
    /// Number of blocks in `used` that could be evicted now.
    pub(crate) idle: usize,
    /// The eviction order of pieces that are awake and not held.
    pub(crate) order: Order,
    /// Total size of the tenant's sleeping pieces, in bytes.
    pub(crate) sleeping_bytes: usize,
    /// The tenant's counts. Gauges are filled in when the metrics are read.
    pub(crate) counted: ChunkCacheMetrics,
    /// The keys of the tenant's pieces that have left, and the keys of each text.
    pub(crate) known: KnownKeys,
}

impl Account {
    pub(crate) fn new(tenant: Tenant, pool_blocks: usize, max_chunks: usize, policy: PolicyKind) -> Self {
        let quota = tenant.max_blocks.map_or(pool_blocks, |most| most.min(pool_blocks));
        let order = Order::new(policy, pool_blocks.min(max_chunks));
        let (counted, known) = (ChunkCacheMetrics::default(), KnownKeys::default());
        Self { tenant, quota, used: 0, idle: 0, order, sleeping_bytes: 0, counted, known }
    }

    /// Returns the fraction of the quota in use.
    pub(crate) fn pressure(&self) -> f64 {
        self.used as f64 / self.quota.max(1) as f64
    }
}

// Decision: docs/decisions/chunks.md#one-index-for-all-tenants-one-policy-for-each
/// An eviction order over pieces. The eviction policy identifies each piece by a number below the order's
/// capacity.
///
/// A piece that is being put to sleep keeps its rank in the order, in case it has to stay awake.
/// [`evict`](Self::evict) skips such a piece.
#[derive(Debug)]
pub(crate) struct Order {
    policy: Box<dyn EvictionPolicy>,
    /// For each number, the slot of its piece in the index.
    pieces: Vec<u32>,
    free: Vec<u32>,
    wants_hits: bool,
    /// The numbers of departed pieces, which are being put to sleep.
    departed: Vec<u32>,
    /// The numbers that the policy evicted while their pieces were departed, in eviction order.
    passed_over: Vec<u32>,
}

impl Order {
    /// Creates an order for at most `capacity` awake pieces at a time.
    fn new(policy: PolicyKind, capacity: usize) -> Self {
        let policy = policy.build(capacity);
        let numbers = capacity as u32;
        Self {
            wants_hits: policy.wants_hits(),
            policy,
            pieces: vec![0; capacity],
            free: (0..numbers).rev().collect(),
            departed: Vec::new(),
            passed_over: Vec::new(),
        }
    }

    /// Assigns a free number to a piece. Returns `None` if all numbers are in use.
    pub(crate) fn admit(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Records the index slot of the piece that has this number.
    pub(crate) fn assign(&mut self, number: u32, piece: u32) {
        self.pieces[number as usize] = piece;
    }

    /// Frees a number, so that another piece can use it.
    pub(crate) fn retire(&mut self, number: u32) {
        self.free.push(number);
    }

    /// Makes a piece evictable.
    pub(crate) fn insert(&mut self, number: u32, key: &BlockKey, now: u64) {
        self.policy.insert(number, &PolicyEntry { key: Some(key), now, ..PolicyEntry::default() });
    }

    /// Makes a piece unevictable, because it is held again or removed.
    pub(crate) fn remove(&mut self, number: u32) {
        if !take(&mut self.passed_over, number) {
            self.policy.remove(number);
        }
    }

    /// Makes a piece unevictable while it is being put to sleep. The piece keeps its rank.
    pub(crate) fn depart(&mut self, number: u32) {
        self.departed.push(number);
    }

    /// Makes a departed piece evictable again, at its old rank.
    pub(crate) fn stay(&mut self, number: u32) {
        take(&mut self.departed, number);
    }

    /// Removes a departed piece, which is now asleep, and frees its number.
    pub(crate) fn arrive(&mut self, number: u32) {
        take(&mut self.departed, number);
        self.remove(number);
        self.retire(number);
    }

    /// Tells the policy that a lookup has found the piece.
    pub(crate) fn hit(&mut self, number: u32, key: &BlockKey) {
        if self.wants_hits {
            self.policy.hit(number, key);
        }
    }

    /// Removes the next piece to evict, and returns its index slot.
    pub(crate) fn evict(&mut self, now: u64) -> Option<u32> {
        let back = self.passed_over.iter().position(|number| !self.departed.contains(number));
        if let Some(at) = back {
            return Some(self.pieces[self.passed_over.remove(at) as usize]);
        }
        loop {
            let number = self.policy.evict(now)?;
            if !self.departed.contains(&number) {
                return Some(self.pieces[number as usize]);
            }
            self.passed_over.push(number);
        }
    }

    /// Returns the number of evictable pieces.
    pub(crate) fn len(&self) -> usize {
        self.policy.len() + self.passed_over.len() - self.departed.len()
    }
}

/// Removes a number from a list, and returns whether the list contained the number.
fn take(numbers: &mut Vec<u32>, number: u32) -> bool {
    let at = numbers.iter().position(|&other| other == number);
    at.map(|at| numbers.remove(at)).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn departed_pieces_are_passed_over_and_keep_their_place() {
        let mut order = Order::new(PolicyKind::Lru, 5);
        let key = BlockKey::from_bytes([1; 32]);
        for piece in 10..15 {
            let number = order.admit().unwrap();
            order.assign(number, piece);
            order.insert(number, &key, 0);
        }
        assert_eq!(order.admit(), None);
        order.depart(0);
        order.depart(1);
        order.depart(3);
        assert_eq!((order.len(), order.evict(0), order.len()), (2, Some(12), 1));
        order.stay(1);
        order.stay(3);
        order.arrive(0);
        assert_eq!(order.admit(), Some(0));
        assert_eq!([order.evict(0), order.evict(0), order.evict(0)], [Some(11), Some(13), Some(14)]);
        assert_eq!((order.evict(0), order.len()), (None, 0));
    }
}
