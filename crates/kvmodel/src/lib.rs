//! Decoder-only transformers whose attention reads the caches of `kvcore`.
//!
//! Keys, values and attention live on a [`kvcore::Backend`]. The dense steps around them (embedding, norms,
//! projections, feed-forward layers, head) are computed by a [`dense::Dense`]: on the host by default, by weights as they are
//! stored. Programs should set `RAYON_NUM_THREADS`, as `kvc` does; see [`dense::HostDense`]. A model loads from a Hugging Face directory: `config.json`,
//! safetensors (one file or shards), and `tokenizer.json` with its chat template; or from one GGUF file.
//!
//! ```no_run
//! use kvbackend_cpu::CpuBackend;
//! use kvmodel::{Engine, EngineConfig, ModelDirectory, Request};
//!
//! let loaded = ModelDirectory::load("models/tiny-rag".as_ref(), Default::default(), &mut |_, _| ())?;
//! let codec = loaded.codec;
//! let mut engine = Engine::new(loaded.model, CpuBackend::new(), codec.digest(), &EngineConfig::default())?;
//! let prompt = codec.prompt("answer briefly ## alba is red . ## alba ?", "##", true)?;
//! let answer = engine.generate(&Request::new(prompt), &mut ())?;
//! println!("{}", codec.decode(&answer.tokens)?);
//! # Ok::<(), kvmodel::Error>(())
//! ```

#![forbid(unsafe_code)]

mod config;
pub mod dense;
pub mod engine;
mod error;
mod files;
mod gguf;
mod layers;
mod load;
mod model;
mod profile;
mod sample;
mod text;
mod weights;

pub use config::{ExpertsConfig, Family, LatentConfig, LayerConfig, ModelConfig};
pub use dense::WeightFormat;
pub use engine::{
    CacheReport, ChunkSleep, Engine, EngineConfig, FinishReason, Generation, PoolTag, Request, Slept,
    TunedBy, TunedReuse,
};
pub use error::{Error, Result, WeightProblem};
pub use load::ModelDirectory;
pub use model::{
    ComputeDevice, DecodeMemory, Forward, FreshKv, FreshQueries, LogitRows, Model, Narrowed, Observer, Pass,
    PassMemory,
};
pub use profile::{ProfileReport, Profiler, Span, SpanStats};
pub use sample::{Sampler, Sampling};
pub use text::{Message, PromptTokens, Role, TextCodec, TextStream};
pub use weights::Weights;
