//! Runs the suite on one backend and prints a table: `conform --backend cpu`.
//!
//! Fails if a case does, if the machine has no device of the backend at all, or if Vulkan's validation layers,
//! where they are installed, report anything meanwhile.

use std::process::ExitCode;

use kvconform::{BACKENDS, Bench, CASES, NamedBackend};

#[cfg(feature = "wgpu")]
mod validation;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let wanted = match args.as_slice() {
        [flag, name] if flag == "--backend" => name.as_str(),
        _ => {
            eprintln!("usage: conform --backend NAME");
            return ExitCode::from(2);
        }
    };
    let backends: Vec<_> = BACKENDS.iter().filter(|b| b.name == wanted).collect();
    if backends.is_empty() {
        let mut known: Vec<_> = BACKENDS.iter().map(|b| b.name).collect();
        known.dedup();
        eprintln!("no backend {wanted:?} in this build; it has {}", known.join(", "));
        return ExitCode::from(2);
    }
    #[cfg(feature = "wgpu")]
    validation::listen();
    let (mut passed, mut failed) = (0, 0);
    for backend in backends {
        println!("{} ({})", backend.name, backend.variant);
        match (backend.make)() {
            Ok(_) => run(backend, &mut passed, &mut failed),
            Err(reason) => println!("  SKIPPED: {reason}"),
        }
    }
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

/// All cases on one variant of a backend, a line each.
fn run(backend: &NamedBackend, passed: &mut usize, failed: &mut usize) {
    for case in CASES {
        let mut line = format!("  {:<55}", case.name);
        let mut failures = Vec::new();
        for &dtype in backend.dtypes {
            let bench = (backend.make)().and_then(|backend| Bench::new(backend, dtype));
            let outcome = match bench {
                Ok(bench) => case.run(&bench).map_err(|failure| failure.to_string()),
                Err(error) => Err(error.to_string()),
            };
            let verdict = if outcome.is_ok() { "ok  " } else { "FAIL" };
            line.extend([" ", dtype.name(), " ", verdict]);
            match outcome {
                Ok(()) => *passed += 1,
                Err(failure) => failures.push(format!("    {dtype}: {failure}")),
            }
        }
        println!("{line}");
        *failed += failures.len();
        for failure in &failures {
            println!("{failure}");
        }
    }
}
