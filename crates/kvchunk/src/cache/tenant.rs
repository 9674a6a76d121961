//! Tenants: who a piece belongs to, how much each may hold, and in which order its pieces go.

use kvcore::block::Entry as PolicyEntry;
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
    /// Blocks of its pieces and reservations.
    pub(super) used: usize,
    /// Those of them that could be evicted now.
    pub(super) idle: usize,
    /// Pieces that are awake and not held, in the order in which they go.
    pub(super) order: Order,
    /// Counts; what is held now is filled in when somebody asks.
    pub(super) counted: ChunkCacheMetrics,
}

impl Account {
    pub(super) fn new(tenant: Tenant, pool_blocks: usize, max_chunks: usize, policy: PolicyKind) -> Self {
        let quota = tenant.max_blocks.map_or(pool_blocks, |most| most.min(pool_blocks));
        let order = Order::new(policy, pool_blocks.min(max_chunks));
        Self { tenant, quota, used: 0, idle: 0, order, counted: ChunkCacheMetrics::default() }
    }

    /// Share of the quota in use.
    pub(super) fn pressure(&self) -> f64 {
        self.used as f64 / self.quota.max(1) as f64
    }
}

/// An eviction policy over pieces, which it knows by numbers of its own.
#[derive(Debug)]
pub(super) struct Order {
    policy: Box<dyn EvictionPolicy>,
    /// The piece behind a number.
    pieces: Vec<u32>,
    free: Vec<u32>,
    wants_hits: bool,
}

impl Order {
    /// For at most `capacity` pieces that are awake at a time: each has a block.
    fn new(policy: PolicyKind, capacity: usize) -> Self {
        let policy = policy.build(capacity);
        let numbers = capacity as u32;
        Self {
            wants_hits: policy.wants_hits(),
            policy,
            pieces: vec![0; capacity],
            free: (0..numbers).rev().collect(),
        }
    }

    /// A number for a piece; `None` when there are as many as there can be.
    pub(super) fn admit(&mut self, piece: u32) -> Option<u32> {
        let number = self.free.pop()?;
        self.pieces[number as usize] = piece;
        Some(number)
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
        self.policy.remove(number);
    }

    /// A lookup found the piece.
    pub(super) fn hit(&mut self, number: u32, key: &BlockKey) {
        if self.wants_hits {
            self.policy.hit(number, key);
        }
    }

    /// Takes the piece out that is to go next.
    pub(super) fn evict(&mut self, now: u64) -> Option<u32> {
        self.policy.evict(now).map(|number| self.pieces[number as usize])
    }

    /// Pieces that can be evicted.
    pub(super) fn len(&self) -> usize {
        self.policy.len()
    }
}
