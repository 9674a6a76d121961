//! Preemption: a request's blocks are copied to host memory and back, or recomputed, whichever takes less
//! time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcore::{
    Backend, BlockId, BlockPool, KvArena, KvLayout, KvPool, KvShape, PagedKvCache, PoolCounts, SequenceId,
    Stream, SwapBlocks, SwappedSequence,
};

use super::live::{Branch, LiveRequest};
use crate::error::Result;
use crate::runner::{Caches, Runner};

/// The number of blocks to copy when measuring the time of a copy.
const SAMPLE: usize = 8;

/// The costs of a preemption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PreemptionCosts {
    /// The time to recompute one token.
    pub token: Duration,
    /// The time to copy one block to host memory and back.
    pub block: Duration,
}

/// Host memory for preempted requests, with the costs of using it.
#[derive(Debug, Default)]
pub(super) struct SwapSpace {
    /// The maximum amount of host memory, in bytes.
    memory: usize,
    /// Costs that were set explicitly. They take precedence over measured costs.
    given: Option<PreemptionCosts>,
    /// The running average of the prefill time, in seconds per token. `None` until a pass has been measured.
    token: Option<f64>,
    /// For each group of layers, the time to copy one block to host memory and back, in seconds.
    block: Vec<f64>,
    /// One pool per group, allocated at the first preemption.
    host: Option<Vec<KvPool>>,
    /// True if allocating host memory failed.
    refused: bool,
}

impl SwapSpace {
    pub(super) fn new(memory: usize) -> Self {
        Self { memory, ..Self::default() }
    }

    /// Returns the maximum amount of host memory, in bytes.
    pub(super) fn memory(&self) -> usize {
        self.memory
    }

    /// Sets the costs explicitly, so that they are not measured.
    pub(super) fn set_costs(&mut self, costs: PreemptionCosts) {
        self.given = Some(costs);
    }

    /// Returns the block counts of the host memory, or `None` if none has been allocated.
    pub(super) fn counts(&self) -> Option<PoolCounts> {
        self.host.as_ref().map(|host| host.iter().map(|pool| pool.blocks().counts()).sum())
    }

    pub(super) fn check_invariants(&self) -> std::result::Result<(), String> {
        self.host.iter().flatten().try_for_each(|pool| pool.blocks().check_invariants())
    }

    /// Records the time of a prefill pass.
    pub(super) fn computed(&mut self, tokens: usize, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64() / tokens.max(1) as f64;
        self.token = Some(self.token.map_or(seconds, |known| 0.75 * known + 0.25 * seconds));
    }

    // Decision: docs/decisions/models.md#a-preempted-request-resumes-the-cheaper-way
    /// Returns true if copying `blocks` blocks, one count per group, costs less than recomputing `tokens`
    /// tokens. If no costs were set, copying is preferred until a prefill pass has been measured.
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

    /// Returns the host memory. The first call allocates it and measures its speed. Returns `None` if the
    /// allocation failed.
    fn host(&mut self, backend: &dyn Backend, stream: &dyn Stream, caches: &Caches) -> Option<Vec<KvPool>> {
        if self.host.is_none() && !self.refused {
            self.host = self.allocate(backend, stream, caches).ok();
            self.refused = self.host.is_none();
        }
        self.host.clone()
    }

