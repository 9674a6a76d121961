//! Answers many requests at once.
//!
//! ```text
//!  submit ──► waiting, by priority and arrival
//!                │ admitted: there is room for its first piece above the watermark
//!                ▼
//!             running ── each step, in one pass: a token for each answer, then pieces of prompts
//!                │   ▲
//!                │   └── admitted again: its computed tokens are found in the caches or recomputed
//!                ▼
//!   out of blocks: the last in the order of service is preempted; its blocks are freed or copied to the host
//! ```
//!
//! A request is either waiting or running. Its next work depends only on its state: a
//! [`LivePrompt`](crate::prompt::LivePrompt) contains the documents of a chunked prompt, and a
//! [`Branch`](live::Branch) is one sample, with its tokens and the number of computed tokens. A sampled token
//! is one more token to compute. A preempted request keeps its tokens, but loses its computed KV unless it is
//! copied to host memory.

mod admit;
mod answer;
mod beams;
mod bounds;
mod constrained;
mod disk;
mod draft;
mod feed;
mod follow;
mod known;
mod layered;
mod live;
mod numbers;
mod pages;
mod plan;
mod portable;
mod samples;
mod scheduler;
mod step;
mod submit;
mod swap;

pub use answer::{Answer, AnswerEvent, RequestId};
pub use portable::{RestoredPrompt, SavedPrompt};
pub(crate) use portable::{restore_prompt, save_prompt};
pub(crate) use scheduler::Scheduler;
pub use scheduler::{Step, StepTimes};
pub(crate) use submit::{is_saved, pin};
pub use swap::PreemptionCosts;
