//! The part of a chunk cache that is protected by its lock: the pieces, their holders and the eviction order.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::Arc;

use kvcore::{BlockId, BlockKey, MutableBlocks, PinnedBlocks, SleepingBlocks};
use kvtier::{Gone, RecordNote};

use super::flight::Flight;
use super::heat::Heat;
use super::index::{ChunkHashIndex, Indexed};
use super::tenant::{Account, TenantId};
use crate::hash::{ChunkHash, ChunkPiece, PieceEvidence};
use crate::pool::ChunkBlockPool;
use crate::sleep::{SavedPiece, Sleeping};
use crate::tier::MissReason;

/// The memory state of a stored piece.
#[derive(Debug)]
pub(crate) enum PieceMemory {
    /// The piece is in blocks of the pool.
    Awake(AwakePiece),
    /// The piece is being put to sleep or woken. Its blocks count towards its tenant's quota, and belong to
    /// the thread that moves it.
    Moving(Arc<Flight>),
    /// The piece is in a lower memory tier.
    Asleep(SavedPiece),
}

#[derive(Debug)]
pub(crate) struct AwakePiece {
    pub(crate) pinned: PinnedBlocks,
    pub(crate) ids: Arc<[BlockId]>,
    /// The piece's number in its tenant's eviction order.
    pub(crate) number: u32,
}

/// A stored piece.
#[derive(Debug)]
pub(crate) struct StoredPiece {
    pub(crate) hash: ChunkHash,
    pub(crate) any_system: Option<BlockKey>,
    pub(crate) evidence: PieceEvidence,
    pub(crate) tenant: TenantId,
    /// A number that distinguishes holds on this entry from holds on a later entry in the same slot.
    pub(crate) generation: u64,
    pub(crate) stored_start: i64,
    pub(crate) memory: PieceMemory,
    pub(crate) exact: bool,
    pub(crate) holders: u32,
    /// True if the piece was cleared while it was moving. If so, it is removed when the move ends.
    pub(crate) doomed: bool,
    /// The time when the piece was stored, in milliseconds of the cache's clock.
    pub(crate) created: u64,
    /// The time when the piece was last stored or woken, in milliseconds of the cache's clock.
    pub(crate) awake_since: u64,
    pub(crate) last_accessed: u64,
    pub(crate) access_count: u64,
    pub(crate) heat: Heat,
}

impl StoredPiece {
    pub(crate) fn is_evictable(&self) -> bool {
        self.holders == 0 && matches!(self.memory, PieceMemory::Awake(_))
    }

    /// Returns a digest of the tokens that does not depend on the context.
    fn text(&self) -> Option<NonZeroU64> {
        RecordNote::text_of(self.evidence.tokens())
    }
}

impl Indexed for StoredPiece {
    fn hash(&self) -> ChunkHash {
        self.hash
    }

    fn any_system(&self) -> Option<BlockKey> {
        self.any_system
    }
}

/// A piece that a request is computing.
#[derive(Debug)]
pub(crate) struct UnderWay {
    pub(crate) evidence: PieceEvidence,
    pub(crate) flight: Arc<Flight>,
    pub(crate) tenant: TenantId,
    pub(crate) blocks: usize,
}

/// A held piece that can no longer be found, because it was cleared or the cache had no place for it. Its
/// blocks count towards its tenant's quota until the last hold is dropped.
#[derive(Debug)]
pub(crate) struct Orphan {
    tenant: TenantId,
    blocks: usize,
    holders: u32,
}

/// The memory state of the pool's blocks.
#[derive(Debug)]
pub(crate) enum PoolMemory {
    Awake,
    /// A thread that does not hold the lock is putting the pool to sleep or waking it.
    Moving,
    Asleep(SleepingBlocks),
}

impl PoolMemory {
    pub(crate) fn is_awake(&self) -> bool {
        matches!(self, Self::Awake)
    }
}

