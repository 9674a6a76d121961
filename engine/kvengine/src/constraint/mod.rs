//! Constraints on answers: at each position, the tokens that may follow.
//!
//! The tokens that may follow an answer's next token are worked out on a [`worker`], while the model computes the
//! logits after it. A step waits for them only briefly. An answer whose tokens are late keeps its logits and goes on in
//! a later step, so it does not hold up the others.

mod mask;
mod state;
mod worker;

use std::fmt;

pub use mask::TokenMask;
pub(crate) use state::ConstraintState;
pub(crate) use worker::ConstraintWorkers;

use crate::error::Result;

/// A constraint that all answers to a request obey, such as a grammar.
///
/// The engine starts it once for each request, on a worker thread. A panic ends the request.
pub trait AnswerConstraint: Send + Sync + fmt::Debug {
    /// Returns the state before an answer's first token.
    ///
    /// # Errors
    /// Any error ends the request.
    fn start(&self) -> Result<Box<dyn TokenConstraint>>;
}

/// The state of a constraint after some tokens of an answer.
///
/// A state depends only on the answer's tokens. It is kept when the request is preempted. [`next`](Self::next) and
/// [`accept`](Self::accept) are called on worker threads, and [`fork`](Self::fork) within a step.
pub trait TokenConstraint: Send {
    /// Returns the tokens that may follow.
    ///
    /// # Errors
    /// Any error ends the request.
    fn next(&mut self) -> Result<NextTokens>;

    /// Adds the answer's next token, which is one of those that [`next`](Self::next) returned, and no end token.
    ///
    /// # Errors
    /// Any error ends the request.
    fn accept(&mut self, token: u32) -> Result<()>;

    /// Returns an independent copy, for another answer that begins with the same tokens.
    fn fork(&self) -> Box<dyn TokenConstraint>;
}

/// The tokens that may follow an answer's tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextTokens {
    /// One of these tokens. The model's end tokens are among them if the answer may end here.
    OneOf(TokenMask),
    /// None: the answer is complete.
    Complete,
}
