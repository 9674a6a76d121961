//! Tests that cannot run on a machine: they are reported and counted, or they fail in strict runs.

use std::fmt::Display;
use std::sync::LazyLock;

/// The environment variable that turns skipped tests into failures. `cargo xtask ci` sets it.
pub const STRICT: &str = "KVCACHE_STRICT";

/// Returns whether [`STRICT`] is set.
pub fn is_strict() -> bool {
    static SET: LazyLock<bool> = LazyLock::new(|| std::env::var_os(STRICT).is_some());
    *SET
}

/// Reports that a test cannot run here: prints `SKIPPED: reason`, which `cargo xtask test` counts.
///
/// # Panics
/// Panics if [`STRICT`] is set. The panic message is the reason, which names what to install.
pub fn skip(reason: impl Display) {
    assert!(!is_strict(), "nothing may be skipped here ({STRICT} is set): {reason}");
    println!("SKIPPED: {reason}");
}
