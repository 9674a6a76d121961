//! A laboratory for KV reuse. It measures the accuracy and the cost of each strategy, and decides whether
//! reuse fits a model.
//!
//! - `eval`: [`evaluate`] asks questions through a real [`kvengine::Engine`] and scores each [`Arm`];
//!   [`Gate`] checks the identities that exact reuse must keep; [`Tuning`] finds the cheapest strategy whose
//!   loss can be bounded
//! - `workload`: [`RagWorkload`] and [`Traffic`] draw a service's requests; [`serve`], [`play`],
//!   [`ttft_rows`], [`decoy_rows`] and [`disk_rows`] measure the times of the answers
//! - `error`: the error type
//!
//! ```no_run
//! let world = kvlab::World::from_json(&std::fs::read_to_string("models/tiny-rag/world.json")?)?;
//! let questions = world.questions(7, 4); // four questions of each kind, drawn from seed 7
//! println!("{} questions about {} documents", questions.len(), questions[0].documents.len());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod error;
mod eval;
mod workload;

pub use error::{Error, Result};
pub use eval::{
    Arm, Estimate, EvalOptions, Evaluation, Gate, GateCheck, GateLimits, Grader, Measure, Paired,
    PromptStyle, Question, QuestionKind, Score, TextForm, Texts, Trial, TuneOptions, TuneRow, Tuning,
    Verdict, World, evaluate,
};
pub use workload::{
    Arrival, ArrivalTimes, ClientReport, ClientTally, Popularity, RagReport, RagWorkload, SharedPrefix,
    Times, Traffic, TrafficPrompts, TrafficReport, TtftRow, TtftTarget, cpu_seconds, decoy_rows, disk_rows,
    play, serve, thread_cpu_seconds, ttft_rows,
};
