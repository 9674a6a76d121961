//! `cargo xtask test`: runs and counts every test.

use clap::Args;
use xtask::counts::OutputReader;
use xtask::cuda_double;
use xtask::run::{Result, cargo_command, lines};

use crate::ascend_simulator;

/// Options of `cargo xtask test`.
#[derive(Args)]
pub(crate) struct TestArgs {
    /// Build this workspace's crates with debug assertions and overflow checks, and leave out documentation
    /// examples.
    #[arg(long)]
    assertions: bool,
}

/// Release profile settings that enable assertions in this workspace's crates but not in their dependencies.
const ASSERTIONS: &str = "--config profile.release.debug-assertions=true \
     --config profile.release.overflow-checks=true \
     --config profile.release.package.'*'.debug-assertions=false \
     --config profile.release.package.'*'.overflow-checks=false";

/// All targets whose manifests say that they have tests. Naming kinds of targets would build every program of
/// a kind as a test, also the Python module, which takes half a minute and has none.
const PROGRAMS: &str = "--tests";

/// Runs the tests. Prints what failed, then `N passed, N failed, N skipped`.
pub(crate) fn test(args: &TestArgs) -> Result {
    let mut reader = OutputReader::default();
    let mut ok = true;
    if args.assertions {
        ok &= pass(&format!("{ASSERTIONS} {PROGRAMS}"), &mut reader)?;
    } else {
        ok &= pass(PROGRAMS, &mut reader)?;
        ok &= pass("--doc", &mut reader)?;
    }
    let sums = reader.sums;
    if !reader.failures.is_empty() {
        println!("\n{}", reader.failures.join("\n"));
    }
    println!("\n{sums}");
    if ok && sums.failed == 0 && sums.passed > 0 { Ok(()) } else { Err("tests failed".to_owned()) }
}

/// Runs the tests of some targets. Returns true if all of them passed.
fn pass(targets: &str, reader: &mut OutputReader) -> Result<bool> {
    // Without `--show-output`, the test harness would hide why a test was skipped.
    let args = format!("test --release --workspace --all-features --no-fail-fast {targets} -- --show-output");
    let mut command = cargo_command(&args);
    cuda_double::provide(&mut command)?;
    ascend_simulator::provide(&mut command)?;
    let mut output = String::new();
    let failed_before = reader.sums.failed;
    let passed = lines(&mut command, &format!("cargo {args}"), |line| {
        reader.add(line);
        if line.starts_with("test result: ") || line.trim_start().starts_with("SKIPPED") {
            println!("{line}");
        }
        output += line;
        output.push('\n');
    })?;
    if !passed {
        reader.broke_off(failed_before, &output);
    }
    Ok(passed)
}
