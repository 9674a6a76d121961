//! Tests that cannot run on a machine: said and counted, or a failure where nothing may be missing.

use std::fmt::Display;
use std::sync::LazyLock;

/// The variable of the environment under which nothing that can be installed may be missing. `cargo xtask ci` sets it.
pub const STRICT: &str = "KVCACHE_STRICT";

/// Returns whether [`STRICT`] is set.
pub fn is_strict() -> bool {
    static SET: LazyLock<bool> = LazyLock::new(|| std::env::var_os(STRICT).is_some());
    *SET
}

/// Says that a test cannot run here: prints `SKIPPED: reason`, which `cargo xtask test` counts.
///
/// # Panics
/// Under [`STRICT`], with the reason: it names what to install.
pub fn skip(reason: impl Display) {
    assert!(!is_strict(), "nothing may be skipped here ({STRICT} is set): {reason}");
    println!("SKIPPED: {reason}");
}
