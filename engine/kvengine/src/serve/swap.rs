//! Giving way: a request's blocks go to host memory and come back, or are computed again, whichever costs less.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcore::{
    Backend, BlockId, BlockPool, KvArena, KvLayout, KvPool, KvShape, PagedKvCache, PoolCounts, SequenceId,
    Stream, SwapBlocks, SwappedSequence,
};

use super::live::{Branch, Live};
use super::parts::chunked;
use super::plan::is_out_of_blocks;
use crate::caches::Caches;
use crate::engine::Engine;
use crate::error::Result;

/// The blocks that are moved to measure what moving takes.
const SAMPLE: usize = 8;

/// The costs of giving way and coming back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PreemptionCosts {
    /// The time to compute a token again.
    pub token: Duration,
    /// The time to copy a block to host memory and back.
    pub block: Duration,
}

/// The costs as far as they are known, and the host memory.
#[derive(Debug, Default)]
pub(crate) struct SwapSpace {
    /// The largest number of bytes of host memory.
    pub(crate) memory: usize,
    /// The costs that were given. None are measured then.
    pub(crate) given: Option<PreemptionCosts>,
    /// Seconds a token of the latest passes that were not decode steps.
    token: Option<f64>,
    /// Seconds a block of each group of layers.
    block: Vec<f64>,
    /// A pool for each group, allocated when the first request gives way.
    host: Option<Vec<KvPool>>,
    /// Host memory was refused.
    refused: bool,
}

impl SwapSpace {
    pub(crate) fn new(memory: usize) -> Self {
        Self { memory, ..Self::default() }
    }

    /// Returns the blocks of the host memory, if it was needed.
    pub(crate) fn counts(&self) -> Option<PoolCounts> {
        self.host.as_ref().map(|host| host.iter().map(|pool| pool.blocks().counts()).sum())
    }

    pub(crate) fn check_invariants(&self) -> std::result::Result<(), String> {
        self.host.iter().flatten().try_for_each(|pool| pool.blocks().check_invariants())
    }

    /// Takes note of a pass over prompts.
    pub(super) fn computed(&mut self, tokens: usize, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64() / tokens.max(1) as f64;
        self.token = Some(self.token.map_or(seconds, |known| 0.75 * known + 0.25 * seconds));
    }

    /// Returns whether moving blocks, so many of each group, costs less than computing tokens. What was never measured is taken to be
    /// dear.
    fn prefers(&self, blocks: &[usize], tokens: usize) -> bool {
        match self.given {
            Some(costs) => {
                let blocks = blocks.iter().sum::<usize>();
                costs.block.saturating_mul(blocks as u32) < costs.token.saturating_mul(tokens as u32)
            }
            None => self.token.is_none_or(|token| {
                let seconds: f64 = self.block.iter().zip(blocks).map(|(each, &n)| each * n as f64).sum();
                seconds < token * tokens as f64
            }),
        }
    }

    /// Returns the host memory, which the first call allocates and measures.
    fn host(&mut self, backend: &dyn Backend, stream: &dyn Stream, caches: &Caches) -> Option<Vec<KvPool>> {
        if self.host.is_none() && !self.refused {
            self.host = self.allocate(backend, stream, caches).ok();
            self.refused = self.host.is_none();
        }
        self.host.clone()
    }

    /// Allocates host memory that is divided between the groups as that of the device is.
    fn allocate(
        &mut self,
        backend: &dyn Backend,
        stream: &dyn Stream,
        caches: &Caches,
    ) -> Result<Vec<KvPool>> {
        let bytes = |cache: &PagedKvCache| cache.pool().range().len() * cache.arena().layout().block_bytes();
        let all: usize = caches.groups().map(|(_, cache)| bytes(cache)).sum();
        let mut host = Vec::new();
        self.block.clear();
        for (_, cache) in caches.groups() {
            let layout = cache.arena().layout();
            let memory = (self.memory as u128 * bytes(cache) as u128 / all.max(1) as u128) as usize;
            let num_blocks = (memory / layout.block_bytes().max(1)).min(cache.pool().range().len());
            let layout = KvLayout::new(KvShape { num_blocks, ..layout.shape().clone() })?;
            let arena = KvArena::allocate(backend, backend.capabilities().host_memory(), Arc::new(layout))?;
            let pool = KvPool::new(arena, BlockPool::new(0..num_blocks as u32)?)?;
            if self.given.is_none() {
                self.block.push(measure(stream, cache, &pool)?);
            }
            host.push(pool);
        }
        Ok(host)
    }
}

