//! Named spans, which measure times, and named counters of events.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

mod report;

pub use report::{ProfileReport, SpanStats};

/// A collection of spans and counters. Clones share the collection, and any thread may use them.
///
/// A disabled profiler records nothing. A span costs one pointer test when it begins and one when it ends,
/// and an increment costs one pointer test. No clock is read, no lock is taken and no memory is allocated.
///
/// An enabled profiler reads the clock twice per span, and briefly takes a lock when the span ends. The lock
/// is not held while the work runs, so spans may be nested. The time of an outer span includes the times of
/// its inner spans.
///
/// ```
/// use kvmodel::Profiler;
///
/// fn prefill(profiler: &Profiler, fail: bool) -> Result<(), &'static str> {
///     let _span = profiler.record("prefill");       // ends at `}`, at `?` and at a panic
///     profiler.increment("tokens", 512);
///     if fail { Err("out of blocks")? }
///     Ok(())
/// }
///
/// let profiler = Profiler::enabled();
/// prefill(&profiler, false)?;
/// assert!(prefill(&profiler, true).is_err());
/// assert_eq!(profiler.span("decode", || 42), 42);   // a span around a closure
/// let report = profiler.report();
/// assert_eq!((report.spans["prefill"].count, report.counters["tokens"]), (2, 1024));
/// println!("{report}");                             // a table; `serde` gives JSON
/// # Ok::<(), &'static str>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Profiler(Option<Arc<Mutex<ProfileReport>>>);

impl Profiler {
    /// Creates a profiler that records.
    pub fn enabled() -> Self {
        Self(Some(Arc::default()))
    }

    /// Creates a profiler that does nothing.
    pub fn disabled() -> Self {
        Self(None)
    }

    /// Returns true if the profiler records.
    pub fn is_enabled(&self) -> bool {
        self.0.is_some()
    }

    /// Starts a span. The span ends when the guard is dropped, no matter how the scope is left.
    #[inline]
    pub fn record(&self, name: &'static str) -> Span<'_> {
        Span(self.0.as_ref().map(|records| (records.as_ref(), name, Instant::now())))
    }

    /// Runs `work` and records its time.
    pub fn span<T>(&self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let _span = self.record(name);
        work()
    }

    /// Adds `by` to a counter. A counter starts at 0 and saturates at `u64::MAX`.
    #[inline]
    pub fn increment(&self, name: &'static str, by: u64) {
        if let Some(records) = &self.0 {
            let mut records = records.lock();
            let counter = records.counters.entry(name).or_default();
            *counter = counter.saturating_add(by);
        }
    }

    /// Returns the statistics of all spans, by name.
    pub fn summary(&self) -> BTreeMap<&'static str, SpanStats> {
        self.report().spans
    }

    /// Returns all spans and counters.
    pub fn report(&self) -> ProfileReport {
        self.0.as_ref().map(|records| records.lock().clone()).unwrap_or_default()
    }

    /// Discards everything recorded so far. A running span is still recorded when it ends.
    pub fn reset(&self) {
        if let Some(records) = &self.0 {
            *records.lock() = ProfileReport::default();
        }
    }
}

/// A running span.
///
/// # Drop behaviour
/// Records the time since [`Profiler::record`] under the span's name.
#[derive(Debug)]
#[must_use = "a span ends when its guard is dropped"]
pub struct Span<'a>(Option<(&'a Mutex<ProfileReport>, &'static str, Instant)>);

impl Drop for Span<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some((records, name, start)) = self.0 {
            let took: Duration = start.elapsed();
            records.lock().spans.entry(name).or_default().add(took);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_add_up_and_a_disabled_profiler_keeps_none() {
        let profiler = Profiler::enabled();
        for _ in 0..3 {
            assert_eq!(profiler.clone().span("a", || 7), 7);
        }
        let a = profiler.summary()["a"];
        assert!(a.count == 3 && a.min <= a.max && a.max <= a.total);
        profiler.increment("n", 1);
        profiler.reset();
        assert_eq!(profiler.report(), ProfileReport::default());
        let off = Profiler::disabled();
        assert_eq!((off.span("a", || 1), off.is_enabled(), off.record("b").0.is_none()), (1, false, true));
        off.increment("n", 1);
        assert_eq!(off.report(), ProfileReport::default());
    }

    #[test]
    fn guards_record_whichever_way_a_scope_is_left() {
        let profiler = Profiler::enabled();
        let work = |fail: bool| -> Result<(), ()> {
            let _span = profiler.record("work");
            if fail {
                Err(())?;
            }
            Ok(())
        };
        assert!(work(false).is_ok() && work(true).is_err());
        let panics = || profiler.span("work", || std::panic::resume_unwind(Box::new("as a kernel would")));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics));
        assert!(panicked.is_err());
        assert_eq!(profiler.summary()["work"].count, 3);
    }

    #[test]
    fn spans_inside_spans_are_part_of_the_outer_one() {
        let profiler = Profiler::enabled();
        let outer = profiler.record("outer");
        profiler.span("inner", || profiler.span("inner", || std::thread::sleep(Duration::from_millis(2))));
        assert!(!profiler.summary().contains_key("outer"), "it still runs");
        drop(outer);
        let spans = profiler.summary();
        assert_eq!((spans["inner"].count, spans["outer"].count), (2, 1));
        assert!(spans["outer"].total >= spans["inner"].max && spans["inner"].min >= Duration::from_millis(2));
    }

    #[test]
    fn threads_share_a_collection() {
        let profiler = Profiler::enabled();
        std::thread::scope(|scope| {
            for thread in 1..=4 {
                let profiler = profiler.clone();
                scope.spawn(move || {
                    for _ in 0..500 {
                        let _span = profiler.record("step");
                        profiler.increment("tokens", thread);
                    }
                });
            }
        });
        let report = profiler.report();
        assert_eq!((report.spans["step"].count, report.counters["tokens"]), (2000, 500 * 10));
        profiler.increment("tokens", u64::MAX);
        assert_eq!(profiler.report().counters["tokens"], u64::MAX);
    }
}
