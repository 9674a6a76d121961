//! A client that loads servers over HTTP/1.1, with one connection for each request that is being answered.
//!
//! - `url`: [`ServerUrl`], the address of a server
//! - `client`: [`Client`] sends requests on connections that are used again, and reads responses whole, piece by piece, or
//!   as server-sent events
//! - `trace`: [`play`] sends the requests of a trace to any server with `/v1/completions`, and reports what the client
//!   sees
//! - `first`: [`first_tokens`] asks for chats one after another, and measures the times to their first tokens
//! - `error`: the error type
//!
//! ```no_run
//! use kvload::{Target, play};
//!
//! let target = Target {
//!     url: "http://127.0.0.1:8000".parse()?,
//!     model: "tiny-rag".to_owned(),
//!     vocabulary: 1000,
//!     limit: 2048,
//! };
//! let trace = kvlab::Traffic { requests: 16, ..kvlab::Traffic::default() }.draw()?;
//! let report = play(&target, &trace, 0, 7, &mut |_, _| ())?;
//! println!("{} answer tokens in {:.2} s", report.answer_tokens, report.seconds);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod client;
mod error;
mod first;
mod trace;
mod url;

pub use client::{Client, Events, Response};
pub use error::{Error, Result};
pub use first::{FirstToken, first_tokens};
pub use trace::{Target, get_all, model_names, play};
pub use url::ServerUrl;
