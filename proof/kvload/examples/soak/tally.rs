//! Counts of requests by their kind, and what was wrong.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use comfy_table::{LineStyle, Table, TableStyle};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// The most violations that are kept.
const KEPT: usize = 20;
/// The number of violations after which a soak ends at the next checkpoint.
const ENOUGH: usize = 20;

/// Requests of one kind.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Count {
    pub(crate) requests: u64,
    /// The sum of the times, in milliseconds.
    pub(crate) ms: f64,
    /// The longest time, in milliseconds.
    pub(crate) longest_ms: f64,
}

/// Counts that all clients share.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    counts: Mutex<BTreeMap<String, Count>>,
    violations: Mutex<Vec<String>>,
    wrong: Arc<AtomicUsize>,
    panics: Arc<Mutex<Vec<String>>>,
}

impl Tally {
    /// Creates a tally that goes on from earlier counts.
    pub(crate) fn new(counts: BTreeMap<String, Count>) -> Self {
        Self { counts: Mutex::new(counts), ..Self::default() }
    }

    /// Counts panics of all threads as violations, also of those that the server survives.
    pub(crate) fn count_panics(&self) {
        let (panics, wrong) = (Arc::clone(&self.panics), Arc::clone(&self.wrong));
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            wrong.fetch_add(1, Ordering::Relaxed);
            let mut panics = panics.lock();
            if panics.len() < KEPT {
                panics.push(format!("a panic: {panic}"));
            }
            default(panic);
        }));
    }

    /// Counts a request that went as it should.
    pub(crate) fn count(&self, kind: &str, time: Duration) {
        let (mut counts, ms) = (self.counts.lock(), time.as_secs_f64() * 1e3);
        if !counts.contains_key(kind) {
            counts.insert(kind.to_owned(), Count::default());
        }
        if let Some(count) = counts.get_mut(kind) {
            count.requests += 1;
            count.ms += ms;
            count.longest_ms = count.longest_ms.max(ms);
        }
    }

    pub(crate) fn counts(&self) -> BTreeMap<String, Count> {
        self.counts.lock().clone()
    }

    /// Notes something that must not happen.
    pub(crate) fn violation(&self, what: String) {
        self.wrong.fetch_add(1, Ordering::Relaxed);
        let mut violations = self.violations.lock();
        if violations.len() < KEPT {
            violations.push(what);
        }
    }

    /// Returns true if so much is wrong that going on tells nothing new.
    pub(crate) fn has_failed(&self) -> bool {
        self.wrong.load(Ordering::Relaxed) >= ENOUGH
    }

    /// Returns a table of the requests.
    pub(crate) fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─')));
        table.set_header(["requests", "number", "mean", "longest"]);
        for (kind, count) in &*self.counts.lock() {
            let mean = count.ms / count.requests.max(1) as f64;
            let row = [
                kind.clone(),
                count.requests.to_string(),
                format!("{mean:.1} ms"),
                format!("{:.0} ms", count.longest_ms),
            ];
            table.add_row(row);
        }
        table
    }

    /// Prints what was wrong. Returns true if nothing was.
    pub(crate) fn print_violations(&self) -> bool {
        let wrong = self.wrong.load(Ordering::Relaxed);
        for what in self.violations.lock().iter().chain(&*self.panics.lock()) {
            println!("WRONG: {what}");
        }
        println!(
            "{}",
            if wrong == 0 { "nothing was wrong".to_owned() } else { format!("{wrong} things were wrong") }
        );
        wrong == 0
    }
}