#[derive(Debug)]
pub(crate) struct CacheState {
    pub(crate) index: ChunkHashIndex<StoredPiece>,
    pub(crate) under_way: HashMap<BlockKey, UnderWay>,
    /// The orphans by generation.
    orphans: HashMap<u64, Orphan>,
    pub(crate) accounts: Vec<Account>,
    /// The memory state of the pool's blocks: awake, moving or asleep.
    pub(crate) pool: PoolMemory,
    generations: u64,
    /// Contents to drop once the lock is released, because dropping them runs the store's code.
    pub(crate) discarded: Vec<Box<dyn Sleeping>>,
}

impl CacheState {
    pub(crate) fn new(first: Account) -> Self {
        Self {
            index: ChunkHashIndex::new(),
            under_way: HashMap::new(),
            orphans: HashMap::new(),
            accounts: vec![first],
            pool: PoolMemory::Awake,
            generations: 0,
            discarded: Vec::new(),
        }
    }

    /// Returns `tenant`, or the default tenant if this cache has no tenant with that ID. The fallback only
    /// affects quotas and counts; different keys still keep the tenants' pieces apart.
    pub(crate) fn known(&self, tenant: TenantId) -> TenantId {
        if (tenant.0 as usize) < self.accounts.len() { tenant } else { TenantId::default() }
    }

    /// Returns the account of a [known](Self::known) tenant.
    pub(crate) fn account(&mut self, tenant: TenantId) -> &mut Account {
        &mut self.accounts[tenant.0 as usize]
    }

    /// Returns the piece's slot, if it is stored and the entry under its hash really is that piece.
    pub(crate) fn find(&self, piece: &ChunkPiece<'_>) -> Option<u32> {
        let slot = self.index.slot_of(&piece.hash().key)?;
        self.index.at(slot).filter(|entry| entry.evidence.proves(piece)).map(|_| slot)
    }

    /// Returns why a piece is not stored, as far as the tenant's own pieces tell.
    pub(crate) fn why_missing(&self, tenant: TenantId, piece: &ChunkPiece<'_>) -> MissReason {
        let known = &self.accounts[tenant.0 as usize].known;
        let others = || known.keys_of(RecordNote::text_of(piece.tokens()));
        match known.why_gone(&piece.hash().key) {
            Some(Gone::Evicted) => MissReason::Evicted,
            Some(Gone::Damaged) => MissReason::Damaged,
            None if others().is_empty() => MissReason::New,
            None => MissReason::OtherContext,
        }
    }

    // Decision: docs/decisions/chunks.md#chunks-of-another-system-prompt-move-forward-only
    /// Returns the slot of the latest piece that has the same tokens, with any system prompt, if it is awake
    /// and stored at or before `stored_start`. Such a piece only moves forward, so no query is rotated to a
    /// position that its request does not reach.
    pub(crate) fn find_any_system(&self, piece: &ChunkPiece<'_>, stored_start: i64) -> Option<u32> {
        let slot = self.index.slot_under_any_system(&piece.any_system()?)?;
        let same = |entry: &&StoredPiece| {
            entry.evidence.proves_under_any_system(piece)
                && entry.stored_start <= stored_start
                && matches!(entry.memory, PieceMemory::Awake(_))
        };
        self.index.at(slot).filter(same).map(|_| slot)
    }

    /// Adds a holder to a piece if both the piece and the pool are awake, and removes the piece from the eviction
    /// order. Counts a use if `used` is the time of one.
    pub(crate) fn hold(&mut self, slot: u32, used: Option<u64>) -> Option<(&StoredPiece, &AwakePiece)> {
        if !self.pool.is_awake() {
            return None;
        }
        let entry = self.index.at_mut(slot)?;
        let PieceMemory::Awake(awake) = &entry.memory else { return None };
        let account = &mut self.accounts[entry.tenant.0 as usize];
        if used.is_some() {
            account.order.hit(awake.number, &entry.hash.key);
        }
        if entry.holders == 0 {
            account.order.remove(awake.number);
            account.idle -= entry.hash.num_blocks;
        }
        entry.holders += 1;
        if let Some(now) = used {
            entry.access_count += 1;
            entry.heat.touch(now);
            entry.last_accessed = now;
        }
        Some((entry, awake))
    }

