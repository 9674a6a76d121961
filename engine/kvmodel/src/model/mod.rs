//! The forward pass: an implementation of [`Dense`] runs the dense steps, and a backend stores KV and
//! attends.

use std::ops::ControlFlow;
use std::sync::Arc;

use kvcore::{Backend, KeyForm, KvArena, KvExtents, KvFormat, LayerRopes, RopeConfig, RopeFamily, Stream};
use serde::Serialize;

use crate::config::ModelConfig;
use crate::dense::{Activation, Dense, HostDense, Weight, WeightFile, WeightFormat};
use crate::error::{Error, Result};
use crate::layers::{Layer, Linear, Loader, RmsNorm};
use crate::profile::Profiler;
use crate::weights::Weights;

#[cfg(test)]
mod allocations;
mod attention;
mod decode;
mod flops;
mod groups;
mod logits;
mod mass;
mod pass;
mod readback;
mod rows;

pub use attention::{FreshKv, FreshQueries};
pub use decode::DecodeMemory;
pub use groups::LayerGroup;
pub use logits::LogitRows;
pub use mass::AttentionMass;
pub use pass::{Forward, KeptRows, Narrowed, Pass, PassMemory};
pub use readback::{KvRows, read_f32};

/// A decoder-only transformer.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    dense: Arc<dyn Dense>,
    embedding: Arc<dyn Weight>,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    ropes: RopeFamily,
    groups: Vec<LayerGroup>,
    revision: [u8; 32],
    identity: [u8; 32],
    weight_bytes: usize,
    /// The files that weights may be parts of.
    files: Vec<WeightFile>,
    /// The names of the tensors that were not used.
    unused: Vec<String>,
}

/// An observer of a request's progress, which may stop the request.
///
/// If a method returns [`ControlFlow::Break`], the request ends with [`Error::Cancelled`] and releases
/// everything that it holds. If [`is_complete`](Self::is_complete) returns true, the request ends early and
/// returns its answer. The default methods never end a request, and neither does the observer `()`.
///
/// ```
/// use std::ops::ControlFlow;
/// use std::sync::atomic::{AtomicBool, Ordering};
/// use kvmodel::Observer;
///
/// /// Stops when another thread says so.
/// struct Until<'a>(&'a AtomicBool);
///
/// impl Observer for Until<'_> {
///     fn layer(&mut self, _done: usize, _total: usize) -> ControlFlow<()> {
///         if self.0.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
///     }
/// }
///
/// let stop = AtomicBool::new(false);
/// assert!(Until(&stop).layer(1, 8).is_continue());
/// stop.store(true, Ordering::Relaxed);
/// assert!(Until(&stop).layer(2, 8).is_break());
/// ```
pub trait Observer {
    /// Called when `done` of the `total` layers of a prefill pass have been computed. A prefill has several
    /// passes if, for example, its prompt is long, it waits for other requests' chunks, or some tokens are
    /// recomputed.
    fn layer(&mut self, done: usize, total: usize) -> ControlFlow<()> {
        let _ = (done, total);
        ControlFlow::Continue(())
    }

    /// Called when the answer has a new token.
    fn token(&mut self, token: u32) -> ControlFlow<()> {
        let _ = token;
        ControlFlow::Continue(())
    }

    /// Returns true if the answer is complete, for example at a stop string. Called after each token.
    fn is_complete(&self) -> bool {
        false
    }
}

impl Observer for () {}

/// The device that a forward pass runs on.
#[derive(Debug)]
pub struct ComputeDevice<'a> {
    /// The backend that allocates the pass's buffers.
    pub backend: &'a dyn Backend,
    /// The stream that runs the pass's operations in order.
    pub stream: &'a dyn Stream,
    /// The arenas that hold keys and values: one for all layers, or one for each of the model's
    /// [groups](Model::groups).
    pub arenas: &'a [KvArena],
    /// The form in which the arenas store keys: rotated or unrotated.
    pub keys: KeyForm,
    /// The profiler that records the times of the pass's steps.
    pub profiler: &'a Profiler,
}

impl Model {
    /// Builds the model from its config and weights, with the dense steps on the host.
    ///
    /// # Errors
    /// Returns [`Error::Weight`] if a tensor is missing or has the wrong shape.
    pub fn new(config: ModelConfig, weights: Weights, format: WeightFormat) -> Result<Self> {
        Self::with_dense(config, weights, format, Arc::new(HostDense::default()))
    }

