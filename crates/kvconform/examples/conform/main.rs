//! Runs the suite on one backend and prints a table: `conform --backend cpu`.
//!
//! Fails if a case fails, if the machine has no device of the backend, or if Vulkan's validation layers are
//! installed and report anything meanwhile.

use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};

use kvconform::{BACKENDS, Bench, CASES, NamedBackend};
use kvcore::DType;

use table::Table;

mod table;
#[cfg(feature = "wgpu")]
mod validation;

/// A column of the table: one element type of one variant of the backend, on its own device.
struct Column {
    backend: &'static NamedBackend,
    dtype: DType,
}

/// The report of a column.
enum Report {
    /// The machine has no such device.
    Skipped(String),
    /// The number of a case, and its failure if it failed.
    Case(usize, Result<(), String>),
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let wanted = match args.as_slice() {
        [flag, name] if flag == "--backend" => name.as_str(),
        _ => {
            eprintln!("usage: conform --backend NAME");
            return ExitCode::from(2);
        }
    };
    let of =
        |backend: &'static NamedBackend| backend.dtypes.iter().map(move |&dtype| Column { backend, dtype });
    let columns: Vec<Column> = BACKENDS.iter().filter(|b| b.name == wanted).flat_map(of).collect();
    if columns.is_empty() {
        let mut known: Vec<_> = BACKENDS.iter().map(|b| b.name).collect();
        known.dedup();
        eprintln!("no backend {wanted:?} in this build; it has {}", known.join(", "));
        return ExitCode::from(2);
    }
    #[cfg(feature = "wgpu")]
    validation::listen();
    let (passed, failed) = run_all(&columns);
    println!("{passed} passed, {failed} failed");
    if passed == 0 {
        eprintln!("no case ran: this machine has no device of the backend {wanted:?}");
    }
    #[cfg(feature = "wgpu")]
    if wanted == "wgpu" && !validation::silent() {
        return ExitCode::FAILURE;
    }
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs as many columns at a time as there are processors, and prints lines in order as soon as they are
/// complete. Returns the numbers of passed and of failed cases.
fn run_all(columns: &[Column]) -> (usize, usize) {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(columns.len());
    let next = AtomicUsize::new(0);
    let (sender, reports) = channel();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                while let Some((number, column)) = columns.iter().enumerate().nth(next.fetch_add(1, Relaxed))
                {
                    run(number, column, &sender);
                }
            });
        }
        drop(sender);
        let mut table = Table::new(columns);
        for (column, report) in reports {
            table.add(column, report);
        }
        table.counts()
    })
}

/// Runs all cases of a column. A closed receiver is no error.
fn run(number: usize, column: &Column, sender: &Sender<(usize, Report)>) {
    let backend = match (column.backend.make)() {
        Ok(backend) => backend,
        Err(reason) => {
            let _ = sender.send((number, Report::Skipped(reason.to_string())));
            return;
        }
    };
    for (i, case) in CASES.iter().enumerate() {
        let bench = Bench::new(backend.clone(), column.dtype).map_err(|error| error.to_string());
        let outcome = bench.and_then(|bench| case.run(&bench).map_err(|failure| failure.to_string()));
        let _ = sender.send((number, Report::Case(i, outcome)));
    }
}
