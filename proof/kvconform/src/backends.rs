//! The backends that this build can test, by the name passed to `--backend`.

use std::sync::Arc;

#[cfg(feature = "ascend")]
use kvbackend_ascend::{AscendBackend, AscendOptions};
#[cfg(feature = "cpu")]
use kvbackend_cpu::{CpuBackend, CpuOptions, Execution, KernelSet, SimdLevel};
#[cfg(feature = "cuda")]
use kvbackend_cuda::{CudaBackend, CudaOptions};
#[cfg(feature = "wgpu")]
use kvbackend_wgpu::{WgpuBackend, WgpuOptions};
use kvcore::{Backend, DType, Result};

/// A backend, and the name under which the suite reports it.
#[derive(Clone, Copy)]
pub struct NamedBackend {
    /// The backend's name, as in `conform --backend NAME`.
    pub name: &'static str,
    /// The name of the variant: a mode of the backend, or a device. Empty if the backend has only one
    /// variant.
    pub variant: &'static str,
    /// The element types to test. Every type is in at least one variant of each backend.
    pub dtypes: &'static [DType],
    /// Opens a device and creates the backend. The error explains what this machine is missing.
    pub make: fn() -> Result<Arc<dyn Backend>>,
}

#[cfg(feature = "cpu")]
fn cpu(options: CpuOptions) -> Result<Arc<dyn Backend>> {
    Ok(CpuBackend::with_options(&options)?)
}

#[cfg(feature = "cpu")]
fn at(simd: SimdLevel) -> Result<Arc<dyn Backend>> {
    cpu(CpuOptions { simd: Some(simd), threads: Some(3), ..CpuOptions::default() })
}

#[cfg(feature = "ascend")]
fn ascend(device: usize) -> Result<Arc<dyn Backend>> {
    Ok(AscendBackend::with_options(&AscendOptions { device, plain: false })?)
}

#[cfg(feature = "cuda")]
fn cuda(device: usize) -> Result<Arc<dyn Backend>> {
    Ok(CudaBackend::with_options(&CudaOptions { device, ..CudaOptions::default() })?)
}

#[cfg(feature = "wgpu")]
fn wgpu(options: &WgpuOptions) -> Result<Arc<dyn Backend>> {
    Ok(WgpuBackend::with_options(options)?)
}

/// Every element type.
#[cfg(any(feature = "ascend", feature = "cpu", feature = "cuda"))]
const ALL: &[DType] = &DType::COMPUTE;

/// All variants. The CPU backend runs with the fast kernels of every instruction set, with the reference
/// kernels, and with work deferred until something waits for it. wgpu runs with the device's own f16, with
/// packed f16, and with windows so small that pools are bound in parts. (A software GPU takes a second to
/// compile a kernel, so each wgpu variant runs with only some element types; `conform --every` runs all of
/// them.)
pub const BACKENDS: &[NamedBackend] = &[
    #[cfg(feature = "ascend")]
    NamedBackend { name: "ascend", variant: "device 0", dtypes: ALL, make: || ascend(0) },
    #[cfg(feature = "ascend")]
    NamedBackend { name: "ascend", variant: "device 1", dtypes: ALL, make: || ascend(1) },
    #[cfg(feature = "cpu")]
    NamedBackend { name: "cpu", variant: "portable", dtypes: ALL, make: || at(SimdLevel::Portable) },
    #[cfg(feature = "cpu")]
    NamedBackend { name: "cpu", variant: "avx2", dtypes: ALL, make: || at(SimdLevel::Avx2) },
    #[cfg(feature = "cpu")]
    NamedBackend { name: "cpu", variant: "avx512", dtypes: ALL, make: || at(SimdLevel::Avx512) },
    #[cfg(feature = "cpu")]
    NamedBackend { name: "cpu", variant: "amx", dtypes: ALL, make: || at(SimdLevel::Amx) },
    #[cfg(feature = "cpu")]
    NamedBackend {
        name: "cpu",
        variant: "reference",
        dtypes: ALL,
        make: || cpu(CpuOptions { kernels: KernelSet::Reference, ..CpuOptions::default() }),
    },
    #[cfg(feature = "cpu")]
    NamedBackend {
        name: "cpu",
        variant: "deferred",
        dtypes: ALL,
        make: || cpu(CpuOptions { execution: Execution::Deferred, ..CpuOptions::default() }),
    },
    #[cfg(feature = "cuda")]
    NamedBackend { name: "cuda", variant: "device 0", dtypes: ALL, make: || cuda(0) },
    #[cfg(feature = "cuda")]
    NamedBackend { name: "cuda", variant: "device 1", dtypes: ALL, make: || cuda(1) },
    #[cfg(feature = "wgpu")]
    NamedBackend {
        name: "wgpu",
        variant: "native",
        dtypes: &[DType::F32, DType::F16],
        make: || wgpu(&WgpuOptions::default()),
    },
    #[cfg(feature = "wgpu")]
    NamedBackend {
        name: "wgpu",
        variant: "packed",
        dtypes: &[DType::F16],
        make: || wgpu(&WgpuOptions { packed_f16: true, ..WgpuOptions::default() }),
    },
    #[cfg(feature = "wgpu")]
    NamedBackend {
        name: "wgpu",
        variant: "windowed",
        dtypes: &[DType::BF16],
        make: || wgpu(&WgpuOptions { max_binding: Some(32 << 10), ..WgpuOptions::default() }),
    },
];