    /// Removes one holder of a piece. An awake piece without holders becomes evictable.
    pub(crate) fn drop_holder(&mut self, slot: Option<u32>, generation: u64, now: u64) {
        let entry = slot.and_then(|slot| self.index.at_mut(slot));
        let Some(entry) = entry.filter(|entry| entry.generation == generation) else {
            return self.drop_orphan_holder(generation);
        };
        entry.holders -= 1;
        if entry.holders == 0
            && let PieceMemory::Awake(awake) = &entry.memory
        {
            let account = &mut self.accounts[entry.tenant.0 as usize];
            account.order.insert(awake.number, &entry.hash.key, now);
            account.idle += entry.hash.num_blocks;
        }
    }

    fn drop_orphan_holder(&mut self, generation: u64) {
        let Some(orphan) = self.orphans.get_mut(&generation) else { return };
        orphan.holders -= 1;
        if orphan.holders == 0 {
            let (tenant, blocks) = (orphan.tenant, orphan.blocks);
            self.orphans.remove(&generation);
            self.account(tenant).used -= blocks;
        }
    }

    /// Returns the total number of blocks in orphans.
    pub(crate) fn orphaned_blocks(&self) -> usize {
        self.orphans.values().map(|orphan| orphan.blocks).sum()
    }

    /// Records an orphan with one holder, and returns its generation. Its blocks must already count towards
    /// its tenant's quota.
    pub(crate) fn insert_orphan(&mut self, tenant: TenantId, blocks: usize) -> u64 {
        self.generations += 1;
        self.orphans.insert(self.generations, Orphan { tenant, blocks, holders: 1 });
        self.generations
    }

    /// Inserts an awake, held piece into the index. Its blocks must already count towards its tenant's quota,
    /// and it must have a number in the eviction order. Returns the slot and the generation.
    pub(crate) fn insert(&mut self, mut entry: StoredPiece) -> (u32, u64) {
        self.generations += 1;
        let (generation, tenant) = (self.generations, entry.tenant);
        entry.generation = generation;
        let number = match &entry.memory {
            PieceMemory::Awake(awake) => Some(awake.number),
            PieceMemory::Moving(_) | PieceMemory::Asleep(_) => None,
        };
        let (text, key) = (entry.text(), entry.hash.key);
        let slot = self.index.insert(entry);
        let account = self.account(tenant);
        account.known.insert(text, key);
        if let Some(number) = number {
            account.order.assign(number, slot);
        }
        (slot, generation)
    }

    /// Removes an evictable piece from the eviction order.
    fn unorder(&mut self, slot: u32) {
        let Some(entry) = self.index.at(slot).filter(|entry| entry.is_evictable()) else { return };
        if let PieceMemory::Awake(awake) = &entry.memory {
            let account = &mut self.accounts[entry.tenant.0 as usize];
            account.order.remove(awake.number);
            account.idle -= entry.hash.num_blocks;
        }
    }

    /// Removes the piece in `slot`, which must not be in an eviction order, and returns whether there was
    /// one. The blocks of a held piece count towards its tenant's quota until the last hold is dropped. The
    /// blocks of a moving piece are accounted for by the thread that moves it.
    fn forget(&mut self, slot: u32) -> bool {
        let Some(entry) = self.index.remove(slot) else { return false };
        let (tenant, blocks, holders) = (entry.tenant, entry.hash.num_blocks, entry.holders);
        let account = &mut self.accounts[tenant.0 as usize];
        account.known.remove(entry.text(), &entry.hash.key);
        match entry.memory {
            PieceMemory::Awake(awake) => {
                account.order.retire(awake.number);
                if holders == 0 {
                    account.used -= blocks;
                } else {
                    self.orphans.insert(entry.generation, Orphan { tenant, blocks, holders });
                }
            }
            PieceMemory::Moving(_) => {}
            PieceMemory::Asleep(saved) => {
                account.sleeping_bytes -= saved.bytes;
                self.discarded.push(saved.contents);
            }
        }
        true
    }

