//! A few threads that wait for work, so that a kernel can be cut into parts.
//!
//! Kernels are short: a decode step runs some ten of them per millisecond. Therefore threads look for a while before
//! they sleep, the caller works too, a call allocates nothing, and a caller that finds the threads busy with another stream's work does its own
//! work alone.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{Builder, JoinHandle};

use parking_lot::{Condvar, Mutex};

/// Threads that share the parts of one job at a time.
pub(crate) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Locked while a job runs.
    busy: Mutex<()>,
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Workers({})", self.count())
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<JobState>,
    wake: Condvar,
    done: Condvar,
    /// Number of the next part that no thread has taken.
    next: AtomicUsize,
    /// The count of jobs and the number of threads inside one, as `state` has them, for threads that look without a lock.
    posted: AtomicU64,
    inside: AtomicUsize,
}

// Decision: docs/decisions/backend-cpu.md#threads-look-for-a-while-before-they-sleep
/// Looks at a value before a thread sleeps: about thirty microseconds. Steps of a model follow one another faster than a thread
/// that sleeps is woken.
const LOOKS: usize = 1000;

/// Looks until `ready` is true, or for a while. Returns whether it was.
fn look(ready: impl Fn() -> bool) -> bool {
    (0..LOOKS).any(|_| {
        std::hint::spin_loop();
        ready()
    })
}

#[derive(Default)]
struct JobState {
    job: Option<Job>,
    /// Count of jobs, so that a thread takes part in each job once.
    number: u64,
    /// Number of threads inside the job.
    inside: usize,
    panic: Option<Box<dyn Any + Send>>,
    stop: bool,
}

/// The function to call for each part. `Workers::run` keeps the referent of `work` alive while it waits.
#[derive(Clone, Copy)]
struct Job {
    work: *const (dyn Fn(usize) + Sync),
    parts: usize,
}

// SAFETY: `work` points to a `Sync` closure, and `Workers::run` keeps the closure alive until no thread is
// inside.
unsafe impl Send for Job {}

impl Shared {
    /// Takes parts and calls `work` with each, until none is left.
    fn take_parts(&self, work: &(dyn Fn(usize) + Sync), parts: usize) {
        loop {
            let part = self.next.fetch_add(1, Ordering::Relaxed);
            if part >= parts {
                return;
            }
            work(part);
        }
    }

    fn serve(&self) {
        let (mut seen, mut looked) = (0, true);
        let mut state = self.state.lock();
        loop {
            if state.stop {
                return;
            }
            match state.job {
                Some(job) if state.number != seen => {
                    (seen, looked) = (state.number, false);
                    state.inside += 1;
                    self.inside.store(state.inside, Ordering::Relaxed);
                    drop(state);
                    // SAFETY: `job.work` was read under the lock while the job was set, and `inside` was
                    // counted up under the same lock; `run` keeps the closure alive until `inside` is 0.
                    let work = unsafe { &*job.work };
                    let result = catch_unwind(AssertUnwindSafe(|| self.take_parts(work, job.parts)));
                    state = self.state.lock();
                    state.inside -= 1;
                    self.inside.store(state.inside, Ordering::Relaxed);
                    if let Err(panic) = result {
                        state.panic.get_or_insert(panic);
                    }
                    if state.inside == 0 {
                        self.done.notify_one();
                    }
                }
                _ if looked => {
                    self.wake.wait(&mut state);
                    looked = false;
                }
                _ => {
                    // A job that ended without this thread is none to wait for.
                    seen = state.number;
                    drop(state);
                    looked = !look(|| self.posted.load(Ordering::Relaxed) != seen);
                    state = self.state.lock();
                }
            }
        }
    }
}

impl Workers {
    /// Starts `threads - 1` threads, which with the caller make `threads`; fewer if the system refuses one.
    pub(crate) fn new(threads: usize) -> Self {
        let shared: Arc<Shared> = Arc::default();
        let threads = (1..threads)
            .map_while(|i| {
                let shared = Arc::clone(&shared);
                Builder::new().name(format!("kv-cpu-{i}")).spawn(move || shared.serve()).ok()
            })
            .collect();
        Self { shared, threads, busy: Mutex::new(()) }
    }

