//! Rows parsed from the benchmarks' output, and sweeps: rows that differ only in size.

use serde::Deserialize;

/// One row.
#[derive(Debug, Clone, Deserialize)]
pub struct BenchRow {
    /// The name of the measurement.
    pub what: String,
    /// The sweep's name, if `what` names the size. All rows of such a sweep are shown.
    pub sweep: Option<String>,
    /// The size, in `unit`.
    pub size: f64,
    /// The unit of the size, such as bytes, tokens or GFLOP.
    pub unit: String,
    /// The measured time.
    pub seconds: f64,
    /// The name of the limit or peer.
    pub limit: String,
    /// The time of the limit or peer.
    pub limit_seconds: f64,
    /// `limit_seconds / seconds`.
    pub ratio: f64,
    /// True if a test double replaced the device, so the times do not apply to a real device.
    #[serde(default)]
    pub double: bool,
}

impl BenchRow {
    /// Formats the row's rate: bytes per second if its size is in bytes, otherwise operations per second. A
    /// copy's bytes count once, although they are read and written.
    pub fn rate(&self) -> Option<String> {
        let rate = self.size / self.seconds;
        match (self.unit.as_str(), rate) {
            ("bytes", r) if r < 1e6 => Some(format!("{:.1} KB/s", r / 1e3)),
            ("bytes", r) if r < 1e9 => Some(format!("{:.0} MB/s", r / 1e6)),
            ("bytes", r) => Some(format!("{:.1} GB/s", r / 1e9)),
            ("GFLOP", r) => Some(format!("{:.1} TFLOP/s", r / 1e3)),
            _ => None,
        }
    }
}

/// Parses the rows in a benchmark's output.
pub fn parsed(output: &str) -> Vec<BenchRow> {
    output.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Rows that differ only in size, smallest first.
#[derive(Debug)]
pub struct Sweep {
    /// The name shared by all rows.
    pub name: String,
    /// The rows.
    pub rows: Vec<BenchRow>,
}

impl Sweep {
    /// Returns the exponent `e` for which time grows like size to the power of `e`, measured between the
    /// smallest and the largest size. Returns `None` if the rows do not differ in size.
    pub fn exponent(&self) -> Option<f64> {
        let (first, last) = (self.rows.first()?, self.rows.last()?);
        let grown = last.size / first.size;
        (grown > 1.0).then(|| (last.seconds / first.seconds).ln() / grown.ln())
    }

    /// Returns the rows to show: all rows if their names include the size, otherwise only the largest
    /// row.
    pub fn shown(&self) -> &[BenchRow] {
        match self.rows.last() {
            Some(last) if last.sweep.as_ref().is_none_or(|name| *name == last.what) => {
                &self.rows[self.rows.len() - 1..]
            }
            _ => &self.rows,
        }
    }
}

/// Groups rows into sweeps, in order of first occurrence.
pub fn sweeps(rows: Vec<BenchRow>) -> Vec<Sweep> {
    let mut all: Vec<Sweep> = Vec::new();
    for row in rows {
        let name = row.sweep.clone().unwrap_or_else(|| row.what.clone());
        // The limits in a named sweep may have different names.
        let same = |s: &&mut Sweep| s.name == name && (row.sweep.is_some() || s.rows[0].limit == row.limit);
        match all.iter_mut().find(same) {
            Some(sweep) => sweep.rows.push(row),
            None => all.push(Sweep { name, rows: vec![row] }),
        }
    }
    for sweep in &mut all {
        sweep.rows.sort_by(|a, b| a.size.total_cmp(&b.size));
    }
    all
}

/// A row at the largest size of its sweep.
#[derive(Debug, Clone, PartialEq)]
pub struct LargestRow {
    /// The name of the measurement.
    pub what: String,
    /// The size in bytes, or `None` if the row has another unit.
    pub bytes: Option<f64>,
    /// The measured time.
    pub seconds: f64,
}

/// Parses the rows in a benchmark's output, and keeps only the largest row of each sweep.
pub fn largest(output: &str) -> Vec<LargestRow> {
    let last = |sweep: Sweep| {
        let BenchRow { what, size, unit, seconds, .. } = sweep.rows.into_iter().next_back()?;
        Some(LargestRow { what, bytes: (unit == "bytes").then_some(size), seconds })
    };
    sweeps(parsed(output)).into_iter().filter_map(last).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn row(size: f64, seconds: f64) -> BenchRow {
        let (what, unit, limit) = ("a".to_owned(), "bytes".to_owned(), "memcpy".to_owned());
        let ratio = 1.0 / seconds;
        BenchRow { what, sweep: None, size, unit, seconds, limit, limit_seconds: 1.0, ratio, double: false }
    }

    #[test]
    fn a_sweep_shows_its_largest_size_and_its_exponent() {
        let all = sweeps(vec![row(4.0, 16.0), row(1.0, 1.0), row(2.0, 4.0)]);
        assert_eq!((all.len(), all[0].shown().len(), all[0].shown()[0].size), (1, 1, 4.0));
        assert!(all[0].exponent().is_some_and(|e| (e - 2.0).abs() < 1e-9));
        assert!(sweeps(vec![row(1.0, 1.0)])[0].exponent().is_none());
    }

    #[test]
    fn bytes_and_operations_have_a_rate_and_tokens_have_none() {
        assert_eq!(row(3e9, 2.0).rate().as_deref(), Some("1.5 GB/s"));
        assert_eq!(row(3e6, 2.0).rate().as_deref(), Some("2 MB/s"));
        let operations = BenchRow { unit: "GFLOP".to_owned(), ..row(275.0, 5e-4) };
        assert_eq!(operations.rate().as_deref(), Some("550.0 TFLOP/s"));
        assert_eq!(BenchRow { unit: "tokens".to_owned(), ..row(3e6, 2.0) }.rate(), None);
    }

    #[test]
    fn rows_are_read_among_other_lines() {
        let line = r#"{"what":"cuda: rope bf16","size":4,"unit":"bytes","seconds":2,"limit":"c","limit_seconds":1,"ratio":0.5"#;
        let rows = parsed(&format!("on a card\n{line}}}\n{line},\"double\":true}}\n{{\"else\":1}}\n"));
        assert_eq!(
            rows.iter().map(|row| (row.ratio, row.double)).collect::<Vec<_>>(),
            [(0.5, false), (0.5, true)]
        );
    }

    #[test]
    fn rows_that_name_their_size_are_all_shown() {
        let named = |size: f64| BenchRow {
            what: format!("a of {size}"),
            sweep: Some("a".to_owned()),
            limit: format!("b of {size}"),
            ..row(size, size)
        };
        let all = sweeps(vec![named(1.0), named(4.0)]);
        assert_eq!((all.len(), all[0].shown().len()), (1, 2));
        assert!(all[0].exponent().is_some_and(|e| (e - 1.0).abs() < 1e-9));
    }
}
