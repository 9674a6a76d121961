//! The pool's bookkeeping behind its lock: states, counts, free list and index.

use hashbrown::HashTable;

use super::evict::EvictionPolicy;
use super::{BlockId, PoolCounts};
use crate::error::{Error, Result};
use crate::key::BlockKey;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Free,
    Mutable,
    Complete,
    /// Shared while it has holders, cached while only claims keep it.
    Held,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Meta {
    pub(super) stage: Stage,
    pub(super) holders: u32,
    /// Retaining runs outside the pool.
    pub(super) retained: u32,
    /// The key under which the index finds the block.
    pub(super) key: Option<BlockKey>,
}

const FRESH: Meta = Meta { stage: Stage::Free, holders: 0, retained: 0, key: None };

/// All methods take indices into the pool, not block ids.
#[derive(Debug)]
pub(super) struct State {
    pub(super) meta: Vec<Meta>,
    free: Vec<u32>,
    index: HashTable<u32>,
    policy: Box<dyn EvictionPolicy>,
    mutable: usize,
    complete: usize,
    shared: usize,
    pub(super) evicted: u64,
}

impl State {
    pub(super) fn new(blocks: usize, policy: Box<dyn EvictionPolicy>) -> Self {
        Self {
            meta: vec![FRESH; blocks],
            free: (0..blocks as u32).rev().collect(),
            index: HashTable::with_capacity(blocks),
            policy,
            mutable: 0,
            complete: 0,
            shared: 0,
            evicted: 0,
        }
    }

    pub(super) fn counts(&self) -> PoolCounts {
        let (free, total) = (self.free.len(), self.meta.len());
        let cached = total - free - self.mutable - self.complete - self.shared;
        PoolCounts {
            total,
            free,
            mutable: self.mutable,
            complete: self.complete,
            shared: self.shared,
            cached,
            evictable: self.policy.len(),
        }
    }

    /// Takes `n` blocks, evicting if needed; all or none.
    pub(super) fn allocate(&mut self, n: usize, mut take: impl FnMut(u32)) -> Result<()> {
        let (free, evictable, total) = (self.free.len(), self.policy.len(), self.meta.len());
        let out_of_blocks = Error::OutOfBlocks { asked: n, free, evictable, total };
        if free + evictable < n {
            return Err(out_of_blocks);
        }
        while self.free.len() < n {
            // A policy that holds blocks and gives none up breaks its contract; nothing is lost by it.
            let Some(block) = self.policy.evict() else { return Err(out_of_blocks) };
            self.forget(block);
            self.release(block);
            self.evicted += 1;
        }
        for block in self.free.drain(self.free.len() - n..).rev() {
            self.meta[block as usize].stage = Stage::Mutable;
            take(block);
        }
        self.mutable += n;
        Ok(())
    }

    /// Drops the block's key from the index.
    fn forget(&mut self, block: u32) {
        if let Some(key) = self.meta[block as usize].key.take()
            && let Ok(entry) = self.index.find_entry(key.word(), |&other| other == block)
        {
            entry.remove();
        }
    }

    fn find(&self, key: &BlockKey) -> Option<u32> {
        self.index.find(key.word(), |&block| self.meta[block as usize].key.as_ref() == Some(key)).copied()
    }

    pub(super) fn complete(&mut self, block: u32) {
        self.meta[block as usize].stage = Stage::Complete;
        self.mutable -= 1;
        self.complete += 1;
    }

    /// A mutable or complete block goes back unused.
    pub(super) fn discard(&mut self, block: u32) {
        match self.meta[block as usize].stage {
            Stage::Mutable => self.mutable -= 1,
            Stage::Complete => self.complete -= 1,
            Stage::Free | Stage::Held => return,
        }
        self.release(block);
    }

    fn release(&mut self, block: u32) {
        self.meta[block as usize] = FRESH;
        self.free.push(block);
    }

    /// A complete block gets its first holder, under `key` if given. If the key is known already,
    /// the known block gets a holder instead, this one is freed, and the known one is returned.
    pub(super) fn hold_first(&mut self, block: u32, key: Option<BlockKey>) -> u32 {
        if let Some(known) = key.as_ref().and_then(|key| self.find(key)) {
            self.hold(known);
            self.discard(block);
            return known;
        }
        self.complete -= 1;
        self.shared += 1;
        self.meta[block as usize] = Meta { stage: Stage::Held, holders: 1, retained: 0, key };
        if let Some(key) = key {
            let meta = &self.meta;
            self.index.insert_unique(key.word(), block, |&other| {
                meta[other as usize].key.as_ref().map_or(0, BlockKey::word)
            });
        }
        block
    }

