//! The backends that this build can test, by the name given to `--backend`.

use std::sync::Arc;

use kvbackend_cpu::{CpuBackend, CpuOptions, Execution, KernelSet, SimdLevel};
use kvcore::{Backend, Result};

/// A backend with the name under which the suite reports it.
#[derive(Clone, Copy)]
pub struct NamedBackend {
    /// Name of the backend, as in `conform --backend NAME`.
    pub name: &'static str,
    /// How it computes, where it has several ways.
    pub variant: &'static str,
    /// Makes it; an error says what this machine lacks.
    pub make: fn() -> Result<Arc<dyn Backend>>,
}

fn cpu(options: CpuOptions) -> Result<Arc<dyn Backend>> {
    Ok(CpuBackend::with_options(&options)?)
}

fn at(simd: SimdLevel) -> Result<Arc<dyn Backend>> {
    cpu(CpuOptions { simd: Some(simd), threads: Some(3), ..CpuOptions::default() })
}

/// All of them. The CPU backend runs with fast kernels of every instruction set, with reference kernels, and
/// deferred until something waits.
pub const BACKENDS: &[NamedBackend] = &[
    NamedBackend { name: "cpu", variant: "portable", make: || at(SimdLevel::Portable) },
    NamedBackend { name: "cpu", variant: "avx2", make: || at(SimdLevel::Avx2) },
    NamedBackend { name: "cpu", variant: "avx512", make: || at(SimdLevel::Avx512) },
    NamedBackend { name: "cpu", variant: "amx", make: || at(SimdLevel::Amx) },
    NamedBackend {
        name: "cpu",
        variant: "reference",
        make: || cpu(CpuOptions { kernels: KernelSet::Reference, ..CpuOptions::default() }),
    },
    NamedBackend {
        name: "cpu",
        variant: "deferred",
        make: || cpu(CpuOptions { execution: Execution::Deferred, ..CpuOptions::default() }),
    },
];