    /// Returns the pool with one thread per processor, which all backends without a thread count of their own
    /// share.
    pub(crate) fn of_the_machine() -> Arc<Self> {
        static ALL: OnceLock<Arc<Workers>> = OnceLock::new();
        let threads = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Arc::clone(ALL.get_or_init(|| Arc::new(Self::new(threads()))))
    }

    /// Returns the number of threads, including the caller.
    pub(crate) fn count(&self) -> usize {
        self.threads.len() + 1
    }

    /// Returns the number of parts into which `units` units of work that move `bytes` bytes in all are best
    /// cut.
    pub(crate) fn parts(&self, units: usize, bytes: usize, bytes_per_thread: usize) -> usize {
        (bytes / bytes_per_thread.max(1)).min(self.count()).min(units).max(1)
    }

    /// Calls `work` once for each part of `0..parts`, on several threads, and waits for all of them.
    ///
    /// If a part panics, the panic is passed on after all other parts have ended.
    pub(crate) fn run(&self, parts: usize, work: &(dyn Fn(usize) + Sync)) {
        let alone = || (0..parts).for_each(work);
        if parts <= 1 || self.threads.is_empty() {
            return alone();
        }
        let Some(_busy) = self.busy.try_lock() else { return alone() };
        let shared = &self.shared;
        shared.next.store(0, Ordering::Relaxed);
        // SAFETY: the transmute changes only the lifetime of `work`. Threads call the job only while `inside`
        // counts them; below, the job is removed and `inside` reaches 0 before this call returns, so that
        // `work` outlives every use.
        let erased: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(work) };
        {
            let mut state = shared.state.lock();
            state.job = Some(Job { work: erased, parts });
            state.number += 1;
            shared.posted.store(state.number, Ordering::Relaxed);
        }
        shared.wake.notify_all();
        let own = catch_unwind(AssertUnwindSafe(|| shared.take_parts(work, parts)));
        shared.state.lock().job = None;
        look(|| shared.inside.load(Ordering::Relaxed) == 0);
        let mut state = shared.state.lock();
        while state.inside > 0 {
            shared.done.wait(&mut state);
        }
        let panic = state.panic.take();
        drop(state);
        if let Some(panic) = own.err().or(panic) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.state.lock().stop = true;
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A thread itself never panics: it catches the panics of its work.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_runs_once_on_any_number_of_threads() {
        for threads in [1, 2, 5] {
            let workers = Workers::new(threads);
            for parts in [0, 1, 2, 7, 1000] {
                let counts: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
                workers.run(parts, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn several_callers_at_once_all_get_their_work_done() {
        let workers = Workers::new(3);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let sum = AtomicUsize::new(0);
                        workers.run(9, &|i| {
                            sum.fetch_add(i, Ordering::Relaxed);
                        });
                        assert_eq!(sum.load(Ordering::Relaxed), 36);
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_is_passed_on_and_the_threads_live() {
        let workers = Workers::new(2);
        for bad in [0, 63] {
            let result = catch_unwind(AssertUnwindSafe(|| workers.run(64, &|i| assert_ne!(i, bad))));
            assert!(result.is_err());
        }
        let sum = AtomicUsize::new(0);
        workers.run(64, &|i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.load(Ordering::Relaxed), 2016);
    }

    #[test]
    fn little_work_stays_with_the_caller() {
        let workers = Workers::new(4);
        assert_eq!(workers.parts(1000, 999, 1000), 1);
        assert_eq!(workers.parts(1000, 3000, 1000), 3);
        assert_eq!(workers.parts(1, 1 << 30, 1000), 1);
        assert_eq!(workers.parts(1000, 1 << 30, 1000), 4);
        assert_eq!(workers.parts(0, 0, 0), 1);
    }
}
