//! Loads what waiting requests miss from a disk, and saves what ended requests have computed. No step waits for
//! the disk.
//!
//! ```text
//!   waiting: Open ──► Running ──► over ──► admitted ──► Done        preempted: Open again
//!              │         └─► a few records have arrived: written to the caches
//!              ├─► nothing on the disk ─────► admitted ──► Done
//!              └─► Later: others load the same records ──► Open, or too late: Done
//! ```

use std::time::{Duration, Instant};

use kvchunk::{BeganFetch, TierFetch, TierLink};
use kvcore::{BlockKey, KvPool, SharedBlocks};

use super::live::LiveRequest;
use super::scheduler::Scheduler;
use crate::error::Result;
use crate::runner::Runner;

/// The number of requests per step whose loads are tried again, because others load the same records.
const TRIES: usize = 8;

/// The state of a request's loads from a disk.
#[derive(Debug, Default)]
pub(super) enum DiskFetch {
    /// Not begun.
    #[default]
    Open,
    /// Not begun, because others load the same records or too much, and to be tried again until this time.
    Later(Instant),
    /// The records are being loaded, or have been loaded and are not used yet.
    Running(Box<TierFetch>),
    /// The request has used what was on the disk.
    Done,
}

impl DiskFetch {
    /// Records that the request has used what was loaded.
    pub(super) fn finish(&mut self) {
        if let Self::Running(fetch) = std::mem::replace(self, Self::Done) {
            fetch.finish();
        }
    }
}

impl Scheduler {
    /// Starts the loads of waiting requests, in the order of service.
    pub(super) fn fetch(&mut self, runner: &Runner) {
        let Some(tier) = &runner.tier else { return };
        let (mut tries, now) = (0, Instant::now());
        for live in self.waiting.values_mut() {
            let until = match live.fetch {
                DiskFetch::Open => None,
                DiskFetch::Later(until) if now >= until => {
                    live.fetch = DiskFetch::Done;
                    continue;
                }
                // The ones behind it may have nothing on the disk.
                DiskFetch::Later(_) if tries == TRIES => continue,
                DiskFetch::Later(until) => Some(until),
                DiskFetch::Running(_) | DiskFetch::Done => continue,
            };
            tries += usize::from(until.is_some());
            live.fetch = match live.begin_fetch(runner, tier) {
                Ok(Some(BeganFetch::Loading(fetch) | BeganFetch::Nothing(fetch))) => {
                    DiskFetch::Running(Box::new(fetch))
                }
                Ok(Some(BeganFetch::Later(patience))) => DiskFetch::Later(until.unwrap_or(now + patience)),
                // The lookup reports what is wrong with the request.
                Ok(None) | Err(_) => DiskFetch::Done,
            };
        }
    }

    /// Puts what waiting requests have loaded so far into the caches.
    pub(super) fn put_arrived(&mut self, runner: &Runner) {
        for live in self.waiting.values_mut() {
            // What cannot be put into the caches is computed.
            drop(live.put_arrived(runner));
        }
    }

    /// Waits for at most `limit` for a record that a request is loading, if nothing else is to be done.
    pub(super) fn wait_for_disk(&self, limit: Duration) {
        let mut running = self.waiting.values().filter_map(|live| match &live.fetch {
            DiskFetch::Running(fetch) if !fetch.is_over() => Some(fetch),
            _ => None,
        });
        if let Some(fetch) = running.next() {
            fetch.wait_for(limit);
        }
    }
}

impl LiveRequest {
    /// Returns true if the request should not be admitted yet, because it is loading from a disk or will.
    pub(super) fn is_loading(&self, runner: &Runner) -> bool {
        match &self.fetch {
            DiskFetch::Open | DiskFetch::Later(_) => runner.tier.is_some(),
            DiskFetch::Running(fetch) => !fetch.is_over(),
            DiskFetch::Done => false,
        }
    }

