//! Runs the suite on one backend and prints a table: `conform --backend cpu`.

use std::process::ExitCode;

use kvconform::{BACKENDS, Bench, CASES};
use kvcore::DType;

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
    let (mut passed, mut failed) = (0, 0);
    for backend in backends {
        println!("{} ({})", backend.name, backend.variant);
        if let Err(reason) = (backend.make)() {
            println!("  SKIPPED: {reason}");
            continue;
        }
        for case in CASES {
            let mut line = format!("  {:<55}", case.name);
            let mut failures = Vec::new();
            for dtype in DType::COMPUTE {
                let bench = (backend.make)().and_then(|backend| Bench::new(backend, dtype));
                let outcome = match bench {
                    Ok(bench) => case.run(&bench).map_err(|failure| failure.to_string()),
                    Err(error) => Err(error.to_string()),
                };
                let verdict = if outcome.is_ok() { "ok  " } else { "FAIL" };
                line.extend([" ", dtype.name(), " ", verdict]);
                match outcome {
                    Ok(()) => passed += 1,
                    Err(failure) => failures.push(format!("    {dtype}: {failure}")),
                }
            }
            println!("{line}");
            failed += failures.len();
            for failure in &failures {
                println!("{failure}");
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
