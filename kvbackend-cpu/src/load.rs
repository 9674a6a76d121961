//! Estimates how busy other programs keep the cores, by counting how often the scheduler preempts a pool's
//! threads.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Minimum time between two system queries by one thread. A query takes a fraction of a microsecond.
const BETWEEN: Duration = Duration::from_millis(1);

thread_local! {
    /// The time of this thread's last count of preemptions, and the count.
    static ASKED: Cell<Option<(Instant, u64)>> = const { Cell::new(None) };
}

/// Returns the number of times that this thread was preempted since its preemptions were last counted, or 0
/// if that was less than [`BETWEEN`] ago.
pub(crate) fn preemptions(now: Instant) -> u64 {
    match ASKED.get() {
        Some((asked, _)) if now.saturating_duration_since(asked) < BETWEEN => 0,
        before => {
            let count = count();
            ASKED.set(Some((now, count)));
            before.map_or(0, |(_, before)| count.saturating_sub(before))
        }
    }
}

/// Excludes all earlier preemptions of this thread from the next result of [`preemptions`].
fn forget(now: Instant) {
    ASKED.set(Some((now, count())));
}

/// Returns the number of times that this thread has been preempted.
#[cfg(target_os = "linux")]
fn count() -> u64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` has room for the answer, and all zeros are a valid value.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
        usage.assume_init()
    };
    u64::try_from(usage.ru_nivcsw).unwrap_or(0)
}

/// Returns 0, because preemptions are counted only on Linux. On other systems, a pool's threads always help.
#[cfg(not(target_os = "linux"))]
fn count() -> u64 {
    0
}

/// Minimum length of the window in which preemptions are counted.
const WINDOW: Duration = Duration::from_millis(20);

/// Number of preemptions per [`WINDOW`] at which cores are considered busy. On a core shared by two busy
/// threads, a preemption occurs about every three milliseconds; on a free core, only occasionally.
const MANY: u64 = 3;

/// The first and the longest period in which callers work alone after cores were found busy. The trial window
/// after each period is much shorter than the period.
const ALONE: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(800)];

// Decision: docs/decisions/backend-cpu.md#on-busy-cores-the-caller-works-alone
/// Decides whether a pool's threads help with its jobs.
#[derive(Debug)]
pub(crate) struct Judgement {
    /// The start of the current window, and the number of preemptions before it.
    since: Option<(Instant, u64)>,
    /// The end of the current period in which callers work alone, if there is one.
    until: Option<Instant>,
    /// The length of the next period in which callers work alone.
    alone: Duration,
}

impl Default for Judgement {
    fn default() -> Self {
        Self { since: None, until: None, alone: ALONE[0] }
    }
}

impl Judgement {
    /// Returns whether threads should help with a job that begins now. `preemptions` is the total number of
    /// preemptions of the pool's threads so far.
    pub(crate) fn threads_help(&mut self, now: Instant, preemptions: u64) -> bool {
        if let Some(until) = self.until {
            if now < until {
                return false;
            }
            self.until = None;
            self.since = None;
            forget(now);
        }
        let (begun, before) = *self.since.get_or_insert((now, preemptions));
        let elapsed = now.saturating_duration_since(begun);
        if elapsed < WINDOW {
            return true;
        }
        self.since = Some((now, preemptions));
        let count = u128::from(preemptions.saturating_sub(before));
        if count * WINDOW.as_nanos() < u128::from(MANY) * elapsed.as_nanos() {
            self.alone = ALONE[0];
            return true;
        }
        self.until = Some(now + self.alone);
        self.alone = ALONE[1].min(2 * self.alone);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether threads help with each job. A job is given by its time in milliseconds and by the
    /// total number of preemptions so far.
    fn judged(judgement: &mut Judgement, start: Instant, jobs: &[(u64, u64)]) -> Vec<bool> {
        let at = |&(ms, count): &(u64, u64)| judgement.threads_help(start + Duration::from_millis(ms), count);
        jobs.iter().map(at).collect()
    }

    #[test]
    fn busy_cores_are_left_alone_for_a_while_and_tried_again() {
        let (mut judgement, start) = (Judgement::default(), Instant::now());
        let first = [(0, 0), (10, 2), (19, 9), (20, 9), (60, 9), (119, 30)];
        assert_eq!(judged(&mut judgement, start, &first), [true, true, true, false, false, false]);
        // The trial window ignores the preemptions before it. The cores are busy again, so callers work alone
        // for twice as long.
        let second = [(121, 40), (140, 44), (141, 44), (330, 50), (342, 50)];
        assert_eq!(judged(&mut judgement, start, &second), [true, true, false, false, true]);
        // The cores are free again.
        assert_eq!(judged(&mut judgement, start, &[(370, 51), (400, 52), (430, 52)]), [true; 3]);
        let busy_again = [(450, 60), (540, 60), (551, 60)];
        assert_eq!(judged(&mut judgement, start, &busy_again), [false, false, true], "as long as at first");
    }

    #[test]
    fn a_preemption_now_and_then_is_no_load() {
        let (mut judgement, start) = (Judgement::default(), Instant::now());
        let jobs: Vec<(u64, u64)> = (0..1000).map(|i| (10 * i, i / 10)).collect();
        assert!(judged(&mut judgement, start, &jobs).into_iter().all(|help| help));
        // Few jobs with long pauses: a whole second has only as many preemptions as a busy window.
        assert!(judged(&mut judgement, start, &[(10_000, 100), (11_000, 110)]).into_iter().all(|help| help));
    }

    #[test]
    fn a_thread_counts_its_losses_since_its_last_query_and_may_ignore_some() {
        let (now, later) = (Instant::now(), |times: u32| Instant::now() + times * BETWEEN);
        assert_eq!(preemptions(now), 0, "the first call only remembers");
        // Pretend that there have been five preemptions since they were last counted.
        ASKED.set(Some((now, count().wrapping_sub(5))));
        assert_eq!(preemptions(now), 0, "a moment ago");
        if count() >= 5 {
            assert!(preemptions(later(2)) >= 5);
        }
        ASKED.set(Some((now, 0)));
        forget(later(3));
        assert_eq!(ASKED.get().map(|(_, lost)| lost), Some(count()));
    }
}
