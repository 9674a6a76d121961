//! Decoder-only transformers that keep their keys and values in `kvcore` caches.
//!
//! A [`kvcore::Backend`] stores keys and values and computes attention. A [`dense::Dense`] computes
//! everything else: the dense steps (embedding, norms, projections, feed-forward layers, head). By default,
//! they run on the host, with weights in their stored type. A model is loaded from a Hugging Face directory
//! (`config.json`, safetensors in one file or shards, and `tokenizer.json` with its chat template) or from
//! a single GGUF file.
//!
//! ```
//! use std::sync::Arc;
//!
//! use kvbackend_cpu::CpuBackend;
//! use kvcore::{
//!     Backend, BlockPool, DType, KeyForm, KvArena, KvLayout, Logits, MemoryKind, PagedKvCache, RankInfo, SequenceInput,
//!     SequenceStart,
//! };
//! use kvmodel::{ComputeDevice, Model, ModelConfig, Profiler, WeightFormat, Weights};
//!
//! let model = Model::new(ModelConfig::benchmark(1, 64)?, Weights::random(1), WeightFormat::Stored)?;
//! let backend = CpuBackend::new();
//! let stream = backend.stream()?;
//! let shape = model.kv_extents(DType::F32).shape(&RankInfo::default(), 8, 16)?;
//! let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(KvLayout::new(shape)?))?;
//! let mut cache = PagedKvCache::new(arena.clone(), BlockPool::new(0..8)?)?;
//!
//! let id = cache.create(SequenceStart::default())?;
//! let slots = cache.grow(id, 3)?;
//! let prompt = SequenceInput::new(vec![7, 8, 9], 0, 0, slots, [cache.segment(id)?]);
//! let device = ComputeDevice {
//!     backend: backend.as_ref(),
//!     stream: stream.as_ref(),
//!     arenas: std::slice::from_ref(&arena),
//!     keys: KeyForm::default(),
//!     profiler: &Profiler::disabled(),
//! };
//! let batch = [prompt.with_logits(Logits::Last)];
//! let pass = model.forward(&device, &model.ropes(3)?, &batch, &mut ())?;
//! assert_eq!(pass.logits.unwrap().rows(), 1);
//! # Ok::<(), kvmodel::Error>(())
//! ```
//!
//! The crate `kvengine` answers requests with such a model.
//!
//! ```text
//! load, gguf   loading a model and its text codec from a directory or a GGUF file
//! text         tokenizers, chat templates, and decoding an answer token by token
//! model        the forward pass: passes, decode steps with graphs, attention mass, reading cache rows
//!   layers     the projections of a decoder layer, for grouped-query and latent attention, and experts
//!   dense      the trait of the dense steps, with implementations on the host and on devices
//! config       config.json files of the supported model families
//! weights      tensors of safetensors files
//! profile      named spans and counters
//! error        the errors
//! ```

#![forbid(unsafe_code)]

// Files shared by the unit tests and the test suite refer to this crate by name.
#[cfg(test)]
extern crate self as kvmodel;

mod config;
pub mod dense;
mod error;
mod files;
mod gguf;
mod layers;
mod load;
mod model;
mod notes;
mod profile;
mod text;
mod weights;

pub use config::{ExpertsConfig, Family, LatentConfig, LayerConfig, ModelConfig};
pub use dense::WeightFormat;
pub use error::{Error, Result, WeightProblem};
pub use files::read_small_file;
pub use load::ModelDirectory;
pub use model::{
    AttentionMass, ComputeDevice, DecodeMemory, Forward, FreshKv, FreshQueries, KeptRows, KvRows, LayerGroup,
    LogitRows, Model, Narrowed, Observer, Pass, PassMemory, read_f32,
};
pub use profile::{ProfileReport, Profiler, Span, SpanStats};
pub use text::{
    AnswerPart, ForcedCalls, Message, Role, TextCodec, TextStream, ToolCall, ToolCallFormat, ToolCallParser,
    Variable,
};
pub use weights::Weights;