/// Returns the seconds that a block takes to host memory and back: twice those of the way there, measured on blocks in use, which
/// are only read.
fn measure(stream: &dyn Stream, cache: &PagedKvCache, host: &KvPool) -> Result<f64> {
    let first = cache.pool().range().start;
    let to = host.blocks().allocate(SAMPLE.min(host.blocks().range().len()))?;
    let pairs: Arc<[_]> = (first..).map(BlockId).zip(to.ids().iter().copied()).collect();
    let (src, dst) = (cache.arena().clone(), host.arena().clone());
    let copy = SwapBlocks { src, dst, pairs: to.write_pairs(pairs)? };
    let mut seconds = f64::INFINITY;
    // The first touches memory for the first time.
    for _ in 0..3 {
        stream.synchronize()?;
        let started = Instant::now();
        stream.swap_blocks(&copy)?;
        stream.synchronize()?;
        seconds = seconds.min(started.elapsed().as_secs_f64());
    }
    Ok(2.0 * seconds / to.len().max(1) as f64)
}

impl Engine {
    /// Sets what it costs to give way, in place of what is measured, for tests and simulations.
    pub fn set_preemption_costs(&mut self, costs: PreemptionCosts) {
        self.swap.given = Some(costs);
    }

    /// Moves the sequences of a request to host memory, if that costs less than computing them again and there is room. Returns whether
    /// it did; if not, the request is to be withdrawn. The parts of a chunked prompt are looked up again instead.
    pub(super) fn swap_away(&mut self, live: &mut Live) -> bool {
        if self.swap.memory == 0 {
            return false;
        }
        let own: Vec<SequenceId> = live.branches.iter().filter_map(|branch| branch.own).collect();
        let held = |cache: &PagedKvCache| -> usize {
            own.iter().filter_map(|&id| cache.blocks(id).ok()).map(|blocks| blocks.len()).sum()
        };
        let blocks: Vec<usize> = self.caches.groups().map(|(_, cache)| held(cache)).collect();
        let nothing = blocks.iter().all(|&blocks| blocks == 0);
        if nothing || chunked(live).is_some() || !self.swap.prefers(&blocks, tokens_again(live)) {
            return false;
        }
        let host = self.swap.host(self.backend.as_ref(), self.stream.as_ref(), &self.caches);
        let Some(host) = host else { return false };
        // Measured just now, perhaps.
        let short = |(pool, &blocks): (&KvPool, &usize)| pool.blocks().counts().available() < blocks;
        if !self.swap.prefers(&blocks, tokens_again(live)) || host.iter().zip(&blocks).any(short) {
            return false;
        }
        for branch in live.branches.iter_mut().filter(|branch| branch.own.is_some()) {
            let Some(id) = branch.own else { continue };
            let Ok(swapped) = self.caches.swap_out(id, self.stream.as_ref(), &host) else { return false };
            branch.computed = swapped.first().map_or(0, SwappedSequence::len);
            (branch.own, branch.input, branch.swapped) = (None, None, Some(swapped));
            branch.draft.clear();
        }
        true
    }

    /// Brings the sequences of a request back from host memory, all or none. Returns whether there were any. A request that finds no
    /// room although it is `alone` gives them up, to be computed again.
    pub(super) fn swap_back(&mut self, live: &mut Live, alone: bool) -> Result<bool> {
        if live.branches.iter().all(|branch| branch.swapped.is_none()) {
            return Ok(false);
        }
        let stream = Arc::clone(&self.stream);
        let mut back = Ok(());
        for branch in &mut live.branches {
            if let Some(swapped) = &branch.swapped {
                match self.caches.swap_in(swapped, stream.as_ref()) {
                    Ok(own) => branch.own = Some(own),
                    Err(error) => {
                        back = Err(error);
                        break;
                    }
                }
            }
        }
        let Err(error) = back else {
            live.branches.iter_mut().for_each(|branch| branch.swapped = None);
            return Ok(true);
        };
        for branch in &mut live.branches {
            if let Some(own) = branch.own.take() {
                drop(self.caches.free(own));
            }
        }
        if !alone && is_out_of_blocks(&error) {
            return Err(error);
        }
        live.branches.iter_mut().for_each(Branch::forget);
        if let Some(beams) = &mut live.beams {
            beams.forget();
        }
        Ok(false)
    }
}

/// Returns the number of tokens that a request would compute again. Samples find the prompt that the first computes.
fn tokens_again(live: &Live) -> usize {
    let of = |(i, branch): (usize, &Branch)| {
        if i == 0 { branch.computed } else { branch.computed.saturating_sub(branch.prompt) }
    };
    live.branches.iter().enumerate().map(of).sum()
}
