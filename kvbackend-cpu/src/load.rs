//! Estimates how busy other threads keep the cores, by how long a pool's threads wait for a core.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Minimum time between two system queries by one thread. A query takes about a microsecond.
const BETWEEN: Duration = Duration::from_millis(1);

thread_local! {
    /// The time of this thread's last query, and its answer.
    static ASKED: Cell<Option<(Instant, Losses)>> = const { Cell::new(None) };
}

/// The time that a thread has lost to others since it began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Losses {
    /// The number of times that the thread was preempted.
    preemptions: u64,
    /// The time that the thread was ready to run without a core. It includes the time to wake the thread, which the thread
    /// does not lose in the middle of its work.
    waited: Duration,
}

impl Losses {
    /// Returns the time that a thread lost since `earlier` if it was preempted.
    fn since(self, earlier: Self) -> Duration {
        if self.preemptions > earlier.preemptions {
            self.waited.saturating_sub(earlier.waited)
        } else {
            Duration::ZERO
        }
    }
}

/// Returns how long this thread has waited for a core since the last call if it was preempted, and zero if it was not, or
/// if the last call was less than [`BETWEEN`] ago.
pub(crate) fn lost(now: Instant) -> Duration {
    match ASKED.get() {
        Some((asked, _)) if now.saturating_duration_since(asked) < BETWEEN => Duration::ZERO,
        before => {
            let losses = losses();
            ASKED.set(Some((now, losses)));
            before.map_or(Duration::ZERO, |(_, before)| losses.since(before))
        }
    }
}

/// Excludes what this thread has lost so far from the next result of [`lost`].
fn forget(now: Instant) {
    ASKED.set(Some((now, losses())));
}