    /// Starts to load what the request misses. Returns `None` if it uses no disk.
    fn begin_fetch(&mut self, runner: &Runner, tier: &TierLink) -> Result<Option<BeganFetch>> {
        if self.prompt.is_chunked() {
            return self.prompt.fetch(runner, &self.request);
        }
        let Some((branch, pool)) = self.unfed().zip(self.kept_in(runner)) else { return Ok(None) };
        let root = *self.prompt.keys().root();
        let branch = &mut self.branches[branch];
        if branch.swapped.is_some() {
            return Ok(None);
        }
        let keys = branch.prompt_keys(root, pool.block_size());
        Ok(Some(tier.fetch_prefix(&pool, keys.keys(), keys.tokens())))
    }

    /// Returns the pool that keeps the blocks of the request's own sequences, or `None` if they are not kept.
    fn kept_in(&self, runner: &Runner) -> Option<KvPool> {
        let [(_, cache)] = runner.caches.sequences.groups() else { return None };
        self.finds_prefix().then(|| cache.kv_pool().clone())
    }

    /// Puts what was loaded so far into the caches, if the request still waits for the rest.
    fn put_arrived(&mut self, runner: &Runner) -> Result<()> {
        let DiskFetch::Running(fetch) = &self.fetch else { return Ok(()) };
        if fetch.is_over() {
            return Ok(());
        }
        if self.prompt.is_chunked() {
            return self.prompt.put_arrived(runner, &self.request, fetch);
        }
        self.put_loaded(runner, TierLink::put_arrived).map(drop)
    }

    /// Puts the blocks of an ordinary prompt that were loaded into the pool, and holds them.
    pub(super) fn put_prefix(&mut self, runner: &Runner) -> Result<Option<SharedBlocks>> {
        self.put_loaded(runner, TierLink::put_prefix)
    }

    /// Calls `put` with the chain of an ordinary prompt that is being loaded: its root and the keys of its blocks.
    fn put_loaded<R>(
        &mut self,
        runner: &Runner,
        put: impl FnOnce(&TierLink, &KvPool, (&BlockKey, &[BlockKey]), &TierFetch) -> kvchunk::Result<R>,
    ) -> Result<Option<R>> {
        let (Some(tier), Some(pool)) = (&runner.tier, self.kept_in(runner)) else { return Ok(None) };
        let (DiskFetch::Running(fetch), Some(branch)) = (&self.fetch, self.unfed()) else { return Ok(None) };
        let root = *self.prompt.keys().root();
        let keys = self.branches[branch].prompt_keys(root, pool.block_size());
        Ok(Some(put(tier, &pool, (&root, keys.keys()), fetch)?))
    }

    /// Queues the blocks of a sample's sequence to be written to the disk, so that prompts that start with the
    /// same tokens find them. An error of the backend is counted, and the blocks are computed again.
    pub(super) fn save_branch(&mut self, runner: &Runner, branch: usize) {
        let (Some(tier), Some(pool)) = (&runner.tier, self.kept_in(runner)) else { return };
        let (root, tenant) = (*self.prompt.keys().root(), self.prompt.keys().id());
        let account = runner.caches.chunks().map(|cache| tier.account(cache, tenant)).unwrap_or_default();
        let branch = &mut self.branches[branch];
        let Some(sequence) = branch.sequence else { return };
        let Ok(segment) = runner.caches.sequences.first().segment(sequence) else { return };
        let full = branch.computed.min(segment.len) / pool.block_size();
        // Blocks that a window has passed are gone, and the blocks after them cannot be found alone.
        if segment.logical_start > 0 || segment.blocks.len() < full {
            return;
        }
        let prompt = branch.owner.map(|_| branch.prompt / pool.block_size());
        let keys = branch.prompt_keys(root, pool.block_size());
        // Approximate answers stay out of the disk: nobody could find them.
        let full = full.min(keys.keys().len()).min(prompt.unwrap_or(full));
        drop(tier.save_prefix(account, keys.tokens(), &keys.keys()[..full], &segment.blocks[..full]));
    }
}
