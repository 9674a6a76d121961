//! The engine: a [`kvmodel::Model`] with its caches, which answers requests.
//!
//! ```no_run
//! use kvbackend_cpu::CpuBackend;
//! use kvchunk::Reuse;
//! use kvengine::{Engine, EngineConfig, Request};
//! use kvmodel::ModelDirectory;
//!
//! let loaded = ModelDirectory::load("models/tiny-rag".as_ref(), Default::default(), &mut |_, _| ())?;
//! let codec = loaded.codec;
//! let mut engine = Engine::new(loaded.model, CpuBackend::new(), codec.digest(), &EngineConfig::default())?;
//! let prompt = codec.prompt("answer briefly ## alba is red . ## alba ?", "##", true)?;
//! // The way that was measured to lose least; without it nothing is recomputed.
//! let request = Request::new(prompt).reusing(&Reuse::default());
//! let answer = engine.generate(&request, &mut ())?;
//! println!("{}", codec.decode(&answer.tokens)?);
//! # Ok::<(), kvengine::Error>(())
//! ```

#![forbid(unsafe_code)]

mod blend;
mod caches;
mod calibrate;
mod chunked;
mod config;
mod engine;
mod error;
mod generate;
mod grouped;
mod inquire;
mod logprobs;
mod pinned;
mod request;
mod sample;
mod seen;
mod sequences;
mod serve;
mod sleep;
mod tuned;

pub use caches::{CacheReport, GroupReport};
pub use config::{
    ChunkSleep, DEFAULT_GRAPHS, DEFAULT_KV_MEMORY, DEFAULT_SWAP_MEMORY, DEFAULT_TYPICAL_LEN, EngineConfig,
    Scheduling,
};
pub use engine::Engine;
pub use error::{Error, Result};
pub use logprobs::TokenLogprobs;
pub use pinned::PinnedPrompt;
pub use request::{FinishReason, Generation, Request};
pub use sample::{Sampler, Sampling};
pub use serve::{Answer, AnswerEvent, BeamSearch, PreemptionCosts, RequestId, SparseDecode, Step, StepTimes};
pub use sleep::{PoolTag, Slept};
pub use tuned::{TunedBy, TunedReuse};
