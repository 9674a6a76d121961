//! The runner: a model on a device with its caches. It computes passes and knows nothing about requests.

use std::sync::Arc;

use kvchunk::{ReplicaDevice, ReplicaLink, TenantKeys, TierLink};
use kvcore::{
    Backend, BlockKey, Clock, CopyBlocks, GraphCounts, KeyForm, KeyScope, LayerRopes, PromptKeys, StepBatch,
    Stream, WritePairs,
};
use kvmodel::{ComputeDevice, DecodeMemory, Forward, Model, Observer, PassMemory, Profiler};

mod caches;
mod calibrate;
mod fixed;
mod groups;
mod pinned;
mod sequence_cache;
mod sleep;
mod tiers;

pub use caches::{CacheReport, GroupReport};
pub use pinned::PinnedPrompt;
pub use sleep::Slept;

use crate::config::EngineConfig;
use crate::error::{Error, Result};
pub(crate) use caches::Caches;
use calibrate::{StaticScales, calibrate};

/// The device, and the settings that engines over the same memory share.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) stream: Arc<dyn Stream>,
    pub(crate) keys: KeyForm,
    /// The clock for time limits.
    pub(crate) clock: Arc<dyn Clock>,
    /// The static scales of an fp8 cache.
    scales: Option<StaticScales>,
    tenant_salt: Vec<u8>,
    graphs: usize,
    profile: bool,
}

/// A model on a device, with its caches.
#[derive(Debug)]
pub(crate) struct Runner {
    pub(crate) model: Model,
    pub(crate) setup: Setup,
    pub(crate) caches: Caches,
    pub(crate) profiler: Profiler,
    /// The link to other engines with the same model.
    pub(crate) replicas: Option<ReplicaLink>,
    /// The disk below the chunk cache.
    pub(crate) tier: Option<TierLink>,
    /// Everything that each key covers, except a request's rotary embeddings.
    scope: KeyScope,
    decode_memory: DecodeMemory,
    pass_memory: PassMemory,
}

impl Runner {
    /// Creates a runner, and allocates the model's caches. `tokenizer` identifies the tokenizer and becomes
    /// part of every key.
    pub(crate) fn new(
        model: Model,
        backend: Arc<dyn Backend>,
        tokenizer: &[u8],
        config: &EngineConfig,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let stream = backend.stream()?;
        // Calibrate before the caches allocate their memory.
        let device = (backend.as_ref(), stream.as_ref());
        let scales = calibrate(&model, device, (config.kv_format, config.keys))?;
        let caches = Caches::new(&model, &backend, &stream, config, &clock)?;
        if let Some(scales) = &scales {
            scales.set(&model, caches.sequences.arenas(), stream.as_ref())?;
        }
        let setup = Setup {
            backend,
            stream,
            keys: config.keys,
            clock,
            scales,
            tenant_salt: config.tenant_salt.clone(),
            graphs: config.graphs,
            profile: config.profile,
        };
        Ok(Self::over(model, tokenizer, setup, caches))
    }

    /// Creates a runner for another model over the same memory.
    pub(crate) fn sharing(&self, model: Model, tokenizer: &[u8]) -> Result<Self> {
        let caches = self.caches.shared(&model)?;
        Ok(Self::over(model, tokenizer, self.setup.clone(), caches))
    }

    fn over(model: Model, tokenizer: &[u8], setup: Setup, caches: Caches) -> Self {
        let scope = KeyScope::new("kvmodel", model.revision()).tokenizer(tokenizer);
        let layouts = caches.sequences.arenas().iter().map(|arena| arena.layout().shape());
        let scope = layouts.fold(scope, KeyScope::layout).keys(setup.keys).tenant_salt(&setup.tenant_salt);
        let scope = match &setup.scales {
            Some(StaticScales { k, v }) => scope.static_scales(k, v),
            None => scope,
        };
        Self {
            profiler: if setup.profile { Profiler::enabled() } else { Profiler::disabled() },
            decode_memory: DecodeMemory::new(setup.graphs),
            pass_memory: PassMemory::default(),
            replicas: None,
            tier: None,
            model,
            setup,
            caches,
            scope,
        }
    }

    /// Returns the memory that holds the chunks, so that other engines can pull them.
    pub(crate) fn replica_device(&self) -> ReplicaDevice {
        ReplicaDevice {
            backend: Arc::clone(&self.setup.backend),
            stream: Arc::clone(&self.setup.stream),
            arena: self.caches.sequences.first().arena().clone(),
            keys: self.setup.keys,
        }
    }

