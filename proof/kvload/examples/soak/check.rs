//! Checkpoints: while no request is sent, nothing is held but registered documents, all threads live, and fixed requests have their answers.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use kvserve::Server;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::counted::allocated;
use crate::kept;
use crate::requests::{Dialect, add_documents, asked};
use crate::served::KEYS;
use crate::state::State;
use crate::tally::Tally;
use crate::users::Place;

/// The number of fixed requests: with and without documents in each dialect.
pub(crate) const FIXED: usize = 2 * Dialect::ALL.len();

/// The time after the end of the traffic in which everything must have been given back.
const GIVEN_BACK: Duration = Duration::from_secs(10);

/// The memory that an idle connection may take in the process of the server, in bytes.
const IDLE_CONNECTION: u64 = 16 << 10;

/// The factor of the growth that is allowed in a short run, whose checkpoints differ by what the last requests left in caches.
const SHORT: u64 = 2;

/// The least number of checkpoints before the process is judged by its growth.
const WARM_UP: usize = 12;

/// The bytes that may be allocated after the last connection has closed, beyond those before the first request: what the
/// server remembers of texts, forms of answers and cached blocks.
const REMEMBERED: u64 = 16 << 20;

/// The threads that must live, with their least number. Names in the system have up to 15 bytes. Those for texts
/// (`kv-text`) end when they have nothing to do.
const THREADS: [(&str, usize); 3] = [("kv-documents", 1), ("kv-engine", 1), ("kv-serve", 1)];

/// The first answers to the fixed requests.
#[derive(Debug, Default)]
pub(crate) struct FixedAnswers(Mutex<[Option<String>; FIXED]>);

impl FixedAnswers {
    /// Returns a fixed request.
    pub(crate) fn request(fixed: usize) -> (Dialect, Value) {
        let dialect = Dialect::ALL[fixed % Dialect::ALL.len()];
        let mut body = asked(dialect, "alba ?", 8);
        body["temperature"] = json!(0);
        if fixed >= Dialect::ALL.len() {
            add_documents(dialect, &mut body, &[3, 1, 2]);
        }
        (dialect, body)
    }

    /// Remembers the first answer. Returns it if this one differs.
    pub(crate) fn differs(&self, fixed: usize, text: &str) -> Option<String> {
        let mut answers = self.0.lock();
        let first = answers[fixed].get_or_insert_with(|| text.to_owned());
        (first != text).then(|| first.clone())
    }
}

/// The measurements of checkpoints.
#[derive(Debug, Default)]
pub(crate) struct Checkpoints {
    /// The resident memory at each checkpoint, in bytes.
    resident: Vec<u64>,
    /// The bytes that were allocated at each checkpoint.
    allocated: Vec<u64>,
    /// The number of idle connections that were open then.
    idle: Vec<usize>,
    /// The most threads.
    threads: usize,
}

impl Checkpoints {
    /// Checks the server while there is no traffic, but so many idle connections.
    pub(crate) fn check(
        &mut self,
        runtime: &Runtime,
        server: &Server,
        place: &Place,
        idle: usize,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let place = place.with_key(KEYS[0].0);
        runtime.block_on(async {
            for fixed in 0..FIXED {
                place.ask_fixed(fixed).await;
            }
        });
        let until = Instant::now() + GIVEN_BACK;
        let held = loop {
            let pinned = runtime.block_on(kept::pinned_blocks(&place));
            let held = held(server, pinned);
            if held.is_ok() || Instant::now() > until {
                break held;
            }
            // The runtime reads the ends of connections that clients have left.
            runtime.block_on(async { tokio::time::sleep(Duration::from_millis(10)).await });
        };
        if let Err(held) = held {
            place.tally.violation(format!("{GIVEN_BACK:?} after the traffic: {held}"));
        }
        let threads = threads()?;
        for (name, number) in THREADS {
            let alive = threads.get(name).copied().unwrap_or(0);
            if alive < number {
                place.tally.violation(format!("{alive} threads {name} live instead of {number}"));
            }
        }
        self.threads = self.threads.max(threads.values().sum());
        self.resident.push(resident()?);
        self.allocated.push(allocated());
        self.idle.push(idle);
        Ok(())
    }

