//! `cargo xtask sanitize`: checks unsafe code with AddressSanitizer, or with valgrind if there is no nightly
//! toolchain.

use std::process::Command;

use clap::Args;

use xtask::run::{Result, cargo_command, root, run, skip};
use xtask::tools::{Tool, succeeds};

use crate::ascend_simulator;

/// Options of `cargo xtask sanitize`.
#[derive(Args)]
pub(crate) struct SanitizeArgs {
    /// Run every test of these crates, instead of the few that reach the unsafe code fastest.
    #[arg(long)]
    all: bool,
    /// Test the Ascend backend instead, on the CANN simulator.
    #[arg(long, conflicts_with = "all")]
    ascend: bool,
}

/// The crates whose `unsafe` code touches memory, the conformance suite that runs them, and the chunk cache,
/// whose threads put reserved memory to sleep.
const ALL: &str = "-p kvbackend-cpu -p kvconform -p kvchunk -p kvtier --tests";

/// The tests that run without `--all`: unit tests, tests of memory, every kernel in every instruction set on
/// one thread and on several, and the conformance suite.
const SOONEST: &str =
    "-p kvbackend-cpu -p kvconform --lib --test=fast --test=memory --test=tensors --test=conformance";

/// The tests of a backend that loads its device's libraries at run time.
const ASCEND: &str = "-p kvbackend-ascend --tests";

/// Little is optimised, because no other task uses this build. Only the CPU backend's kernels run so long that
/// level 2 pays off; level 3 takes longer to compile than it saves. The level is not set by `package.'*'`,
/// which would also optimise procedural macros.
const LIGHT: &str =
    "--config profile.release.opt-level=1 --config profile.release.package.kvbackend-cpu.opt-level=2";

/// Valgrind, which finds less than AddressSanitizer does.
const VALGRIND: Tool = Tool::Program("valgrind", "valgrind");

/// A nightly toolchain, or else valgrind.
pub(crate) const SANITIZER: Tool = Tool::Made {
    name: "sanitizer",
    is_here: || nightly() || VALGRIND.is_here(),
    bring: || {
        "rustup toolchain install nightly --profile minimal || apt-get install -y -q valgrind".to_owned()
    },
};

/// Returns true if rustup has a nightly toolchain.
fn nightly() -> bool {
    let mut command = Command::new("cargo");
    // The rustup that runs this program sets both variables, and they would override the requested toolchain.
    command.args(["+nightly", "--version"]).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
    succeeds(&mut command)
}

pub(crate) fn sanitize(args: &SanitizeArgs) -> Result {
    if nightly() {
        address_sanitizer(args)
    } else if VALGRIND.is_here() {
        valgrind(args)
    } else {
        skip(&format!("no nightly toolchain and no valgrind: {}", SANITIZER.bring()))
    }
}

/// The number of cases per property test without `--all`. That is enough to find an out-of-bounds read,
/// because a wrong kernel makes one in most cases.
const CASES: &str = "32";

/// Adds the arguments after `cargo test`.
fn add_tests(command: &mut Command, args: &SanitizeArgs) -> Result {
    let chosen = match args {
        SanitizeArgs { ascend: true, .. } => ASCEND,
        SanitizeArgs { all: true, .. } => ALL,
        _ => SOONEST,
    };
    command.arg("--release").args(LIGHT.split(' ')).args(chosen.split(' '));
    if !args.all {
        command.env("PROPTEST_CASES", CASES);
    }
    if args.ascend { ascend_simulator::provide(command) } else { Ok(()) }
}

fn address_sanitizer(args: &SanitizeArgs) -> Result {
    let host = host()?;
    let mut command = Command::new("cargo");
    command.args(["+nightly", "test", "--target", &host]);
    add_tests(&mut command, args)?;
    command
        .current_dir(root())
        .env_remove("RUSTUP_TOOLCHAIN")
        .env_remove("CARGO")
        .env("RUSTFLAGS", "-Zsanitizer=address")
        .env("CARGO_TARGET_DIR", root().join("target/sanitize"));
    run(&mut command, "cargo +nightly test")
}

/// Finds accesses outside of heap allocations, and uses of freed memory. Valgrind does not watch the stack,
/// and it hides instructions that it does not support from programs that query the processor.
fn valgrind(args: &SanitizeArgs) -> Result {
    let runner = format!("CARGO_TARGET_{}_RUNNER", host()?.to_uppercase().replace('-', "_"));
    let mut command = cargo_command("test");
    add_tests(&mut command, args)?;
    command.env(runner, "valgrind --quiet --error-exitcode=99 --fair-sched=yes");
    run(&mut command, "cargo test (valgrind)")
}

/// Returns the machine's own target, which a sanitizer build must name.
fn host() -> Result<String> {
    let output = Command::new("rustc").arg("-vV").output();
    let output = output.map_err(|e| format!("`rustc -vV` cannot be run: {e}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find_map(|line| line.strip_prefix("host: "));
    line.map(str::to_owned).ok_or_else(|| "rustc names no host".to_owned())
}
