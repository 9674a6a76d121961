//! The chunk cache: stored pieces of chunks, found by hash.
//!
//! A *piece* is a chunk, or a part of an oversized chunk. A request [acquires](ChunkCacheManager::acquire)
//! the pieces of its chunks. It gets a [`PieceHold`] on each cached piece, and a [`ChunkReservation`] to
//! compute each missing piece into, unless another request is already computing that piece.
//!
//! ```text
//!              acquire ──────────────────► Hit ────────────┐
//!                │  miss      store                        ▼  last holder ends
//!                ├─► Compute ───────► Awake, held ──► Awake, idle ──► evicted
//!                ├─► Busy (another request's Compute)       │   ▲
//!                └─► NoRoom                  sleep          ▼   │ wake_up, hit
//!                                                         Asleep
//! ```
//!
//! The whole pool can sleep too ([`ChunkCacheManager::sleep_pool`]). While it is asleep, every request gets
//! `NoRoom`. This module contains lookup, acquisition, eviction, tenants and metrics. Sleeping and waking are
//! in `crate::sleep`.
//!
//! All methods take `&self`. The lock is never held while a model computes or a piece is copied.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

use crate::metrics::LatencyHistogram;
use kvcore::{BlockKey, Clock, SystemClock};
use parking_lot::{Mutex, MutexGuard};

use crate::config::ChunkCacheConfig;
use crate::error::{Error, Result};
use crate::hash::ChunkHash;
use crate::pool::ChunkBlockPool;
use crate::sleep::{SleepStore, Sleeping};

mod acquire;
mod flight;
mod goals;
mod heat;
mod hold;
mod index;
mod metrics;
mod search;
mod state;
mod system;
mod tenant;

pub use flight::ChunkWaiter;
pub use hold::{ChunkReservation, PieceHold};
pub use index::ChunkHashIndex;
pub use metrics::ChunkCacheMetrics;
pub use search::Acquired;
pub(crate) use system::{SystemFill, SystemFlight, SystemFound};
pub use tenant::{Tenant, TenantId, TenantKeys};

pub(crate) use flight::Flight;
pub(crate) use state::{AwakePiece, CacheState, PieceMemory, PoolMemory, StoredPiece};

use tenant::Account;

/// A cache of chunk pieces. Clones share one cache.
///
/// ```
/// use kvchunk::{
///     Acquired, ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager, ChunkContext, ChunkHasher, ComputeMode,
///     HashAlgorithm, TenantId,
/// };
/// use kvcore::KeyScope;
///
/// let cache = ChunkCacheManager::new(ChunkCacheConfig::default(), ChunkBlockPool::new(0..64, 16)?)?;
/// let context = ChunkContext::new(KeyScope::new("m", b"w").root(), ComputeMode::Alone, &[]);
/// let hasher = ChunkHasher::new(HashAlgorithm::Blake3, context, 16);
/// let piece = hasher.pieces(&[1, 2, 3], 4096).next().unwrap();
///
/// let Acquired::Compute(reservation) = cache.acquire(TenantId::default(), &piece, 0) else { panic!() };
/// assert_eq!(reservation.write_slots()?.len(), 3);      // … run the model, scatter to these slots …
/// drop(reservation.store());
/// let Acquired::Hit(chunk) = cache.acquire(TenantId::default(), &piece, 0) else { panic!() };
/// assert_eq!((chunk.num_tokens(), cache.metrics().hit_count), (3, 1));
/// # Ok::<(), kvchunk::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ChunkCacheManager(pub(crate) Arc<SharedCache>);

/// A weak reference to a cache, for stores and clocks that the cache owns and that use the cache themselves.
///
/// ```
/// use kvchunk::{ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager};
/// let cache = ChunkCacheManager::new(ChunkCacheConfig::default(), ChunkBlockPool::new(0..64, 16)?)?;
/// let weak = cache.downgrade();
/// assert!(weak.upgrade().is_some());
/// drop(cache);
/// assert!(weak.upgrade().is_none());
/// # Ok::<(), kvchunk::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct WeakChunkCache(Weak<SharedCache>);

impl WeakChunkCache {
    /// Returns the cache, if it still exists.
    pub fn upgrade(&self) -> Option<ChunkCacheManager> {
        self.0.upgrade().map(ChunkCacheManager)
    }
}

