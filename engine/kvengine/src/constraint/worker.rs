//! Threads that work out which tokens may follow, beside the engine's steps.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// The time for which a step waits in total for tokens that may follow. Working them out usually takes less time than
/// the pass that goes on at the same time, and answers that go on together share passes.
const PATIENCE: Duration = Duration::from_millis(2);

/// The maximum number of threads. The model's own threads need most processors.
const MOST_THREADS: usize = 4;

/// The stack of a thread. Grammars nest, and their parsers call themselves.
const STACK: usize = 16 << 20;

type Job = Box<dyn FnOnce() + Send>;

/// A small pool of threads. They end when the pool is dropped.
pub(crate) struct ConstraintWorkers {
    queue: Arc<JobQueue>,
    /// The time for which the current step may still wait.
    patience: Mutex<Duration>,
}

#[derive(Default)]
struct JobQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    jobs: VecDeque<Job>,
    idle: usize,
    threads: usize,
    closed: bool,
}

impl ConstraintWorkers {
    /// Creates a pool without threads. They start when there is work.
    pub(crate) fn new() -> Self {
        Self { queue: Arc::default(), patience: Mutex::new(PATIENCE) }
    }

    /// Runs a job on a thread of the pool. If no thread can be started, runs it here.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.queue.state.lock();
        state.jobs.push_back(Box::new(job));
        let most = thread::available_parallelism().map_or(1, |n| (n.get() / 4).clamp(1, MOST_THREADS));
        if state.jobs.len() > state.idle && state.threads < most {
            let queue = Arc::clone(&self.queue);
            let begun = Builder::new().name("kv-constraint".to_owned()).stack_size(STACK);
            if begun.spawn(move || queue.serve()).is_ok() {
                state.threads += 1;
            }
        }
        let stranded = if state.threads == 0 { state.jobs.pop_front() } else { None };
        drop(state);
        self.queue.changed.notify_one();
        if let Some(job) = stranded {
            job();
        }
    }

    /// Begins a step, which may wait anew.
    pub(crate) fn begin_step(&self) {
        *self.patience.lock() = PATIENCE;
    }

    /// Calls `wait` with the time for which the step may still wait, and subtracts the time that it takes.
    pub(super) fn wait<T>(&self, wait: impl FnOnce(Duration) -> T) -> T {
        let left = *self.patience.lock();
        let begun = Instant::now();
        let result = wait(left);
        *self.patience.lock() = left.saturating_sub(begun.elapsed());
        result
    }
}

impl JobQueue {
    /// Runs jobs until the pool is dropped.
    fn serve(&self) {
        let mut state = self.state.lock();
        while !state.closed {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.state.lock();
            } else {
                state.idle += 1;
                self.changed.wait(&mut state);
                state.idle -= 1;
            }
        }
    }
}

impl Drop for ConstraintWorkers {
    fn drop(&mut self) {
        self.queue.state.lock().closed = true;
        self.queue.changed.notify_all();
    }
}

impl fmt::Debug for ConstraintWorkers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.queue.state.lock();
        f.debug_struct("ConstraintWorkers")
            .field("threads", &state.threads)
            .field("jobs", &state.jobs.len())
            .finish_non_exhaustive()
    }
}
