//! What a chunk cache knows, behind its lock: the pieces, who holds them, which goes next.

use std::collections::HashMap;
use std::sync::Arc;

use kvcore::{BlockId, BlockKey, MutableBlocks, PinnedBlocks};

use super::flight::Flight;
use super::pool_sleep::PoolPlace;
use super::sleep::Sleeping;
use super::tenant::{Account, TenantId};
use crate::hash::{ChunkHash, ChunkPiece, Evidence};
use crate::pool::ChunkBlockPool;

/// Where a stored piece is.
#[derive(Debug)]
pub(super) enum Place {
    /// In blocks of the pool.
    Awake(Awake),
    /// On its way into sleep or out of it.
    Moving(Arc<Flight>),
    /// In a lower memory.
    Asleep(Box<dyn Sleeping>),
}

#[derive(Debug)]
pub(super) struct Awake {
    pub(super) pinned: PinnedBlocks,
    pub(super) ids: Arc<[BlockId]>,
    /// The piece's number in its tenant's order.
    pub(super) number: u32,
}

/// A stored piece.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) hash: ChunkHash,
    pub(super) any_system: Option<BlockKey>,
    pub(super) evidence: Evidence,
    pub(super) tenant: TenantId,
    /// Tells an entry from a later one in the same slot.
    pub(super) generation: u64,
    pub(super) stored_start: i64,
    pub(super) place: Place,
    pub(super) exact: bool,
    pub(super) holders: u32,
    /// Cleared while it moved: it goes when it has arrived.
    pub(super) doomed: bool,
    /// In milliseconds of the cache's clock.
    pub(super) created: u64,
    pub(super) last_accessed: u64,
    pub(super) access_count: u64,
}

impl Entry {
    pub(super) fn is_evictable(&self) -> bool {
        self.holders == 0 && matches!(self.place, Place::Awake(_))
    }
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    index: HashMap<BlockKey, u32>,
    /// The latest piece of the same tokens under any system prompt.
    any_system: HashMap<BlockKey, u32>,
    pub(super) flights: HashMap<BlockKey, (Evidence, Arc<Flight>)>,
    pub(super) accounts: Vec<Account>,
    /// Whether the blocks have memory.
    pub(super) pool: PoolPlace,
    generations: u64,
}

impl State {
    pub(super) fn new(first: Account) -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            index: HashMap::new(),
            any_system: HashMap::new(),
            flights: HashMap::new(),
            accounts: vec![first],
            pool: PoolPlace::Awake,
            generations: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    pub(super) fn account(&mut self, tenant: TenantId) -> &mut Account {
        &mut self.accounts[tenant.0 as usize]
    }

    pub(super) fn entry(&self, slot: u32) -> Option<&Entry> {
        self.entries.get(slot as usize)?.as_ref()
    }

    pub(super) fn entry_mut(&mut self, slot: u32) -> Option<&mut Entry> {
        self.entries.get_mut(slot as usize)?.as_mut()
    }

    pub(super) fn slot_of(&self, key: &BlockKey) -> Option<u32> {
        self.index.get(key).copied()
    }

    /// The stored piece, if what is stored under its hash is it.
    pub(super) fn find(&self, piece: &ChunkPiece<'_>) -> Option<u32> {
        let slot = self.slot_of(&piece.hash().key)?;
        self.entry(slot).filter(|entry| entry.evidence.proves(piece)).map(|_| slot)
    }

    /// A piece of the same tokens under another system prompt that is awake, stored no further on than
    /// `stored_start`: moved forward only, no query is turned to a position that its request does not reach.
    pub(super) fn find_any_system(&self, piece: &ChunkPiece<'_>, stored_start: i64) -> Option<u32> {
        let slot = *self.any_system.get(&piece.any_system()?)?;
        let same = |entry: &&Entry| {
            entry.evidence.proves_under_any_system(piece)
                && entry.stored_start <= stored_start
                && matches!(entry.place, Place::Awake(_))
        };
        self.entry(slot).filter(same).map(|_| slot)
    }

    /// Counts a use of an awake piece in an awake pool and takes it out of the order of eviction.
    pub(super) fn hold(&mut self, slot: u32, now: u64) -> Option<(&Entry, &Awake)> {
        if !self.pool.is_awake() {
            return None;
        }
        let entry = self.entries.get_mut(slot as usize)?.as_mut()?;
        let Place::Awake(awake) = &entry.place else { return None };
        let account = &mut self.accounts[entry.tenant.0 as usize];
        account.order.hit(awake.number, &entry.hash.key);
        if entry.holders == 0 {
            account.order.remove(awake.number);
            account.idle -= entry.hash.num_blocks;
        }
        entry.holders += 1;
        entry.access_count += 1;
        entry.last_accessed = now;
        Some((entry, awake))
    }

