//! An HTTP server that answers the clients of existing APIs with a [`kvengine::Engine`], and computes each document only
//! once.
//!
//! ```no_run
//! use kvbackend_cpu::CpuBackend;
//! use kvengine::{Engine, EngineConfig};
//! use kvmodel::ModelDirectory;
//! use kvserve::{ServedModel, Server, ServerConfig};
//!
//! let loaded = ModelDirectory::load("models/tiny-rag".as_ref(), Default::default(), &mut |_, _| ())?;
//! let codec = loaded.codec;
//! let engine = Engine::new(loaded.model, CpuBackend::new(), codec.digest(), &EngineConfig::default())?;
//! let model = ServedModel { engine, codec, names: vec!["tiny-rag".to_owned()], reuse: None };
//! let server = Server::start(model, ServerConfig::default())?;
//! println!("http://{}/v1", server.address());
//! server.run_until_signal()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ```text
//! connection ─► routes ─► dialect ──► Ask ──► prompt: documents found, text tokenised   (threads for text)
//!                            ▲                   │ Request
//!                            │                   ▼
//!                          Reply ◄── decode ◄── Answer ◄── engine thread: submit, step, step, …
//! ```
//!
//! The engine has a thread of its own, which sleeps while there are no requests. Handlers send it commands. Texts are
//! tokenised and decoded on other threads.
//!
//! - `dialect`: translates requests of existing clients to [an internal one](ask), and replies back
//! - `ask`, `shape`, `prompt`, `reply`, `calls`, `token_texts`, `report`, `refusal`: the request, what its answer consists of,
//!   its tokens, its answer, the calls of tools and the tokens in it, what the answer says about its prompt, and why there is
//!   none
//! - `service`, `engine_thread`, `library`, `metrics`, `labels`, `tenants`: what handlers share
//! - `seats`, `body_memory`, `text_work`, `leisure`, `pins`: places, memory and threads of requests, what waits for an idle engine, and what
//!   stays in memory
//! - `registrar`, `journal`, `restored`: the thread that changes registered documents, the file in which they outlive the
//!   server, and what it registers again
//! - `page`: the page for people, with the last requests
//! - `body`, `routes`, `server`, `origin`, `patient`, `descriptors`: HTTP
//! - `config`, `error`: the settings of a server, and its errors

#![forbid(unsafe_code)]

mod ask;
mod beginning;
mod body;
mod body_memory;
mod calls;
mod config;
mod descriptors;
mod dialect;
mod engine_thread;
mod error;
mod journal;
mod labels;
mod leisure;
mod library;
mod metrics;
mod origin;
mod page;
mod patient;
mod pins;
mod prompt;
mod refusal;
mod registrar;
mod reply;
mod report;
mod restored;
mod routes;
mod seats;
mod server;
mod service;
mod shape;
mod tenants;
mod text_work;
mod token_texts;

pub use config::{DocumentReuse, Limits, ServedModel, ServerConfig};
pub use error::{Error, Result};
pub use server::Server;
pub use tenants::ApiKeys;