    /// Removes the piece in `slot`, and returns whether there was one. The blocks of a held piece stay in use
    /// until its last hold is dropped.
    pub(crate) fn remove(&mut self, slot: u32) -> bool {
        self.unorder(slot);
        self.forget(slot)
    }

    /// Removes the piece in `slot` if it was cleared while it was moving.
    pub(crate) fn bury(&mut self, slot: u32) {
        if self.index.at(slot).is_some_and(|entry| entry.doomed) {
            self.remove(slot);
        }
    }

    /// Evicts a tenant's next piece. Returns false if the tenant has no evictable piece.
    pub(crate) fn evict(&mut self, tenant: TenantId, now: u64) -> bool {
        let account = &mut self.accounts[tenant.0 as usize];
        let Some(slot) = account.order.evict(now) else { return false };
        account.counted.evictions += 1;
        if let Some(entry) = self.index.at(slot) {
            account.idle -= entry.hash.num_blocks;
            account.known.evicted(&entry.hash.key);
        }
        self.forget(slot)
    }

    /// Evicts the next piece of this tenant or, if it has no evictable piece, of the tenant that uses the
    /// largest fraction of its quota. Returns false if nothing was evicted.
    pub(crate) fn evict_any(&mut self, tenant: TenantId, now: u64) -> bool {
        self.evict(tenant, now) || self.evict_fullest(now)
    }

    /// Evicts the next piece of the tenant that uses the largest fraction of its quota. Tenants without
    /// evictable pieces are ignored. Returns false if nothing was evicted.
    pub(crate) fn evict_fullest(&mut self, now: u64) -> bool {
        self.fullest().is_some_and(|tenant| self.evict(tenant, now))
    }

    fn fullest(&self) -> Option<TenantId> {
        let idle = self.accounts.iter().enumerate().filter(|(_, account)| account.order.len() > 0);
        idle.max_by(|(_, a), (_, b)| a.pressure().total_cmp(&b.pressure())).map(|(i, _)| TenantId(i as u32))
    }

    /// Removes one piece so that a tenant can store another. The tenant's own pieces are removed before other
    /// tenants' pieces. Sleeping pieces are removed before awake pieces, because they are colder. Returns
    /// false if no piece can be removed.
    pub(crate) fn make_place(&mut self, tenant: TenantId, now: u64) -> bool {
        self.evict_sleeper(|of| of == tenant)
            || self.evict(tenant, now)
            || self.evict_sleeper(|_| true)
            || self.evict_fullest(now)
    }

    /// Removes the least recently used sleeping piece that belongs to a tenant that `of` accepts. Returns
    /// false if there is none.
    pub(crate) fn evict_sleeper(&mut self, of: impl Fn(TenantId) -> bool) -> bool {
        let sleeps = |entry: &StoredPiece| matches!(entry.memory, PieceMemory::Asleep(_)) && of(entry.tenant);
        let sleepers = self.index.with_slots().filter(|(_, entry)| sleeps(entry));
        let longest = sleepers.min_by_key(|(slot, entry)| (entry.last_accessed, *slot));
        let Some(hash) = longest.map(|(_, entry)| entry.hash) else { return false };
        self.evict_if_asleep(&hash)
    }

    /// Evicts the piece with this hash if it is asleep. Returns false otherwise.
    pub(crate) fn evict_if_asleep(&mut self, hash: &ChunkHash) -> bool {
        let Some(slot) = self.index.slot_of(&hash.key) else { return false };
        let sleeps = |entry: &&StoredPiece| matches!(entry.memory, PieceMemory::Asleep(_));
        let Some(entry) = self.index.at(slot).filter(sleeps) else { return false };
        let account = &mut self.accounts[entry.tenant.0 as usize];
        account.counted.evictions += 1;
        account.known.evicted(&hash.key);
        self.remove(slot)
    }

