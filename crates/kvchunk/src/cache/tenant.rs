//! Tenants: who a piece belongs to, how much each may hold, and in which order its pieces go.

use kvcore::Entry as PolicyEntry;
use kvcore::{BlockKey, EvictionPolicy, PolicyKind};

use super::metrics::ChunkCacheMetrics;

/// A tenant of a chunk cache, by number. The default one is always there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct TenantId(pub(super) u32);

/// Who uses a chunk cache: a tag for people, a salt that separates its keys, and a quota.
///
/// The salt comes from whoever runs the server: one that clients choose protects nobody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    /// The tenant's name, unique in a cache.
    pub tag: String,
    /// Part of every key of the tenant.
    pub salt: Vec<u8>,
    /// Most blocks that its pieces may take, or `None` for all of the pool.
    pub max_blocks: Option<usize>,
}

impl Tenant {
    /// The tag of the tenant that is always there.
    pub const DEFAULT_TAG: &'static str = "chunk_cache";

    /// A tenant without a limit of its own, salted by its tag.
    pub fn new(tag: &str) -> Self {
        Self { tag: tag.to_owned(), salt: tag.as_bytes().to_vec(), max_blocks: None }
    }

    /// The root of this tenant's keys under a root that all tenants have in common; without a salt, that one.
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
pub(super) struct Account {
    pub(super) tenant: Tenant,
    /// Blocks it may have.
    pub(super) quota: usize,
    /// Blocks of its pieces and reservations, also of pieces that are held and cannot be found any more.
    pub(super) used: usize,
    /// Those of them that could be evicted now.
    pub(super) idle: usize,
    /// Pieces that are awake and not held, in the order in which they go.
    pub(super) order: Order,
    /// Bytes that its sleeping pieces take.
    pub(super) sleeping_bytes: usize,
    /// Counts; what is held now is filled in when somebody asks.
    pub(super) counted: ChunkCacheMetrics,
}

impl Account {
    pub(super) fn new(tenant: Tenant, pool_blocks: usize, max_chunks: usize, policy: PolicyKind) -> Self {
        let quota = tenant.max_blocks.map_or(pool_blocks, |most| most.min(pool_blocks));
        let order = Order::new(policy, pool_blocks.min(max_chunks));
        let counted = ChunkCacheMetrics::default();
        Self { tenant, quota, used: 0, idle: 0, order, sleeping_bytes: 0, counted }
    }

    /// Share of the quota in use.
    pub(super) fn pressure(&self) -> f64 {
        self.used as f64 / self.quota.max(1) as f64
    }
}

/// An eviction policy over pieces, which it knows by numbers of its own.
///
/// A piece that departs into sleep keeps its place, in case it has to stay; [`evict`](Self::evict) passes it over.
#[derive(Debug)]
pub(super) struct Order {
    policy: Box<dyn EvictionPolicy>,
    /// The piece behind a number.
    pieces: Vec<u32>,
    free: Vec<u32>,
    wants_hits: bool,
    /// Numbers of pieces that have departed.
    departed: Vec<u32>,
    /// Numbers that the policy gave up while their pieces were away, the next to go first.
    passed_over: Vec<u32>,
}

impl Order {
    /// For at most `capacity` pieces that are awake at a time.
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

    /// A number for a piece; `None` when there are as many as there can be.
    pub(super) fn admit(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Says which piece a number belongs to.
    pub(super) fn assign(&mut self, number: u32, piece: u32) {
        self.pieces[number as usize] = piece;
    }

    /// Takes a number back.
    pub(super) fn retire(&mut self, number: u32) {
        self.free.push(number);
    }

    /// The piece can be evicted from now on.
    pub(super) fn insert(&mut self, number: u32, key: &BlockKey, now: u64) {
        self.policy.insert(number, &PolicyEntry { key: Some(key), now, ..PolicyEntry::default() });
    }

    /// The piece is held again, or goes.
    pub(super) fn remove(&mut self, number: u32) {
        if !take(&mut self.passed_over, number) {
            self.policy.remove(number);
        }
    }

    /// The piece cannot be evicted for a while.
    pub(super) fn depart(&mut self, number: u32) {
        self.departed.push(number);
    }

    /// A piece that had departed can be evicted again, at its turn.
    pub(super) fn stay(&mut self, number: u32) {
        take(&mut self.departed, number);
    }

    /// A piece that had departed is awake no more.
    pub(super) fn arrive(&mut self, number: u32) {
        take(&mut self.departed, number);
        self.remove(number);
        self.retire(number);
    }

    /// A lookup found the piece.
    pub(super) fn hit(&mut self, number: u32, key: &BlockKey) {
        if self.wants_hits {
            self.policy.hit(number, key);
        }
    }

    /// Takes the piece out that is to go next.
    pub(super) fn evict(&mut self, now: u64) -> Option<u32> {
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

    /// Pieces that can be evicted.
    pub(super) fn len(&self) -> usize {
        self.policy.len() + self.passed_over.len() - self.departed.len()
    }
}

/// Takes a number out of a list; whether it was there.
fn take(numbers: &mut Vec<u32>, number: u32) -> bool {
    let at = numbers.iter().position(|&other| other == number);
    at.map(|at| numbers.remove(at)).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_departs_is_passed_over_and_keeps_its_place() {
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
