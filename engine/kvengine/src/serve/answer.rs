//! An answer as a stream of events: the engine's thread sends them, and any thread can poll for them, wait
//! for them or await them.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};
use crate::request::{Generation, TokenLogprobs};

/// The ID of a request. IDs increase in the order of submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// An event in the stream of an answer.
#[derive(Debug, Clone)]
pub enum AnswerEvent {
    /// A sample has a new token.
    Token {
        /// The zero-based index of the sample.
        sample: usize,
        /// The token.
        token: u32,
        /// The token's log-probability, if the request asks for it.
        logprobs: Option<Box<TokenLogprobs>>,
    },
    /// A sample is complete.
    End {
        /// The zero-based index of the sample.
        sample: usize,
        /// The finished sample, with its costs.
        generation: Box<Generation>,
    },
}

/// The answer to a submitted request, as a stream of events.
///
/// The stream ends after the last sample's [`AnswerEvent::End`], or after an error. It buffers unread events,
/// up to the request's token limit, so a slow reader does not delay other requests.
///
/// Read it with [`try_next`](Self::try_next) on the thread that steps the engine, as a blocking iterator on
/// another thread, or with [`poll_next`](Self::poll_next) in a future.
///
/// # Drop behaviour
/// The request is cancelled if it has not ended.
#[derive(Debug)]
#[must_use = "dropping it cancels the request"]
pub struct Answer {
    id: RequestId,
    channel: Arc<AnswerChannel>,
}

/// The sending end of an answer, used by the engine.
#[derive(Debug)]
pub(super) struct AnswerSender(Arc<AnswerChannel>);

/// The queue between the engine and the reader of an answer.
#[derive(Debug, Default)]
struct AnswerChannel {
    state: Mutex<AnswerState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct AnswerState {
    events: VecDeque<Result<AnswerEvent>>,
    /// True once no more events will follow.
    closed: bool,
    cancelled: bool,
    /// The indices of samples that must end with their current tokens.
    complete: Vec<usize>,
    waker: Option<Waker>,
}

// Decision: docs/decisions/models.md#an-answer-buffers-all-unread-tokens
/// Creates the sending and the receiving end of an answer.
pub(super) fn channel(id: RequestId) -> (AnswerSender, Answer) {
    let channel: Arc<AnswerChannel> = Arc::default();
    (AnswerSender(Arc::clone(&channel)), Answer { id, channel })
}

impl Answer {
    /// Returns the request's ID.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Returns the next event if there is one, without waiting.
    pub fn try_next(&mut self) -> Option<Result<AnswerEvent>> {
        self.channel.state.lock().events.pop_front()
    }

    /// Returns the next event, or `None` at the end of the stream. If there is no event yet, returns
    /// [`Poll::Pending`] and wakes the task when there is one.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<AnswerEvent>>> {
        // A waker is cloned and dropped without the lock, because its code may read the answer.
        let mut waker = Some(context.waker().clone());
        let mut state = self.channel.state.lock();
        match state.events.pop_front() {
            Some(event) => Poll::Ready(Some(event)),
            None if state.closed => Poll::Ready(None),
            None => {
                std::mem::swap(&mut state.waker, &mut waker);
                Poll::Pending
            }
        }
    }

    /// Returns true if the stream has ended and all events have been read.
    pub fn is_over(&self) -> bool {
        let state = self.channel.state.lock();
        state.closed && state.events.is_empty()
    }

    /// Cancels the request at the start of the engine's next step. The answer then ends with
    /// [`Error::Cancelled`].
    pub fn cancel(&self) {
        self.channel.state.lock().cancelled = true;
    }

    /// Ends a sample at the start of the engine's next step, because its text is complete, for example at a
    /// stop string. If the request has several samples, a sample that has no token yet ends only after its
    /// first token. Has no effect on a beam search.
    pub fn complete(&self, sample: usize) {
        self.channel.state.lock().complete.push(sample);
    }
}

impl Iterator for Answer {
    type Item = Result<AnswerEvent>;

    /// Waits for the next event. Another thread must step the engine.
    fn next(&mut self) -> Option<Self::Item> {
        let mut state = self.channel.state.lock();
        loop {
            if let Some(event) = state.events.pop_front() {
                return Some(event);
            }
            if state.closed {
                return None;
            }
            self.channel.changed.wait(&mut state);
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.cancel();
    }
}

impl AnswerSender {
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

    /// Returns true if a sample was declared complete.
    pub(super) fn is_complete(&self, sample: usize) -> bool {
        self.0.state.lock().complete.contains(&sample)
    }

    fn push(&self, event: Result<AnswerEvent>, last: bool) {
        self.change(|state| {
            state.events.push_back(event);
            state.closed |= last;
        });
    }

    /// Changes the state and wakes the readers.
    fn change(&self, change: impl FnOnce(&mut AnswerState)) {
        let mut state = self.0.state.lock();
        change(&mut state);
        let waker = state.waker.take();
        drop(state);
        self.0.changed.notify_all();
        if let Some(waker) = waker {
            // A waker that panics concerns only its own task, not the engine's step.
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        }
    }
}

impl Drop for AnswerSender {
    /// Closes the stream.
    fn drop(&mut self) {
        self.change(|state| state.closed = true);
    }
}
