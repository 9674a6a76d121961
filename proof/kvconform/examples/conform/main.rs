//! Runs the suite on one backend and prints a table: `conform --backend cpu`. `--every` tests all element
//! types, even for variants that are usually tested with only some types. `--only PREFIX`, which may be
//! repeated, runs only the cases whose names start with a prefix.
//!
//! Fails if a case fails, if a variant cannot be opened (except for missing processor instructions or a
//! missing second card), or if Vulkan's validation layers report anything. In strict runs, the layers must be
//! installed.

use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};

use kvconform::{BACKENDS, Bench, CASES, Case, NamedBackend};
use kvcore::DType;

use table::CaseTable;

mod table;
#[cfg(feature = "wgpu")]
mod validation;

/// A column of the table: one element type of one variant of the backend, on its own device.
struct Column {
    backend: &'static NamedBackend,
    /// Element types of all of the variant's columns.
    dtypes: &'static [DType],
    dtype: DType,
}

/// Options of the command line.
struct Options<'a> {
    wanted: &'a str,
    every: bool,
    /// Prefixes of case names; none for all cases.
    only: Vec<&'a str>,
}

impl<'a> Options<'a> {
    fn parsed(args: &'a [String]) -> Option<Self> {
        let mut words = args.iter().map(String::as_str);
        let (Some("--backend"), Some(wanted)) = (words.next(), words.next()) else { return None };
        let mut options = Self { wanted, every: false, only: Vec::new() };
        while let Some(word) = words.next() {
            match word {
                "--every" => options.every = true,
                "--only" => options.only.push(words.next()?),
                _ => return None,
            }
        }
        Some(options)
    }
}

/// A report for a column.
enum ColumnReport {
    /// The error because of which the column cannot be opened.
    Unopened(kvcore::Error),
    /// The index of a case, and its outcome.
    Case(usize, Result<(), String>),
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(Options { wanted, every, only }) = Options::parsed(&args) else {
        eprintln!("usage: conform --backend NAME [--every] [--only PREFIX]...");
        return ExitCode::from(2);
    };
    let cases: Vec<&'static Case> = CASES
        .iter()
        .filter(|case| only.is_empty() || only.iter().any(|prefix| case.name.starts_with(prefix)))
        .collect();
    if cases.is_empty() {
        eprintln!("no case begins with {}", only.join(" or "));
        return ExitCode::from(2);
    }
    let of = |backend: &'static NamedBackend| {
        let dtypes = if every { &DType::COMPUTE[..] } else { backend.dtypes };
        dtypes.iter().map(move |&dtype| Column { backend, dtypes, dtype })
    };
    let columns: Vec<Column> = BACKENDS.iter().filter(|b| b.name == wanted).flat_map(of).collect();
    if columns.is_empty() {
        let mut known: Vec<_> = BACKENDS.iter().map(|b| b.name).collect();
        known.dedup();
        eprintln!("no backend {wanted:?} in this build; it has {}", known.join(", "));
        return ExitCode::from(2);
    }
    #[cfg(feature = "wgpu")]
    validation::listen();
    let (passed, failed, skipped) = run_all(&columns, &cases);
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    if passed == 0 {
        eprintln!("no case ran: this machine has no device of the backend {wanted:?}");
    }
    #[cfg(feature = "wgpu")]
    if wanted == "wgpu" && !validation::silent() {
        return ExitCode::FAILURE;
    }
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs as many columns at a time as there are processors. Prints lines in order, each as soon as it is
/// complete. Returns the numbers of passed, failed and skipped cases.
fn run_all(columns: &[Column], cases: &[&'static Case]) -> (usize, usize, usize) {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(columns.len());
    let next = AtomicUsize::new(0);
    let (sender, reports) = channel();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                while let Some((number, column)) = columns.iter().enumerate().nth(next.fetch_add(1, Relaxed))
                {
                    run(number, column, cases, &sender);
                }
            });
        }
        drop(sender);
        let mut table = CaseTable::new(columns, cases);
        for (column, report) in reports {
            table.add(column, report);
        }
        table.counts()
    })
}

/// Runs all cases of a column. A closed receiver is not an error.
fn run(number: usize, column: &Column, cases: &[&'static Case], sender: &Sender<(usize, ColumnReport)>) {
    let backend = match (column.backend.make)() {
        Ok(backend) => backend,
        Err(reason) => {
            let _ = sender.send((number, ColumnReport::Unopened(reason)));
            return;
        }
    };
    for (i, case) in cases.iter().enumerate() {
        let bench = Bench::new(backend.clone(), column.dtype).map_err(|error| error.to_string());
        let outcome = bench.and_then(|bench| case.run(&bench).map_err(|failure| failure.to_string()));
        let _ = sender.send((number, ColumnReport::Case(i, outcome)));
    }
}
