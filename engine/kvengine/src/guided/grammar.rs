//! A compiled grammar, and the state of an answer in it.

use std::fmt::{self, Display};
use std::sync::Arc;

use llguidance::Matcher;
use llguidance::api::StopReason;

use crate::constraint::{AnswerConstraint, NextTokens, TokenConstraint, TokenMask};
use crate::error::{Error, Result};

/// The beginning of the library's message if no token may follow.
const NOTHING_FOLLOWS: &str = "NoExtensionBias";

/// The maximum number of lines of a message, and of characters in a line.
const LONGEST_MESSAGE: (usize, usize) = (8, 100);

/// A compiled grammar.
pub(super) struct Grammar {
    /// The state before the first token.
    beginning: Matcher,
    ends: Arc<[u32]>,
}

/// The state of an answer in a grammar.
struct GrammarState {
    matcher: Matcher,
    ends: Arc<[u32]>,
}

impl Grammar {
    /// Creates a constraint from the state before the first token.
    pub(super) fn new(beginning: Matcher, ends: Arc<[u32]>) -> Result<Self> {
        match beginning.get_error() {
            None => Ok(Self { beginning, ends }),
            Some(error) => Err(Error::Constraint(message(&error))),
        }
    }
}

impl AnswerConstraint for Grammar {
    fn start(&self) -> Result<Box<dyn TokenConstraint>> {
        // A deep copy has caches of its own, so requests do not wait for each other.
        Ok(Box::new(GrammarState { matcher: self.beginning.deep_clone(), ends: Arc::clone(&self.ends) }))
    }
}

impl TokenConstraint for GrammarState {
    fn next(&mut self) -> Result<NextTokens> {
        if self.is_complete()? {
            return Ok(NextTokens::Complete);
        }
        let may_end = self.matcher.is_accepting().map_err(|error| failed(&error))?;
        match self.matcher.compute_mask() {
            Ok(mask) => {
                let mask = TokenMask::from_words(mask.as_slice().to_vec());
                // If only an end token may follow, the model need not be asked.
                let only_ends = may_end && mask.tokens().all(|token| self.ends.contains(&token));
                Ok(if only_ends { NextTokens::Complete } else { NextTokens::OneOf(mask) })
            }
            Err(error) if !error.to_string().starts_with(NOTHING_FOLLOWS) => Err(failed(&error)),
            Err(_) if may_end => Ok(NextTokens::Complete),
            Err(_) => Err(Error::Constraint(
                "no token of this model continues the answer; the form needs text that the tokenizer lacks"
                    .to_owned(),
            )),
        }
    }

    fn accept(&mut self, token: u32) -> Result<()> {
        self.matcher.consume_token(token).map_err(|error| failed(&error))
    }

    fn fork(&self) -> Box<dyn TokenConstraint> {
        Box::new(Self { matcher: self.matcher.deep_clone(), ends: Arc::clone(&self.ends) })
    }
}

impl GrammarState {
    /// Returns true if nothing may follow.
    fn is_complete(&self) -> Result<bool> {
        match self.matcher.stop_reason() {
            StopReason::NotStopped => Ok(false),
            StopReason::NoExtension | StopReason::NoExtensionBias | StopReason::EndOfSentence => Ok(true),
            reason => Err(Error::Constraint(format!("the answer cannot go on ({reason})"))),
        }
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").field("ends", &self.ends).finish_non_exhaustive()
    }
}

fn failed(error: &impl Display) -> Error {
    Error::Constraint(message(&error.to_string()))
}

/// Shortens a message of the library, which quotes the form, and removes its marks.
fn message(text: &str) -> String {
    let lines = text.lines().map(str::trim_end).filter(|line| !line.is_empty() && *line != "<non-verbose/>");
    let short = lines.take(LONGEST_MESSAGE.0).map(|line| match line.char_indices().nth(LONGEST_MESSAGE.1) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line.to_owned(),
    });
    short.collect::<Vec<_>>().join("\n")
}
