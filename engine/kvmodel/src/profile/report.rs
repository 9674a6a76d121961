//! The report of a profiler, as a table and as JSON.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Serialize, Serializer};

/// The times recorded under one name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct SpanStats {
    /// The number of recorded spans with this name.
    pub count: u64,
    /// The sum of all durations.
    #[serde(rename = "total_seconds", serialize_with = "seconds")]
    pub total: Duration,
    /// The shortest duration.
    #[serde(rename = "min_seconds", serialize_with = "seconds")]
    pub min: Duration,
    /// The longest duration.
    #[serde(rename = "max_seconds", serialize_with = "seconds")]
    pub max: Duration,
}

fn seconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64())
}

impl SpanStats {
    /// Adds a duration.
    pub(super) fn add(&mut self, took: Duration) {
        self.min = if self.count == 0 { took } else { self.min.min(took) };
        self.max = self.max.max(took);
        self.count += 1;
        self.total = self.total.saturating_add(took);
    }

    /// Returns the average duration, or 0 if no span was recorded.
    pub fn mean(&self) -> Duration {
        let nanos = self.total.as_nanos().checked_div(u128::from(self.count)).unwrap_or(0);
        Duration::from_nanos(nanos.min(u128::from(u64::MAX)) as u64)
    }
}

/// The spans and counters of a [`Profiler`](super::Profiler).
///
/// The report is displayed as a table, with the longest total first. Its JSON has durations in seconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ProfileReport {
    /// The spans by name.
    pub spans: BTreeMap<&'static str, SpanStats>,
    /// The counters by name.
    pub counters: BTreeMap<&'static str, u64>,
}

impl fmt::Display for ProfileReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |duration: Duration| format!("{:.3}", duration.as_secs_f64() * 1e3);
        let mut spans: Vec<_> = self.spans.iter().collect();
        spans.sort_by_key(|(_, stats)| Reverse(stats.total));
        let spans = spans.into_iter().map(|(name, s)| {
            vec![(*name).to_owned(), s.count.to_string(), ms(s.total), ms(s.mean()), ms(s.min), ms(s.max)]
        });
        table(f, &["span", "count", "total ms", "mean ms", "min ms", "max ms"], spans.collect())?;
        if !self.spans.is_empty() && !self.counters.is_empty() {
            writeln!(f)?;
        }
        let counters = self.counters.iter().map(|(name, n)| vec![(*name).to_owned(), n.to_string()]);
        table(f, &["counter", "value"], counters.collect())
    }
}

/// Writes rows under a header, with the first column left-aligned and all other columns right-aligned.
/// Writes nothing if there are no rows.
fn table(f: &mut fmt::Formatter<'_>, header: &[&str], mut rows: Vec<Vec<String>>) -> fmt::Result {
    if rows.is_empty() {
        return Ok(());
    }
    rows.insert(0, header.iter().map(|&title| title.to_owned()).collect());
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    for row in &rows {
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            if column == 0 { write!(f, "{cell:<width$}")? } else { write!(f, "  {cell:>width$}")? }
        }
        writeln!(f)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> ProfileReport {
        let stats = |micros: &[u64]| {
            let mut stats = SpanStats::default();
            for &us in micros {
                stats.add(Duration::from_micros(us));
            }
            stats
        };
        ProfileReport {
            spans: [("decode", stats(&[400, 600, 500])), ("look-up und Prüfung", stats(&[12_345]))].into(),
            counters: [("blocks evicted", 7), ("tokens", 1024)].into(),
        }
    }

    #[test]
    fn the_table_is_aligned_and_the_longest_comes_first() {
        let expected = "\
span                 count  total ms  mean ms  min ms  max ms
look-up und Prüfung      1    12.345   12.345  12.345  12.345
decode                   3     1.500    0.500   0.400   0.600

counter         value
blocks evicted      7
tokens           1024
";
        assert_eq!(report().to_string(), expected);
        assert_eq!(ProfileReport::default().to_string(), "");
        let counters = ProfileReport { spans: BTreeMap::new(), ..report() };
        assert!(counters.to_string().starts_with("counter "), "no empty line before it");
    }

    #[test]
    fn json_has_seconds() {
        let json = serde_json::to_value(report()).unwrap();
        let expected = serde_json::json!({
            "count": 3, "total_seconds": 0.0015, "min_seconds": 0.0004, "max_seconds": 0.0006
        });
        assert_eq!((&json["spans"]["decode"], &json["counters"]["tokens"]), (&expected, &1024.into()));
    }

    #[test]
    fn the_longest_times_do_not_overflow() {
        let mut stats = SpanStats::default();
        assert_eq!(stats.mean(), Duration::ZERO);
        stats.add(Duration::MAX);
        stats.add(Duration::MAX);
        assert_eq!((stats.total, stats.min), (Duration::MAX, Duration::MAX));
        assert_eq!(stats.mean(), Duration::from_nanos(u64::MAX));
    }
}
