//! The constraint of one sample: its state, and the tokens that may follow, once they are known.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::worker::ConstraintWorkers;
use super::{AnswerConstraint, NextTokens, TokenConstraint};
use crate::error::{Error, Result};

/// A sample's constraint.
#[derive(Debug)]
pub(crate) struct ConstraintState {
    workers: Arc<ConstraintWorkers>,
    progress: Progress,
}

enum Progress {
    /// A worker works out the tokens that may follow.
    Working(Arc<ResultSlot>),
    /// The tokens are known.
    Known(Box<dyn TokenConstraint>, NextTokens),
    /// The request has ended with an error.
    Failed,
}

/// A state with the tokens that may follow.
type Known = (Box<dyn TokenConstraint>, NextTokens);

/// The place where a worker puts its result.
#[derive(Default)]
struct ResultSlot {
    result: Mutex<Option<Result<Known>>>,
    changed: Condvar,
}

impl ConstraintState {
    /// Starts to work out an answer's first tokens.
    pub(crate) fn start(workers: Arc<ConstraintWorkers>, constraint: Arc<dyn AnswerConstraint>) -> Self {
        let progress = work(&workers, move || {
            let mut state = constraint.start()?;
            let next = state.next()?;
            Ok((state, next))
        });
        Self { workers, progress }
    }

    /// Returns true if the tokens that may follow are known.
    ///
    /// # Errors
    /// Returns the constraint's error, once.
    pub(crate) fn is_known(&mut self) -> Result<bool> {
        let Progress::Working(slot) = &self.progress else { return Ok(true) };
        let result = slot.take_within(Duration::ZERO);
        self.record(result)
    }

    /// Like [`is_known`](Self::is_known), but waits for the tokens as long as the step may wait.
    pub(crate) fn is_soon_known(&mut self) -> Result<bool> {
        if self.is_known()? {
            return Ok(true);
        }
        let Progress::Working(slot) = &self.progress else { return Ok(true) };
        let result = self.workers.wait(|patience| slot.take_within(patience));
        self.record(result)
    }

    /// Waits up to `patience` for the tokens that may follow.
    pub(crate) fn wait_for(&self, patience: Duration) {
        if let Progress::Working(slot) = &self.progress {
            let mut result = slot.result.lock();
            if result.is_none() {
                slot.changed.wait_for(&mut result, patience);
            }
        }
    }

    fn record(&mut self, result: Option<Result<Known>>) -> Result<bool> {
        match result {
            None => Ok(false),
            Some(Ok((state, next))) => {
                self.progress = Progress::Known(state, next);
                Ok(true)
            }
            Some(Err(error)) => {
                self.progress = Progress::Failed;
                Err(error)
            }
        }
    }

    /// Returns the tokens that may follow, or `None` if they are not known.
    pub(crate) fn next(&self) -> Option<&NextTokens> {
        match &self.progress {
            Progress::Known(_, next) => Some(next),
            Progress::Working(_) | Progress::Failed => None,
        }
    }

    /// Starts to work out the tokens that may follow `token`.
    pub(crate) fn advance(&mut self, token: u32) {
        if let Progress::Known(mut state, _) = std::mem::replace(&mut self.progress, Progress::Failed) {
            self.progress = work(&self.workers, move || {
                state.accept(token)?;
                let next = state.next()?;
                Ok((state, next))
            });
        }
    }

    /// Returns a copy for another sample, or `None` if the tokens that may follow are not known.
    pub(crate) fn fork(&self) -> Option<Self> {
        let Progress::Known(state, next) = &self.progress else { return None };
        let progress = Progress::Known(state.fork(), next.clone());
        Some(Self { workers: Arc::clone(&self.workers), progress })
    }
}

/// Runs `job` on a worker. A panic becomes an error.
fn work(workers: &ConstraintWorkers, job: impl FnOnce() -> Result<Known> + Send + 'static) -> Progress {
    let slot: Arc<ResultSlot> = Arc::default();
    let place = Arc::clone(&slot);
    workers.run(move || {
        let result = catch_unwind(AssertUnwindSafe(job));
        let result = result.unwrap_or_else(|_| {
            Err(Error::Constraint("it panicked; the panic's message was printed".to_owned()))
        });
        *place.result.lock() = Some(result);
        place.changed.notify_all();
    });
    Progress::Working(slot)
}

impl ResultSlot {
    fn take_within(&self, patience: Duration) -> Option<Result<Known>> {
        let mut result = self.result.lock();
        if result.is_none() && !patience.is_zero() {
            self.changed.wait_for(&mut result, patience);
        }
        result.take()
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Working(_) => "Working",
            Self::Known(..) => "Known",
            Self::Failed => "Failed",
        })
    }
}