#[derive(Debug)]
pub(crate) struct SharedCache {
    pub(crate) config: ChunkCacheConfig,
    pub(crate) pool: ChunkBlockPool,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) sleep: Option<Arc<dyn SleepStore>>,
    pub(crate) state: Mutex<CacheState>,
    pub(crate) lookups: LatencyHistogram,
    pub(crate) wakes: LatencyHistogram,
    pub(crate) reindexes: LatencyHistogram,
    pub(crate) computes: LatencyHistogram,
    /// The system prompts that requests are computing, by the key of the whole system prompt. This lock must
    /// be taken before any other lock of the cache.
    pub(crate) systems: Mutex<HashMap<BlockKey, Arc<Flight>>>,
}

// Decision: docs/decisions/chunks.md#saved-contents-are-dropped-without-the-lock
/// The locked state. Sleeping contents that are discarded under the lock are dropped after the lock is
/// released, because dropping them runs the store's code, which may use the cache.
pub(crate) struct LockedState<'a> {
    /// The lock guard. It is declared first so that it is dropped before `discarded`.
    pub(crate) state: MutexGuard<'a, CacheState>,
    discarded: Vec<Box<dyn Sleeping>>,
}

impl SharedCache {
    pub(crate) fn lock(&self) -> LockedState<'_> {
        LockedState { state: self.state.lock(), discarded: Vec::new() }
    }
}

impl Drop for LockedState<'_> {
    fn drop(&mut self) {
        self.discarded = std::mem::take(&mut self.state.discarded);
    }
}

impl std::ops::Deref for LockedState<'_> {
    type Target = CacheState;

    fn deref(&self) -> &CacheState {
        &self.state
    }
}

impl std::ops::DerefMut for LockedState<'_> {
    fn deref_mut(&mut self) -> &mut CacheState {
        &mut self.state
    }
}

/// A snapshot of a stored piece.
#[derive(Debug, Clone, PartialEq)]
pub struct ChunkInfo {
    /// The piece's hash, with its token and block counts.
    pub chunk_hash: ChunkHash,
    /// The tag of the tenant that owns the piece.
    pub tenant: String,
    /// The position that the first key was rotated to when the piece was stored.
    pub cached_position_start: i64,
    /// The number of holds on the piece. Clones of one [`PieceHold`] count once.
    pub ref_count: u32,
    /// The number of times the piece has been held since it was stored, including holds that a prompt did not
    /// use.
    pub access_count: u64,
    /// A measure of how often the piece was used lately, from 0 to 1: `1 − 2^−u` after `u` uses, of which each
    /// counts half as much every ten minutes. Storing the piece is its first use.
    pub heat: f64,
    /// Milliseconds since the piece was stored.
    pub age_ms: u64,
    /// Milliseconds since the piece was last held.
    pub idle_ms: u64,
    /// True if the piece is asleep, or is being put to sleep or woken.
    pub asleep: bool,
    /// True if the bytes are exactly what the hash describes.
    pub exact: bool,
}

/// The heat of a stored piece, without the rest of [`ChunkInfo`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PieceHeat {
    /// The piece's hash, with its token and block counts.
    pub chunk_hash: ChunkHash,
    /// The heat; see [`ChunkInfo::heat`].
    pub heat: f64,
    /// True if the piece is in a lower memory tier.
    pub asleep: bool,
    /// True if nobody holds the piece or moves it.
    pub idle: bool,
}

impl ChunkCacheManager {
    /// Creates an empty cache over `pool`, without a sleep store and with the system clock.
    ///
    /// # Errors
    /// Returns the errors of [`ChunkCacheConfig::check`].
    pub fn new(config: ChunkCacheConfig, pool: ChunkBlockPool) -> Result<Self> {
        Self::build(config, pool, None, Arc::new(SystemClock::default()))
    }

    /// Creates an empty cache over `pool`, with the given sleep store and clock.
    ///
    /// # Errors
    /// Returns the errors of [`ChunkCacheConfig::check`].
    pub fn build(
        config: ChunkCacheConfig,
        pool: ChunkBlockPool,
        sleep: Option<Arc<dyn SleepStore>>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        config.check()?;
        let everybody = Tenant { salt: Vec::new(), ..Tenant::new(Tenant::DEFAULT_TAG) };
        let blocks = pool.blocks().range().len();
        let first = Account::new(everybody, blocks, config.max_chunks, config.cache_policy);
        Ok(Self(Arc::new(SharedCache {
            state: Mutex::new(CacheState::new(first)),
            config,
            pool,
            clock,
            sleep,
            lookups: LatencyHistogram::default(),
            wakes: LatencyHistogram::default(),
            reindexes: LatencyHistogram::default(),
            computes: LatencyHistogram::default(),
            systems: Mutex::default(),
        })))
    }

    /// Returns a weak reference to this cache.
    pub fn downgrade(&self) -> WeakChunkCache {
        WeakChunkCache(Arc::downgrade(&self.0))
    }