    /// Returns whether evicting all pieces without holders would make room for `n` more blocks of a tenant.
    pub(crate) fn has_room(&self, pool: &ChunkBlockPool, tenant: TenantId, n: usize) -> bool {
        let idle: usize = self.accounts.iter().map(|account| account.idle).sum();
        let account = &self.accounts[tenant.0 as usize];
        account.used - account.idle + n <= account.quota && n <= pool.num_free_blocks() + idle
    }

    /// Allocates `n` blocks for a tenant, evicting pieces without holders as needed. Returns `None`, without
    /// evicting anything, if evicting all such pieces would not make enough room.
    pub(crate) fn room(
        &mut self,
        pool: &ChunkBlockPool,
        tenant: TenantId,
        n: usize,
        now: u64,
    ) -> Option<MutableBlocks> {
        if !self.has_room(pool, tenant, n) {
            return None;
        }
        while self.account(tenant).used + n > self.account(tenant).quota {
            if !self.evict(tenant, now) {
                return None;
            }
        }
        loop {
            if let Ok(blocks) = pool.allocate_blocks(n) {
                self.account(tenant).used += n;
                return Some(blocks);
            }
            if !self.evict_any(tenant, now) {
                return None;
            }
        }
    }

    /// Checks that the state is consistent. Returns a description of the first inconsistency as `Err`.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.index.check()?;
        let mut sums = vec![AccountSums::default(); self.accounts.len()];
        for (slot, entry) in self.index.with_slots() {
            let sum = &mut sums[entry.tenant.0 as usize];
            match &entry.memory {
                PieceMemory::Awake(awake) => {
                    sum.used += awake.pinned.len();
                    if awake.pinned.len() != entry.hash.num_blocks {
                        return Err(format!("piece {slot} has {} blocks", awake.pinned.len()));
                    }
                }
                PieceMemory::Moving(_) => sum.used += entry.hash.num_blocks,
                PieceMemory::Asleep(saved) => sum.sleeping_bytes += saved.bytes,
            }
            if entry.holders > 0 && !matches!(entry.memory, PieceMemory::Awake(_)) {
                return Err(format!("piece {slot} is held and not awake"));
            }
            if entry.is_evictable() {
                sum.idle += entry.hash.num_blocks;
                sum.evictable += 1;
            }
        }
        for under_way in self.under_way.values() {
            sums[under_way.tenant.0 as usize].used += under_way.blocks;
        }
        for orphan in self.orphans.values() {
            sums[orphan.tenant.0 as usize].used += orphan.blocks;
        }
        self.accounts.iter().zip(sums).try_for_each(|(account, sum)| sum.check(account))
    }
}

/// The values that a tenant's account should contain, recounted for a check.
#[derive(Debug, Clone, Copy, Default)]
struct AccountSums {
    used: usize,
    idle: usize,
    evictable: usize,
    sleeping_bytes: usize,
}

impl AccountSums {
    fn check(self, account: &Account) -> Result<(), String> {
        let pairs = [
            ("idle blocks", account.idle, self.idle),
            ("pieces in order", account.order.len(), self.evictable),
            ("blocks used", account.used, self.used),
            ("bytes asleep", account.sleeping_bytes, self.sleeping_bytes),
        ];
        let tag = &account.tenant.tag;
        if let Some((what, counted, found)) = pairs.into_iter().find(|(_, counted, found)| counted != found) {
            return Err(format!("{tag}: {counted} {what}, {found} found"));
        }
        if account.used > account.quota {
            return Err(format!("{tag}: {} blocks used of {}", account.used, account.quota));
        }
        Ok(())
    }
}