/// Asks the system what this thread has lost.
#[cfg(target_os = "linux")]
fn losses() -> Losses {
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;

    /// The time that a preemption is taken to last where the system does not measure it.
    const SLICE: Duration = Duration::from_millis(1);

    thread_local! {
        /// The thread's times: on a core and without one, in nanoseconds.
        static TIMES: Option<File> = File::open("/proc/thread-self/schedstat").ok();
    }
    let measured = || {
        let mut text = [0; 96];
        let length = TIMES.with(|file| file.as_ref()?.read_at(&mut text, 0).ok())?;
        let waited = std::str::from_utf8(text.get(..length)?).ok()?.split_whitespace().nth(1)?;
        Some(Duration::from_nanos(waited.parse().ok()?))
    };
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` has room for the answer, and all zeros are a valid value.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
        usage.assume_init()
    };
    let preemptions = u64::try_from(usage.ru_nivcsw).unwrap_or(0);
    let waited = measured().unwrap_or_else(|| SLICE * u32::try_from(preemptions).unwrap_or(u32::MAX));
    Losses { preemptions, waited }
}

/// Returns nothing, because losses are known only on Linux. On other systems, a pool's threads always help.
#[cfg(not(target_os = "linux"))]
fn losses() -> Losses {
    Losses::default()
}

/// Minimum length of the window in which lost time is added up.
const WINDOW: Duration = Duration::from_millis(20);

/// The time that a pool's threads together lose per [`WINDOW`] if cores are considered busy. On a core shared by two busy
/// threads, each loses half of the window. Threads that only pass on what was computed, such as those of a server, take
/// much less.
const MUCH: Duration = Duration::from_millis(3);

/// The first and the longest period in which callers work alone after cores were found busy. The trial window
/// after each period is much shorter than the period.
const ALONE: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(800)];

// Decision: docs/decisions/backend-cpu.md#on-busy-cores-the-caller-works-alone
/// Decides whether a pool's threads help with its jobs.
#[derive(Debug)]
pub(crate) struct Judgement {
    /// The start of the current window, and the time lost before it.
    since: Option<(Instant, Duration)>,
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
    /// Returns whether threads should help with a job that begins now. `lost` is the time that the pool's threads have
    /// lost so far.
    pub(crate) fn threads_help(&mut self, now: Instant, lost: Duration) -> bool {
        if let Some(until) = self.until {
            if now < until {
                return false;
            }
            self.until = None;
            self.since = None;
            forget(now);
        }
        let (begun, before) = *self.since.get_or_insert((now, lost));
        let elapsed = now.saturating_duration_since(begun);
        if elapsed < WINDOW {
            return true;
        }
        self.since = Some((now, lost));
        let lost = lost.saturating_sub(before);
        if lost.as_nanos() * WINDOW.as_nanos() < MUCH.as_nanos() * elapsed.as_nanos() {
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
    /// milliseconds lost so far.
    fn judged(judgement: &mut Judgement, start: Instant, jobs: &[(u64, u64)]) -> Vec<bool> {
        let ms = Duration::from_millis;
        jobs.iter().map(|&(at, lost)| judgement.threads_help(start + ms(at), ms(lost))).collect()
    }

    #[test]
    fn busy_cores_are_left_alone_for_a_while_and_tried_again() {
        let (mut judgement, start) = (Judgement::default(), Instant::now());
        let first = [(0, 0), (10, 2), (19, 9), (20, 9), (60, 9), (119, 30)];
        assert_eq!(judged(&mut judgement, start, &first), [true, true, true, false, false, false]);
        // The trial window ignores what was lost before it. The cores are busy again, so callers work alone
        // for twice as long.
        let second = [(121, 40), (140, 44), (141, 44), (330, 50), (342, 50)];
        assert_eq!(judged(&mut judgement, start, &second), [true, true, false, false, true]);
        // The cores are free again.
        assert_eq!(judged(&mut judgement, start, &[(370, 51), (400, 52), (430, 52)]), [true; 3]);
        let busy_again = [(450, 60), (540, 60), (551, 60)];
        assert_eq!(judged(&mut judgement, start, &busy_again), [false, false, true], "as long as at first");
    }

    #[test]
    fn a_wait_now_and_then_is_no_load() {
        let (mut judgement, start) = (Judgement::default(), Instant::now());
        let jobs: Vec<(u64, u64)> = (0..1000).map(|i| (10 * i, i)).collect();
        assert!(judged(&mut judgement, start, &jobs).into_iter().all(|help| help));
        // Few jobs with long pauses lose much, but over a whole second.
        assert!(
            judged(&mut judgement, start, &[(10_000, 1000), (11_000, 1100)]).into_iter().all(|help| help)
        );
    }

    #[test]
    fn a_thread_counts_its_losses_since_its_last_query_and_may_ignore_some() {
        let (now, later) = (Instant::now(), |times: u32| Instant::now() + times * BETWEEN);
        assert_eq!(lost(now), Duration::ZERO, "the first call only remembers");
        // Pretend that the thread had lost nothing by its last query.
        ASKED.set(Some((now, Losses::default())));
        assert_eq!(lost(now), Duration::ZERO, "a moment ago");
        let before = losses();
        let since = lost(later(2));
        assert!(since <= losses().waited && since >= before.since(Losses::default()), "{since:?}");
        ASKED.set(Some((now, Losses::default())));
        forget(later(3));
        assert!(ASKED.get().is_some_and(|(_, losses)| losses.waited >= before.waited));
    }

    #[test]
    fn only_a_preempted_thread_loses_what_it_waits() {
        let losses = |preemptions, ms| Losses { preemptions, waited: Duration::from_millis(ms) };
        assert_eq!(losses(3, 9).since(losses(2, 5)), Duration::from_millis(4));
        assert_eq!(losses(3, 9).since(losses(3, 5)), Duration::ZERO, "it was only woken late");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn threads_that_share_their_cores_lose_time() {
        let threads = 2 * std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let until = Instant::now() + Duration::from_millis(300);
        let spin = || {
            let before = losses();
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            losses().since(before)
        };
        let lost: Duration = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(spin)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        // Of two threads on a core, one waits at any time.
        assert!(lost > Duration::from_millis(100), "{lost:?}");
    }
}
