//! Named spans: where time went. A disabled profiler costs one branch per span.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Time spent under one name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct SpanStats {
    /// Times the span was entered.
    pub count: u64,
    /// Sum of all durations.
    pub total: Duration,
    /// Shortest duration.
    pub min: Duration,
    /// Longest duration.
    pub max: Duration,
}

/// Collects spans; clones share the collection.
///
/// ```
/// use kvcore::Profiler;
/// let profiler = Profiler::enabled();
/// profiler.span("prefill", || ());
/// assert_eq!(profiler.summary()["prefill"].count, 1);
/// ```
#[derive(Debug, Clone, Default)]
pub struct Profiler(Option<Arc<Mutex<BTreeMap<&'static str, SpanStats>>>>);

impl Profiler {
    /// A profiler that records.
    pub fn enabled() -> Self {
        Self(Some(Arc::default()))
    }

    /// A profiler that does nothing.
    pub fn disabled() -> Self {
        Self(None)
    }

    /// Whether spans are recorded.
    pub fn is_enabled(&self) -> bool {
        self.0.is_some()
    }

    /// Runs `work` and records how long it took.
    pub fn span<T>(&self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let Some(spans) = &self.0 else { return work() };
        let start = Instant::now();
        let value = work();
        let took = start.elapsed();
        spans
            .lock()
            .entry(name)
            .and_modify(|s| {
                s.count += 1;
                s.total += took;
                s.min = s.min.min(took);
                s.max = s.max.max(took);
            })
            .or_insert(SpanStats { count: 1, total: took, min: took, max: took });
        value
    }

    /// All spans by name.
    pub fn summary(&self) -> BTreeMap<&'static str, SpanStats> {
        self.0.as_ref().map(|spans| spans.lock().clone()).unwrap_or_default()
    }

    /// Forgets all spans.
    pub fn reset(&self) {
        if let Some(spans) = &self.0 {
            spans.lock().clear();
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
        profiler.reset();
        assert!(profiler.summary().is_empty());
        assert_eq!(Profiler::disabled().span("a", || 1), 1);
        assert!(Profiler::disabled().summary().is_empty());
    }
}