    /// Checks that what connections and requests have allocated is given back, now that all of them have ended.
    pub(crate) fn end(&mut self, runtime: &Runtime, tally: &Tally) {
        let most = self.allocated.first().copied().unwrap_or(0) + REMEMBERED;
        let until = Instant::now() + GIVEN_BACK;
        while allocated() > most && Instant::now() < until {
            runtime.block_on(async { tokio::time::sleep(Duration::from_millis(10)).await });
        }
        let left = allocated();
        self.allocated.push(left);
        if left > most {
            let most = mib(most);
            tally.violation(format!(
                "{} are allocated after the last connection, and {most} may be",
                mib(left)
            ));
        }
    }

    /// Judges the memory by a bound on its growth in bytes, after a warm-up in which connections are opened, caches fill,
    /// and the buffers of most clients reach their largest size: that of the process after a third of the run, but at least
    /// two minutes. In a shorter run, the most that is allocated in the second half is compared with the most in the first.
    pub(crate) fn judge(&self, most: u64, tally: &Tally) {
        let checkpoints = self.resident.len();
        let (what, sizes, before, after, most) = if self.is_long() {
            let warm_up = (checkpoints / 3).max(WARM_UP);
            ("the process", &self.resident, warm_up..warm_up + 1, checkpoints - 1..checkpoints, most)
        } else {
            let half = checkpoints.div_ceil(2);
            ("what is allocated", &self.allocated, 0..half, half..checkpoints, SHORT * most)
        };
        let largest = |range: &Range<usize>| sizes.get(range.clone())?.iter().max().copied();
        let (Some(warm), Some(last)) = (largest(&before), largest(&after)) else { return };
        let open =
            |range: Range<usize>| self.idle.get(range).into_iter().flatten().max().copied().unwrap_or(0);
        let opened = open(after).saturating_sub(open(before)) as u64;
        if last.saturating_sub(warm) > most + opened * IDLE_CONNECTION {
            tally.violation(format!("{what} grew from {} to {}", mib(warm), mib(last)));
        }
    }

    /// Returns whether the run is long enough to judge the growth of the process.
    fn is_long(&self) -> bool {
        self.resident.len() > WARM_UP + 1
    }

    pub(crate) fn print(&self, state: &State, growth: u64) {
        let every = self.resident.len().div_ceil(10).max(1);
        let shown = |all: &[u64]| {
            let shown: Vec<String> = all.iter().step_by(every).chain(all.last()).map(|&b| mib(b)).collect();
            shown.join(", ")
        };
        let growth = if self.is_long() { growth } else { SHORT * growth };
        let judged = format!("after a warm-up, it may grow by {growth} MiB");
        let (of_process, of_allocated) = if self.is_long() {
            (format!("; {judged}"), String::new())
        } else {
            (String::new(), format!("; {judged}"))
        };
        println!(
            "{:.0} seconds of traffic, {} checkpoints, up to {} threads\n\
             resident memory from the first checkpoint to the last: {}{of_process}\n\
             allocated memory from the first checkpoint to the last, and after the last connection: {}{of_allocated}",
            state.seconds,
            self.resident.len(),
            self.threads,
            shown(&self.resident),
            shown(&self.allocated),
        );
    }
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Checks that all blocks are free or cached but those of pinned documents, and that no request runs.
fn held(server: &Server, pinned: Option<usize>) -> Result<(), String> {
    let pinned = pinned.ok_or("the tokens of registered documents have not been counted")?;
    let report = server.with_engine(|engine| engine.check_invariants().map(|()| engine.report()));
    let report = report.ok_or("the engine does not answer")??;
    for (name, counts, pinned) in [("main", report.main, 0), ("documents", report.chunks, pinned)] {
        let Some(counts) = counts else { continue };
        if counts.total != counts.free + counts.cached + pinned
            || (counts.mutable, counts.shared) != (0, pinned)
        {
            return Err(format!(
                "{pinned} blocks of the pool {name} are pinned, and these are held: {counts:?}"
            ));
        }
    }
    Ok(())
}

/// Returns the number of threads of this process by their names.
fn threads() -> std::io::Result<BTreeMap<String, usize>> {
    let mut names = BTreeMap::new();
    for thread in std::fs::read_dir("/proc/self/task")? {
        // A thread may end while it is counted.
        if let Ok(name) = std::fs::read_to_string(thread?.path().join("comm")) {
            *names.entry(name.trim().to_owned()).or_default() += 1;
        }
    }
    Ok(names)
}

/// Returns the resident memory of this process in bytes.
fn resident() -> std::io::Result<u64> {
    let text = std::fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.map(|kib| kib << 10)
        .ok_or_else(|| std::io::Error::other("the system does not tell the resident memory"))
}
