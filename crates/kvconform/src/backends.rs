//! The backends that this build can test, by the name given to `--backend`.

use std::sync::Arc;

use kvbackend_cpu::{CpuBackend, Execution};
use kvcore::Backend;

/// A backend with the name under which the suite reports it.
#[derive(Clone, Copy)]
pub struct NamedBackend {
    /// Name of the backend, as in `conform --backend NAME`.
    pub name: &'static str,
    /// How work is executed, where a backend has several ways.
    pub variant: &'static str,
    /// Makes it.
    pub make: fn() -> Arc<dyn Backend>,
}

/// All of them. The CPU backend runs twice: at once, and deferred until something waits.
pub const BACKENDS: &[NamedBackend] = &[
    NamedBackend { name: "cpu", variant: "immediate", make: || CpuBackend::new() },
    NamedBackend {
        name: "cpu",
        variant: "deferred",
        make: || CpuBackend::with_execution(Execution::Deferred),
    },
];
