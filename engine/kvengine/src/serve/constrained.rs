//! Answers with a constraint: the next token is chosen once it is known which tokens may follow.

use std::time::Duration;

use super::live::LiveRequest;
use super::scheduler::Scheduler;
use crate::constraint::{ConstraintState, NextTokens};
use crate::error::{Error, Result};
use crate::request::Request;
use crate::runner::Runner;

/// Checks that a request's constraint is compatible with its other settings.
pub(super) fn check(request: &Request) -> Result<()> {
    let reason = match request {
        Request { constraint: None, .. } => return Ok(()),
        Request { forced: Some(_), .. } => "a forced answer is not chosen; leave out one of the two",
        Request { beams: Some(_), .. } => "a beam search cannot follow one; choose answers token by token",
        Request { ignore_end: true, .. } => {
            "the constraint decides where an answer may end; leave end tokens as they are"
        }
        _ => return Ok(()),
    };
    Err(Error::Constraint(reason.to_owned()))
}

impl LiveRequest {
    /// Chooses a sample's next token from the logits after its last token. If it is not yet known which tokens may
    /// follow, keeps the logits for a later step.
    pub(super) fn take_logits(&mut self, runner: &mut Runner, branch: usize, logits: &[f32]) -> Result<()> {
        let it = &mut self.branches[branch];
        if let Some(constraint) = &mut it.constraint
            && !constraint.is_soon_known()?
        {
            it.late = Some(logits.to_vec());
            return Ok(());
        }
        if it.answer().is_empty() {
            self.begin_answer(runner, logits)
        } else {
            self.choose(runner, branch, logits)
        }
    }

    /// Chooses the tokens of samples whose logits were kept, where it is known by now which tokens may follow. Waits for
    /// nothing: a step has waited for them already.
    fn choose_late(&mut self, runner: &mut Runner) -> Result<()> {
        for branch in 0..self.branches.len() {
            let it = &mut self.branches[branch];
            let Some(constraint) = it.constraint.as_mut().filter(|_| it.late.is_some() && !it.over) else {
                continue;
            };
            if constraint.is_known()?
                && let Some(logits) = it.late.take()
            {
                self.take_logits(runner, branch, &logits)?;
            }
        }
        Ok(())
    }
}

impl Scheduler {
    /// Chooses the tokens of answers that waited for their constraint.
    pub(super) fn choose_late(&mut self, runner: &mut Runner) {
        let Some(workers) = &self.workers else { return };
        workers.begin_step();
        let mut at = 0;
        while at < self.running.len() {
            match self.running[at].choose_late(runner) {
                Ok(()) => at += 1,
                Err(error) => self.fail(runner, at, error),
            }
        }
        self.remove_ended(runner);
    }

    /// Waits for the constraint of an answer that can do nothing else. Returns false if there is none.
    pub(super) fn wait_for_constraint(&self, patience: Duration) -> bool {
        let mut branches = self.running.iter().flat_map(|live| &live.branches);
        let late = branches.find(|branch| branch.late.is_some() && !branch.over);
        let constraint = late.and_then(|branch| branch.constraint.as_ref());
        constraint.map(|constraint: &ConstraintState| constraint.wait_for(patience)).is_some()
    }
}

/// Returns the tokens that may follow a sample's tokens.
///
/// # Errors
/// Returns [`Error::Constraint`] if they are not known, which no caller lets happen.
pub(super) fn next_tokens(constraint: &ConstraintState) -> Result<&NextTokens> {
    constraint.next().ok_or_else(unknown)
}

/// Returns a copy of a sample's constraint, for another sample.
///
/// # Errors
/// Returns [`Error::Constraint`] if the tokens that may follow are not known, which no caller lets happen.
pub(super) fn forked(constraint: &ConstraintState) -> Result<ConstraintState> {
    constraint.fork().ok_or_else(unknown)
}

fn unknown() -> Error {
    Error::Constraint("it is not known what may follow".to_owned())
}
