//! The engine, which answers requests with a [`kvmodel::Model`] and its caches.
//!
//! ```no_run
//! use kvbackend_cpu::CpuBackend;
//! use kvchunk::Reuse;
//! use kvengine::{Engine, EngineConfig, PromptTokens, Request};
//! use kvmodel::ModelDirectory;
//!
//! let loaded = ModelDirectory::load("models/tiny-rag".as_ref(), Default::default(), &mut |_, _| ())?;
//! let codec = loaded.codec;
//! let mut engine = Engine::new(loaded.model, CpuBackend::new(), codec.digest(), &EngineConfig::default())?;
//! let prompt = PromptTokens::split(&codec, "answer briefly ## alba is red . ## alba ?", "##", true)?;
//! // The setting with the smallest loss in measurements. Without it, nothing is recomputed.
//! let request = Request::new(prompt).reusing(&Reuse::default());
//! let answer = engine.generate(&request, &mut ())?;
//! println!("{}", codec.decode(&answer.tokens)?);
//! # Ok::<(), kvengine::Error>(())
//! ```
//!
//! A module uses only modules below it:
//!
//! ```text
//! engine                 the public face: a runner and a scheduler
//!   serve                many requests: submission, admission, plans, steps, samples, beams, preemption
//!     prompt             one prompt: text cut into parts, documents looked up, computed, recomputed
//!       documents        registered texts, found in prompts and cut out as chunks
//!       sampling         the choice of tokens from logits
//!       guided           JSON schemas and grammars as constraints
//!       runner           a model on a device with its caches; independent of requests
//!         constraint     what may follow an answer's tokens, worked out beside the steps
//!         request        requests with their settings, and answers
//!         config, error  the settings of an engine, its errors
//! tuned                  a file with the reuse settings that suit a model, and the settings without such a file
//!   result_file          a file that a result will be written to
//! ```

#![forbid(unsafe_code)]

mod config;
mod constraint;
mod documents;
mod engine;
mod error;
mod guided;
mod prompt;
mod request;
mod result_file;
mod runner;
mod sampling;
mod serve;
mod tuned;

pub use config::{
    ChunkSleep, DEFAULT_GRAPHS, DEFAULT_KV_MEMORY, DEFAULT_SWAP_MEMORY, DEFAULT_TYPICAL_LEN, EngineConfig,
    PoolTag, Scheduling,
};
pub use constraint::{AnswerConstraint, NextTokens, TokenConstraint, TokenMask};
pub use documents::{
    CutPrompt, DocumentCosts, DocumentLibrary, FoundDocument, LibraryLimits, NewDocument, RegisteredDocument,
};
pub use engine::Engine;
pub use error::{Error, Result};
pub use guided::{AnswerForm, AnswerGuide};
pub use prompt::{BUILT_IN_DECOYS, document_text};
pub use request::{
    BeamSearch, FinishReason, Generation, PromptTokens, Request, Sampling, SparseDecode, TokenLogprobs,
};
pub use result_file::ResultFile;
pub use runner::{CacheReport, GroupReport, PinnedPrompt, Slept};
pub use sampling::Sampler;
pub use serve::{
    Answer, AnswerEvent, PreemptionCosts, RequestId, RestoredPrompt, SavedPrompt, Step, StepTimes,
};
pub use tuned::{DefaultReuse, TunedBy, TunedReuse};