    /// One more holder of a held block.
    pub(super) fn hold(&mut self, block: u32) {
        let meta = &mut self.meta[block as usize];
        meta.holders += 1;
        if meta.holders == 1 {
            self.shared += 1;
            if self.evictable(block) {
                self.policy.remove(block);
            }
        }
    }

    /// Whether only its key keeps the block (once it has no holder).
    fn evictable(&self, block: u32) -> bool {
        let meta = &self.meta[block as usize];
        meta.retained == 0 && meta.key.is_some()
    }

    /// One holder fewer.
    pub(super) fn let_go(&mut self, block: u32) {
        let meta = &mut self.meta[block as usize];
        meta.holders -= 1;
        if meta.holders == 0 {
            self.shared -= 1;
            self.settle(block);
        }
    }

    /// A block without holders is cached if something claims it, else free.
    fn settle(&mut self, block: u32) {
        let meta = &self.meta[block as usize];
        if meta.retained > 0 {
            return;
        }
        if meta.key.is_some() { self.policy.insert(block) } else { self.release(block) }
    }

    /// One more claim on a block that somebody holds.
    pub(super) fn retain(&mut self, block: u32) {
        self.meta[block as usize].retained += 1;
    }

    pub(super) fn unretain(&mut self, block: u32) {
        let meta = &mut self.meta[block as usize];
        meta.retained -= 1;
        if meta.retained == 0 && meta.holders == 0 {
            self.settle(block);
        }
    }

    /// Finds a key and takes a hold of its block.
    pub(super) fn lookup(&mut self, key: &BlockKey) -> Option<u32> {
        let block = self.find(key)?;
        self.hold(block);
        Some(block)
    }

    /// Frees all cached blocks that the pool may evict.
    pub(super) fn clear_cached(&mut self) -> usize {
        let mut cleared = 0;
        while let Some(block) = self.policy.evict() {
            self.forget(block);
            self.release(block);
            cleared += 1;
        }
        cleared
    }

    /// Recounts everything from the blocks themselves.
    pub(super) fn check(&self, start: u32) -> std::result::Result<(), String> {
        let mut seen =
            PoolCounts { total: self.meta.len(), evictable: self.policy.len(), ..PoolCounts::default() };
        let (mut keyed, mut evictable) = (0, 0);
        for (i, meta) in self.meta.iter().enumerate() {
            let id = BlockId(start + i as u32);
            match meta.stage {
                Stage::Free => seen.free += 1,
                Stage::Mutable => seen.mutable += 1,
                Stage::Complete => seen.complete += 1,
                Stage::Held if meta.holders > 0 => seen.shared += 1,
                Stage::Held => seen.cached += 1,
            }
            let claimed = meta.holders > 0 || meta.retained > 0 || meta.key.is_some();
            if (meta.stage == Stage::Held) != claimed {
                return Err(format!("block {id} is {:?} with claims {claimed}", meta.stage));
            }
            evictable += usize::from(meta.stage == Stage::Held && meta.holders == 0 && meta.retained == 0);
            if let Some(key) = &meta.key {
                keyed += 1;
                if self.find(key) != Some(i as u32) {
                    return Err(format!("the index does not find block {id} under its key"));
                }
            }
        }
        let mut free: Vec<u32> = self.free.clone();
        free.sort_unstable();
        free.dedup();
        if free.len() != self.free.len() || free.iter().any(|&i| self.meta[i as usize].stage != Stage::Free) {
            return Err("the free list holds a block twice or one in use".to_owned());
        }
        if keyed != self.index.len() {
            return Err(format!("{keyed} blocks have keys, the index holds {}", self.index.len()));
        }
        if evictable != self.policy.len() {
            return Err(format!("{evictable} blocks are evictable, the policy holds {}", self.policy.len()));
        }
        if seen == self.counts() {
            Ok(())
        } else {
            Err(format!("counted {seen:?}, kept {:?}", self.counts()))
        }
    }
}