    /// Allocates host memory, divided between the groups in the same way as device memory.
    fn allocate(
        &mut self,
        backend: &dyn Backend,
        stream: &dyn Stream,
        caches: &Caches,
    ) -> Result<Vec<KvPool>> {
        let bytes = |cache: &PagedKvCache| cache.pool().range().len() * cache.arena().layout().block_bytes();
        let all: usize = caches.sequences.groups().iter().map(|(_, cache)| bytes(cache)).sum();
        let mut host = Vec::new();
        self.block.clear();
        for (_, cache) in caches.sequences.groups() {
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

/// Returns the time to copy a block to host memory and back, in seconds: twice the time of a copy to host
/// memory. The measurement reads device blocks that may be in use.
fn measure(stream: &dyn Stream, cache: &PagedKvCache, host: &KvPool) -> Result<f64> {
    let first = cache.pool().range().start;
    let to = host.blocks().allocate(SAMPLE.min(host.blocks().range().len()))?;
    let pairs: Arc<[_]> = (first..).map(BlockId).zip(to.ids().iter().copied()).collect();
    let (src, dst) = (cache.arena().clone(), host.arena().clone());
    let copy = SwapBlocks { src, dst, pairs: to.write_pairs(pairs)? };
    let mut seconds = f64::INFINITY;
    // The first copy may be slower, because it touches the memory for the first time.
    for _ in 0..3 {
        stream.synchronize()?;
        let started = Instant::now();
        stream.swap_blocks(&copy)?;
        stream.synchronize()?;
        seconds = seconds.min(started.elapsed().as_secs_f64());
    }
    Ok(2.0 * seconds / to.len().max(1) as f64)
}

impl SwapSpace {
    /// Copies a request's sequences to host memory and frees them, if that costs less than recomputing them
    /// and there is room. Returns true if they were copied; otherwise the caller must withdraw the request. A
    /// chunked prompt's parts are not copied but looked up again.
    pub(super) fn swap_out(&mut self, runner: &mut Runner, live: &mut LiveRequest) -> bool {
        if self.memory == 0 || live.prompt.is_chunked() {
            return false;
        }
        let sequences: Vec<SequenceId> = live.branches.iter().filter_map(|branch| branch.sequence).collect();
        let held = |(_, cache): &(_, PagedKvCache)| -> usize {
            sequences.iter().filter_map(|&id| cache.blocks(id).ok()).map(|blocks| blocks.len()).sum()
        };
        let blocks: Vec<usize> = runner.caches.sequences.groups().iter().map(held).collect();
        let nothing = blocks.iter().all(|&blocks| blocks == 0);
        if nothing || !self.prefers(&blocks, tokens_again(live)) {
            return false;
        }
        let (backend, stream) = (runner.setup.backend.as_ref(), runner.setup.stream.as_ref());
        let Some(host) = self.host(backend, stream, &runner.caches) else { return false };
        // Compares the costs only now, because the call above may have measured them.
        let short = |(pool, &blocks): (&KvPool, &usize)| pool.blocks().counts().available() < blocks;
        if !self.prefers(&blocks, tokens_again(live)) || host.iter().zip(&blocks).any(short) {
            return false;
        }
        for branch in &mut live.branches {
            let Some(id) = branch.sequence else { continue };
            let Ok(cache) = runner.caches.sequences.grouped() else { return false };
            let Ok(swapped) = cache.swap_out(id, stream, &host) else { return false };
            branch.computed = swapped.first().map_or(0, SwappedSequence::len);
            (branch.sequence, branch.input, branch.swapped) = (None, None, Some(swapped));
            branch.draft.clear();
        }
        true
    }
}

impl LiveRequest {
    /// Restores the request's sequences from host memory, all or none. Returns true if sequences were restored.
    /// `alone` means that no other request is running. If blocks run out and the request is not alone, returns
    /// the error and keeps the copies. After any other failure, drops the copies; the tokens will be
    /// recomputed.
    pub(super) fn swap_in(&mut self, runner: &mut Runner, alone: bool) -> Result<bool> {
        if self.branches.iter().all(|branch| branch.swapped.is_none()) {
            return Ok(false);
        }
        let cache = runner.caches.sequences.grouped()?;
        let mut restored: Result<()> = Ok(());
        for branch in &mut self.branches {
            let Some(swapped) = &branch.swapped else { continue };
            match cache.swap_in(swapped, runner.setup.stream.as_ref()) {
                Ok(sequence) => branch.sequence = Some(sequence),
                Err(error) => {
                    restored = Err(error.into());
                    break;
                }
            }
        }
        let Err(error) = restored else {
            self.branches.iter_mut().for_each(|branch| branch.swapped = None);
            return Ok(true);
        };
        for branch in &mut self.branches {
            if let Some(sequence) = branch.sequence.take() {
                drop(cache.free(sequence));
            }
        }
        if !alone && error.is_out_of_blocks() {
            return Err(error);
        }
        self.branches.iter_mut().for_each(Branch::forget);
        if let Some(beams) = &mut self.beams {
            beams.forget();
        }
        Ok(false)
    }
}

/// Returns the number of tokens to recompute if the request is withdrawn. The prompt counts once, because the
/// other samples find the prompt that the first sample recomputes.
fn tokens_again(live: &LiveRequest) -> usize {
    let first = live.branches.first().map_or(0, |branch| branch.computed);
    let others = live.branches.iter().skip(1);
    first + others.map(|branch| branch.computed.saturating_sub(branch.prompt)).sum::<usize>()
}
