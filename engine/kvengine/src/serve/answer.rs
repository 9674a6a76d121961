//! An answer as a stream: the engine's thread sends, any other thread reads, waits or awaits.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};
use crate::logprobs::TokenLogprobs;
use crate::request::Generation;

/// The number of a request, in the order of submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// A part of an answer.
#[derive(Debug, Clone)]
pub enum AnswerEvent {
    /// A sample has a new token.
    Token {
        /// The number of the sample, from 0.
        sample: usize,
        /// The token.
        token: u32,
        /// Its log-probability, if the request asks for it.
        logprobs: Option<Box<TokenLogprobs>>,
    },
    /// A sample is complete.
    End {
        /// The number of the sample, from 0.
        sample: usize,
        /// The sample, with its costs.
        generation: Box<Generation>,
    },
}

/// The answer to a submitted request, as it comes.
///
/// The stream ends after the last sample's [`AnswerEvent::End`], or after an error. It buffers whatever is not read, which the request's
/// token limit bounds, so that a reader who pauses holds nobody up.
///
/// Read it with [`try_next`](Self::try_next) from the thread that steps the engine, as an iterator, which blocks, from another thread,
/// and by [`poll_next`](Self::poll_next) from a future.
///
/// # Drop behaviour
/// The request is cancelled if it has not ended.
#[derive(Debug)]
#[must_use = "dropping it cancels the request"]
pub struct Answer {
    id: RequestId,
    shared: Arc<Shared>,
}

/// The engine's end of an answer.
#[derive(Debug)]
pub(super) struct Sender(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<Result<AnswerEvent>>,
    /// No event follows.
    closed: bool,
    cancelled: bool,
    /// Samples that are to end as they are.
    complete: Vec<usize>,
    waker: Option<Waker>,
}

/// Returns the two ends of an answer.
pub(super) fn channel(id: RequestId) -> (Sender, Answer) {
    let shared: Arc<Shared> = Arc::default();
    (Sender(Arc::clone(&shared)), Answer { id, shared })
}

impl Answer {
    /// Returns the number of the request.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Returns what has come, without waiting.
    pub fn try_next(&mut self) -> Option<Result<AnswerEvent>> {
        self.shared.state.lock().events.pop_front()
    }

    /// Returns the next part, `None` at the end, or wakes the task when there is one.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<AnswerEvent>>> {
        let mut state = self.shared.state.lock();
        match state.events.pop_front() {
            Some(event) => Poll::Ready(Some(event)),
            None if state.closed => Poll::Ready(None),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Returns whether everything has come and been read.
    pub fn is_over(&self) -> bool {
        let state = self.shared.state.lock();
        state.closed && state.events.is_empty()
    }

    /// Cancels the request before the engine's next step, with [`Error::Cancelled`].
    pub fn cancel(&self) {
        self.shared.state.lock().cancelled = true;
    }

    /// Ends a sample before the engine's next step, as it is: its text is complete, as at a stop string. One of several samples goes on
    /// until it has a token, beams go on to their end.
    pub fn complete(&self, sample: usize) {
        self.shared.state.lock().complete.push(sample);
    }
}

impl Iterator for Answer {
    type Item = Result<AnswerEvent>;

    /// Waits for the next part. Another thread must step the engine.
    fn next(&mut self) -> Option<Self::Item> {
        let mut state = self.shared.state.lock();
        loop {
            if let Some(event) = state.events.pop_front() {
                return Some(event);
            }
            if state.closed {
                return None;
            }
            self.shared.changed.wait(&mut state);
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.cancel();
    }
}

impl Sender {
    pub(super) fn send(&self, event: AnswerEvent) {
        self.push(Ok(event), false);
    }

    /// Ends the answer with an error.
    pub(super) fn fail(self, error: Error) {
        self.push(Err(error), true);
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.0.state.lock().cancelled
    }

    /// Returns whether a sample is to end as it is.
    pub(super) fn is_complete(&self, sample: usize) -> bool {
        self.0.state.lock().complete.contains(&sample)
    }

    fn push(&self, event: Result<AnswerEvent>, last: bool) {
        let mut state = self.0.state.lock();
        state.events.push_back(event);
        state.closed |= last;
        let waker = state.waker.take();
        drop(state);
        self.0.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Drop for Sender {
    /// Nothing follows.
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.closed = true;
        let waker = state.waker.take();
        drop(state);
        self.0.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