    /// Returns the settings.
    pub fn config(&self) -> &ChunkCacheConfig {
        &self.0.config
    }

    /// Returns the pool of the cache's blocks.
    pub fn pool(&self) -> &ChunkBlockPool {
        &self.0.pool
    }

    /// Adds a tenant and returns its ID.
    ///
    /// # Errors
    /// Returns [`Error::TenantExists`] if the tag is taken. Returns [`Error::SharedSalt`] if another tenant
    /// has the same salt, because the two would find each other's chunks. The default tenant's salt is empty,
    /// so an empty salt is rejected too.
    pub fn add_tenant(&self, tenant: Tenant) -> Result<TenantId> {
        let mut state = self.0.lock();
        for Account { tenant: other, .. } in &state.accounts {
            if other.tag == tenant.tag {
                return Err(Error::TenantExists(tenant.tag));
            }
            if other.salt == tenant.salt {
                return Err(Error::SharedSalt { tag: tenant.tag, other: other.tag.clone() });
            }
        }
        let blocks = self.0.pool.blocks().range().len();
        let (most, policy) = (self.0.config.max_chunks, self.0.config.cache_policy);
        state.accounts.push(Account::new(tenant, blocks, most, policy));
        Ok(TenantId(state.accounts.len() as u32 - 1))
    }

    /// Returns the ID and the description of the tenant with this tag.
    ///
    /// # Errors
    /// Returns [`Error::UnknownTenant`] if no tenant has this tag.
    pub fn tenant(&self, tag: &str) -> Result<(TenantId, Tenant)> {
        let state = self.0.lock();
        let at = state.accounts.iter().position(|account| account.tenant.tag == tag);
        let at = at.ok_or_else(|| Error::UnknownTenant(tag.to_owned()))?;
        Ok((TenantId(at as u32), state.accounts[at].tenant.clone()))
    }

    /// Returns the description of the tenant with this ID, if there is one.
    pub(crate) fn described(&self, tenant: TenantId) -> Option<Tenant> {
        self.0.lock().accounts.get(tenant.0 as usize).map(|account| account.tenant.clone())
    }

    /// Returns the tenant with this tag, or the default tenant if `tag` is `None`, and the root of its keys.
    /// That root is derived from `root`, which all tenants share.
    ///
    /// # Errors
    /// Returns [`Error::UnknownTenant`] if no tenant has this tag.
    pub fn tenant_keys(&self, tag: Option<&str>, root: &BlockKey) -> Result<TenantKeys> {
        let Some(tag) = tag else { return Ok(TenantKeys::shared(*root)) };
        let (id, tenant) = self.tenant(tag)?;
        Ok(TenantKeys { id, root: tenant.root(root) })
    }

    /// Evicts the next evictable piece of the tenant that uses the largest fraction of its quota. If no awake
    /// piece can be evicted, evicts the least recently used sleeping piece. Returns false if nothing was
    /// evicted.
    pub fn evict_lru(&self) -> bool {
        let now = self.0.clock.millis();
        let mut state = self.0.lock();
        state.evict_fullest(now) || state.evict_sleeper(|_| true)
    }

    /// Evicts the given pieces if they are asleep, and returns the number of evicted pieces.
    pub fn discard_sleeping_chunks(&self, hashes: &[ChunkHash]) -> usize {
        let mut state = self.0.lock();
        hashes.iter().filter(|hash| state.evict_if_asleep(hash)).count()
    }

    /// Removes every stored piece. A held piece is freed when its last hold is dropped, and counts towards
    /// its tenant's quota until then. A piece that is being computed is still stored when it is ready.
    pub fn clear(&self) {
        self.clear_where(|_| true);
    }

    /// Removes one tenant's stored pieces; see [`clear`](Self::clear).
    pub fn clear_tenant(&self, tenant: TenantId) {
        self.clear_where(|of| of == tenant);
    }

    fn clear_where(&self, of: impl Fn(TenantId) -> bool) {
        let mut state = self.0.lock();
        for slot in 0..state.index.slots() {
            let Some(entry) = state.index.at_mut(slot).filter(|entry| of(entry.tenant)) else { continue };
            if matches!(entry.memory, PieceMemory::Moving(_)) {
                entry.doomed = true;
            } else {
                state.remove(slot);
            }
        }
    }

    /// Returns a snapshot of every stored piece.
    pub fn chunks(&self) -> Vec<ChunkInfo> {
        self.index().iter().cloned().collect()
    }