    /// One holder fewer.
    pub(super) fn let_go(&mut self, slot: u32, generation: u64, now: u64) {
        let Some(entry) = self.entries.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        if entry.generation != generation {
            return;
        }
        entry.holders -= 1;
        if entry.holders == 0
            && let Place::Awake(awake) = &entry.place
        {
            let account = &mut self.accounts[entry.tenant.0 as usize];
            account.order.insert(awake.number, &entry.hash.key, now);
            account.idle += entry.hash.num_blocks;
        }
    }

    /// Puts a piece into the index; its blocks are counted to its tenant already.
    pub(super) fn insert(&mut self, mut entry: Entry) -> (u32, u64) {
        self.generations += 1;
        entry.generation = self.generations;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() as u32 - 1
        });
        self.index.insert(entry.hash.key, slot);
        if let Some(key) = entry.any_system {
            self.any_system.insert(key, slot);
        }
        if let Place::Awake(awake) = &mut entry.place {
            // There are as many numbers as pieces can be awake.
            awake.number = self.accounts[entry.tenant.0 as usize].order.admit(slot).unwrap_or_default();
        }
        let generation = entry.generation;
        self.entries[slot as usize] = Some(entry);
        (slot, generation)
    }

    /// A piece that could be evicted leaves the order of eviction.
    fn unorder(&mut self, slot: u32) {
        let Some(entry) = self.entry(slot).filter(|entry| entry.is_evictable()) else { return };
        let (Place::Awake(awake), tenant, blocks) = (&entry.place, entry.tenant, entry.hash.num_blocks)
        else {
            return;
        };
        let number = awake.number;
        let account = self.account(tenant);
        account.order.remove(number);
        account.idle -= blocks;
    }

    /// The blocks of a piece, which is in no order, are no longer its tenant's.
    fn discharge(&mut self, entry: &Entry) {
        if let Place::Awake(awake) = &entry.place {
            let account = self.account(entry.tenant);
            account.order.retire(awake.number);
            account.used -= entry.hash.num_blocks;
        }
    }

    /// A piece that nobody holds starts to move into sleep: its blocks stay until it has arrived.
    pub(super) fn depart(&mut self, slot: u32, flight: &Arc<Flight>) -> Option<Awake> {
        self.unorder(slot);
        let entry = self.entries.get_mut(slot as usize)?.as_mut()?;
        match std::mem::replace(&mut entry.place, Place::Moving(Arc::clone(flight))) {
            Place::Awake(awake) => Some(awake),
            other => {
                entry.place = other;
                None
            }
        }
    }

    /// A piece that had departed stays awake after all.
    pub(super) fn stay(&mut self, slot: u32, awake: Awake, now: u64) {
        let Some(entry) = self.entries.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        let account = &mut self.accounts[entry.tenant.0 as usize];
        account.order.insert(awake.number, &entry.hash.key, now);
        account.idle += entry.hash.num_blocks;
        entry.place = Place::Awake(awake);
    }

    /// A piece that had departed sleeps now, and its blocks are free.
    pub(super) fn arrive(&mut self, slot: u32, awake: Awake, asleep: Box<dyn Sleeping>) {
        let Some(entry) = self.entries.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        let account = &mut self.accounts[entry.tenant.0 as usize];
        account.order.retire(awake.number);
        account.used -= entry.hash.num_blocks;
        entry.exact &= asleep.is_exact();
        entry.place = Place::Asleep(asleep);
        drop(awake); // its blocks are free
    }

    /// A sleeping piece is awake again, in blocks that its tenant has been charged with; nobody holds it.
    pub(super) fn wake(&mut self, slot: u32, pinned: PinnedBlocks, ids: Arc<[BlockId]>, now: u64) {
        let Some(entry) = self.entries.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        let account = &mut self.accounts[entry.tenant.0 as usize];
        let number = account.order.admit(slot).unwrap_or_default();
        account.order.insert(number, &entry.hash.key, now);
        account.idle += entry.hash.num_blocks;
        entry.last_accessed = now; // it is not cold at once
        entry.place = Place::Awake(Awake { pinned, ids, number });
    }

    /// Forgets a piece that is in no order.
    fn forget(&mut self, slot: u32) -> Option<Entry> {
        let entry = self.entries.get_mut(slot as usize)?.take()?;
        self.discharge(&entry);
        self.index.remove(&entry.hash.key);
        if let Some(key) = entry.any_system
            && self.any_system.get(&key) == Some(&slot)
        {
            self.any_system.remove(&key);
        }
        self.free.push(slot);
        Some(entry)
    }

    /// Forgets a piece. What is held lives on until its holders end.
    pub(super) fn remove(&mut self, slot: u32) -> Option<Entry> {
        self.unorder(slot);
        self.forget(slot)
    }

    /// Forgets a piece that was cleared while it moved.
    pub(super) fn bury(&mut self, slot: u32) {
        if self.entry(slot).is_some_and(|entry| entry.doomed) {
            self.remove(slot);
        }
    }

    /// Evicts the next piece of a tenant; `false` if all are held.
    pub(super) fn evict(&mut self, tenant: TenantId, now: u64) -> bool {
        let account = self.account(tenant);
        let Some(slot) = account.order.evict(now) else { return false };
        account.counted.evictions += 1;
        let Some(entry) = self.forget(slot) else { return false };
        self.account(tenant).idle -= entry.hash.num_blocks;
        true
    }

    /// Evicts any piece: of this tenant, or else of the one that uses most of its quota.
    pub(super) fn evict_any(&mut self, tenant: TenantId, now: u64) -> bool {
        self.evict(tenant, now) || self.evict_fullest(now)
    }

    /// Evicts the next piece of the tenant that uses most of its quota.
    pub(super) fn evict_fullest(&mut self, now: u64) -> bool {
        self.fullest().is_some_and(|tenant| self.evict(tenant, now))
    }

    fn fullest(&self) -> Option<TenantId> {
        let idle = self.accounts.iter().enumerate().filter(|(_, account)| account.order.len() > 0);
        idle.max_by(|(_, a), (_, b)| a.pressure().total_cmp(&b.pressure())).map(|(i, _)| TenantId(i as u32))
    }

    /// Forgets the piece that has slept longest.
    pub(super) fn evict_sleeper(&mut self) -> bool {
        let sleepers = self.entries.iter().enumerate().filter_map(|(slot, entry)| {
            let entry = entry.as_ref().filter(|entry| matches!(entry.place, Place::Asleep(_)))?;
            Some((entry.last_accessed, slot as u32, entry.tenant))
        });
        let Some((_, slot, tenant)) = sleepers.min() else { return false };
        self.account(tenant).counted.evictions += 1;
        self.remove(slot).is_some()
    }

    /// `n` blocks for a tenant, evicting pieces that nobody holds as needed. `None` when even that does
    /// not make room; then nothing was evicted.
    pub(super) fn room(
        &mut self,
        pool: &ChunkBlockPool,
        tenant: TenantId,
        n: usize,
        now: u64,
    ) -> Option<MutableBlocks> {
        let idle: usize = self.accounts.iter().map(|account| account.idle).sum();
        let account = self.account(tenant);
        let fits_quota = account.used - account.idle + n <= account.quota;
        if !fits_quota || n > pool.num_free_blocks() + idle {
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

    /// Recounts everything; `Err` says what is inconsistent.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut sums: Vec<(usize, usize, usize)> = vec![(0, 0, 0); self.accounts.len()];
        for (slot, entry) in self.entries.iter().enumerate() {
            let Some(entry) = entry else { continue };
            if self.index.get(&entry.hash.key) != Some(&(slot as u32)) {
                return Err(format!("piece {slot} is not in the index"));
            }
            let sum = &mut sums[entry.tenant.0 as usize];
            if let Place::Awake(awake) = &entry.place {
                sum.0 += awake.pinned.len();
                if awake.pinned.len() != entry.hash.num_blocks {
                    return Err(format!("piece {slot} has {} blocks", awake.pinned.len()));
                }
            } else if entry.holders > 0 {
                return Err(format!("piece {slot} is held and not awake"));
            }
            if entry.is_evictable() {
                sum.1 += entry.hash.num_blocks;
                sum.2 += 1;
            }
        }
        if self.index.len() != self.entries.iter().flatten().count() {
            return Err(format!("the index has {} pieces", self.index.len()));
        }
        for (account, (awake, idle, evictable)) in self.accounts.iter().zip(sums) {
            let tag = &account.tenant.tag;
            if account.idle != idle || account.order.len() != evictable {
                return Err(format!(
                    "{tag}: {} of {idle} idle blocks, {} of {evictable} pieces in order",
                    account.idle,
                    account.order.len()
                ));
            }
            // Reservations are counted as used, too.
            if account.used < awake || (self.flights.is_empty() && account.used != awake) {
                return Err(format!("{tag}: {} blocks used, {awake} awake", account.used));
            }
            if account.used > account.quota {
                return Err(format!("{tag}: {} blocks used of {}", account.used, account.quota));
            }
        }
        Ok(())
    }
}
