//! A pool of threads that run parts of kernels.
//!
//! Kernels are short: a decode step runs about ten of them per millisecond. Therefore, threads poll for a
//! while before they sleep, the caller also works, and a call does not allocate. The caller works alone if
//! the threads are busy with another stream's work, or if the cores are busy with other programs: a thread
//! that is preempted in the middle of a part would keep all other threads waiting.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::load::{Judgement, lost};

/// A pool of threads that share the parts of one job at a time. The threads are started by the first job that
/// is split, and end when the pool is dropped.
pub(crate) struct Workers {
    shared: Arc<SharedQueue>,
    /// Number of threads in the pool, including the caller.
    count: usize,
    threads: OnceLock<Vec<JoinHandle<()>>>,
    /// A lock that is held while a job runs on several threads.
    busy: Mutex<Judgement>,
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Workers({})", self.count())
    }
}

#[derive(Default)]
struct SharedQueue {
    state: Mutex<JobState>,
    wake: Condvar,
    done: Condvar,
    /// Index of the next part to run.
    next: AtomicUsize,
    /// A copy of `number` in `state`, for threads that poll without the lock.
    posted: AtomicU64,
    /// A copy of `inside` in `state`, for a caller that polls without the lock.
    inside: AtomicUsize,
    /// Total time, in nanoseconds, that threads waited for a core while they worked on jobs.
    lost: AtomicU64,
}

// Decision: docs/decisions/backend-cpu.md#threads-poll-before-they-sleep
/// Number of times that a thread polls a value before it sleeps (about 30 µs). A model's next step usually
/// begins before a sleeping thread could be woken.
const LOOKS: usize = 1000;

/// Polls `ready` for a limited time, and returns whether `ready` returned true.
fn look(ready: impl Fn() -> bool) -> bool {
    (0..LOOKS).any(|_| {
        std::hint::spin_loop();
        ready()
    })
}

#[derive(Default)]
struct JobState {
    job: Option<Job>,
    /// Number of jobs so far. Threads compare this number so that they take part in each job only once.
    number: u64,
    /// Number of pool threads that are working on the job.
    inside: usize,
    panic: Option<Box<dyn Any + Send>>,
    stop: bool,
}

/// A job: the function to call for each part, and the number of parts. `Workers::run` keeps the closure that
/// `work` points to alive until no thread uses it.
#[derive(Clone, Copy)]
struct Job {
    work: *const (dyn Fn(usize) + Sync),
    parts: usize,
}

// SAFETY: `work` points to a `Sync` closure, and `Workers::run` keeps the closure alive until no thread works
// on the job.
unsafe impl Send for Job {}

impl SharedQueue {
    /// Calls `work` with one part after another until no parts are left.
    fn take_parts(&self, work: &(dyn Fn(usize) + Sync), parts: usize) {
        loop {
            let part = self.next.fetch_add(1, Ordering::Relaxed);
            if part >= parts {
                break;
            }
            work(part);
        }
        let lost = lost(Instant::now()).as_nanos() as u64;
        if lost > 0 {
            self.lost.fetch_add(lost, Ordering::Relaxed);
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
                    // increased under the same lock; `run` keeps the closure alive until `inside` is 0.
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
                    // Skip a job that ended before this thread could join it.
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
    /// Creates a pool of `count` threads, including the caller.
    pub(crate) fn new(count: usize) -> Self {
        let (shared, busy) = (Arc::default(), Mutex::default());
        Self { shared, count: count.max(1), threads: OnceLock::new(), busy }
    }

    // Decision: docs/decisions/backend-cpu.md#backends-without-a-thread-count-share-a-pool
    /// Returns the pool with one thread per processor. The pool is shared by all backends that do not set a
    /// thread count, and ends when nothing uses it any more.
    pub(crate) fn of_the_machine() -> Arc<Self> {
        static SHARED: Mutex<Weak<Workers>> = Mutex::new(Weak::new());
        let count = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self::shared(&SHARED, count)
    }

    fn shared(place: &Mutex<Weak<Self>>, count: impl FnOnce() -> usize) -> Arc<Self> {
        let mut place = place.lock();
        place.upgrade().unwrap_or_else(|| {
            let pool = Arc::new(Self::new(count()));
            *place = Arc::downgrade(&pool);
            pool
        })
    }

    /// Starts all threads of the pool except the caller. Stops at the first thread that the system fails to
    /// start.
    fn start(&self) -> Vec<JoinHandle<()>> {
        let start = |i| {
            let shared = Arc::clone(&self.shared);
            Builder::new().name(format!("kv-cpu-{i}")).spawn(move || shared.serve()).ok()
        };
        (1..self.count).map_while(start).collect()
    }

    /// Returns the number of threads, including the caller.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Returns the best number of parts for `units` units of work that together move `bytes` bytes.
    pub(crate) fn parts(&self, units: usize, bytes: usize, bytes_per_thread: usize) -> usize {
        (bytes / bytes_per_thread.max(1)).min(self.count()).min(units).max(1)
    }

    /// Calls `work` once for each part in `0..parts`, and waits until all calls have returned. Uses several
    /// threads unless the pool has another job or the cores are busy.
    ///
    /// If a part panics, the panic continues in the caller after the parts on other threads have ended.
    pub(crate) fn run(&self, parts: usize, work: &(dyn Fn(usize) + Sync)) {
        let alone = || (0..parts).for_each(work);
        if parts <= 1 || self.count == 1 {
            return alone();
        }
        let Some(mut busy) = self.busy.try_lock() else { return alone() };
        let shared = &self.shared;
        let lost = Duration::from_nanos(shared.lost.load(Ordering::Relaxed));
        if !busy.threads_help(Instant::now(), lost) {
            drop(busy);
            return alone();
        }
        self.threads.get_or_init(|| self.start());
        shared.next.store(0, Ordering::Relaxed);
        // SAFETY: the transmute changes only the lifetime of `work`. Threads call the job only while `inside`
        // counts them; below, the job is removed and `inside` reaches 0 before this call returns, so
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
        for thread in self.threads.take().into_iter().flatten() {
            // Joining cannot fail, because a thread catches the panics of its work.
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
    fn threads_start_with_the_first_job_and_end_with_the_pool() {
        let workers = Workers::new(3);
        workers.run(1, &|_| ());
        assert!(workers.threads.get().is_none(), "one part needs no threads");
        workers.run(8, &|_| ());
        assert_eq!(workers.threads.get().map(Vec::len), Some(2));
        let shared = Arc::downgrade(&workers.shared);
        drop(workers);
        assert!(shared.upgrade().is_none(), "a thread that lived would hold what they share");
    }

    #[test]
    fn a_shared_pool_ends_with_its_last_user() {
        let place = Mutex::new(Weak::new());
        let (a, b) = (Workers::shared(&place, || 2), Workers::shared(&place, || 5));
        assert!(Arc::ptr_eq(&a, &b));
        a.run(4, &|_| ());
        let shared = Arc::downgrade(&a.shared);
        drop(a);
        assert!(shared.upgrade().is_some());
        drop(b);
        assert!(shared.upgrade().is_none());
        assert_eq!(Workers::shared(&place, || 5).count(), 5, "a new one");
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