    /// Returns a copy of the index: a snapshot of every stored piece, by hash.
    pub fn index(&self) -> ChunkHashIndex<ChunkInfo> {
        let now = self.0.clock.millis();
        let state = self.0.lock();
        state.index.map(|entry| ChunkInfo {
            chunk_hash: entry.hash,
            tenant: state.accounts[entry.tenant.0 as usize].tenant.tag.clone(),
            cached_position_start: entry.stored_start,
            ref_count: entry.holders,
            access_count: entry.access_count,
            heat: entry.heat.now(now),
            age_ms: now.saturating_sub(entry.created),
            idle_ms: now.saturating_sub(entry.last_accessed),
            asleep: !matches!(entry.memory, PieceMemory::Awake(_)),
            exact: entry.exact,
        })
    }

    /// Returns how hot the stored pieces are, coldest first.
    pub fn heats(&self) -> Vec<PieceHeat> {
        let now = self.0.clock.millis();
        let state = self.0.lock();
        let heat = |entry: &StoredPiece| PieceHeat {
            chunk_hash: entry.hash,
            heat: entry.heat.now(now),
            asleep: matches!(entry.memory, PieceMemory::Asleep(_)),
            idle: entry.holders == 0 && !matches!(entry.memory, PieceMemory::Moving(_)),
        };
        let mut heats: Vec<PieceHeat> = state.index.iter().map(heat).collect();
        drop(state);
        heats.sort_by(|a, b| a.heat.total_cmp(&b.heat));
        heats
    }

    /// Returns the counts since the cache was created, and the current gauges.
    pub fn metrics(&self) -> ChunkCacheMetrics {
        let state = self.0.lock();
        let counts = self.0.pool.blocks().counts();
        let sum = state
            .accounts
            .iter()
            .fold(ChunkCacheMetrics::default(), |sum, account| sum.plus(&account.counted));
        ChunkCacheMetrics {
            cached_chunks: state.index.len(),
            sleeping_chunks: asleep(&state, |_| true),
            sleeping_bytes: state.accounts.iter().map(|account| account.sleeping_bytes).sum(),
            total_blocks: counts.total,
            used_blocks: counts.total - counts.free,
            lookups: self.0.lookups.snapshot(),
            wakes: self.0.wakes.snapshot(),
            reindexes: self.0.reindexes.snapshot(),
            computes: self.0.computes.snapshot(),
            ..sum
        }
    }

    /// Returns one tenant's metrics, without latencies. All values are 0 for a tenant that was never added.
    pub fn tenant_metrics(&self, tenant: TenantId) -> ChunkCacheMetrics {
        let state = self.0.lock();
        let Some(account) = state.accounts.get(tenant.0 as usize) else {
            return ChunkCacheMetrics::default();
        };
        ChunkCacheMetrics {
            cached_chunks: state.index.iter().filter(|entry| entry.tenant == tenant).count(),
            sleeping_chunks: asleep(&state, |of| of == tenant),
            sleeping_bytes: account.sleeping_bytes,
            total_blocks: account.quota,
            used_blocks: account.used,
            ..account.counted.clone()
        }
    }

    /// Returns the metrics of all tenants with their tags, without latencies and without the gauges of sleeping pieces. The
    /// default tenant comes first.
    pub fn metrics_by_tenant(&self) -> Vec<(String, ChunkCacheMetrics)> {
        let state = self.0.lock();
        let mut chunks = vec![0; state.accounts.len()];
        for entry in state.index.iter() {
            chunks[entry.tenant.0 as usize] += 1;
        }
        let one = |(account, cached_chunks): (&Account, usize)| {
            let metrics = ChunkCacheMetrics {
                cached_chunks,
                total_blocks: account.quota,
                used_blocks: account.used,
                ..account.counted.clone()
            };
            (account.tenant.tag.clone(), metrics)
        };
        state.accounts.iter().zip(chunks).map(one).collect()
    }

    /// Checks that the cache is consistent. Returns a description of the first inconsistency as `Err`.
    pub fn check_invariants(&self) -> std::result::Result<(), String> {
        self.0.lock().check()?;
        self.0.pool.blocks().check_invariants()
    }

    /// Records how long it took to place a piece, measured from `since`.
    pub(crate) fn reindexed(&self, since: Instant) {
        if self.0.config.stats {
            self.0.reindexes.record(since.elapsed());
        }
    }
}

/// Counts the pieces that are not awake and belong to a tenant that `of` accepts.
fn asleep(state: &CacheState, of: impl Fn(TenantId) -> bool) -> usize {
    let sleeps = |entry: &&StoredPiece| of(entry.tenant) && !matches!(entry.memory, PieceMemory::Awake(_));
    state.index.iter().filter(sleeps).count()
}
