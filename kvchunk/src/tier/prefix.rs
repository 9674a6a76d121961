//! Fetches the parts of a prompt, and puts the blocks of prefixes back into the pool.

use kvcore::{BlockId, BlockKey, KvPool, MutableBlocks, SharedBlocks};
use kvtier::{Found, RecordNote};

use super::fetch::Wanted;
use super::save::is_public;
use super::{BeganFetch, TierFetch, TierLink};
use crate::assembly::Assembler;
use crate::error::Result;
use crate::position::PositionPlan;
use crate::prompt::ChunkedPrompt;

impl TierLink {
    /// Starts to load the blocks of an ordinary prompt that are on the disk and not in the pool: those that
    /// follow the cached ones in the chain `keys`, which starts with `tokens`.
    pub fn fetch_prefix(&self, pool: &KvPool, keys: &[BlockKey], tokens: &[u32]) -> BeganFetch {
        self.begin(self.wanted_of(pool, keys, tokens))
    }

    /// Returns the blocks of a chain that are on the disk and not in the pool.
    fn wanted_of(&self, pool: &KvPool, keys: &[BlockKey], tokens: &[u32]) -> Vec<Wanted> {
        let block_size = pool.block_size();
        let cached = pool.blocks().cached_prefix(keys);
        let each = tokens.chunks(block_size).zip(keys).enumerate().skip(cached);
        each.take_while(|(_, (_, key))| self.slab.contains(key))
            .map(|(place, (tokens, &key))| Wanted {
                id: self.device.record_id(key, tokens, (place * block_size) as i64),
                text: None,
            })
            .collect()
    }

    /// Puts the blocks of a chain that `fetch` has brought into the pool, behind the ones that it has already.
    /// Returns a hold on them: the blocks stay in the pool at least until it is dropped. If the pool has no
    /// room, nothing is put there.
    ///
    /// # Errors
    /// Returns the errors of the backend.
    pub fn put_prefix(
        &self,
        pool: &KvPool,
        (root, keys): (&BlockKey, &[BlockKey]),
        fetch: &TierFetch,
    ) -> Result<SharedBlocks> {
        let cached = pool.blocks().cached_prefix(keys);
        let arrived: Vec<_> = keys[cached..].iter().map_while(|key| fetch.take(key)).collect();
        let Ok(blocks) = pool.blocks().allocate(arrived.len()) else {
            for unused in arrived {
                self.slab.recycle(unused);
            }
            return Ok(SharedBlocks::none(pool.blocks()));
        };
        self.fill(blocks, (root, keys, cached), arrived)
    }

    /// Fills as many of the blocks as there are records, and registers them as the blocks after the first
    /// `cached` ones of a chain.
    pub(super) fn fill(
        &self,
        mut blocks: MutableBlocks,
        (root, keys, cached): (&BlockKey, &[BlockKey], usize),
        records: Vec<Found>,
    ) -> Result<SharedBlocks> {
        let count = records.len();
        drop(blocks.split_off(count)?);
        for (&id, buffers) in blocks.ids().iter().zip(records) {
            let pairs = blocks.write_pairs([(BlockId(0), id)])?;
            self.device.write(1, pairs, &buffers)?;
            self.slab.recycle(buffers);
        }
        let parent = cached.checked_sub(1).map_or(*root, |last| keys[last]);
        let registered = blocks.register(Some(parent), &keys[cached..cached + count]);
        Ok(registered.map_err(|rejected| rejected.error)?)
    }
}

impl Assembler<'_> {
    /// Starts to load the parts of a prompt that are on the disk and not in memory: blocks of its system
    /// prompt and decoys, and pieces of its chunks. Returns `None` without a disk.
    ///
    /// # Errors
    /// Returns the errors of [`assemble`](Self::assemble) about the prompt itself.
    pub fn fetch(&self, prompt: &ChunkedPrompt, plan: &PositionPlan) -> Result<Option<BeganFetch>> {
        let Some(link) = self.tier.filter(|_| self.ranks.is_none()) else { return Ok(None) };
        let plan = self.in_slots(prompt, plan.clone())?;
        let mut wanted = Vec::new();
        let mut missing = Vec::new();
        if let Some(cache) = self.chunks {
            // From now on, the tenant's account has its limit, and is counted.
            link.account(cache, self.tenant.id());
            self.each_piece(prompt, &plan, |place, tokens_before, piece| {
                if !cache.contains(piece) && piece.resists_collisions() {
                    let (hash, tokens) = (piece.hash(), piece.tokens());
                    let stored_start = place.stored_start + tokens_before as i64;
                    missing.push(Wanted {
                        id: link.device.record_id(hash.key, tokens, stored_start),
                        text: RecordNote::text_of(tokens).filter(|_| is_public(self.tenant.id())),
                    });
                }
            })?;
        }
        for (keys, tokens) in self.prefixes_of(prompt, !missing.is_empty())? {
            wanted.extend(link.wanted_of(&self.main, &keys, &tokens));
        }
        wanted.extend(missing);
        Ok(Some(link.begin(wanted)))
    }

    /// Returns whether the disk has everything that it can store for a prompt: its prefixes and its chunks.
    /// Returns false without a disk.
    ///
    /// # Errors
    /// Returns the errors of [`assemble`](Self::assemble) about the prompt itself.
    pub fn is_saved(&self, prompt: &ChunkedPrompt, plan: &PositionPlan) -> Result<bool> {
        let Some(link) = self.tier.filter(|_| self.ranks.is_none()) else { return Ok(false) };
        let plan = self.in_slots(prompt, plan.clone())?;
        let mut all = true;
        self.each_piece(prompt, &plan, |_, _, piece| all &= link.slab.contains(&piece.hash().key))?;
        let prefixes = self.prefixes_of(prompt, true)?;
        Ok(all && prefixes.iter().flat_map(|(keys, _)| keys).all(|key| link.slab.contains(key)))
    }

    /// Puts the prefixes of a prompt that a fetch has brought into the pool. Returns holds on them, to be kept
    /// until the prompt is assembled.
    ///
    /// # Errors
    /// Returns the errors of the backend.
    pub(crate) fn put_prefixes(&self, prompt: &ChunkedPrompt) -> Result<Vec<SharedBlocks>> {
        let Some((link, fetch)) = self.tier.zip(self.fetched) else { return Ok(Vec::new()) };
        let root = self.tenant.root();
        let put = |(keys, _): (Vec<BlockKey>, Vec<u32>)| link.put_prefix(&self.main, (root, &keys), fetch);
        self.prefixes_of(prompt, true)?.into_iter().map(put).collect()
    }

    /// Returns the system prompt and, if `decoys` is true, the system prompt with the decoys, each as a chain of
    /// keys and its tokens. Returns nothing if prefixes are not kept.
    pub(crate) fn prefixes_of(
        &self,
        prompt: &ChunkedPrompt,
        decoys: bool,
    ) -> Result<Vec<(Vec<BlockKey>, Vec<u32>)>> {
        if !self.prefixes {
            return Ok(Vec::new());
        }
        let mut all = vec![prompt.system().to_vec()];
        if decoys && !prompt.decoys_in(self.cell.mode)?.is_empty() {
            all.push(prompt.before(self.cell.mode)?);
        }
        let block_size = self.main.block_size();
        Ok(all.into_iter().map(|tokens| (self.tenant.root().chain(&tokens, block_size), tokens)).collect())
    }
}