    /// Builds the model from its config and weights, with `dense` for the dense steps.
    ///
    /// # Errors
    /// Returns [`Error::Weight`] if a tensor is missing, has the wrong shape, or is stored in a type that
    /// `dense` does not support. Returns the errors of [`ModelConfig::check`] and of [`Dense::load`].
    pub fn with_dense(
        config: ModelConfig,
        mut weights: Weights,
        format: WeightFormat,
        dense: Arc<dyn Dense>,
    ) -> Result<Self> {
        config.check()?;
        // Decision: docs/decisions/models.md#a-models-key-is-a-hash-of-everything-that-affects-its-kv
        let revision = hashed("kvmodel revision v1", weights.digest(), &(&config, format, dense.name()))?;
        let identity = hashed("kvmodel identity v1", weights.digest(), &config)?;
        let (vocabulary, hidden) = (config.vocab_size, config.hidden_size);
        let norm_shift = if config.shifted_norms { 1.0 } else { 0.0 };
        let mut loader = Loader::new(&mut weights, dense.as_ref(), format, norm_shift);
        let embedding = loader.table("model.embed_tokens", vocabulary, hidden)?;
        let layers = (0..config.num_layers())
            .map(|index| Layer::load(&mut loader, &config, index))
            .collect::<Result<_>>()?;
        let norm = loader.norm("model.norm", hidden, config.rms_norm_eps)?;
        let head = if config.tied_head {
            loader.tied_head(&embedding)?
        } else {
            loader.linear("lm_head", vocabulary, hidden, false)?
        };
        let weight_bytes = loader.held();
        let files = weights.take_files();
        let unused = weights.take_rest();
        let specifications: Vec<RopeConfig> = config.layers.iter().map(|layer| layer.rope.clone()).collect();
        let ropes = RopeFamily::new(&specifications, config.max_positions)?;
        let groups = groups::groups(&config);
        Ok(Self {
            config,
            dense,
            embedding,
            layers,
            norm,
            head,
            ropes,
            groups,
            revision,
            identity,
            weight_bytes,
            files,
            unused,
        })
    }

    /// Returns the note of the dense steps for the user, if there is one.
    pub(crate) fn dense_note(&self) -> Option<String> {
        self.dense.note()
    }

    /// Returns the names of the tensors in the files that the model does not use.
    pub(crate) fn unused(&self) -> &[String] {
        &self.unused
    }

    /// Checks that no weight file that is mapped into memory has changed since the model was loaded. The engine
    /// calls this method for each request.
    ///
    /// # Errors
    /// Returns [`Error::FileChanged`], with the path, for a file with another length or modification time.
    pub fn check_files(&self) -> Result<()> {
        match self.files.iter().find(|file| file.has_changed()) {
            Some(file) => Err(Error::FileChanged { path: file.path().to_owned() }),
            None => Ok(()),
        }
    }

    /// Returns the residual stream before the first layer.
    fn embed(&self, tokens: &[u32]) -> Result<Activation> {
        self.dense.embed(self.embedding.as_ref(), tokens, self.config.embedding_scale.unwrap_or(1.0))
    }

    /// Returns the number of bytes of memory that the weights take.
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    /// Returns the config.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns every layer's rotary embedding for a request that uses only positions below `longest`,
    /// including the positions of tokens that it may still generate. The embeddings are part of the
    /// request's cache keys; see [`kvcore::Regime`].
    ///
    /// # Errors
    /// Returns [`kvcore::Error::TooLarge`] if the model has fewer positions.
    pub fn ropes(&self, longest: usize) -> Result<LayerRopes> {
        Ok(self.ropes.at(longest)?)
    }

    /// Returns the hash of the weights, the config, the weight format and the name of the dense steps:
    /// everything in the model that its keys and values depend on.
    pub fn revision(&self) -> &[u8; 32] {
        &self.revision
    }

    /// Returns the hash of the weights and the config. It identifies the model regardless of its dense steps.
    pub fn identity(&self) -> &[u8; 32] {
        &self.identity
    }

    /// Returns the extents of a cache for this model; see [`ModelConfig::kv_extents`].
    pub fn kv_extents(&self, format: impl Into<KvFormat>) -> KvExtents {
        self.config.kv_extents(format)
    }
}

/// Returns a hash of the weights' digest and `settings`.
fn hashed(context: &str, weights: &[u8; 32], settings: &impl Serialize) -> Result<[u8; 32]> {
    let text = serde_json::to_vec(settings).map_err(|e| Error::Config(e.to_string()))?;
    let mut hasher = blake3::Hasher::new_derive_key(context);
    hasher.update(weights);
    hasher.update(&text);
    Ok(*hasher.finalize().as_bytes())
}