    pub(crate) fn graph_counts(&self) -> GraphCounts {
        self.decode_memory.counts()
    }

    // Decision: docs/decisions/models.md#a-request-has-one-regime-of-rope
    /// Returns the rotary embeddings for a prompt that ends before position `end`, followed by an answer of
    /// up to `new_tokens` tokens. The last token of the answer does not count, because it is never fed back,
    /// and positions beyond the model's maximum do not count either.
    pub(crate) fn ropes(&self, end: usize, new_tokens: usize) -> Result<LayerRopes> {
        let longest = end.saturating_add(new_tokens.saturating_sub(1));
        Ok(self.model.ropes(longest.min(self.model.config().max_positions))?)
    }

    // Decision: docs/decisions/models.md#only-other-frequencies-are-a-miss
    /// Returns the tenant with this tag, and the root of its keys for a client's salt and the RoPE regime of `ropes`.
    /// Tenants do not share chunks or prefixes with each other, and neither do salts of a tenant, or regimes.
    pub(crate) fn keys(
        &self,
        (tenant, salt): (Option<&str>, Option<&[u8]>),
        ropes: &LayerRopes,
    ) -> Result<TenantKeys> {
        let root: BlockKey = self.scope.clone().ropes(ropes).root();
        let keys = match (tenant, self.caches.chunks()) {
            (None, _) => TenantKeys::shared(root),
            (Some(tag), Some(cache)) => cache.tenant_keys(Some(tag), &root)?,
            (Some(tag), None) => return Err(kvchunk::Error::UnknownTenant(tag.to_owned()).into()),
        };
        Ok(salt.map_or(keys, |salt| keys.salted(salt)))
    }

    /// Returns the key of everything that each key of this engine covers, except a request's rotary embeddings.
    pub(crate) fn scope(&self) -> BlockKey {
        self.scope.clone().root()
    }

    /// Returns the maximum number of positions per request.
    pub(crate) fn longest(&self) -> usize {
        self.model.config().max_positions.min(self.caches.sequences.longest())
    }

    /// Pins the cached blocks for `tokens` at the start of a tenant's prompts.
    pub(crate) fn pin(&self, keys: &TenantKeys, tokens: &[u32]) -> Result<PinnedPrompt> {
        let [(_, cache)] = self.caches.sequences.groups() else {
            return Err(Error::NoChunks("use a paged cache to keep prompts"));
        };
        let block_size = cache.kv_pool().block_size();
        let keys = PromptKeys::new(*keys.root(), tokens, block_size);
        Ok(PinnedPrompt::start(cache.pool().lookup_chain(keys.keys()).pin(), block_size))
    }

    /// Copies blocks within the arena.
    pub(crate) fn copy(&self, pairs: &WritePairs) -> Result<()> {
        let arena = self.caches.sequences.first().arena().clone();
        Ok(self.setup.stream.copy_blocks(&CopyBlocks { arena, pairs: pairs.clone() })?)
    }

    /// Runs a decode step, as a graph if possible. Reuses memory instead of allocating it.
    pub(crate) fn decode(
        &mut self,
        ropes: &LayerRopes,
        batch: StepBatch<'_>,
        logits: Vec<f32>,
    ) -> Result<Forward> {
        let device = self.setup.device(&self.caches, &self.profiler);
        Ok(self.model.decode(&device, ropes, batch, &mut self.decode_memory, logits)?)
    }

    /// Runs a pass. Reuses the memory of earlier passes.
    pub(crate) fn forward(
        &mut self,
        ropes: &LayerRopes,
        batch: StepBatch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Forward> {
        let device = self.setup.device(&self.caches, &self.profiler);
        Ok(self.model.begin(&device, ropes, batch, &mut self.pass_memory)?.end(observer)?)
    }

    /// Returns the device that passes run on.
    pub(crate) fn device(&self) -> ComputeDevice<'_> {
        self.setup.device(&self.caches, &self.profiler)
    }
}

impl Setup {
    /// Combines the parts of a runner that a pass needs. The runner's other parts can still be borrowed
    /// mutably.
    fn device<'a>(&'a self, caches: &'a Caches, profiler: &'a Profiler) -> ComputeDevice<'a> {
        ComputeDevice {
            backend: self.backend.as_ref(),
            stream: self.stream.as_ref(),
            arenas: caches.sequences.arenas(),
            keys: self.keys,
            profiler,
        }
    }
}
